"""How rows are compared within rounds and across hosts, against numpy, scipy and known answers."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis.differences import MACHINE, ROW_ON_HOST, Differences, RunTime, rounds_to_settle
from fastlaunch.analysis.statistics import Contrast, Difference, OnHosts, Variance


def in_rounds(*rows: Sequence[float | None], first: int = 0) -> list[RunTime]:
    """A run for each log time, by row and round; None for one that failed."""
    return [
        RunTime(row=row, log_time=time, host="host", block=first + number)
        for row, times in enumerate(rows)
        for number, time in enumerate(times)
        if time is not None
    ]


def drawn(rng: random.Random, num_rows: int, num_rounds: int, *, lost: float = 0.0) -> list[RunTime]:
    """Rows that deviate by 1%, in rounds that deviate by 5%; of the runs a share is lost."""
    rounds = [rng.gauss(0, 0.05) for _ in range(num_rounds)]
    return in_rounds(
        *(
            [None if rng.random() < lost else rounds[k] + rng.gauss(0, 0.01) for k in range(num_rounds)]
            for _ in range(num_rows)
        )
    )


def only(difference: Difference | None) -> Contrast:
    assert difference is not None
    (estimate,) = difference.estimates
    return estimate


def test_two_rows_are_compared_by_the_paired_t_test() -> None:
    base, row = [0.1, 0.3, 0.2, 0.4], [0.0, 0.18, 0.13, 0.31]
    differences = Differences(in_rounds(base, row))
    estimate, expected = only(differences.between(1, 0)), scipy.stats.ttest_rel(base, row)
    assert estimate.value == pytest.approx(np.mean(base) - np.mean(row))
    assert (estimate.value / estimate.error, estimate.dof) == pytest.approx((expected.statistic, 3))
    assert only(differences.between(0, 1)).value == -estimate.value


def least_squares(runs: Sequence[RunTime]) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Effects of 4 rows and 6 rounds, their covariance over a run's variance, residual squares and dof."""
    design = np.zeros((len(runs), 10))
    for line, run in enumerate(runs):
        design[line, run.row] = design[line, 4 + run.block] = 1  # type: ignore[operator]
    times = np.array([run.log_time for run in runs])
    effects, *_ = np.linalg.lstsq(design, times, rcond=None)
    residuals = times - design @ effects
    dof = len(runs) - int(np.linalg.matrix_rank(design))
    return effects, np.linalg.pinv(design.T @ design), residuals @ residuals, dof


@pytest.mark.parametrize("lost", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(5))
def test_effects_and_scatter_are_those_of_least_squares(seed: int, lost: float) -> None:
    runs = drawn(random.Random(seed), 4, 6, lost=lost)
    effects, covariance, squares, dof = least_squares(runs)
    contrast = np.zeros(10)
    contrast[0], contrast[2] = 1, -1
    differences = Differences(runs)
    difference = differences.between(2, 0)
    assert difference is not None
    common = max(difference.estimates, key=lambda estimate: estimate.dof)
    assert common.value == pytest.approx(contrast @ effects)
    error = math.sqrt(contrast @ covariance @ contrast * squares / dof)
    assert (common.error, common.dof) == pytest.approx((error, dof))
    # A row's own scatter is by what it adds to the squares.
    *_, of_others, dof_of_others = least_squares([run for run in runs if run.row != 3])
    own = math.sqrt((squares - of_others) / (dof - dof_of_others))
    assert differences.deviations(3) == pytest.approx((own, math.sqrt(of_others / dof_of_others)))


