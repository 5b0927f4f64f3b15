"""What `sweep --until-best` saves: a few draws of tests/benchmarks/sweeps.py, which prints all of it."""

from statistics import fmean

from benchmarks.sweeps import MAX_ROUNDS, NEAR, NOISES, SIZES, simulate


def test_a_few_small_matrices_are_swept_for_a_part_of_their_cost() -> None:
    outcomes = simulate(SIZES[0], NOISES[0], draws=4)
    assert fmean(each.cost for each in outcomes) < 0.3
    assert all(each.ratio <= NEAR and 1.0 <= each.ratio_of_full <= NEAR for each in outcomes)
    assert all(each.num_runs < each.num_cells * MAX_ROUNDS / 2 for each in outcomes)
