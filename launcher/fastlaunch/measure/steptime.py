"""The step time of one attempt from its ranks' records: what is warm-up, what is left, and its interval.

The rule and its constants were checked by simulation; docs/method.md describes them:

1.  A block's synchronised wall time is shared out over its steps in proportion to their device time, so a
    cut may fall inside a block and blocks still add up to what the clock said. Steps after the last block
    (a killed process) have no synchronised time and are left out.
2.  Warm-up: everything through the last compile, graph capture or allocator growth, at least 10 steps; then
    tenths of the rest until the first fifth's mean is within 2% of the last half's.
3.  The headline is the mean wall time of the retained steps on the slowest rank, untrimmed: the bill is
    linear in it. Six contiguous batch means give the interval, since steps are autocorrelated.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastlaunch.measure.summary import Interval, Timing
from fastlaunch_train.records.records import RankRecord

Array: TypeAlias = NDArray[np.float64]

MIN_WARMUP_STEPS = 10
#: Steps that must be left after the first cut, so that a tenth of them is a step.
MIN_TIMED_STEPS = 10
STEADY_WITHIN = 0.02
NUM_BATCHES = 6
#: 97.5% point of Student's t with NUM_BATCHES - 1 = 5 degrees of freedom.
T_OF_BATCHES = 2.571
MIN_STEPS_FOR_INTERVAL = 60


class NoTiming(ValueError):
    """Why the records of an attempt yield no step time, in words."""


@np.errstate(all="ignore")  # absurd numbers in a foreign file show in the result
def time_attempt(ranks: Sequence[RankRecord]) -> Timing:
    """Return the timing of one attempt by the records of its ranks. Raises NoTiming if it has too few steps.

    An attempt that did not settle keeps its last half, without interval.
    """
    num_steps = min(sum(block.last_step - block.first_step + 1 for block in rank.blocks) for rank in ranks)
    first_cut = max(MIN_WARMUP_STEPS, *(steps_until_warm(rank) for rank in ranks))
    if num_steps - first_cut < MIN_TIMED_STEPS:
        raise NoTiming(
            f"too few steps: {num_steps} were timed, the first {min(first_cut, num_steps)} are warm-up, "
            f"and {MIN_TIMED_STEPS} more are needed"
        )
    walls = np.stack([wall_times_s(rank)[:num_steps] for rank in ranks])
    slowest = int(np.argmax(walls[:, first_cut:].sum(axis=1)))
    settled = settled_after(walls[slowest, first_cut:])
    cut = first_cut + (settled if settled is not None else (num_steps - first_cut) // 2)

    retained = walls[:, cut:]
    slowest = int(np.argmax(retained.sum(axis=1)))
    totals_s = retained.sum(axis=1)
    if not (np.isfinite(totals_s) & (totals_s > 0)).all():
        raise NoTiming("the recorded wall times are zero or absurd")
    low_s, high_s = batch_interval(retained[slowest]) if settled is not None else (None, None)
    num_retained = num_steps - cut
    third = num_retained // 3
    steps = [rank.steps[cut:num_steps] for rank in ranks]
    device_s = np.array([[step.step_time_s for step in row] for row in steps]).max(axis=0)
    waits_s = np.array([[step.data_wait_s for step in row] for row in steps]).sum(axis=1)
    return Timing(
        num_retained_steps=num_retained,
        steady=settled is not None,
        step_time_s=Interval(value=float(retained[slowest].mean()), low=low_s, high=high_s),
        samples_per_step=sum(step.num_samples for row in steps for step in row) / num_retained,
        tokens_per_step=sum(step.num_tokens for row in steps for step in row) / num_retained or None,
        median_step_time_s=_finite(np.median(device_s)),
        p95_step_time_s=_finite(np.percentile(device_s, 95)),
        data_wait_fraction=_finite((waits_s / totals_s).max()),
        utilization=_utilization(ranks, cut),
        drift=_finite(retained[slowest, -third:].mean() / retained[slowest, :third].mean() - 1.0),
        warmup_s=_finite(walls[slowest, :cut].sum()),
        num_warmup_steps=cut,
    )


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _utilization(ranks: Sequence[RankRecord], cut: int) -> float | None:
    """Return the mean after `cut` steps of the GPU that computed least; None without samples."""
    samples = [
        [
            block.utilization
            for block in rank.blocks
            if block.first_step >= rank.header["first_step"] + cut and block.utilization is not None
        ]
        for rank in ranks
    ]
    return min((float(np.mean(of_rank)) for of_rank in samples if of_rank), default=None)


def wall_times_s(rank: RankRecord) -> Array:
    """Return the wall time of each synchronised step of one rank. Shape: (steps in blocks,)."""
    shares = []
    steps = iter(rank.steps)
    for block in rank.blocks:
        num_steps = block.last_step - block.first_step + 1
        times_s = np.array([next(steps).step_time_s for _ in range(num_steps)])
        total_s = times_s.sum()
        shares.append(
            block.wall_s * (times_s / total_s if total_s > 0 else np.full(num_steps, 1 / num_steps))
        )
    return np.concatenate(shares) if shares else np.zeros(0)


def steps_until_warm(rank: RankRecord) -> int:
    """Return the steps of one rank through its last compile, graph capture or allocator growth.

    The count of compiled graphs starts at 0, so compiling in the first block counts; what the allocator
    holds after the first block is where its growth is measured from.
    """
    before_first: int = rank.header["first_step"] - 1
    last = max((phase.step for phase in rank.phases if phase.name == "compile"), default=before_first)
    num_compiles, reserved_gib = 0, float("inf")
    for block in rank.blocks:
        now_reserved_gib = reserved_gib if block.reserved_gib is None else block.reserved_gib
        if block.num_compiles > num_compiles or now_reserved_gib > reserved_gib:
            last = max(last, block.last_step)
        num_compiles, reserved_gib = block.num_compiles, now_reserved_gib
    return max(0, last - before_first)


def settled_after(times_s: Array) -> int | None:
    """Return the steps to cut until the first fifth's mean is within 2% of the last half's; None if over
    half.

    times_s: (steps,), at least MIN_TIMED_STEPS. Cuts in tenths.
    """
    for tenths in range(6):
        cut = tenths * len(times_s) // 10
        left = times_s[cut:]
        first_fifth, last_half = left[: max(1, len(left) // 5)].mean(), left[len(left) // 2 :].mean()
        if abs(first_fifth - last_half) <= STEADY_WITHIN * last_half:
            return cut
    return None


def batch_interval(times_s: Array) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% interval of the mean of `times_s` (steps,) from six contiguous batch means.

    (None, None) under 60 steps, or where single stalls are so long that it would reach 0.
    """
    if len(times_s) < MIN_STEPS_FOR_INTERVAL:
        return None, None
    batch_means = np.array([batch.mean() for batch in np.array_split(times_s, NUM_BATCHES)])
    half_width = T_OF_BATCHES * float(batch_means.std(ddof=1)) / NUM_BATCHES**0.5
    mean = float(times_s.mean())
    return (mean - half_width, mean + half_width) if half_width < mean else (None, None)