def test_what_a_round_does_to_all_rows_alike_cancels() -> None:
    base, row = [0.0, 0.01, -0.01, 0.005], [-0.05, -0.045, -0.06, -0.04]
    hours = [0.0, 0.5, -0.3, 0.2]
    still = Differences(in_rounds(base, row)).between(1, 0)
    moved = Differences(
        in_rounds(*([time + hour for time, hour in zip(times, hours, strict=True)] for times in (base, row)))
    ).between(1, 0)
    assert still is not None and moved is not None
    assert moved.limits(0.05) == pytest.approx(still.limits(0.05))


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_rounds_on_several_hosts_have_in_the_error_what_hosts_differ_by(num_hosts: int) -> None:
    faster = [0.01, 0.02, 0.03][:num_hosts]
    rounds = [
        RunTime(
            row=row, log_time=0.001 * (-1) ** number - row * on_it, host=(host, "s"), block=(host, number)
        )
        for host, on_it in enumerate(faster)
        for number in range(4)
        for row in (0, 1)
    ]
    estimate = only(Differences(rounds).between(1, 0))
    assert estimate.value == pytest.approx(np.mean(faster))
    own, known = estimate.error**2, estimate.variances[-1]
    if num_hosts == 1:
        assert (known.value, known.dof) == pytest.approx((own, estimate.dof))
        return
    squares = 5 * ROW_ON_HOST**2 + np.var(faster) * num_hosts
    of_hosts = squares / (5 + num_hosts - 1) / num_hosts
    dof = (own + of_hosts) ** 2 / (own**2 / estimate.dof + of_hosts**2 / (5 + num_hosts - 1))
    assert (known.value, known.dof) == pytest.approx((own + of_hosts, dof))
    # Two sessions on one machine are still about that machine.
    sessions = [replace(run, machine="m") for run in rounds]
    assert only(Differences(sessions).between(1, 0)).variances[-1].value == pytest.approx(own)


def test_rows_that_only_others_link_across_hosts_have_a_part_of_each() -> None:
    quiet = [0.0, 0.001, -0.001]
    runs = [
        replace(run, host=host, block=(host, run.block))
        for host, (first, second) in (("a", (0, 2)), ("b", (1, 2)))
        for run in in_rounds(quiet, quiet)
        for run in [replace(run, row=(first, second)[run.row])]
    ]
    estimate = only(Differences(runs).between(1, 0))
    assert estimate.variances[-1].value == pytest.approx(estimate.error**2 + 2 * ROW_ON_HOST**2)


def test_noise_that_carries_over_makes_fewer_rounds() -> None:
    def between(speeds: Sequence[float]) -> Contrast:
        return only(Differences(in_rounds([0.0] * len(speeds), [-speed for speed in speeds])).between(1, 0))

    slow, quick = [0.0, 0.1, 0.1, 0.3, 0.4, 0.4, 0.3, 0.2], [0.0, 0.4, 0.1, 0.3, 0.1, 0.4, 0.3, 0.2]
    carried, other = between([0.1 * each for each in slow]), between([0.1 * each for each in quick])
    assert carried.carried > 0.3 and other.carried == 0.0
    rounds_in_one = (1 + carried.carried) / (1 - carried.carried)
    assert carried.error == pytest.approx(0.1 * np.std(slow, ddof=1) * math.sqrt(rounds_in_one / 8))
    assert carried.dof == 7
    assert (other.error, other.dof) == pytest.approx((0.1 * np.std(quick, ddof=1) / math.sqrt(8), 7))
    assert between([0.1 * each for each in slow[:5]]).carried == 0.0


def test_scatter_has_a_floor() -> None:
    estimate = only(Differences(in_rounds([0.0, 0.0, 0.0], [-0.1, -0.1, -0.1])).between(1, 0))
    assert estimate.error == pytest.approx(0.001 * math.sqrt(2 / 3))


def test_a_noisy_row_is_judged_by_its_own_rounds_and_leaves_the_others_sharp() -> None:
    rng = random.Random(3)
    quiet = [[rng.gauss(0, 0.002) for _ in range(5)] for _ in range(3)]
    noisy = [rng.gauss(0, 0.1) for _ in range(5)]
    with_noisy, alone = Differences(in_rounds(*quiet, noisy)), Differences(in_rounds(*quiet))
    assert with_noisy.noise(3) > 0.8 and max(with_noisy.noise(row) for row in range(3)) < 0.8
    paired = scipy.stats.ttest_rel(quiet[0], noisy)
    own = only(with_noisy.between(3, 0))
    assert (own.value / own.error, own.dof) == pytest.approx((paired.statistic, 4))
    first, second = (each.between(1, 0) for each in (with_noisy, alone))
    assert first is not None and second is not None
    assert first.limits(0.05) == pytest.approx(second.limits(0.05))


