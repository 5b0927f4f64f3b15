"""Student's t, Holm's correction, the pooled deviation and the verdict, against scipy and known answers."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import special, stats

from fastlaunch.analysis.statistics import (
    BETTER,
    TIE,
    UNRESOLVED,
    WORSE,
    RunVariance,
    Sample,
    Uncertainty,
    classify,
    holm_levels,
    mark_uneven,
    more_runs,
    p_value,
    pooled_spread,
    regularised_beta,
    t_quantile,
    t_survival,
    uncertainty,
)


@given(st.floats(0.0, 1.0), st.floats(0.5, 500.0), st.one_of(st.just(0.5), st.floats(0.5, 50.0)))
def test_the_incomplete_beta_function_is_scipys(x: float, a: float, b: float) -> None:
    assert regularised_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=1e-9, abs=1e-14)


@given(st.floats(0.0, 200.0), st.floats(1.0, 1000.0))
@example(1e-6, 420.0)
def test_the_survival_function_is_scipys(t: float, dof: float) -> None:
    assert t_survival(t, dof) == pytest.approx(stats.t.sf(t, dof), rel=1e-8, abs=1e-15)


@pytest.mark.parametrize("dof", [1, 1.5, 2, 3, 4.7, 10, 30, 400, math.inf])
@pytest.mark.parametrize("p", [0.5, 0.75, 0.95, 0.975, 0.99, 0.9995])
def test_the_quantile_is_scipys(p: float, dof: float) -> None:
    expected = stats.norm.ppf(p) if math.isinf(dof) else stats.t.ppf(p, dof)
    assert t_quantile(p, dof) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("dof", "point"), [(1, 12.706), (5, 2.571), (6, 2.447), (math.inf, 1.960)])
def test_the_points_that_tables_print(dof: float, point: float) -> None:
    assert t_quantile(0.975, dof) == pytest.approx(point, abs=5e-4)


def test_the_deviation_is_pooled_over_rows_of_two_runs_or_more() -> None:
    # Squares about the means: 2 x 0.01^2 and 2 x 0.02^2, over 1 + 2 degrees of freedom.
    rows = [[0.01, -0.01], [1.02, 0.98, 1.0], [7.0], []]
    spread = pooled_spread(rows)
    assert spread.dof == 3
    assert spread.deviation == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.02**2) / 3))


def test_the_deviation_has_a_floor_and_may_be_unknown() -> None:
    assert pooled_spread([[0.0, 0.0, 1e-6]]) == RunVariance(deviation=0.005, dof=2)
    assert pooled_spread([[0.0], [1.0]]) == RunVariance(deviation=0.0, dof=0)


def test_rows_of_several_runs_share_the_pooled_deviation() -> None:
    found = uncertainty(
        [Sample(log_time=0, num_runs=3), Sample(log_time=0, num_runs=2)], RunVariance(deviation=0.01, dof=7)
    )
    assert found.error == pytest.approx(0.01 * math.sqrt(1 / 3 + 1 / 2))
    assert found.dof == pytest.approx(7)


def test_a_single_run_takes_one_percent_and_its_own_error() -> None:
    none_known = RunVariance(deviation=0.0, dof=0)
    found = uncertainty([Sample(log_time=0, num_runs=1, within=0.0075)], none_known)
    assert found.error == pytest.approx(0.0125)
    assert math.isinf(found.dof)
    assert found.half_width() == pytest.approx(0.0125 * 1.959964, rel=1e-6)
    wide = uncertainty([Sample(log_time=0, num_runs=1)], RunVariance(deviation=0.03, dof=4))
    assert wide.error == pytest.approx(0.03)


def test_degrees_of_freedom_by_welch_and_satterthwaite() -> None:
    arms = [Sample(log_time=0, num_runs=4), Sample(log_time=0, num_runs=1)]
    found = uncertainty(arms, RunVariance(deviation=0.01, dof=3))
    pooled, known = 0.01**2 / 4, 0.01**2
    assert found.error == pytest.approx(math.sqrt(pooled + known))
    assert found.dof == pytest.approx((pooled + known) ** 2 / (pooled**2 / 3))


def test_where_rows_deviate_unequally_each_takes_its_own_that_has_three_runs() -> None:
    quiet, noisy = RunVariance(deviation=0.005, dof=4), RunVariance(deviation=0.1, dof=2)
    arms = [Sample(log_time=0, num_runs=5, own=quiet), Sample(log_time=0, num_runs=3, own=noisy)]
    two = Sample(log_time=0, num_runs=2, own=RunVariance(deviation=0.01, dof=1))
    even = RunVariance(deviation=0.06, dof=12)
    uneven = replace(even, is_uneven=True)
    assert uncertainty(arms, even).error == pytest.approx(0.06 * math.sqrt(1 / 5 + 1 / 3))
    assert uncertainty(arms[:1], uneven) == Uncertainty(
        error=pytest.approx(0.005 / math.sqrt(5)), dof=pytest.approx(4)
    )
    assert uncertainty([two], uneven) == uncertainty([two], even)
    found, parts = uncertainty(arms, uneven), (0.005**2 / 5, 0.1**2 / 3)
    assert found.error == pytest.approx(math.sqrt(sum(parts)))
    assert found.dof == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 4 + parts[1] ** 2 / 2))
    # Two rows of equal deviations know each of its own alone.
    assert uncertainty([arms[0], arms[0]], uneven).dof == pytest.approx(4)
    assert uncertainty([arms[0], replace(arms[0], own=replace(quiet))], uneven).dof == pytest.approx(8)


def test_more_runs_where_rows_deviate_unequally() -> None:
    # 1% each of its own, 2 dof each. With k more: t(0.975, 2 (2 + k)) x 0.01 x sqrt(2 / (3 + k)):
    # 0: 2.776 x 0.00816 = 2.27%; 1: 2.447 x 0.00707 = 1.73% < 1.8%; 2: 2.306 x 0.00632 = 1.46% < 1.6%.
    own = RunVariance(deviation=0.01, dof=2)
    arms = (Sample(log_time=0, num_runs=3, own=own), Sample(log_time=0, num_runs=3, own=replace(own)))
    uneven = RunVariance(deviation=0.08, dof=9, is_uneven=True)
    assert more_runs(0.018, arms, uneven, level=0.05, other_machines=False) == 1
    assert more_runs(0.016, arms, uneven, level=0.05, other_machines=False) == 2
    even = replace(uneven, is_uneven=False)
    assert (more_runs(0.018, arms, even, level=0.05, other_machines=False) or 100) > 50


@pytest.mark.parametrize(("machines", "parts"), [((1, 1), 2), ((2, 1), 1), ((0, 2), 1), ((2, 3), 0)])
def test_a_machine_that_stands_alone_for_its_type_adds_one_percent(
    machines: tuple[int, int], parts: int
) -> None:
    arms = [Sample(log_time=0, num_runs=4, num_machines=number) for number in machines]
    spread = RunVariance(deviation=0.01, dof=6)
    assert uncertainty(arms, spread, other_machines=True).error == pytest.approx(
        math.sqrt(0.01**2 / 2 + parts * 0.01**2)
    )
    assert uncertainty(arms, spread).error == pytest.approx(math.sqrt(0.01**2 / 2))


def test_holm_by_hand() -> None:
    # 0.01 <= 0.05/4; 0.015 <= 0.05/3; 0.04 > 0.05/2, which stops it, though 0.045 <= 0.05 alone.
    assert holm_levels([0.045, 0.01, 0.04, 0.015]) == pytest.approx([0.025, 0.0125, 0.025, 0.05 / 3])
    assert holm_levels([0.03, 0.04]) == pytest.approx([0.025, 0.025])
    assert holm_levels([0.02, 0.04]) == pytest.approx([0.025, 0.05])
    assert holm_levels([]) == []


@given(st.lists(st.floats(0.0, 1.0), max_size=8))
def test_holm_rejects_what_its_adjusted_p_values_reject(p_values: list[float]) -> None:
    adjusted, highest = {}, 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = highest
    for index, level in enumerate(holm_levels(p_values)):
        if abs(adjusted[index] - 0.05) > 1e-12:
            assert (p_values[index] <= level) == (adjusted[index] <= 0.05)


@pytest.mark.parametrize(
    ("log_ratio", "half_width", "said"),
    [
        (0.05, 0.04, BETTER),
        (-0.05, 0.04, WORSE),
        (0.0, 0.019, TIE),
        (0.0, 0.021, UNRESOLVED),
        (0.015, 0.016, UNRESOLVED),
        (0.01, 0.005, BETTER),
    ],
)
def test_the_verdict(log_ratio: float, half_width: float, said: str) -> None:
    assert classify(log_ratio, half_width) == said


def test_the_p_value_and_the_interval_agree() -> None:
    of = uncertainty([Sample(log_time=0, num_runs=3)] * 2, RunVariance(deviation=0.01, dof=4))
    assert p_value(of.half_width(0.02), of) == pytest.approx(0.02, rel=1e-9)


def test_more_runs_by_hand() -> None:
    # Two runs each, s = 1%, 2 dof, 1.5% apart. With k more: t(0.975, 2 + 2k) x 0.01 x sqrt(2 / (2 + k)):
    # 1: 2.776 x 0.00816 = 2.27%, 2: 2.447 x 0.00707 = 1.73%, 3: 2.306 x 0.00632 = 1.46% < 1.5%.
    arms = (Sample(log_time=0, num_runs=2), Sample(log_time=0, num_runs=2))
    spread = RunVariance(deviation=0.01, dof=2)
    assert more_runs(0.015, arms, spread, level=0.05, other_machines=False) == 3
    # No difference is a tie once the interval fits into 2%: 1.98%, so 1.73% does.
    assert more_runs(0.0, arms, spread, level=0.05, other_machines=False) == 2


def test_no_number_of_runs_replaces_a_second_machine() -> None:
    arms = (Sample(log_time=0, num_runs=2), Sample(log_time=0, num_runs=2))
    spread = RunVariance(deviation=0.01, dof=2)
    assert more_runs(0.01, arms, spread, level=0.05, other_machines=True) is None


def wrongly_told(
    arms_like: Sequence[tuple[float, int]], judged: Callable[[list[list[float]]], RunVariance]
) -> float:
    """The share of comparisons of equal recipes with any verdict that calls one faster or slower.

    arms_like: deviation and number of runs of each arm. judged: what rows of log times are judged by.
    """
    noise = random.Random(len(arms_like))
    num_wrong, num_comparisons = 0, 1000
    for _ in range(num_comparisons):
        rows = [[noise.gauss(0, deviation) for _ in range(number)] for deviation, number in arms_like]
        arms = [
            Sample(log_time=sum(row) / len(row), num_runs=len(row), own=pooled_spread([row])) for row in rows
        ]
        ratios = [arms[0].log_time - arm.log_time for arm in arms[1:]]
        spread = judged(rows)
        errors = [uncertainty([arms[0], arm], spread) for arm in arms[1:]]
        levels = holm_levels([p_value(*pair) for pair in zip(ratios, errors, strict=True)])
        said = [
            classify(ratio, error.half_width(level))
            for ratio, error, level in zip(ratios, errors, levels, strict=True)
        ]
        num_wrong += BETTER in said or WORSE in said
    return num_wrong / num_comparisons


def apart_if_uneven(rows: list[list[float]]) -> RunVariance:
    return mark_uneven(pooled_spread(rows), rows)


@pytest.mark.parametrize("judged", [pooled_spread, apart_if_uneven])
@pytest.mark.parametrize("num_runs", [1, 3, 5])
def test_identical_arms_are_rarely_called_different(
    num_runs: int, judged: Callable[[list[list[float]]], RunVariance]
) -> None:
    """Runs that differ by 1%."""
    assert 0.01 < wrongly_told([(0.01, num_runs)] * 4, judged) < 0.07


@pytest.mark.slow
@pytest.mark.parametrize(
    "arms_like",
    [
        [(0.005, 5)] * 4 + [(0.1, 5)] * 2,
        [(0.1, 5), (0.005, 5), (0.005, 5), (0.01, 5), (0.01, 5), (0.1, 5)],
        [(0.005, 5), (0.1, 3), (0.01, 5), (0.1, 3), (0.005, 5), (0.1, 4)],
    ],
)
def test_arms_that_deviate_unequally_are_rarely_called_different(arms_like: list[tuple[float, int]]) -> None:
    """Which one deviation for all of them does not achieve."""
    assert 0.01 < wrongly_told(arms_like, apart_if_uneven) < 0.07
    assert 0.08 < wrongly_told(arms_like, pooled_spread) < 0.18
