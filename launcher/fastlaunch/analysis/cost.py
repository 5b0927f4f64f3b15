"""Seconds into rates, and rates into dollars. Every function carries an interval through, if there is one."""

import math

from fastlaunch.measure.summarize import Interval

SECONDS_PER_HOUR = 3600.0
PER_MILLION = 1e6
PER_BILLION = 1e9


def scaled(quantity: Interval, factor: float) -> Interval:
    """`quantity` x `factor`, which is above 0."""
    return Interval(
        value=quantity.value * factor,
        low=None if quantity.low is None else quantity.low * factor,
        high=None if quantity.high is None else quantity.high * factor,
    )


def reciprocal(quantity: Interval, numerator: float = 1.0) -> Interval:
    """`numerator` / `quantity`, both above 0: the longest time is the lowest rate."""
    return Interval(
        value=_divided(numerator, quantity.value),
        low=None if quantity.high is None else _divided(numerator, quantity.high),
        high=None if quantity.low is None else _divided(numerator, quantity.low),
    )


def _divided(numerator: float, denominator: float) -> float:
    """Infinite where an absurd record has let the denominator fall to 0; a report shows that as unknown."""
    return numerator / denominator if denominator else math.inf


def samples_per_s(step_time_s: Interval, samples_per_step: float) -> Interval:
    """Samples per second of all ranks. samples_per_step: of all ranks together."""
    return reciprocal(step_time_s, samples_per_step)


def usd_per_second(usd_per_hour: float, num_nodes: int) -> float:
    """Dollars for a second of all nodes. usd_per_hour: of one."""
    return usd_per_hour * num_nodes / SECONDS_PER_HOUR


def samples_per_usd(rate_per_s: Interval, usd_per_hour: float, num_nodes: int) -> Interval:
    """Samples (or tokens) that a dollar buys. usd_per_hour: of one node."""
    return scaled(rate_per_s, SECONDS_PER_HOUR / (usd_per_hour * num_nodes))


def usd_per_million(rate_per_s: Interval, usd_per_hour: float, num_nodes: int) -> Interval:
    """Dollars for a million samples; linear in the step time."""
    return reciprocal(samples_per_usd(rate_per_s, usd_per_hour, num_nodes), PER_MILLION)


def usd_per_billion(rate_per_s: Interval, usd_per_hour: float, num_nodes: int) -> Interval:
    """Dollars for a billion tokens."""
    return reciprocal(samples_per_usd(rate_per_s, usd_per_hour, num_nodes), PER_BILLION)


def tflops_per_gpu(rate_per_s: Interval, num_gpus: int, flops_per_sample: float) -> Interval:
    """Model TFLOP/s of one GPU; num_gpus: over all nodes."""
    return scaled(rate_per_s, flops_per_sample / num_gpus / 1e12)


def percent_of_peak(tflops: Interval, peak_tflops: float) -> Interval:
    """Share of the dense peak, in percent."""
    return scaled(tflops, 100.0 / peak_tflops)