def test_a_noisy_rows_round_without_the_baseline_counts_by_the_other_rows() -> None:
    base: list[float | None] = [0.5, 0.502, 0.499, 0.5, None]
    others = [[0.2, 0.203, 0.198, 0.2, 0.2], [0.3, 0.302, 0.3, 0.301, 0.3]]
    noisy = [0.0, -0.05, 0.05, 0.01, 0.19]
    differences = Differences(in_rounds(base, *others, noisy))
    assert differences.noise(3) > 0.8
    alone = Differences(in_rounds(base, *others))
    missing = np.mean([others[at - 1][4] + alone.log_ratio(at, 0) for at in (1, 2)])
    paired = scipy.stats.ttest_rel([*base[:4], missing], noisy)
    paired_only = only(differences.between(3, 0))
    assert (paired_only.value / paired_only.error, paired_only.dof) == pytest.approx((paired.statistic, 4))
    assert only(differences.between(0, 3)).value == pytest.approx(-paired_only.value)


@pytest.mark.parametrize("num_rounds", [24, 600])
def test_a_noisy_row_is_told_by_hundreds_of_runs(num_rounds: int) -> None:
    rng = random.Random(1)
    rows = ([rng.gauss(0, 0.2 if row == 1 else 0.002) for _ in range(num_rounds)] for row in range(17))
    differences = Differences(in_rounds(*rows))
    assert [row for row in range(17) if differences.noise(row) > 0.8] == [1]


LOG_TIMES = st.one_of(st.just(0.0), st.floats(-0.01, 0.01), st.floats(-700.0, 700.0))
HOSTS = st.tuples(st.sampled_from("ab"), st.one_of(st.none(), st.integers(0, 3)))


@given(st.lists(st.tuples(st.integers(0, 3), HOSTS, LOG_TIMES, LOG_TIMES), max_size=24))
def test_any_times_have_a_difference_that_is_a_number(
    runs: list[tuple[int, tuple[str, int | None], float, float]],
) -> None:
    differences = Differences(
        RunTime(row=row, host=at[0], block=at if at[1] is not None else None, log_time=time, late=late)
        for row, at, time, late in runs
    )
    rows = {row for row, *_ in runs}
    for row, base in product(rows, rows):
        difference = differences.between(row, base) if row != base else None
        if difference is None:
            continue
        low, high = difference.limits(0.05)
        assert math.isfinite(low) and low <= high < math.inf
        assert 0 <= difference.p_differs() <= 1
        proposal = rounds_to_settle(difference, 0.05)
        assert proposal is None or 1 <= proposal[0] <= 50


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_one_run_says_nothing_of_its_scatter(num_rounds: int) -> None:
    runs = in_rounds([0.0] * num_rounds, [-0.1] + [None] * (num_rounds - 1))
    differences = Differences(runs)
    assert differences.between(1, 0) is None
    assert differences.log_ratio(1, 0) == pytest.approx(0.1)


def test_rows_of_no_common_round_are_linked_by_those_that_ran_with_both() -> None:
    nowhere = [None, None, None]
    rng = random.Random(1)
    link = [rng.gauss(0, 0.01) for _ in range(6)]
    base = [time + rng.gauss(0, 0.01) for time in link[:3]] + nowhere
    row = nowhere + [time - 0.2 + rng.gauss(0, 0.01) for time in link[3:]]
    differences = Differences(in_rounds(base, row, link))
    assert differences.is_linked(1, 0)
    difference = differences.between(1, 0)
    assert difference is not None and not difference.is_across_hosts
    assert difference.value == pytest.approx(0.2, abs=0.03)


def on(row: int, host: str, *times: float) -> list[RunTime]:
    return [RunTime(row=row, log_time=time, host=host) for time in times]


def test_runs_of_one_host_without_rounds_are_compared_by_welch() -> None:
    base, row = [0.1, 0.12, 0.09, 0.11], [0.0, 0.04, 0.01]
    difference = Differences([*on(0, "a", *base), *on(1, "a", *row)]).between(1, 0)
    expected = scipy.stats.ttest_ind(base, row, equal_var=False)
    estimate = only(difference)
    assert (estimate.value / estimate.error, estimate.dof) == pytest.approx((expected.statistic, expected.df))
    assert difference is not None and not difference.is_across_hosts


