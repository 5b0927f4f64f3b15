"""Profile a few steps with torch's profiler, after the measured ones."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fastlaunch_train.distributed.parallel import agree
from fastlaunch_train.loop.attribution import Event, ProfileError, StepParts, attribute
from fastlaunch_train.loop.training import Training
from fastlaunch_train.records.records import STEP_PARTS, Profile
from fastlaunch_train.steppers.phases import PREFIX, marking, phase

log = logging.getLogger("fastlaunch_train")

#: Steps for the profiler's warm-up, and steps whose time is attributed.
NUM_WARMUP_STEPS, NUM_STEPS = 2, 5

#: Kinds of events by their category in a trace.
_KINDS: Mapping[str, str] = {
    **{"cuda_runtime": "launch", "cuda_driver": "launch"},
    **{"kernel": "device", "gpu_memcpy": "device", "gpu_memset": "device"},
    "cpu_op": "operator",
}
#: Operators that wait for other ranks, and operators that only surround others, which may wait.
_WAITS = ("c10d::", "_c10d_functional::", "c10d_functional::")
_FRAMES = ("autograd::engine::evaluate_function",)
#: What torch calls a collective of gloo in a trace.
_EXCHANGES = ("gloo:",)


def profile_steps(
    training: Training, step: Callable[[], None], *, profiler: Callable[[bool], Any] | None = None
) -> None:
    """Do a few steps, and record on rank 0 where their time went; a profiler that fails is a warning.

    step: does a step, on every rank, and marks its phases. profiler: returns a profiler like torch's, given
    whether there is a GPU.
    """
    process = training.process
    on_device = process.device.type == "cuda"
    (is_stopping,) = agree(process, [float(training.interrupts.requested)])
    if is_stopping:
        return
    parts, problem, started = None, None, None
    if process.rank == 0:
        try:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
            started = profiler(on_device) if profiler else profile(activities=activities)
            started.start()
        except Exception as error:
            started, problem = None, _in_words(error)
    # Do the steps even if the profiler fails, since the other ranks wait for them.
    try:
        with marking():
            for _ in range(NUM_WARMUP_STEPS + NUM_STEPS):
                with phase("step"):
                    step()
        if on_device:
            torch.cuda.synchronize(process.device)
    except Exception as error:
        problem = f"a step under the profiler failed: {_in_words(error)}"
    if started is not None:
        try:
            started.stop()
            if problem is None:
                parts = attribute(_events(started), num_steps=NUM_STEPS, on_device=on_device)
        except Exception as error:
            problem = problem or _in_words(error)
    if process.rank == 0 or problem:
        _record(training, parts, problem)


def _events(profiler: Any) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        with path.open(encoding="utf-8", errors="replace") as file:
            return list(events_of(json.load(file)))


def events_of(trace: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events that tell where the time went, from a trace in Chrome's format as torch writes it."""
    for line in trace["traceEvents"]:
        category, name = line.get("cat"), str(line.get("name"))
        if line.get("ph") != "X" or category is None:
            continue
        kind = _KINDS.get(category)
        if category == "user_annotation":
            if name.startswith(PREFIX):
                kind, name = "phase", name.removeprefix(PREFIX)
            elif name.startswith(_EXCHANGES):
                kind = "exchange"
        elif kind == "operator" and name.startswith(_WAITS):
            kind = "wait"
        elif kind == "operator" and name.startswith(_FRAMES):
            kind = None
        if kind is None:
            continue
        start_us, span_us = float(line["ts"]), float(line["dur"])
        yield Event(
            kind,
            name,
            1e-6 * start_us,
            1e-6 * (start_us + span_us),
            line.get("tid", 0),
            line.get("args", {}).get("correlation"),
        )


def _record(training: Training, parts: StepParts | None, problem: str | None) -> None:
    last_step = training.last_step
    if parts is None:
        problem = problem or "unknown"
        log.warning("warning: no profile of the steps: %s", problem)
        line = Profile(step=last_step, num_steps=NUM_STEPS, problem=problem)
    else:
        by_field: dict[str, Any] = {f"{name}_s": seconds for name, seconds in parts.parts_s.items()}
        line = Profile(
            step=last_step,
            num_steps=NUM_STEPS,
            step_time_s=parts.step_time_s,
            overlapped_communication_s=parts.overlapped_communication_s,
            **by_field,
        )
        shares = [f"{name} {1000 * parts.parts_s[name]:.1f}" for name in STEP_PARTS if name in parts.parts_s]
        log.info("profile of a step, in ms: %s", ", ".join(shares))
    training.writer.add(line)
    training.writer.flush()


def _in_words(error: Exception) -> str:
    if isinstance(error, ProfileError):
        return str(error)
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
