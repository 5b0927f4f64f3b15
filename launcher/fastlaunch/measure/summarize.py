"""Turn the step records of a run, its steps and the events beside them, into its `RunSummary`.

A run may have several attempts, each starting from a checkpoint of the one before. Work after that checkpoint
was repeated, and only the later attempt counts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np

from fastlaunch.core.data import to_data
from fastlaunch.core.units import in_ms, utc_day
from fastlaunch.measure.headers import (
    contradictions,
    files_of,
    fingerprint_of,
    is_silent,
    label_of,
    mixed_schemas,
    num_nodes_of,
    power_limit_of,
    recipe_schema,
    variant_of,
)
from fastlaunch.measure.record_files import RankRecord
from fastlaunch.measure.steptime import NoTiming, time_attempt
from fastlaunch.measure.summary import (
    AllReduce,
    Checkpoints,
    Environment,
    Figures,
    Quality,
    RunSummary,
    Setup,
    Startup,
    StepProfile,
    Timing,
    read_summary,
)
from fastlaunch_train.records.records import (
    BATCH_SIZE_PHASE,
    FETCH_PHASE,
    FROM_CACHE,
    SCRIPT_PHASE,
    STEP_PARTS,
    UNRECORDED_PHASE,
    WRITE_PHASE,
    Check,
    Eval,
)

#: Statuses from best to worst; of several ranks, the one closest to the cause counts.
_STATUSES = ("completed", "interrupted", "killed", "failed", "nan_loss", "out_of_memory")
#: Statuses with usable steps.
_STOPPED = ("interrupted", "killed")
NUM_LOSS_STEPS = 10
DRIFT_WORTH_TELLING = 0.02
SKIPPED_WORTH_TELLING = 0.01


def summarize(records: Sequence[RankRecord]) -> RunSummary:
    """Return the summary of one run from the records of all its ranks and attempts, in any order.

    The timing is of the attempt with the most retained steps, status and loss of the last one. `problems`
    says what makes the run unfit to compare (missing or contradictory ranks, a failure, too few steps);
    `ended` alone a stop before the end with enough steps; `warnings` what is only worth knowing. `uncounted`
    names a script's ranks without steps, which are not timed.
    """
    assert records
    attempts: dict[int, list[RankRecord]] = {}
    for record in sorted(records, key=lambda record: (record.header["attempt"], record.header["rank"])):
        attempts.setdefault(record.header["attempt"], []).append(record)
    last = attempts[max(attempts)]
    timings: dict[int, Timing] = {}
    no_timing = ""
    for attempt, ranks in attempts.items():
        try:
            timings[attempt] = time_attempt(_recorded(ranks))
        except NoTiming as reason:
            no_timing = str(reason)
    longest = max(timings, key=lambda attempt: (timings[attempt].num_retained_steps, attempt), default=None)
    timing = None if longest is None else timings[longest]
    attempted = last if longest is None else attempts[longest]
    timed = _recorded(attempted)

    status = max((_status(record) for record in last), key=_STATUSES.index)
    problems = contradictions(attempts)
    warnings = [text for record in records for text in record.header["warnings"]]
    warnings += mixed_schemas(attempts)
    # Drop the compression suffix, so that compressing a record does not change the text.
    cut = [record.path.name.removesuffix(".xz").removesuffix(".gz") for record in records if record.truncated]
    warnings += [f"{name}: the last line is cut" for name in cut]
    warnings += [
        f"no profile of its steps: {line.problem}"
        for record in records
        for line in record.profiles
        if line.problem
    ]
    ended = None
    if status != "completed":
        message = next(
            (
                record.end.message
                for record in sorted(last, key=is_silent)
                if record.end and record.end.message and _status(record) == status
            ),
            None,
        )
        ended = f"ended as {status}" + (f": {message}" if message else "")
        if status not in _STOPPED or timing is None:
            problems.append(ended)
    if timing and timing.late and abs(timing.late) > DRIFT_WORTH_TELLING:
        warnings.append(f"the last half of the steps took {math.expm1(timing.late):+.1%} against all of them")
    times_s = {attempt: known.step_time_s.value for attempt, known in timings.items() if known.step_time_s}
    warnings += [
        f"the steps of attempt {attempt} took {in_ms(time_s)} and do not count: the step time is that"
        f" of attempt {longest}, the longest, {in_ms(times_s[longest])}"
        for attempt, time_s in times_s.items()
        if longest in times_s and abs(math.log(time_s / times_s[longest])) > DRIFT_WORTH_TELLING
    ]
    skipped = skipped_fraction(attempts)
    if skipped is not None and skipped > SKIPPED_WORTH_TELLING:
        warnings.append(f"the loss scaler skipped {skipped:.0%} of the steps, which trained nothing")
    total_time_s = None if timing else script_wall_s(last)
    if timing is None:
        if total_time_s is None:
            problems.append(no_timing)
    elif timing.samples_per_step is not None and not timing.samples_per_step > 0:
        problems.append("the steps record no samples")

    num_nodes = num_nodes_of(timed)
    header, network = timed[0].header, all_reduce_of(timed)
    machine, length = header["machine"], header["workload"].get("sequence_length")
    kernels = (phase.detail for record in timed for phase in record.phases if phase.name == "kernels")
    batches = {batch_size_of(record) for record in timed}
    ends = [record.end for record in timed if record.end]
    peaks = [end.peak_memory_gib for end in ends]
    if timing is None:
        # For steps it is the memory that their process allocated.
        peaks += [line.memory_gib for record in attempted for line in record.devices]
    evals = evals_of(attempts)
    first_loss, loss_slope = _learning(attempts)
    summary = RunSummary(
        setup=Setup(
            kind="records",
            workload=header["workload"]["name"],
            sample_unit=header["workload"]["sample_unit"],
            flops_per_sample=header["workload"]["flops_per_sample"],
            recipe=label_of(header),
            precision=header["recipe"]["precision"],
            data=header["data"],
            batch_size_per_gpu=batches.pop() if len(batches) == 1 else None,
            sequence_length=length if type(length) is int and length > 0 else None,
            num_nodes=num_nodes,
            num_gpus=header["world_size"],
            instance=header["instance"],
            device_name=machine["device_name"],
            fingerprint=fingerprint_of(header, num_nodes) | ({"fabric": network.fabric} if network else {}),
            variant=variant_of(header) or {},
        ),
        seed=header["seed"],
        status=status,
        ended=ended,
        num_steps=np.unique(np.concatenate([record.steps.column("step") for record in records])).size,
        timing=_with_devices(timing or Timing(), attempted),
        startup=Startup(
            fetch_s=_phase_s(timed, FETCH_PHASE),
            build_s=_phase_s(timed, "build"),
            compile_s=_phase_s(timed, "compile"),
            # In a first run on a machine, some ranks may find what another rank has just compiled.
            compile_cached=all(
                any(phase.name == "compile" and phase.detail == FROM_CACHE for phase in record.phases)
                for record in timed
            ),
        ),
        checkpoints=checkpoints_of(attempts),
        quality=Quality(
            first_loss=first_loss,
            final_loss=_final_loss(attempts.values()),
            loss_slope=loss_slope,
            evals=evals,
            eval_s=sum(line.seconds for line in evals) if evals else None,
            checks=checks_of(records),
            skipped_fraction=skipped,
        ),
        peak_memory_gib=max((gib for gib in peaks if gib is not None), default=None),
        padding_fraction=padding_fraction(timed),
        all_reduce=network,
        kernels=next((text for text in kernels if text), None),
        profile=profile_of(attempts),
        environment=Environment(
            # None on EC2, without an instance, and in older records.
            service="sagemaker" if header["instance"] and machine.get("service") == "sagemaker" else None,
            host_id=",".join(sorted({r.header["machine"]["host_id"] or "" for r in attempted})) or None,
            started_at=min(record.header["started_at"] for record in records),
            measured_on=utc_day(datetime.fromisoformat(header["started_at"])).isoformat(),
            record_schema=header["schema"],
            recipe_schema=recipe_schema(header),
            session=header.get("session"),
            round=header.get("round"),
            max_rounds=header.get("max_rounds"),
            commit=header["commit"],
            files=files_of(header),
            power_limit_w=power_limit_of(header),
        ),
        figures=Figures(total_time_s=total_time_s),
        warnings=tuple(dict.fromkeys(warnings)),
        uncounted=tuple(dict.fromkeys(_uncounted(attempted))),
        problems=tuple(problems),
    )
    # Return the form that the ledger gives back, since names in a record may hold anything.
    return read_summary(to_data(summary))


def _recorded(ranks: Sequence[RankRecord]) -> Sequence[RankRecord]:
    """Return the ranks of a script that recorded steps, or all ranks if none did or for a workload."""
    if variant_of(ranks[0].header) is None:
        return ranks
    return [record for record in ranks if record.steps] or ranks


def _uncounted(ranks: Sequence[RankRecord]) -> Iterator[str]:
    """Yield the parts of a script's attempt that no figure includes."""
    for record in ranks:
        for phase in record.phases:
            if phase.name == UNRECORDED_PHASE:
                yield (
                    "only the first process that called fastlaunch is counted, and not the others: "
                    f"{phase.detail}"
                )
    recorded = _recorded(ranks)
    if len(recorded) < len(ranks):
        names = ", ".join(str(record.header["rank"]) for record in recorded[:8])
        more = " and more" if len(recorded) > 8 else ""
        yield (
            f"only rank{'s' if len(recorded) > 1 else ''} {names}{more} of {len(ranks)} recorded steps: "
            "the samples are those counted there"
        )
    # Killed ranks may have recorded different numbers of steps.
    numbers = {len(record.steps) for record in recorded if _status(record) == "completed"}
    if len(numbers) > 1:
        yield (
            f"the ranks made {min(numbers):,} to {max(numbers):,} steps: only the first {min(numbers):,} "
            "of each are counted"
        )


