"""Test whether a recipe trains to its reference's held-out loss, by runs paired by seed.

A script's seed is unknown, so its runs are paired by round.

Two runs make a pair if they share everything but the recipe: workload, seed (which sets the initialisation
and the data order), the last step, and all of `_SHARED`. The losses of runs with one seed are averaged into
one pair.

The verdict is on the loss at the end, against a margin of 3% of what the reference has learnt: of the fall of
its loss since the initial weights. *within*: the one-sided 95% upper limit of the mean paired difference is
under the margin. *worse*: the lower limit is above 0 and the mean beyond the margin. Else *unknown*, as with
fewer than three pairs. *too short to tell*: fewer than 20 steps, or a fall that is not sure to half its size.

Divided by the slope of the reference's curve at its end, the difference is the steps that the recipe needs
more than the reference to reach the same loss.

The same test at a quarter, a half and three quarters of the
training can only withdraw a *within*: a recipe that is worse on the way but not at the end trains slower, or
every recipe saturates at the end. It never makes a recipe *worse*, so an equal recipe gets that verdict at
most 5% of the time. This holds for a number of pairs chosen beforehand: stopping at the first verdict errs in
8% of cases at a spread of 1%.

A loss that is not a number has no difference. If the recipe diverges and the reference never does, the
recipe is *worse*. This presumes that the reference diverges in fewer than one run of a hundred.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fastlaunch.analysis.pooling import data_of
from fastlaunch.analysis.statistics import t_quantile
from fastlaunch.measure.summary import Interval, RunSummary
from fastlaunch_train.records.records import Eval

#: The largest loss in fp32. A larger one, in a foreign record, would overflow in sums.
_MOST = 3.5e38
COMPLETED, NAN_LOSS = "completed", "nan_loss"
VALIDATION, TEST = "validation", "test"
CURRENT, BEST = "current", "best"

#: The margin, as a share of what the reference has learnt; and the level of each one-sided limit.
MARGIN = 0.03
LEVEL = 0.05
FEWEST_PAIRS = 3
FEWEST_STEPS = 20
PAIRS_WANTED = 5
MOST_PAIRS_PROPOSED = 50
QUARTERS = (0.25, 0.5, 0.75)

WITHIN, WORSE, UNKNOWN, REFERENCE = "within", "worse", "unknown", "reference"
TOO_SHORT = "too short to tell"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out figures at the end of training, as means over the runs of a row that were evaluated there."""

    num_runs: int
    loss: float | None  # None if a run's loss was not finite or not recorded
    metric: str | None = None  # its name; higher is better
    metric_value: float | None = None  # of the last weights on validation data
    test_metric_value: float | None = None  # of the last weights on test data
    best_test_metric_value: float | None = None  # of the best weights on test data


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Held-out losses by step for one seed, of the recipe and the reference, as means over repeats."""

    ours: Mapping[int, float | None]
    theirs: Mapping[int, float | None]
    first_loss: float | None = None  # of the reference's training, at its first step
    loss_slope: float | None = None  # of the reference's training, per step over its last half

    def learnt(self, step: int) -> float | None:
        """Return the fall of the reference's loss until `step`; None if it is not known where it began."""
        end = self.theirs.get(step)
        began = [loss for at, loss in self.theirs.items() if at < step and loss is not None][:1]
        began += [] if self.first_loss is None else [self.first_loss]
        return None if end is None or not began else max(began) - end

    def slope(self, step: int) -> float | None:
        """Return the change of the reference's loss per step at `step`: held-out, or else of training."""
        late = [(at, loss) for at, loss in self.theirs.items() if step / 2 <= at <= step and loss is not None]
        if len(late) < 2:
            return self.loss_slope
        (before, higher), (after, lower) = late[0], late[-1]
        return (lower - higher) / (after - before)


@dataclass(frozen=True, kw_only=True)
class SeedPairs:
    """The pairs of one seed, or the reason why there are none."""

    pairs: Mapping[int, Pair] = field(default_factory=dict)  # by the step at which both end
    diverged: bool = False
    reference_diverged: bool = False
    lacks: str = ""  # why there is no pair


