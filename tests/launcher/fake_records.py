"""Record files as the training entrypoint would have written them, for tests: `write_run`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import (
    Block,
    Check,
    End,
    Eval,
    Phase,
    Profile,
    RecordWriter,
    Step,
    record_path,
)
from fastlaunch_train.workloads.registry import workload_info

VERSIONS = {
    "python": "3.11.9",
    "torch": "2.13.0",
    "cuda": "13.0",
    "cudnn": "91900",
    "nccl": "2.28.9",
    "timm": "1.0.29",
    "transformer_engine": None,
    "fastlaunch_train": "0.1.0",
}


def write_run(
    directory: Path,
    *,
    steps: int = 200,
    step_time_s: float | Callable[[int, int], float] = 0.1,
    batch_size: int = 2,
    world_size: int = 1,
    recipe: str = "bf16",
    workload: str = "vit-huge",
    run_id: str = "run-1",
    attempt: int = 1,
    first_step: int = 1,
    num_nodes: int = 1,
    instance: str | None = None,
    device_name: str = "NVIDIA H200",
    host_id: str = "host-a",
    seed: int = 0,
    data: str = "synthetic",
    started_at: str = "2026-11-01T12:00:00+00:00",
    num_tokens: int = 0,
    num_padding: int = 0,
    skipped: Callable[[int], bool] | None = None,
    data_wait_s: float = 0.0,
    loss: Callable[[int, int], float | None] | None = None,
    steps_per_block: int = 10,
    wall_ratio: float = 1.0,
    num_compiles: Callable[[int], int] | None = None,
    reserved_gib: Callable[[int], float | None] | None = None,
    utilization: Callable[[int, int], float | None] | None = None,
    phases: Sequence[Phase] = (Phase(name="build", seconds=1.5, step=0),),
    evals: Sequence[Eval] = (),
    checks: Sequence[Check] = (),
    profile: Profile | None = None,
    status: str | None = "completed",
    message: str | None = None,
    peak_memory_gib: float | None = 12.5,
    num_unsynchronised: int = 0,
    versions: Mapping[str, str | None] | None = None,
    header: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Paths of the record files of one attempt of a run, one per rank, written under `directory`.

    steps: recorded by this attempt, from `first_step` on; the header asks for all of them.
    step_time_s: seconds, or a function of (rank, step). loss: of (rank, step); by default it falls.
    skipped: whether the loss scaler skipped a step; None without one.
    wall_ratio: a block's wall time over the sum of its step times.
    num_compiles, reserved_gib: of a block's last step. utilization: of (rank, a block's last step).
    status: None for a killed process (no end line).
    num_unsynchronised: so many of the last steps stand after the last block, as a kill may leave them.
    versions, header: entries that replace the usual ones. evals, checks: the same of every rank.
    profile: of rank 0.
    """
    directory.mkdir(parents=True, exist_ok=True)
    time_of = step_time_s if callable(step_time_s) else lambda rank, step, value=step_time_s: value
    loss_of = loss or (lambda rank, step: 2.0 + 1.0 / step)
    last_step = first_step + steps - 1
    name, *overrides = recipe.split()
    info = workload_info(workload)
    paths = []
    for rank in range(world_size):
        path = record_path(directory, rank=rank, attempt=attempt)
        writer = RecordWriter(path)
        writer.write_header(
            {
                "run_id": run_id,
                "attempt": attempt,
                "rank": rank,
                "world_size": world_size,
                "num_nodes": num_nodes,
                "started_at": started_at,
                "workload": {
                    "name": workload,
                    "sample_unit": info.sample_unit,
                    "flops_per_sample": info.flops_per_sample,
                    "num_parameters": info.num_parameters,
                },
                "recipe": resolve_recipe(name, overrides).to_record(),
                "batch_size_per_gpu": batch_size,
                "steps": last_step,
                "first_step": first_step,
                "seed": seed,
                "data": data,
                "machine": {
                    "host_id": host_id,
                    "device_type": "cuda",
                    "device_name": device_name,
                    "num_devices": max(1, world_size // num_nodes),
                    "memory_gib": 139.8,
                    "driver": "580.95",
                    "power_limit_w": 700.0,
                },
                "versions": {**VERSIONS, **(versions or {})},
                "attention_backend": "sdpa:flash",
                "instance": instance,
                "image_digest": None,
                "commit": None,
                "warnings": [],
                **(header or {}),
            }
        )
        for check in checks:
            writer.add(check)
        pending: list[Phase | Eval] = sorted((*phases, *evals), key=lambda line: line.step)
        block_start, wall_s = first_step, 0.0
        for step in range(first_step, last_step + 1):
            while pending and pending[0].step < step:
                writer.add(pending.pop(0))
            seconds = time_of(rank, step)
            writer.add(
                Step(
                    step=step,
                    step_time_s=seconds,
                    data_wait_s=data_wait_s,
                    loss=loss_of(rank, step),
                    num_samples=batch_size,
                    num_tokens=num_tokens,
                    num_padding=num_padding,
                    loss_scale=65536.0 if skipped else None,
                    skipped=skipped(step) if skipped else None,
                )
            )
            wall_s += seconds * wall_ratio
            synchronised = step <= last_step - num_unsynchronised
            phase_follows = bool(pending) and pending[0].step == step
            full = step - block_start + 1 == steps_per_block
            if synchronised and (full or phase_follows or step == last_step - num_unsynchronised):
                writer.add(
                    Block(
                        first_step=block_start,
                        last_step=step,
                        wall_s=wall_s,
                        num_compiles=num_compiles(step) if num_compiles else 0,
                        reserved_gib=reserved_gib(step) if reserved_gib else 10.0,
                        utilization=utilization(rank, step) if utilization else None,
                    )
                )
                block_start, wall_s = step + 1, 0.0
        for phase in pending:
            writer.add(phase)
        if profile is not None and rank == 0:
            writer.add(profile)
        if status is not None:
            writer.add(
                End(status=status, message=message, num_steps=last_step, peak_memory_gib=peak_memory_gib)
            )
        writer.flush()
        writer.close()
        paths.append(path)
    return paths


def read_all(paths: Iterable[Path]) -> list[RankRecord]:
    return [read_record(path) for path in paths]


def step_time_s(summary: RunSummary) -> float:
    assert summary.timing.step_time_s is not None
    return summary.timing.step_time_s.value