def _with_devices(timing: Timing, ranks: Sequence[RankRecord]) -> Timing:
    """Return `timing` with the mean utilization of the least busy GPU, if it is only in device lines."""
    by_gpu: dict[tuple[int, int], list[float]] = {}
    for record in ranks:
        for line in record.devices:
            if line.utilization is not None:
                by_gpu.setdefault((record.header["rank"], line.gpu), []).append(line.utilization)
    if timing.utilization is not None or not by_gpu:
        return timing
    return replace(timing, utilization=min(sum(of) / len(of) for of in by_gpu.values()))


def _status(record: RankRecord) -> str:
    return record.end.status if record.end else "killed"


def _final_loss(attempts: Iterable[Sequence[RankRecord]]) -> float | None:
    """Return the mean loss of the last steps of the last attempt with steps; None if one is not finite."""
    losses: list[float | None] = []
    for ranks in attempts:
        losses = [step.loss for r in ranks for step in r.steps[-NUM_LOSS_STEPS:]] or losses
    finite = [loss for loss in losses if loss is not None]
    if not finite or len(finite) < len(losses):
        return None
    mean = sum(finite) / len(finite)
    return mean if math.isfinite(mean) else None


def _phase_s(ranks: Sequence[RankRecord], name: str) -> float | None:
    """Return the seconds in phases called `name` on the slowest rank; None without such phases."""
    totals = [sum(p.seconds for p in record.phases if p.name == name) for record in ranks]
    recorded = any(p.name == name for record in ranks for p in record.phases)
    return max(totals) if recorded and math.isfinite(max(totals)) else None


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
    return tuple(
        sorted(
            by_key.values(),
            key=lambda line: (line.step, line.split != "validation", line.weights != "current"),
        )
    )