@dataclass(frozen=True, kw_only=True)
class PairMean:
    """The mean of a quantity over pairs, with one-sided limits at LEVEL."""

    num_pairs: int
    mean: float
    deviation: float  # between pairs

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "PairMean | None":
        """Return the mean of the known values; None without one."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = math.fsum(known) / len(known)
        squares = math.fsum((value - mean) ** 2 for value in known)
        deviation = math.sqrt(squares / max(1, len(known) - 1))
        return cls(num_pairs=len(known), mean=mean, deviation=deviation)

    @property
    def low(self) -> float | None:
        half = self.half_width(LEVEL)
        return None if half is None else self.mean - half

    @property
    def high(self) -> float | None:
        half = self.half_width(LEVEL)
        return None if half is None else self.mean + half

    def half_width(self, level: float) -> float | None:
        """Return the distance of the mean from its one-sided limit; None for fewer than two pairs."""
        if self.num_pairs < 2:
            return None
        return t_quantile(1 - level, self.num_pairs - 1) * self.deviation / math.sqrt(self.num_pairs)


@dataclass(frozen=True, kw_only=True)
class LossDifference(PairMean):
    """Paired difference to the reference's held-out loss after `step`."""

    step: int
    reference_loss: float  # mean over the same pairs
    learnt: PairMean | None = None  # the fall of the reference's loss; None if it is not known where it began
    slope: PairMean | None = None  # the change of the reference's loss per step at `step`

    def relative(self, value: float | None) -> float | None:
        """Return `value` as a share of what the reference learnt; None if that is not known to be above 0."""
        if value is None or self.learnt is None or self.learnt.mean <= 0:
            return None
        return value / self.learnt.mean

    def more_steps(self, value: float | None) -> float | None:
        """Return the steps that make up for a difference of `value`, as a share of `step`.

        None if the reference's loss does not surely fall any more.
        """
        if value is None or self.slope is None or self.slope.mean >= 0 or (self.slope.high or 0) > 0:
            return None
        return value / -self.slope.mean / self.step

    @property
    def is_too_short(self) -> bool:
        """Whether the reference has learnt too little for a difference to mean anything."""
        learnt = self.learnt
        is_unsure = learnt is not None and (
            learnt.mean <= 0 or (learnt.low is not None and learnt.low < learnt.mean / 2)
        )
        return self.step < FEWEST_STEPS or is_unsure

    @property
    def verdict(self) -> str:
        """within, worse, unknown or too short to tell."""
        if self.is_too_short:
            return TOO_SHORT
        if self.num_pairs < FEWEST_PAIRS or self.low is None or self.high is None or self.learnt is None:
            return UNKNOWN
        margin = MARGIN * self.learnt.mean
        if self.high < margin:
            return WITHIN
        return WORSE if self.low > 0 and self.mean > margin else UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The verdict on a row, with its evidence."""

    verdict: str
    reference: str | None = None  # the reference's recipe
    seeds: tuple[int, ...] = ()  # of the pairs
    end: LossDifference | None = None  # None without a pair
    checkpoints: tuple[LossDifference, ...] = ()  # at most three, on the way
    diverged: tuple[int, ...] = ()  # seeds at which only its loss is not a number
    missing: tuple[str, ...] = ()  # why seeds make no pair
    caveats: tuple[str, ...] = ()  # further notes on the evidence
    more_pairs: int | None = None  # about how many would settle it; None if unknown

    @property
    def num_pairs(self) -> int:
        return len(self.seeds)


def ratio_to_same_loss(ratio: Interval, convergence: Convergence) -> Interval | None:
    """Return a row's ratio to the reference where both train to the same loss, not as many steps.

    ratio: of samples per dollar or second. Its range is 95%, of both independently. None if the steps that
    make up for the difference are not known.
    """
    end = convergence.end
    more = None if end is None else end.more_steps(end.mean)
    if end is None or more is None or more <= -1:
        return None
    value = ratio.value / (1 + more)
    half = end.more_steps(end.half_width(LEVEL / 2))
    if half is None or ratio.low is None or ratio.high is None:
        return Interval(value=value)
    steps = half / (1 + more)
    return Interval(
        value=value,
        low=value * math.exp(-math.hypot(math.log(ratio.value / ratio.low), steps)),
        high=value * math.exp(math.hypot(math.log(ratio.high / ratio.value), steps)),
    )


def converges(runs: Sequence[RunSummary], reference_runs: Sequence[RunSummary]) -> Convergence:
    """Return the verdict on the runs of one row against its reference's runs of the same workload."""
    if not any(at_end(run) or diverged(run) for run in runs):
        return Convergence(verdict=UNKNOWN, missing=("no held-out loss was recorded at the end",))
    if not reference_runs:
        return Convergence(verdict=UNKNOWN, missing=("there is no reference to compare the loss with",))
    seeds = {
        seed: pairs_of_seed([run for run in runs if run.pair_number == seed], reference_runs)
        for seed in sorted({run.pair_number for run in runs if run.pair_number is not None})
    }
    last_step = end_step(seeds.values())
    pairs = {seed: result.pairs[last_step] for seed, result in seeds.items() if last_step in result.pairs}
    lost = tuple(seed for seed, result in seeds.items() if result.diverged)
    without = {seed: result.lacks for seed, result in seeds.items() if seed not in pairs and seed not in lost}
    result = _judged(last_step, list(pairs.values()), num_lost=len(lost))
    name = reference_runs[0].setup.recipe
    noun = "round" if runs[0].setup.is_script else "seed"
    caveats = [f"its loss is no number at {named_seeds(lost, noun)}"] if lost else []
    reference_lost = [seed for seed, result in seeds.items() if result.reference_diverged]
    if reference_lost:
        caveats.append(f"the loss of {name} itself is no number at {named_seeds(reference_lost, noun)}")
        if lost:
            result = replace(result, verdict=UNKNOWN)
        if all(diverged(run) for run in reference_runs):
            # More runs would not make a pair either.
            result = replace(result, more_pairs=None)
    caveats += [*_on_the_way(result), *_schemas(name, runs, reference_runs)]
    return replace(
        result,
        reference=name,
        seeds=tuple(pairs),
        diverged=lost,
        missing=tuple(by_reason(without, noun, otherwise=f"no pair that ends at step {last_step}")),
        caveats=tuple(caveats),
    )


