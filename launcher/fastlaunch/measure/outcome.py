"""How a run ended by its record files, and whether they belong to the requested run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.jobs.job import Job
from fastlaunch.measure.headers import is_silent, resolved_record
from fastlaunch.measure.record_files import (
    MAX_RECORD_BYTES,
    MAX_RECORD_MEMORY,
    RankRecord,
    RecordError,
    RecordReader,
    TooLarge,
)
from fastlaunch_train.node.protocol import after_restart, is_echo

#: Limits on reading a run, in files and in memory: a million steps of eight ranks, each in its own block.
MAX_RUN_BYTES = 2**32
MAX_RUN_MEMORY = 5 * 2**28

#: End statuses of failures, the most informative first: other ranks fail in the wake of one.
_FAILURES = {"out_of_memory": "out of memory", "nan_loss": "the loss is not a number", "failed": "failed"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A final state and, unless the run completed, the reason."""

    state: RunState
    #: What ended the attempt, if that also ended the run.
    ending: Ending | None = None
    reason: str | None = None


def read_records(
    paths: Iterable[Path], readers: dict[Path, RecordReader] | None = None
) -> tuple[list[RankRecord], list[BadFile]]:
    """Return the readable records among one run's `paths`, and the problems of the others.

    readers: of earlier calls, so that each file is read from where it ended. A run beyond the limits has no
    records.
    """
    readers = {} if readers is None else readers
    records: list[RankRecord] = []
    problems = []
    left_bytes, left_memory = MAX_RUN_BYTES, MAX_RUN_MEMORY
    for path in paths:
        try:
            record = readers.setdefault(path, RecordReader(path)).read(
                max_bytes=min(MAX_RECORD_BYTES, left_bytes), max_memory=min(MAX_RECORD_MEMORY, left_memory)
            )
            left_bytes, left_memory = left_bytes - record.num_bytes, left_memory - record.memory
            records.append(record)
        except RecordError as error:
            problems.append(BadFile(path, error.problem, line=error.line))
            if isinstance(error, TooLarge):
                return [], problems
        except OSError as error:
            problems.append(BadFile(path, f"cannot be read: {error.strerror or error}"))
    return records, problems


def outcome_of(records: Sequence[RankRecord], *, exit_code: int | None = None) -> Outcome:
    """Return how a job that has ended did so, by the end lines of all ranks of its last attempt.

    exit_code: of the started process; None if nobody waited for it. A job without an end line has failed if
    there is an exit code, else it is lost.
    """
    last = max((record.header["attempt"] for record in records), default=0)
    ranks = [record for record in records if record.header["attempt"] == last]
    ranks.sort(key=lambda record: int(record.header["rank"]))
    if not ranks:
        return _without_end("it ended before its first record", exit_code)
    # The lowest rank decides, unless it only lost its peer or has only an exit code, and another rank has its
    # own reason.
    ended = [rank for rank in ranks if rank.end is not None]
    ended.sort(key=lambda rank: (is_echo(_message(rank)), is_silent(rank)))
    by_status = {rank.end.status: rank for rank in reversed(ended) if rank.end is not None}
    there = {rank.header["rank"] for rank in ranks}
    missing = next((rank for rank in range(ranks[0].header["world_size"]) if rank not in there), None)
    is_one_lost = missing is not None or len(ended) < len(ranks)
    for status, words in _FAILURES.items():
        # If all failed ranks had lost a peer, the silent rank is more informative.
        if status in by_status and not (is_one_lost and is_echo(_message(by_status[status]))):
            rank = by_status[status]
            is_known = rank.header["world_size"] > 1 and not is_silent(rank)
            where = f" on rank {rank.header['rank']}" if is_known else ""
            message = after_restart(rank.header.get("restarted_after"), _message(rank))
            reason = ": ".join(filter(None, (f"{words}{where}", message)))
            return Outcome(state=RunState.FAILED, reason=reason)
    for rank in ranks:
        if rank.end is None:
            last = rank.steps[-1].step if rank.steps else 0
            return _without_end(
                f"rank {rank.header['rank']} ended without saying how, after step {last}", exit_code
            )
    if missing is not None:
        return _without_end(f"rank {missing} left no record", exit_code)
    if "interrupted" in by_status:
        reason = _message(by_status["interrupted"]) or "stopped before its last step"
        return Outcome(state=RunState.INTERRUPTED, reason=reason)
    return Outcome(state=RunState.COMPLETED)


def contradictions(job: Job, records: Iterable[RankRecord]) -> tuple[str, ...]:
    """Return the differences between the headers and `job`."""
    differences = (
        _difference(what, requested, recorded)
        for record in records
        for what, requested, recorded in _compared(job, record.header)
        # The entrypoint may choose any value that the job leaves open.
        if requested is not None and requested != recorded
    )
    return tuple(dict.fromkeys(differences))


def _compared(job: Job, header: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a header must share with `job`: name, requested value, recorded value."""
    workload, inputs = header["workload"], job.inputs
    yield "workload", job.workload, workload["name"]
    if job.script:
        # The script chooses everything else.
        yield "variant", job.script.label, header["recipe"]["label"]
        yield "number of ranks", job.num_gpus if job.script.nproc else None, header["world_size"]
        return
    yield "recipe", resolved_record(job.recipe.to_record()), resolved_record(header["recipe"])
    yield "seed", job.seed, header["seed"]
    yield "number of ranks", job.num_gpus, header["world_size"]
    yield "data", inputs.data.partition(":")[0], header["data"].partition(":")[0]
    yield "steps", job.steps, header["steps"]
    yield "batch size", job.batch_size, header["batch_size_per_gpu"]
    # Records of version 1, and of workloads that could not be built, lack these two.
    yield "sequence length", inputs.sequence_length, workload.get("sequence_length") or inputs.sequence_length
    yield "model", inputs.model, workload.get("model") or inputs.model


def _difference(what: str, requested: Any, recorded: Any) -> str:
    if what == "recipe":
        fields = [key for key in {**requested, **recorded} if requested.get(key) != recorded.get(key)]
        changes = ", ".join(
            f"{key} {recorded.get(key)!r} for {requested.get(key)!r}" for key in sorted(fields)
        )
        return f"the record contradicts the request: recipe with {changes}"
    return f"the record contradicts the request: {what} {recorded!r} for {requested!r}"


def _message(rank: RankRecord) -> str:
    return (rank.end and rank.end.message) or ""


def _without_end(what: str, exit_code: int | None) -> Outcome:
    if exit_code is None or exit_code == 0:
        return Outcome(state=RunState.LOST, reason=what)
    how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return Outcome(state=RunState.FAILED, reason=f"{what} ({how})")