def checks_of(records: Iterable[RankRecord]) -> tuple[Check, ...]:
    """Return every check of the run once, by name; prefer a failed one, then the largest value."""

    def badness(check: Check) -> tuple[bool, float]:
        return not check.passed, -math.inf if check.value is None else check.value

    by_name: dict[str, Check] = {}
    for check in (check for record in records for check in record.checks):
        by_name[check.name] = max(by_name.get(check.name, check), check, key=badness)
    return tuple(by_name.values())


def checkpoints_of(attempts: Attempts) -> Checkpoints:
    """Return the time of the run's checkpoints; a repeated checkpoint counts once in the total."""
    longest_s = -math.inf
    seconds: dict[int, float] = {}
    written: dict[int, float] = {}
    for ranks, last_step in _chain(attempts):
        of_attempt: dict[int, float] = {}
        for record in ranks:
            of_rank: dict[int, float] = {}
            # A copy, perhaps a wait until it is written, and the writing itself are lines of their own.
            copied_s: dict[int, float] = {}
            for phase in record.phases:
                if phase.name not in ("checkpoint", WRITE_PHASE) or not math.isfinite(phase.seconds):
                    continue
                if phase.name == WRITE_PHASE:
                    longest_s = max(longest_s, copied_s.get(phase.step, 0.0) + phase.seconds)
                    written[phase.step] = max(written.get(phase.step, 0.0), phase.seconds)
                    continue
                longest_s = max(longest_s, copied_s.setdefault(phase.step, phase.seconds))
                if phase.step <= last_step:
                    of_rank[phase.step] = of_rank.get(phase.step, 0.0) + phase.seconds
            of_attempt = {
                step: max(of_attempt.get(step, 0.0), of_rank.get(step, 0.0)) for step in of_attempt | of_rank
            }
        seconds |= of_attempt
    return Checkpoints(
        longest_s=longest_s if math.isfinite(longest_s) else None,
        total_s=sum(seconds.values()) if seconds else None,
        write_s=sum(written.values()) / len(written) if written else None,
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


def _learning(attempts: Attempts) -> tuple[float | None, float | None]:
    """Return the training loss of step 1, a mean over ranks, and the slope of the last half of the steps.

    The slope is by least squares, per step. None where a loss is not finite or too few steps have one.
    """
    parts = [
        (steps[counted], np.asarray(record.steps.column("loss"))[counted])
        for ranks, last_step in _chain(attempts)
        for record in ranks
        if (counted := (steps := np.asarray(record.steps.column("step"))) <= last_step).any()
    ]
    if not parts:
        return None, None
    steps, losses = (np.concatenate(part) for part in zip(*parts, strict=True))
    first = losses[steps == 1]
    late = steps > steps.max() // 2
    x, y = steps[late] - steps[late].mean(), losses[late]
    has_slope = np.unique(x).size >= NUM_LOSS_STEPS and np.isfinite(y).all()
    return (
        float(first.mean()) if first.size and np.isfinite(first).all() else None,
        float((x * y).sum() / (x * x).sum()) if has_slope else None,
    )


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
    for line in reversed(lines):
        if line.step_time_s is not None:
            parts = {name: getattr(line, f"{name}_s") for name in STEP_PARTS}
            return StepProfile(
                num_steps=line.num_steps,
                step_time_s=line.step_time_s,
                parts_s={name: seconds for name, seconds in parts.items() if seconds is not None},
                overlapped_communication_s=line.overlapped_communication_s or 0.0,
            )
    return None


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