def _judged(last_step: int, pairs: Sequence[Pair], *, num_lost: int) -> Convergence:
    """Judge the losses of `pairs`, given `num_lost` seeds at which only the recipe's loss is not a number."""
    end = _difference(last_step, pairs, last_step)
    checkpoints = _checkpoints(last_step, pairs)
    num_pairs = len(pairs) + num_lost
    if num_lost >= FEWEST_PAIRS or (num_lost and num_pairs >= FEWEST_PAIRS):
        verdict = WORSE
    elif end is not None and end.is_too_short:
        verdict = TOO_SHORT
    elif num_pairs < FEWEST_PAIRS or end is None:
        verdict = UNKNOWN
    else:
        is_slower = end.verdict == WITHIN and WORSE in [checkpoint.verdict for checkpoint in checkpoints]
        verdict = UNKNOWN if is_slower else end.verdict
    more: int | None = None
    if verdict == TOO_SHORT:
        more = None
    elif num_pairs < FEWEST_PAIRS:
        more = PAIRS_WANTED - num_pairs
    elif end is not None and verdict == end.verdict == UNKNOWN:
        # At this mean and spread.
        numbers = range(1, MOST_PAIRS_PROPOSED + 1)
        then = (replace(end, num_pairs=end.num_pairs + number).verdict for number in numbers)
        more = next((number for number, kind in zip(numbers, then, strict=True) if kind != UNKNOWN), None)
    return Convergence(verdict=verdict, end=end, checkpoints=checkpoints, more_pairs=more)


def _difference(step: int, pairs: Iterable[Pair], last_step: int) -> LossDifference | None:
    """Return the paired difference after `step`, over pairs with finite losses.

    What was learnt until `last_step` is the measure at every step: at a quarter of it a difference may be
    large against what was learnt by then.
    """
    known = [pair for pair in pairs if None not in (pair.ours.get(step), pair.theirs.get(step))]
    difference = PairMean.of([(pair.ours[step] or 0.0) - (pair.theirs[step] or 0.0) for pair in known])
    reference = PairMean.of([pair.theirs[step] for pair in known])
    if difference is None or reference is None:
        return None
    return LossDifference(
        step=step,
        num_pairs=difference.num_pairs,
        mean=difference.mean,
        deviation=difference.deviation,
        reference_loss=reference.mean,
        learnt=PairMean.of([pair.learnt(last_step) for pair in known]),
        slope=PairMean.of([pair.slope(step) for pair in known]),
    )


def _checkpoints(last_step: int, pairs: Sequence[Pair]) -> tuple[LossDifference, ...]:
    """Return the differences at the evaluations nearest to a quarter, a half and three quarters."""
    shared = set.intersection(*(pair.ours.keys() & pair.theirs.keys() for pair in pairs)) if pairs else set()
    steps = sorted(step for step in shared if 0 < step < last_step)
    nearest = dict.fromkeys(
        min(steps, key=lambda step: abs(step - part * last_step)) for part in QUARTERS if steps
    )
    differences = [_difference(step, pairs, last_step) for step in nearest]
    return tuple(difference for difference in differences if difference is not None)


