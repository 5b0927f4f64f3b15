"""Runs of a recipe beside those of its reference, paired by seed; and why a seed makes no pair."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastlaunch.analysis.held_out import at_end, curve, diverged, is_finite
from fastlaunch.analysis.pooling import data_of
from fastlaunch.measure.summarize import RunSummary


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Held-out losses by step of one seed, the recipe's and the reference's, means over repeats."""

    ours: Mapping[int, float | None]
    theirs: Mapping[int, float | None]


@dataclass(frozen=True, kw_only=True)
class SeedPairs:
    """What there is at one seed. pairs: by the step at which both end. lacks: why there is none."""

    pairs: Mapping[int, Pair] = field(default_factory=dict)
    diverged: bool = False
    reference_diverged: bool = False
    lacks: str = ""


def pairs_of_seed(runs: Sequence[RunSummary], references: Sequence[RunSummary]) -> SeedPairs:
    """What `runs`, of one seed, have among the reference's runs."""
    name = references[0].recipe
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
        step: Pair(ours=_mean_curve(own), theirs=_mean_curve(reference))
        for step in {_end_of(run) for run in ours}
        if (own := [run for run in ours if _end_of(run) == step])
        and (reference := [run for run in theirs if _end_of(run) == step])
    }
    if not pairs:
        ends = [max(_end_of(run) for run in of) for of in (theirs, ours)]
        return SeedPairs(lacks=f"a {name} run, but to step {ends[0]} and not {ends[1]}")
    sizes = [max(curve(run)[_end_of(run)].num_samples for run in of) for of in (theirs, ours)]
    if sizes[0] != sizes[1]:
        return SeedPairs(
            lacks=f"a {name} run, but of other held-out data ({sizes[0]} samples, not {sizes[1]})"
        )
    return SeedPairs(pairs=pairs)


def asked_alike(run: RunSummary, other: RunSummary) -> bool:
    """Whether two runs share all that a pair does but the seed."""
    return all(of(run) == of(other) for what, of in _SHARED if what)


def _partners(run: RunSummary, references: Sequence[RunSummary]) -> tuple[list[RunSummary], str]:
    """The reference's runs that were asked for as `run` was; without any, what none of them shares."""
    left = list(references)
    for what, of in _SHARED:
        left = [other for other in left if of(other) == of(run)]
        if not left:
            return [], what.format(of(run))
    return left, ""


def _model_files(run: RunSummary) -> str:
    known = [run.fingerprint.get(f"model_{part}") or "?" for part in ("config", "weights")]
    return f"{run.fingerprint.get('model') or 'the model'} ({', '.join(known)})"


#: What a pair shares besides workload and end, and how its lack is told; coarsest first, the seed last.
_SHARED: tuple[tuple[str, Callable[[RunSummary], object]], ...] = (
    (" on data {}", lambda run: run.data),
    (" trained on the same data ({})", data_of),
    (" of the same tokenizer ({})", lambda run: run.fingerprint.get("tokenizer") or "not recorded"),
    (" that starts from {}", lambda run: run.fingerprint.get("model") or "random weights"),
    (" that starts from the same files of {}", _model_files),
    (" at sequence length {}", lambda run: run.sequence_length),
    (" at a global batch of {}", lambda run: run.batch_size_per_gpu * run.num_gpus),
    (" on so many GPUs ({})", lambda run: run.num_gpus),
    ("", lambda run: run.seed),
)


def _end_of(run: RunSummary) -> int:
    return max(curve(run))


def _mean_curve(runs: Sequence[RunSummary]) -> Mapping[int, float | None]:
    """Loss by step, the mean over `runs` at the steps that all have; None where one is no number."""
    curves = [curve(run) for run in runs]
    found: dict[int, float | None] = {}
    for step in curves[0]:
        if all(step in other for other in curves):
            losses = [loss for other in curves if (loss := other[step].loss) is not None and is_finite(loss)]
            found[step] = sum(losses) / len(losses) if len(losses) == len(curves) else None
    return found


def end_step(seeds: Iterable[SeedPairs]) -> int:
    """The step at which most pairs end, the latest of several; 0 without a pair."""
    ends = Counter(step for found in seeds for step in found.pairs)
    return max(ends, key=lambda step: (ends[step], step), default=0)


def by_reason(lacking: Mapping[int, str], *, otherwise: str) -> Iterator[str]:
    """`seeds 1 and 4 have no bf16 run`: a sentence for each reason in `lacking`, which is by seed."""
    reasons = {seed: reason or otherwise for seed, reason in lacking.items()}
    for reason in dict.fromkeys(reasons.values()):
        seeds = [seed for seed, of in reasons.items() if of == reason]
        yield f"{named_seeds(seeds)} {'has' if len(seeds) == 1 else 'have'} {reason}"


def named_seeds(seeds: Sequence[int]) -> str:
    """`seed 1`, `seeds 1 and 4`."""
    return f"seed{'' if len(seeds) == 1 else 's'} {listed(seeds)}"


def listed(items: Sequence[object]) -> str:
    """`1, 2 and 4`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