def test_other_machines_differ_by_themselves() -> None:
    one_each = [*on(0, "a", 0.1, 0.1, 0.1), *on(1, "b", 0.0, 0.0, 0.0)]
    difference = Differences(one_each).between(1, 0)
    assert difference is not None and difference.is_across_hosts
    low, high = difference.limits(0.05)
    # One host each: 2.571 x 1.7% x sqrt(2), and hardly anything for the scatter within.
    assert (high - low) / 2 == pytest.approx(2.5706 * MACHINE * math.sqrt(2), rel=0.01)
    three_each = [run for row, host in product((0, 1), "abc") for run in on(row, f"{host}{row}", 0.0, 0.0)]
    low, high = Differences(three_each).between(1, 0).limits(0.05)  # type: ignore[union-attr]
    # Hosts that were seen to be alike: sqrt(5 / 9) of that deviation, at 9 degrees of freedom.
    assert (high - low) / 2 == pytest.approx(2.262 * MACHINE * math.sqrt(5 / 9 * 2 / 3), rel=0.01)


def test_rows_with_one_run_on_each_of_the_same_hosts_are_compared_by_host() -> None:
    base, row = [0.1, 0.3, 0.2], [0.0, 0.18, 0.13]
    runs = [
        run
        for at, times in enumerate((base, row))
        for host, time in zip("abc", times, strict=True)
        for run in on(at, host, time)
    ]
    difference, expected = Differences(runs).between(1, 0), scipy.stats.ttest_rel(base, row)
    estimate = only(difference)
    assert (estimate.value / estimate.error, estimate.dof) == pytest.approx((expected.statistic, 2))


def test_a_host_each_with_one_run_has_no_interval() -> None:
    assert Differences([*on(0, "a", 0.1), *on(1, "b", 0.0, 0.01)]).between(1, 0) is None


def test_a_row_that_is_still_slowing_has_wider_limits() -> None:
    def limits(lates: Sequence[float]) -> float:
        runs = [
            RunTime(row=row, log_time=0.0, host="a", block=number, late=late if row else 0.0)
            for number, late in enumerate(lates)
            for row in (0, 1)
        ]
        difference = Differences(runs).between(1, 0)
        assert difference is not None
        return difference.drift

    assert limits([0.01, 0.011, 0.009, 0.01]) == pytest.approx(0.02)
    assert limits([0.001, 0.0011, 0.0009, 0.001]) == 0.0  # too little to matter
    assert limits([0.05, -0.04, 0.03, -0.03]) == 0.0  # not always so
    assert limits([0.01, 0.011]) == 0.0  # too few


def test_rounds_that_settle_it() -> None:
    near = Difference(estimates=(Contrast(value=0.03, error=0.012, dof=4, num_rounds=5, dof_per_round=1),))
    assert near.verdict(0.05) == "unresolved"
    rounds, share = rounds_to_settle(near, 0.05) or (0, 0.0)
    assert 2 <= rounds <= 20 and share == 0.8
    assert rounds_to_settle(near, 0.012) > (rounds, share)  # type: ignore[operator]
    hopeless = Difference(estimates=(Contrast(value=0.0, error=0.2, dof=4, num_rounds=5, dof_per_round=1),))
    rounds, share = rounds_to_settle(hopeless, 0.05) or (0, 0.0)
    assert rounds == 50 and share < 0.8
    of_machines = Difference(estimates=(Contrast(value=0.0, error=0.02, dof=5),), is_across_hosts=True)
    assert rounds_to_settle(of_machines, 0.05) is None


def test_what_hosts_differ_by_takes_more_rounds_to_settle() -> None:
    def proposed(hosts: OnHosts) -> tuple[int, float]:
        part = Contrast(value=0.02, error=0.006, dof=10, num_rounds=4, dof_per_round=1, hosts=hosts)
        return rounds_to_settle(Difference(estimates=(part,)), 0.01) or (0, 0.0)

    (rounds, share), (most, less) = (
        proposed(OnHosts(variance=Variance(value=deviation**2, dof=6), num_hosts=2, share=0.5))
        for deviation in (0.0, 0.005)
    )
    assert rounds < 20 and share == 0.8
    assert (most, less) == (50, pytest.approx(0.5, abs=0.25))