def _on_the_way(convergence: Convergence) -> Iterator[str]:
    end = convergence.end
    if end is not None and end.learnt is None:
        yield "the reference's loss at the first step is not recorded, so what it has learnt is not known"
    elif end is not None and end.verdict == WITHIN:
        for checkpoint in convergence.checkpoints:
            part = checkpoint.relative(checkpoint.mean)
            if checkpoint.verdict == WORSE and part is not None:
                yield (
                    f"within {MARGIN:.0%} of what the reference learnt at the end,"
                    f" but {part:+.1%} after step {checkpoint.step}: it trains slower"
                )


def _schemas(name: str, runs: Sequence[RunSummary], references: Sequence[RunSummary]) -> Iterator[str]:
    for what in ("record", "recipe"):
        ours, theirs = (
            sorted({getattr(run.environment, f"{what}_schema") for run in side} - {None})
            for side in (runs, references)
        )
        if ours and theirs and ours != theirs:
            yield f"{what} schema {listed(ours)} is paired with {listed(theirs)} of {name}"


def curve(run: RunSummary) -> Mapping[int, Eval]:
    """Return the evaluations of the current weights on validation data, by step, in order."""
    evals = sorted(run.quality.evals, key=lambda line: line.step)
    return {line.step: line for line in evals if line.split == VALIDATION and line.weights == CURRENT}


def at_end(run: RunSummary) -> Eval | None:
    """Return the evaluation at the end of a run; None if it did not complete or has no loss there."""
    end = _scored_at_end(run)
    return None if end is None or end.has_loss is False else end


def _scored_at_end(run: RunSummary) -> Eval | None:
    """Return the evaluation at the end of a run, even one without a loss."""
    evals = curve(run)
    return evals[max(evals)] if evals and run.status == COMPLETED else None


def diverged(run: RunSummary) -> bool:
    """Return whether the run's loss is not a number, in training or on held-out data at the end."""
    end = at_end(run)
    return run.status == NAN_LOSS or (end is not None and not is_finite(end.loss))


def is_finite(loss: float | None) -> bool:
    return loss is not None and abs(loss) < _MOST


def held_out(runs: Sequence[RunSummary]) -> HeldOut | None:
    """Return the figures at the end of a row's runs; None if no run was evaluated."""
    ends = [end for run in runs if (end := _scored_at_end(run)) is not None]
    if not ends:
        return None
    metric = next((end.metric for end in ends if end.metric is not None), None)
    return HeldOut(
        num_runs=len(ends),
        loss=mean_if_all(end.loss if is_finite(end.loss) else None for end in ends),
        metric=metric,
        metric_value=mean_if_all(end.metric_value for end in ends),
        test_metric_value=mean_if_all(_of_test(run, CURRENT) for run in runs if _scored_at_end(run)),
        best_test_metric_value=mean_if_all(_of_test(run, BEST) for run in runs if _scored_at_end(run)),
    )


def _of_test(run: RunSummary, weights: str) -> float | None:
    evals = [e for e in run.quality.evals if e.split == TEST and e.weights == weights]
    return max(evals, key=lambda e: e.step).metric_value if evals else None


def mean_if_all(values: Iterable[float | None]) -> float | None:
    """Return the mean; None without values, or if a value is unknown or not finite."""
    known = [math.nan if value is None else value for value in values]
    mean = sum(known) / len(known) if known else math.nan
    return mean if math.isfinite(mean) else None


def pairs_of_seed(runs: Sequence[RunSummary], references: Sequence[RunSummary]) -> SeedPairs:
    """Pair `runs`, of one seed, with the reference's runs of that seed."""
    name = references[0].setup.recipe
    partners, what = _partners(runs[0], references)
    if not partners:
        return SeedPairs(lacks=f"no {name} run{what}")
    if any(diverged(run) for run in partners):
        return SeedPairs(reference_diverged=True, lacks=f"no {name} run whose loss stays a number")
    theirs = [run for run in partners if at_end(run)]
    if not theirs:
        return SeedPairs(lacks=f"a {name} run, but no held-out loss at its end")
    if any(diverged(run) for run in runs):
        return SeedPairs(diverged=True)
    ours = [run for run in runs if at_end(run)]
    if not ours:
        return SeedPairs(lacks="no held-out loss at the end")
    pairs = {
        step: Pair(
            ours=_mean_curve(at_step),
            theirs=_mean_curve(reference),
            first_loss=mean_if_all(run.quality.first_loss for run in reference),
            loss_slope=mean_if_all(run.quality.loss_slope for run in reference),
        )
        for step in {_end_of(run) for run in ours}
        if (at_step := [run for run in ours if _end_of(run) == step])
        and (reference := [run for run in theirs if _end_of(run) == step])
    }
    if not pairs:
        ends = [max(map(_end_of, side)) for side in (theirs, ours)]
        return SeedPairs(lacks=f"a {name} run, but to step {ends[0]} and not {ends[1]}")
    sizes = [max(curve(run)[_end_of(run)].num_samples for run in side) for side in (theirs, ours)]
    if sizes[0] != sizes[1]:
        return SeedPairs(
            lacks=f"a {name} run, but of other held-out data ({sizes[0]} samples, not {sizes[1]})"
        )
    return SeedPairs(pairs=pairs)


