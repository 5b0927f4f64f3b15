"""Seconds into rates and dollars, by known answers."""

import pytest
from fake_summaries import price_of
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis import cost
from fastlaunch.measure.summary import Interval


def test_a_tenth_of_a_second_at_batch_2_is_20_samples_per_second() -> None:
    rate = cost.samples_per_s(Interval(value=0.1, low=0.08, high=0.125), 2)
    assert (rate.value, rate.low, rate.high) == pytest.approx((20, 16, 25))


@pytest.mark.parametrize(
    ("step_time_s", "usd_per_hour", "images_per_usd", "usd_per_million"),
    [
        (0.41, 32.7726, 137_176, 7.29),
        (0.199, 98.32, 94_206, 10.62),
        (0.41, 21.957642, 204_740, 4.88),
        (0.199, 55.04, 168_283, 5.94),
    ],
)
def test_the_published_dollars(
    step_time_s: float, usd_per_hour: float, images_per_usd: int, usd_per_million: float
) -> None:
    rate = cost.samples_per_s(Interval(value=step_time_s), 64 * 8)
    assert round(cost.samples_per_usd(rate, price_of(usd_per_hour), 1).value) == images_per_usd
    assert round(cost.usd_per_million(rate, price_of(usd_per_hour), 1).value, 2) == usd_per_million


def test_two_nodes_cost_twice_one() -> None:
    rate = Interval(value=1000.0)
    assert cost.usd_per_million(rate, price_of(3.6), 1).value == pytest.approx(1.0)
    assert cost.usd_per_million(rate, price_of(3.6), 2).value == pytest.approx(2.0)
    assert cost.usd_per_billion(rate, price_of(3.6), 1).value == pytest.approx(1000.0)


def test_the_published_tflops_and_share_of_peak() -> None:
    rate = cost.samples_per_s(Interval(value=0.41), 512)
    tflops = cost.tflops_per_gpu(rate, 8, 763.504e9)
    assert tflops.value == pytest.approx(119.2, abs=0.05)
    assert cost.percent_of_peak(tflops, 312).value == pytest.approx(38.2, abs=0.05)


@given(st.floats(1e-6, 1e6), st.floats(0.5, 0.999), st.floats(1.001, 2), st.floats(1e-3, 1e3))
def test_cost_is_linear_in_the_step_time(
    value: float, below: float, above: float, usd_per_hour: float
) -> None:
    step = Interval(value=value, low=value * below, high=value * above)
    usd = cost.usd_per_million(cost.samples_per_s(step, 64), price_of(usd_per_hour), 1)
    assert usd.low is not None and usd.high is not None
    assert usd.low / usd.value == pytest.approx(below)
    assert usd.high / usd.value == pytest.approx(above)


def test_without_an_interval_there_is_none_after() -> None:
    rate = cost.samples_per_s(Interval(value=0.1), 2)
    assert cost.usd_per_million(rate, price_of(1.0), 1).low is None
    assert cost.percent_of_peak(rate, 10).high is None
