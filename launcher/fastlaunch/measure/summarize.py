"""Step records -> `RunSummary`: the step time of one run, with its interval, once and for all.

A summary is made when a run is collected and stored with it, so that comparing never reads step files.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from typing import Any

from fastlaunch.all_reduce import AllReduce, all_reduce_of
from fastlaunch.measure.events import checkpoints_of, checks_of, evals_of, kernels_of, padding_fraction
from fastlaunch.measure.headers import (
    contradictions,
    fingerprint_of,
    host_ids,
    mixed_schemas,
    power_limit_of,
    recipe_schema,
    sequence_length_of,
    service_of,
)
from fastlaunch.recorded_recipe import label_of
from fastlaunch_train.records.records import FROM_CACHE, Check, Eval, RankRecord


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A measured quantity with its 95% interval; `low` and `high` are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run as the analysis sees it, whether it was recorded step by step or published as a total.

    kind: `records` (step records) or `published` (a CSV row; no steps, so no interval of its own).
    recipe: the recipe's label, with the overrides that change what the workload does by itself.
    num_gpus: ranks over all nodes. batch_size_per_gpu x num_gpus is the global batch.
    data: as the header says, `published` for a published row. measured_on: ISO date, None if not known.
    status: a record's, or `killed` where a rank has no end line; of several ranks, the one nearest the cause.
    service: `sagemaker` where the instance was SageMaker's; None for EC2's, and where it is not known.
    host_id: the machine's; of several nodes, theirs joined by commas.
    steady: whether the step time settled; None for a published row and for a run with too few steps.
    step_time_s: synchronised wall time of the slowest rank per retained step; None if it has no such steps.
    data_wait_fraction: of its time, in which the host fetched batches. utilization: of the GPU that computed
    least, the share of the time in which a kernel ran; None where NVML told nothing, and for older records.
    boot_s, pull_s: of a machine that was started for the run, until it ran its script, and in fetching code
    and image after that; None where no machine was started for it, or it did not say.
    build_s, compile_s, warmup_s: time before the first step, in compiling, and in the num_warmup_steps cut.
    compile_cached: whether every rank's compiling found work of an earlier run on the disk, as a first run's
    does not.
    checkpoint_s: what the longest checkpoint took to write; None if there was none. checkpoints_s: all
    num_checkpoints together, the last after last_checkpoint_step.
    evals: on held-out data, by step, eval_s all of them together; checks: of the recipe, before the steps.
    sequence_length: tokens of a sample. padding_fraction: of the tokens, those that mean nothing.
    record_schema, recipe_schema: the versions of records and recipes; None for a published row.
    commit: of the training code; None for a published row, and where it was not recorded. It is no part of
    what two summaries are compared by: those of before it was kept are the same.
    power_limit_w: of its GPU, and no part of that either.
    all_reduce: the bandwidth between the nodes before the steps; None for one node, and for older records.
    kernels: what one forward pass ran before the steps, in words, where what is measured is their fusion.
    fingerprint: what must agree for two runs to be repeats of each other (GPU, versions, attention backend).
    problems: what makes the run unfit to compare, in words; empty for a sound one.
    """

    kind: str
    workload: str
    sample_unit: str
    flops_per_sample: int | None
    recipe: str
    precision: str | None
    data: str
    batch_size_per_gpu: int
    num_nodes: int
    num_gpus: int
    seed: int | None
    status: str
    instance: str | None
    device_name: str | None
    host_id: str | None
    measured_on: str | None
    source: str | None
    derived: bool = False
    service: str | None = None
    steady: bool | None = None
    step_time_s: Interval | None = None
    num_steps: int = 0
    num_retained_steps: int = 0
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    median_step_time_s: float | None = None
    p95_step_time_s: float | None = None
    data_wait_fraction: float | None = None
    utilization: float | None = None
    drift: float | None = None
    boot_s: float | None = None
    pull_s: float | None = None
    build_s: float | None = None
    compile_s: float | None = None
    compile_cached: bool = False
    warmup_s: float | None = None
    num_warmup_steps: int | None = None
    checkpoint_s: float | None = None
    checkpoints_s: float | None = None
    num_checkpoints: int = 0
    last_checkpoint_step: int | None = None
    evals: tuple[Eval, ...] = ()
    eval_s: float | None = None
    checks: tuple[Check, ...] = ()
    sequence_length: int | None = None
    padding_fraction: float | None = None
    record_schema: int | None = None
    recipe_schema: int | None = None
    final_loss: float | None = None
    peak_memory_gib: float | None = None
    total_time_s: float | None = None
    num_samples: int | None = None
    metric: str | None = None
    metric_value: float | None = None
    all_reduce: AllReduce | None = None
    kernels: str | None = None
    commit: str | None = field(default=None, compare=False)
    power_limit_w: float | None = field(default=None, compare=False)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal summary; what is unknown is left out."""
        data = {name: value for name, value in vars(self).items() if value != _UNSAID[name]}
        if self.step_time_s is not None:
            data["step_time_s"] = {k: v for k, v in vars(self.step_time_s).items() if v is not None}
        if self.all_reduce is not None:
            data["all_reduce"] = dict(vars(self.all_reduce))
        for name in ("evals", "checks"):
            if name in data:
                data[name] = [_line_to_json(line) for line in data[name]]
        for name in ("warnings", "problems"):
            if name in data:
                data[name] = list(data[name])
        if self.fingerprint:
            data["fingerprint"] = dict(self.fingerprint)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RunSummary":
        """The summary that `to_json` wrote. Raises ValueError for data that is no summary."""
        try:
            values = {**_REQUIRED_UNSAID, **data}
            if "step_time_s" in values:
                values["step_time_s"] = Interval(**values["step_time_s"])
            if "all_reduce" in values:
                values["all_reduce"] = AllReduce(**values["all_reduce"])
            if "evals" in values:
                values["evals"] = tuple(Eval(**{"loss": None, **line}) for line in values["evals"])
            if "checks" in values:
                values["checks"] = tuple(Check(**line) for line in values["checks"])
            for name in ("warnings", "problems"):
                if name in values:
                    values[name] = tuple(values[name])
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a run summary: {error}") from None


def _line_to_json(line: Eval | Check) -> dict[str, Any]:
    return {name: value for name, value in vars(line).items() if value is not None}


#: Per field, the value that JSON leaves out: its default, or None where a value must be given.
_UNSAID: Mapping[str, Any] = {
    f.name: {} if f.name == "fingerprint" else None if f.default is MISSING else f.default
    for f in fields(RunSummary)
}
#: The fields that must be given and may be None.
_REQUIRED_UNSAID = {
    f.name: None
    for f in fields(RunSummary)
    if f.default is MISSING and f.default_factory is MISSING and "None" in str(f.type)
}

#: From best to worst; of several ranks, the one that says most about the cause counts.
_STATUSES = ("completed", "interrupted", "killed", "failed", "nan_loss", "out_of_memory")
#: Statuses after which the steps before may still be used: nothing was wrong with them.
_STOPPED = ("interrupted", "killed")
NUM_LOSS_STEPS = 10
DRIFT_WORTH_TELLING = 0.02


def summarize(records: Sequence[RankRecord]) -> RunSummary:
    """Summary of one run from the record files of all its ranks and attempts, in any order.

    Timing is of the attempt with the most retained steps, status and loss of the last one. What makes the
    run unfit to compare (ranks missing or contradicting each other, a failure, too few steps) is said in
    `problems`; what is only worth knowing (a stop before the end with enough steps) in `warnings`.
    """
    from fastlaunch.measure.steptime import AttemptTiming, NoTiming, time_attempt

    assert records
    attempts: dict[int, list[RankRecord]] = {}
    for record in sorted(records, key=lambda record: (record.header["attempt"], record.header["rank"])):
        attempts.setdefault(record.header["attempt"], []).append(record)
    last = attempts[max(attempts)]
    timed, timing, no_timing = last, None, ""
    for ranks in attempts.values():
        try:
            candidate: AttemptTiming | None = time_attempt(ranks)
        except NoTiming as reason:
            candidate, no_timing = None, str(reason)
        if candidate and (timing is None or candidate.num_retained_steps >= timing.num_retained_steps):
            timed, timing = ranks, candidate

    status = max((_status(record) for record in last), key=_STATUSES.index)
    problems = contradictions(attempts)
    warnings = [text for record in records for text in record.header["warnings"]]
    warnings += mixed_schemas(attempts)
    # Without the compression, so that a record says the same after it was compressed.
    cut = [record.path.name.removesuffix(".xz").removesuffix(".gz") for record in records if record.truncated]
    warnings += [f"{name}: the last line is cut" for name in cut]
    if status != "completed":
        message = next(
            (r.end.message for r in last if r.end and r.end.message and _status(r) == status), None
        )
        sentence = f"ended as {status}" + (f": {message}" if message else "")
        (warnings if status in _STOPPED and timing else problems).append(sentence)
    if timing and timing.drift and timing.step_time_s.low and abs(timing.drift) > DRIFT_WORTH_TELLING:
        warnings.append(f"step time drifted by {timing.drift:+.1%} from the first third to the last")
    if timing is None:
        problems.append(no_timing)
    elif timing.samples_per_step <= 0:
        problems.append("the steps record no samples")

    header, network = timed[0].header, all_reduce_of(timed)
    ends = [record.end for record in timed if record.end]
    evals, checkpoints = evals_of(attempts), checkpoints_of(attempts)
    return RunSummary(
        kind="records",
        workload=header["workload"]["name"],
        sample_unit=header["workload"]["sample_unit"],
        flops_per_sample=header["workload"]["flops_per_sample"],
        recipe=label_of(header),
        precision=header["recipe"]["precision"],
        data=header["data"],
        batch_size_per_gpu=header["batch_size_per_gpu"],
        num_nodes=header["num_nodes"],
        num_gpus=header["world_size"],
        seed=header["seed"],
        status=status,
        instance=header["instance"],
        service=service_of(header),
        device_name=header["machine"]["device_name"],
        host_id=host_ids(timed),
        measured_on=datetime.fromisoformat(header["started_at"]).date().isoformat(),
        source=None,
        num_steps=len({step.step for record in records for step in record.steps}),
        build_s=_phase_s(timed, "build"),
        compile_s=_phase_s(timed, "compile"),
        compile_cached=all(_found_compiled(record) for record in timed),
        checkpoint_s=_longest_checkpoint_s(records),
        checkpoints_s=checkpoints.total_s if checkpoints else None,
        num_checkpoints=checkpoints.number if checkpoints else 0,
        last_checkpoint_step=checkpoints.last_step if checkpoints else None,
        evals=evals,
        eval_s=sum(line.seconds for line in evals) if evals else None,
        checks=checks_of(records),
        sequence_length=sequence_length_of(header),
        padding_fraction=padding_fraction(timed),
        record_schema=header["schema"],
        recipe_schema=recipe_schema(header),
        final_loss=_final_loss(attempts.values()),
        peak_memory_gib=max((e.peak_memory_gib for e in ends if e.peak_memory_gib is not None), default=None),
        all_reduce=network,
        kernels=kernels_of(timed),
        commit=header["commit"],
        power_limit_w=power_limit_of(header),
        fingerprint=fingerprint_of(header) | ({"fabric": network.fabric} if network else {}),
        warnings=tuple(dict.fromkeys(warnings)),
        problems=tuple(problems),
        **(vars(timing) if timing else {}),
    )


def _status(record: RankRecord) -> str:
    return record.end.status if record.end else "killed"


def _final_loss(attempts: Iterable[Sequence[RankRecord]]) -> float | None:
    """Mean loss of the last steps of the last attempt that did any; None if one was not finite."""
    losses: list[float | None] = []
    for ranks in attempts:
        losses = [step.loss for r in ranks for step in r.steps[-NUM_LOSS_STEPS:]] or losses
    finite = [loss for loss in losses if loss is not None]
    if not finite or len(finite) < len(losses):
        return None
    mean = sum(finite) / len(finite)
    return mean if math.isfinite(mean) else None


def _phase_s(ranks: Sequence[RankRecord], name: str) -> float | None:
    """Seconds in phases called `name`, on the rank that took longest; None if there were none."""
    totals = [sum(p.seconds for p in record.phases if p.name == name) for record in ranks]
    recorded = any(p.name == name for record in ranks for p in record.phases)
    return max(totals) if recorded and math.isfinite(max(totals)) else None


def _found_compiled(record: RankRecord) -> bool:
    """Whether this rank found some of what it compiled on the disk.

    In a first run on a machine some ranks may, of what others have just put there; one of them does not.
    """
    return any(phase.name == "compile" and phase.detail == FROM_CACHE for phase in record.phases)


def _longest_checkpoint_s(records: Iterable[RankRecord]) -> float | None:
    seconds = [p.seconds for record in records for p in record.phases if p.name == "checkpoint"]
    return max((value for value in seconds if math.isfinite(value)), default=None)
