"""Student's t, Holm's correction and what they say of a difference, against scipy and known answers."""

import math

import pytest
import scipy
from hypothesis import example, given
from hypothesis import strategies as st

from fastlaunch.analysis.statistics import (
    Contrast,
    Difference,
    OnHosts,
    Variance,
    holm_levels,
    regularised_beta,
    t_quantile,
    t_survival,
)


@given(st.floats(0.0, 1.0), st.floats(0.5, 500.0), st.one_of(st.just(0.5), st.floats(0.5, 50.0)))
def test_the_incomplete_beta_function_is_scipys(x: float, a: float, b: float) -> None:
    assert regularised_beta(x, a, b) == pytest.approx(scipy.special.betainc(a, b, x), rel=1e-9, abs=1e-14)


@given(st.floats(-200.0, 200.0), st.floats(1.0, 1000.0))
@example(1e-6, 420.0)
def test_the_survival_function_is_scipys(t: float, dof: float) -> None:
    assert t_survival(t, dof) == pytest.approx(scipy.stats.t.sf(t, dof), rel=1e-8, abs=1e-15)


@pytest.mark.parametrize("dof", [1, 1.5, 2, 3, 4.7, 10, 30, 400, math.inf])
@pytest.mark.parametrize("p", [0.5, 0.75, 0.95, 0.975, 0.99, 0.9995])
def test_the_quantile_is_scipys(p: float, dof: float) -> None:
    expected = scipy.stats.norm.ppf(p) if math.isinf(dof) else scipy.stats.t.ppf(p, dof)
    assert t_quantile(p, dof) == pytest.approx(expected, rel=1e-9, abs=1e-9)


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


def by(*estimates: tuple[float, float, float, float], drift: float = 0.0) -> Difference:
    """The difference of (value, error, dof, weight) each."""
    return Difference(
        estimates=tuple(
            Contrast(value=value, error=error, dof=dof, weight=weight)
            for value, error, dof, weight in estimates
        ),
        drift=drift,
    )


def test_one_estimate_is_students_t() -> None:
    difference = by((0.03, 0.01, 4, 1.0))
    assert difference.p_above(0.0) == pytest.approx(scipy.stats.t.sf(3, 4))
    assert difference.p_below(0.0) == pytest.approx(scipy.stats.t.cdf(3, 4))
    assert difference.p_differs() == pytest.approx(2 * scipy.stats.t.sf(3, 4))
    assert difference.limits(0.05) == pytest.approx((0.03 - 0.01 * 2.776445, 0.03 + 0.01 * 2.776445))


def test_of_two_estimates_the_limits_are_where_the_weighted_p_is_half_the_level() -> None:
    difference = by((0.03, 0.01, 20, 0.7), (0.05, 0.04, 4, 0.3))
    low, high = difference.limits(0.05)
    assert difference.value == pytest.approx(0.7 * 0.03 + 0.3 * 0.05)
    for sign, limit in ((1, low), (-1, high)):
        parts = [(0.7, (0.03 - limit) / 0.01, 20), (0.3, (0.05 - limit) / 0.04, 4)]
        assert sum(w * scipy.stats.t.sf(sign * t, dof) for w, t, dof in parts) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("value", "error", "verdict"),
    [
        (0.05, 0.01, "better"),
        (-0.05, 0.01, "worse"),
        (0.001, 0.005, "tie"),
        (0.05, 0.05, "unresolved"),
        (0.015, 0.009, "unresolved"),
    ],
)
def test_verdicts_are_of_the_limits(value: float, error: float, verdict: str) -> None:
    assert by((value, error, 30, 1.0)).verdict(0.05) == verdict
    assert by((value + 0.2, error, 30, 1.0)).plus(-0.2).verdict(0.05) == verdict


def test_a_row_that_drifts_has_wider_limits_and_fewer_verdicts() -> None:
    still, drifting = by((0.05, 0.01, 30, 1.0)), by((0.05, 0.01, 30, 1.0), drift=0.04)
    low, high = still.limits(0.05)
    assert drifting.limits(0.05) == pytest.approx((low - 0.04, high + 0.04))
    assert (still.verdict(0.05), drifting.verdict(0.05)) == ("better", "unresolved")
    assert by((0.0, 0.004, 30, 1.0), drift=0.04).verdict(0.05) == "unresolved"


@given(
    st.lists(
        st.tuples(st.floats(-0.5, 0.5), st.floats(0.001, 0.1), st.integers(1, 40), st.floats(0.05, 1.0)),
        min_size=1,
        max_size=2,
    ),
    st.floats(0.001, 0.2),
)
def test_a_verdict_agrees_with_its_interval(
    parts: list[tuple[float, float, float, float]], level: float
) -> None:
    total = sum(weight for *_, weight in parts)
    difference = by(*((value, error, dof, weight / total) for value, error, dof, weight in parts))
    low, high = difference.limits(level)
    if min(abs(low), abs(high)) > 1e-9:
        assert (difference.verdict(level) in ("better", "worse")) == (low > 0 or high < 0)
        assert low <= high


@given(st.floats(0.001, 0.1), st.floats(1.0, 40.0), st.floats(0.001, 0.1), st.integers(2, 9))
def test_what_hosts_differ_by_never_narrows_an_interval(
    error: float, dof: float, on_host: float, num_hosts: int
) -> None:
    variance = Variance(value=on_host**2, dof=4 + num_hosts)
    hosts = OnHosts(variance=variance, num_hosts=num_hosts, share=1 / num_hosts)
    alone = Difference(estimates=(Contrast(value=0.02, error=error, dof=dof),))
    both = Difference(estimates=(Contrast(value=0.02, error=error, dof=dof, hosts=hosts),))
    low, high = alone.limits(0.05)
    assert both.limits(0.05)[0] <= low + 1e-9 and high - 1e-9 <= both.limits(0.05)[1]
    assert both.p_differs() >= alone.p_differs()
