"""Whether a recipe trains to the held-out loss of its reference, by runs that are paired by their seeds.

Two runs make a pair if they were alike in everything but the recipe: workload, data and their contents, seed
(which is the initialisation and the order of the data), tokenizer, weights to start from, global batch,
number of GPUs, sequence length, and the step at which they end. Runs of one seed are no pairs of their own:
their losses are averaged first.

The verdict is on the loss at the end. *within*: the one-sided 95% upper limit of the mean paired difference
is under 1% of the reference's loss. *worse*: the lower limit is above 0 and the mean beyond 1%. Else
*unknown*, as with fewer than three pairs. Three checkpoints, a quarter, a half and three quarters through,
are judged alike, and can only take a *within* back: a recipe that is worse on the way and not at the end
trains slower, or the end is where everything saturates. They never make a recipe *worse*, so an equal recipe
is called that at most 5% of the time, for a number of pairs that was chosen beforehand: who looks again after
each pair and stops at the first verdict errs in 8% of cases at a spread of 1%.

A loss that is no number has no difference. Where it is the recipe's and the reference never has one, the
recipe is *worse*; that presumes a reference which diverges in fewer than one run of a hundred.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastlaunch.analysis.held_out import at_end, diverged
from fastlaunch.analysis.loss_pairs import Pair, by_reason, end_step, listed, named_seeds, pairs_of_seed
from fastlaunch.analysis.statistics import t_quantile
from fastlaunch.measure.summarize import RunSummary

#: Of the reference's loss; and the level of each one-sided limit.
MARGIN = 0.01
LEVEL = 0.05
FEWEST_PAIRS = 3
PAIRS_WANTED = 5
MOST_PAIRS_PROPOSED = 50
QUARTERS = (0.25, 0.5, 0.75)

WITHIN, WORSE, UNKNOWN, REFERENCE = "within", "worse", "unknown", "reference"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Held-out loss less the reference's after `step`, paired: the mean with its one-sided 95% limits.

    low, high: None for fewer than two pairs. reference_loss: the mean over the same pairs.
    """

    step: int
    num_pairs: int
    mean: float
    low: float | None
    high: float | None
    reference_loss: float

    def relative(self, value: float | None) -> float | None:
        """`value`, one of the above, as a part of the reference's loss; None if that is not above 0."""
        return None if value is None or self.reference_loss <= 0 else value / self.reference_loss

    @property
    def verdict(self) -> str:
        """within, worse or unknown."""
        margin = MARGIN * self.reference_loss
        if self.num_pairs < FEWEST_PAIRS or self.low is None or self.high is None or margin <= 0:
            return UNKNOWN
        if self.high < margin:
            return WITHIN
        return WORSE if self.low > 0 and self.mean > margin else UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The verdict on a row, with its evidence.

    reference: the recipe compared with. seeds: of the pairs. end: None without a pair. checkpoints: at most
    three, none where there are no evaluations on the way. diverged: seeds at which the loss is no number and
    the reference's is. missing: why seeds make no pair. caveats: what else to know of the evidence.
    more_pairs: about how many would tell, None if that cannot be said.
    """

    verdict: str
    reference: str | None = None
    seeds: tuple[int, ...] = ()
    end: Difference | None = None
    checkpoints: tuple[Difference, ...] = ()
    diverged: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    more_pairs: int | None = None

    @property
    def num_pairs(self) -> int:
        return len(self.seeds)


def converges(runs: Sequence[RunSummary], reference_runs: Sequence[RunSummary]) -> Convergence:
    """The verdict on `runs`, of one row, against runs of its reference, of the same workload."""
    if not any(at_end(run) or diverged(run) for run in runs):
        return Convergence(verdict=UNKNOWN, missing=("no held-out loss was recorded at the end",))
    if not reference_runs:
        return Convergence(verdict=UNKNOWN, missing=("there is no reference to compare the loss with",))
    seeds = {
        seed: pairs_of_seed([run for run in runs if run.seed == seed], reference_runs)
        for seed in sorted({run.seed for run in runs if run.seed is not None})
    }
    last_step = end_step(seeds.values())
    pairs = {seed: found.pairs[last_step] for seed, found in seeds.items() if last_step in found.pairs}
    lost = tuple(seed for seed, found in seeds.items() if found.diverged)
    without = {seed: found.lacks for seed, found in seeds.items() if seed not in pairs and seed not in lost}
    found = _judged(last_step, list(pairs.values()), num_lost=len(lost))
    name = reference_runs[0].recipe
    caveats = [f"its loss is no number at {named_seeds(lost)}"] if lost else []
    reference_lost = [seed for seed, found in seeds.items() if found.reference_diverged]
    if reference_lost:
        caveats.append(f"the loss of {name} itself is no number at {named_seeds(reference_lost)}")
        if lost:
            found = replace(found, verdict=UNKNOWN)
        if all(diverged(run) for run in reference_runs):
            # More of them would make no pair either.
            found = replace(found, more_pairs=None)
    caveats += [*_on_the_way(found), *_schemas(name, runs, reference_runs)]
    return replace(
        found,
        reference=name,
        seeds=tuple(pairs),
        diverged=lost,
        missing=tuple(by_reason(without, otherwise=f"no pair that ends at step {last_step}")),
        caveats=tuple(caveats),
    )


def _judged(last_step: int, pairs: Sequence[Pair], *, num_lost: int) -> Convergence:
    """The verdict by the losses of `pairs`, and of `num_lost` seeds at which only the recipe has none."""
    end = _difference(last_step, pairs)
    checkpoints = _checkpoints(last_step, pairs)
    num_pairs = len(pairs) + num_lost
    if num_pairs < FEWEST_PAIRS or end is None:
        verdict = WORSE if num_lost >= FEWEST_PAIRS else UNKNOWN
    elif num_lost:
        verdict = WORSE
    elif end.verdict == WITHIN and any(checkpoint.verdict == WORSE for checkpoint in checkpoints):
        verdict = UNKNOWN
    else:
        verdict = end.verdict
    more: int | None = None
    if num_pairs < FEWEST_PAIRS:
        more = PAIRS_WANTED - num_pairs
    elif end is not None and verdict == end.verdict == UNKNOWN:
        more = _more_pairs(end)
    return Convergence(verdict=verdict, end=end, checkpoints=checkpoints, more_pairs=more)


def _difference(step: int, pairs: Iterable[Pair]) -> Difference | None:
    """The paired difference after `step`, over the pairs whose losses there are numbers."""
    losses = [
        (ours, theirs)
        for pair in pairs
        if (ours := pair.ours.get(step)) is not None and (theirs := pair.theirs.get(step)) is not None
    ]
    if not losses:
        return None
    mean = math.fsum(ours - theirs for ours, theirs in losses) / len(losses)
    deviation = math.sqrt(
        math.fsum((ours - theirs - mean) ** 2 for ours, theirs in losses) / max(1, len(losses) - 1)
    )
    return _limited(
        step, len(losses), mean, deviation, math.fsum(theirs for _, theirs in losses) / len(losses)
    )


def _limited(step: int, num_pairs: int, mean: float, deviation: float, reference_loss: float) -> Difference:
    half = None
    if num_pairs >= 2:
        half = t_quantile(1 - LEVEL, num_pairs - 1) * deviation / math.sqrt(num_pairs)
    return Difference(
        step=step,
        num_pairs=num_pairs,
        mean=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        reference_loss=reference_loss,
    )


def _checkpoints(last_step: int, pairs: Sequence[Pair]) -> tuple[Difference, ...]:
    """The differences at the evaluations of all pairs nearest to a quarter, a half and three quarters."""
    shared = set.intersection(*(set(pair.ours) & set(pair.theirs) for pair in pairs)) if pairs else set()
    steps = sorted(step for step in shared if 0 < step < last_step)
    nearest = [_nearest(steps, part * last_step) for part in QUARTERS if steps]
    found = [_difference(step, pairs) for step in dict.fromkeys(nearest)]
    return tuple(difference for difference in found if difference is not None)


def _nearest(steps: Sequence[int], to: float) -> int:
    return min(steps, key=lambda step: abs(step - to))


def _more_pairs(end: Difference) -> int | None:
    """How many more pairs would tell if mean and spread stayed as they are; None if too many, or never."""
    assert end.high is not None
    deviation = (end.high - end.mean) * math.sqrt(end.num_pairs) / t_quantile(1 - LEVEL, end.num_pairs - 1)
    for more in range(1, MOST_PAIRS_PROPOSED + 1):
        then = _limited(end.step, end.num_pairs + more, end.mean, deviation, end.reference_loss)
        if then.verdict != UNKNOWN:
            return more
    return None


def _on_the_way(found: Convergence) -> Iterator[str]:
    if found.end is None or found.end.reference_loss <= 0:
        if found.end is not None:
            yield "the reference's loss is not above 0, so 1% of it is no margin"
        return
    for checkpoint in found.checkpoints:
        part = checkpoint.relative(checkpoint.mean)
        if found.end.verdict == WITHIN and checkpoint.verdict == WORSE and part is not None:
            yield f"within 1% at the end, but {part:+.1%} after step {checkpoint.step}: it trains slower"


def _schemas(name: str, runs: Sequence[RunSummary], references: Sequence[RunSummary]) -> Iterator[str]:
    for what in ("record", "recipe"):
        ours, theirs = (
            sorted({number for run in of if (number := getattr(run, f"{what}_schema")) is not None})
            for of in (runs, references)
        )
        if ours and theirs and ours != theirs:
            yield f"{what} schema {listed(ours)} is paired with {listed(theirs)} of {name}"
