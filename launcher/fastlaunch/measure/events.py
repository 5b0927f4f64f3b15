"""The events in a run's records beside its steps: evaluations, checks, checkpoints, padding.

A run may have several attempts, each starting from a checkpoint of the one before. Work after that checkpoint
was repeated, and only the later attempt's counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fastlaunch.measure.summary import AllReduce, Checkpoints, StepProfile
from fastlaunch_train.records.records import (
    BATCH_SIZE_PHASE,
    SCRIPT_PHASE,
    STEP_PARTS,
    Check,
    Eval,
    Profile,
    RankRecord,
)

#: The phase whose detail is read here; `fastlaunch_train.distributed.all_reduce` writes it.
PHASE = "all-reduce"

#: The records of each attempt's ranks, by the attempt's number, in order.
Attempts = Mapping[int, Sequence[RankRecord]]


def batch_size_of(record: RankRecord) -> int | None:
    """Return the samples of a rank's full step, from the header unless a script recorded another number."""
    if "script" in record.header:
        for phase in reversed(record.phases):
            text = phase.detail or ""
            if phase.name == BATCH_SIZE_PHASE and text.isascii() and text.isdigit() and len(text) < 19:
                return int(text)
    size: int | None = record.header["batch_size_per_gpu"]
    return size


def evals_of(attempts: Attempts) -> tuple[Eval, ...]:
    """Return every evaluation of the run once, by step, with the seconds of the slowest rank."""
    by_key: dict[tuple[int, str, str], Eval] = {}
    for ranks, last_step in _chain(attempts):
        of_attempt: dict[tuple[int, str, str], Eval] = {}
        for line in (line for record in ranks for line in record.evals if line.step <= last_step):
            key = (line.step, line.split, line.weights)
            first = of_attempt.setdefault(key, line)
            of_attempt[key] = replace(first, seconds=max(first.seconds, line.seconds))
        by_key |= of_attempt
    return tuple(sorted(by_key.values(), key=_place))


def _place(line: Eval) -> tuple[int, bool, bool]:
    return line.step, line.split != "validation", line.weights != "current"


def checks_of(records: Iterable[RankRecord]) -> tuple[Check, ...]:
    """Return every check of the run once, by name; prefer a failed one, then the largest value."""
    by_name: dict[str, Check] = {}
    for check in (check for record in records for check in record.checks):
        known = by_name.setdefault(check.name, check)
        if _badness(check) > _badness(known):
            by_name[check.name] = check
    return tuple(by_name.values())


def _badness(check: Check) -> tuple[bool, float]:
    return not check.passed, -math.inf if check.value is None else check.value


def checkpoints_of(attempts: Attempts) -> Checkpoints:
    """Return the time of the run's checkpoints; a repeated checkpoint counts once in the total."""
    longest_s = -math.inf
    seconds: dict[int, float] = {}
    for ranks, last_step in _chain(attempts):
        of_attempt: dict[int, float] = {}
        for record in ranks:
            of_rank: dict[int, float] = {}
            for phase in record.phases:
                if phase.name != "checkpoint" or not math.isfinite(phase.seconds):
                    continue
                longest_s = max(longest_s, phase.seconds)
                if phase.step <= last_step:
                    of_rank[phase.step] = of_rank.get(phase.step, 0.0) + phase.seconds
            of_attempt = {
                step: max(of_attempt.get(step, 0.0), of_rank.get(step, 0.0)) for step in of_attempt | of_rank
            }
        seconds |= of_attempt
    return Checkpoints(
        longest_s=longest_s if math.isfinite(longest_s) else None,
        total_s=sum(seconds.values()) if seconds else None,
        number=len(seconds),
        last_step=max(seconds, default=None),
    )


def padding_fraction(records: Sequence[RankRecord]) -> float | None:
    """Return the share of padding tokens; None without tokens and for older records."""
    if any(record.header["schema"] < 2 for record in records):
        return None
    num_tokens = sum(max(0, number) for record in records for number in record.steps.column("num_tokens"))
    num_padding = sum(sum(record.steps.column("num_padding")) for record in records)
    return num_padding / num_tokens if num_tokens else None


def skipped_fraction(attempts: Attempts) -> float | None:
    """Return the share of the run's steps that the loss scaler skipped; None without loss scaling."""
    # The first of equal steps counts, so the last attempt comes first.
    steps, skipped = (
        np.concatenate([ranks[0].steps.column(name) for _, ranks in sorted(attempts.items(), reverse=True)])
        for name in ("step", "skipped")
    )
    is_known = skipped >= 0
    _, first = np.unique(steps[is_known], return_index=True)
    return float(skipped[is_known][first].mean()) if first.size else None


def script_wall_s(ranks: Sequence[RankRecord]) -> float | None:
    """Return the seconds of a script without steps, on the node that took longest; None for other runs."""
    if any(record.steps for record in ranks):
        return None
    walls = [phase.seconds for record in ranks for phase in record.phases if phase.name == SCRIPT_PHASE]
    completed = all(record.end and record.end.status == "completed" for record in ranks)
    return max(walls) if walls and completed and max(walls) > 0 else None


def _chain(attempts: Attempts) -> list[tuple[Sequence[RankRecord], float]]:
    """Return each attempt's records, with its last step that no later attempt repeated."""
    chain: list[tuple[Sequence[RankRecord], float]] = []
    last_step = math.inf
    for _, ranks in sorted(attempts.items(), reverse=True):
        chain.append((ranks, last_step))
        # An attempt without steps may have ended before it knew its first step.
        begun = [record.header["first_step"] for record in ranks if record.steps]
        last_step = min([last_step, *(first - 1 for first in begun)])
    return chain[::-1]


def all_reduce_of(records: Sequence[RankRecord]) -> AllReduce | None:
    """Return the all-reduce that the ranks of one attempt measured; None if absent or unreadable.

    All ranks measured the same. If nodes used different networks, return one that is not EFA.
    """
    results = [
        result
        for record in records
        for phase in record.phases
        if phase.name == PHASE and (result := _read(phase.detail or ""))
    ]
    return min(results, key=lambda result: result.fabric == "efa", default=None)


def profile_of(attempts: Attempts) -> StepProfile | None:
    """Return the last recorded profile, or None."""
    lines = [line for _, ranks in sorted(attempts.items()) for record in ranks for line in record.profiles]
    return next((profile for line in reversed(lines) if (profile := _profile(line))), None)


def _profile(line: Profile) -> StepProfile | None:
    if line.step_time_s is None:
        return None
    parts = {name: getattr(line, f"{name}_s") for name in STEP_PARTS}
    return StepProfile(
        num_steps=line.num_steps,
        step_time_s=line.step_time_s,
        parts_s={name: seconds for name, seconds in parts.items() if seconds is not None},
        overlapped_communication_s=line.overlapped_communication_s or 0.0,
    )


def _read(detail: str) -> AllReduce | None:
    words = dict(word.split("=", 1) for word in detail.split() if "=" in word)
    try:
        bus_gb_per_s, message_bytes = float(words["bus_gb_per_s"]), int(words["bytes"])
    except (KeyError, ValueError):
        return None
    if not (math.isfinite(bus_gb_per_s) and bus_gb_per_s > 0 and message_bytes > 0):
        return None
    return AllReduce(
        bus_gb_per_s=bus_gb_per_s, message_bytes=message_bytes, fabric=words.get("fabric") or "unknown"
    )