def share_setup(run: RunSummary, other: RunSummary) -> bool:
    """Return whether two runs share all that a pair must share, apart from the seed."""
    return all(of(run) == of(other) for what, of in _SHARED if what)


def _partners(run: RunSummary, references: Sequence[RunSummary]) -> tuple[list[RunSummary], str]:
    """Return the reference runs with the setup of `run`, or if there are none, what they do not share."""
    left = list(references)
    for what, of in _SHARED:
        left = [other for other in left if of(other) == of(run)]
        if not left:
            return [], what.format(of(run))
    return left, ""


def _model_files(run: RunSummary) -> str:
    known = [run.setup.fingerprint.get(f"model_{part}") or "?" for part in ("config", "weights")]
    return f"{run.setup.fingerprint.get('model') or 'the model'} ({', '.join(known)})"


def _stated(run: RunSummary) -> str:
    names = ("arguments", "weight_decay", "max_grad_norm", "lr_schedule", "warmup_steps")
    known = [f"{name} {run.setup.fingerprint[name]}" for name in names if name in run.setup.fingerprint]
    return ", ".join(known) or "no arguments"


#: What a pair shares besides workload and last step, with the phrase for a run without it; coarsest first.
_SHARED: tuple[tuple[str, Callable[[RunSummary], object]], ...] = (
    (" on data {}", lambda run: run.setup.data),
    (" trained on the same data ({})", data_of),
    (" of the same tokenizer ({})", lambda run: run.setup.fingerprint.get("tokenizer") or "not recorded"),
    (" that starts from {}", lambda run: run.setup.fingerprint.get("model") or "random weights"),
    (" that starts from the same files of {}", _model_files),
    (" of a workload with {}", _stated),
    (" at sequence length {}", lambda run: run.setup.sequence_length),
    (" at a global batch of {}", lambda run: run.setup.global_batch),
    (" on so many GPUs ({})", lambda run: run.setup.num_gpus),
    ("", lambda run: run.pair_number),
)


def _end_of(run: RunSummary) -> int:
    return max(curve(run))


def _mean_curve(runs: Sequence[RunSummary]) -> Mapping[int, float | None]:
    """Return the mean loss by step at the steps that all `runs` have; None if a loss is not a number."""
    curves = [curve(run) for run in runs]
    return {
        step: mean_if_all(loss if is_finite(loss := other[step].loss) else None for other in curves)
        for step in curves[0]
        if all(step in other for other in curves)
    }


def end_step(seeds: Iterable[SeedPairs]) -> int:
    """Return the step at which most pairs end, the latest if tied; 0 without a pair."""
    ends = Counter(step for pairs in seeds for step in pairs.pairs)
    return max(ends, key=lambda step: (ends[step], step), default=0)


def by_reason(lacking: Mapping[int, str], noun: str = "seed", *, otherwise: str) -> Iterator[str]:
    """Yield `seeds 1 and 4 have no bf16 run` for each reason. lacking: the reasons by seed."""
    reasons = {seed: reason or otherwise for seed, reason in lacking.items()}
    for reason in dict.fromkeys(reasons.values()):
        seeds = [seed for seed, of in reasons.items() if of == reason]
        yield f"{named_seeds(seeds, noun)} {'has' if len(seeds) == 1 else 'have'} {reason}"


def named_seeds(seeds: Sequence[int], noun: str = "seed") -> str:
    """Return `seed 1`, `seeds 1 and 4`; noun: `round` of scripts."""
    return f"{noun}{'' if len(seeds) == 1 else 's'} {listed(seeds)}"


def listed(items: Sequence[object]) -> str:
    """Return `1, 2 and 4`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
