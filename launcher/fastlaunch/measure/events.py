"""What the records of a run say beside its steps: evaluations, checks, checkpoints, padding.

A run may have been carried out in several attempts, each going on from a checkpoint of the one before. What
an attempt did after that checkpoint was done again, and counts once, as the later attempt did it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fastlaunch_train.records.records import Check, Eval, RankRecord

#: The records of each attempt's ranks, by the attempt's number, in order.
Attempts = Mapping[int, Sequence[RankRecord]]


def evals_of(attempts: Attempts) -> tuple[Eval, ...]:
    """Every evaluation of the run once, by step. All ranks score together: seconds are the slowest rank's."""
    found: dict[tuple[int, str, str], Eval] = {}
    for ranks, last_step in _chain(attempts):
        own: dict[tuple[int, str, str], Eval] = {}
        for line in (line for record in ranks for line in record.evals if line.step <= last_step):
            key = (line.step, line.split, line.weights)
            first = own.setdefault(key, line)
            own[key] = replace(first, seconds=max(first.seconds, line.seconds))
        found |= own
    return tuple(sorted(found.values(), key=_place))


def _place(line: Eval) -> tuple[int, bool, bool]:
    return line.step, line.split != "validation", line.weights != "current"


def checks_of(records: Iterable[RankRecord]) -> tuple[Check, ...]:
    """Every check of the run once, by name in order: of several, one that failed, else the largest value."""
    found: dict[str, Check] = {}
    for check in (check for record in records for check in record.checks):
        known = found.setdefault(check.name, check)
        if _badness(check) > _badness(known):
            found[check.name] = check
    return tuple(found.values())


def _badness(check: Check) -> tuple[bool, float]:
    return not check.passed, -math.inf if check.value is None else check.value


@dataclass(frozen=True, kw_only=True)
class CheckpointTimes:
    """Seconds of all checkpoints of a run together, each as on its slowest rank, and the step of the last."""

    number: int
    total_s: float
    last_step: int


def checkpoints_of(attempts: Attempts) -> CheckpointTimes | None:
    """What the checkpoints of the run took; None if there were none."""
    seconds: dict[int, float] = {}
    for ranks, last_step in _chain(attempts):
        own: dict[int, float] = {}
        for record in ranks:
            of_rank: dict[int, float] = {}
            for phase in record.phases:
                if phase.name == "checkpoint" and phase.step <= last_step and math.isfinite(phase.seconds):
                    of_rank[phase.step] = of_rank.get(phase.step, 0.0) + phase.seconds
            own = {step: max(own.get(step, 0.0), of_rank.get(step, 0.0)) for step in own | of_rank}
        seconds |= own
    if not seconds:
        return None
    return CheckpointTimes(number=len(seconds), total_s=sum(seconds.values()), last_step=max(seconds))


def padding_fraction(records: Sequence[RankRecord]) -> float | None:
    """Share of the tokens that mean nothing; None where no tokens are counted, or padding was not yet."""
    if any(record.header["schema"] < 2 for record in records):
        return None
    num_tokens = sum(step.num_tokens for record in records for step in record.steps)
    num_padding = sum(step.num_padding for record in records for step in record.steps)
    return num_padding / num_tokens if num_tokens else None


def kernels_of(records: Sequence[RankRecord]) -> str | None:
    """What one forward pass ran, as the first rank that looked says; None where none did."""
    told = (phase.detail for record in records for phase in record.phases if phase.name == "kernels")
    return next((detail for detail in told if detail), None)


def _chain(attempts: Attempts) -> list[tuple[Sequence[RankRecord], float]]:
    """Each attempt's records, with the last of its steps that no later attempt did again."""
    chain: list[tuple[Sequence[RankRecord], float]] = []
    last_step = math.inf
    for _, ranks in sorted(attempts.items(), reverse=True):
        chain.append((ranks, last_step))
        # One that did no step may have ended before it knew which would be its first.
        begun = [record.header["first_step"] for record in ranks if record.steps]
        last_step = min([last_step, *(first - 1 for first in begun)])
    return chain[::-1]
