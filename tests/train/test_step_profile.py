"""Where a step's time goes: known answers for the attribution, and what a profiled run records."""

import contextlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from entrypoint import arguments, ended, record, run_command, trained
from hypothesis import given
from hypothesis import strategies as st
from toy import ALONE, Lines

from fastlaunch.measure.record_files import RankRecord
from fastlaunch_train.loop.attribution import Event, ProfileError, attribute
from fastlaunch_train.loop.profiling import NUM_STEPS, NUM_WARMUP_STEPS, events_of, profile_steps
from fastlaunch_train.loop.training import Training
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.records.records import Profile

PHASES = ("data", "forward", "backward", "optimizer")
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def phases(*names_and_ends: tuple[str, float], start_s: float = 0.0) -> list[Event]:
    """A step from `start_s` on whose phases follow each other, each to its end."""
    found, at_s = [], start_s
    for name, end_s in names_and_ends:
        found.append(Event("phase", name, at_s, end_s))
        at_s = end_s
    return [Event("phase", "step", start_s, at_s), *found]


def kernel(name: str, launch_s: float, start_s: float, end_s: float, correlation: int) -> list[Event]:
    """A kernel, and the call that launched it, which takes no time."""
    return [
        Event("launch", "cudaLaunchKernel", launch_s, launch_s, 1, correlation),
        Event("device", name, start_s, end_s, 7, correlation),
    ]


#: A host that is ahead of its device: it has launched all of a step within 4 s, of which the device takes 10.
BUSY = [
    *phases(("data", 1.0), ("forward", 2.0), ("backward", 3.0), ("optimizer", 4.0)),
    *kernel("gemm", 1.5, 1.6, 4.0, 1),
    # By autograd's thread, while ours waits in backward.
    *kernel("gemm", 2.5, 4.0, 8.0, 2),
    *kernel("sgd", 3.5, 8.0, 10.0, 3),
]
BUSY_PARTS = {"data": 1.0, "forward": 2.4, "backward": 4.0, "optimizer": 2.0, "other": 0.6}


@pytest.mark.parametrize(
    ("more", "changes", "hidden_s"),
    [
        pytest.param([], {}, 0.0, id="a kernel belongs to the phase that launched it"),
        # Only communication that no computation hides is a part.
        pytest.param(kernel(NCCL, 2.6, 4.5, 7.5, 4), {}, 3.0, id="hidden"),
        pytest.param(kernel(NCCL, 2.6, 10.0, 13.0, 4), {"communication": 3.0}, 0.0, id="exposed"),
        pytest.param(kernel(NCCL, 2.6, 9.0, 13.0, 4), {"communication": 3.0}, 1.0, id="both"),
        pytest.param(
            [*kernel("Memcpy HtoD", 0.5, 3.0, 5.0, 8), *kernel("Memcpy HtoD", 0.6, 1.0, 1.3, 9)],
            {"data": 1.3, "other": 0.3},
            0.0,
            id="a copy of the next batch",
        ),
        pytest.param([Event("device", "unknown", 1.0, 1.6, 7, 99)], {}, 0.0, id="nobody's work is other"),
    ],
)
def test_a_gpus_step_is_told_apart(more: list[Event], changes: dict[str, float], hidden_s: float) -> None:
    found = attribute([*BUSY, *more], num_steps=1, on_device=True)
    known = {name: seconds for name, seconds in found.parts_s.items() if seconds}
    assert known == pytest.approx(BUSY_PARTS | changes)
    assert found.step_time_s == pytest.approx(sum(known.values()))
    assert found.overlapped_communication_s == pytest.approx(hidden_s)


def test_the_kernels_of_a_cuda_graph_belong_to_the_phase_that_replays_it() -> None:
    nodes = [Event("device", "triton", 2.0 + k, 3.0 + k, 7, 1) for k in range(3)]
    launch = Event("launch", "cudaGraphLaunch", 1.5, 1.6, 1, 1)
    found = attribute([*BUSY[:5], launch, *nodes], num_steps=1, on_device=True)
    assert found.parts_s["forward"] == pytest.approx(3.0)


def test_several_steps_are_timed_from_the_end_of_the_work_before_them() -> None:
    # The device takes 3 s for each step, which the host launches within 1 s: it is ever further ahead.
    events = []
    for step in range(4):
        events += phases(("forward", step + 1.0), start_s=float(step))
        events += kernel("gemm", step + 0.5, 3.0 * step + 1, 3.0 * step + 4, step)
    found = attribute(events, num_steps=3, on_device=True)
    assert (found.step_time_s, found.parts_s["forward"]) == (pytest.approx(3.0), pytest.approx(3.0))


def test_on_a_cpu_the_phases_are_the_hosts() -> None:
    events = [
        *phases(("data", 1.0), ("forward", 3.0), ("backward", 8.0), ("optimizer", 9.0)),
        Event("operator", "aten::mm", 1.0, 3.0),
        Event("operator", "aten::mm", 3.0, 6.0),
        # Beside backward for 1 s, then alone; the wait for it is an operator, too.
        Event("exchange", "gloo:all_reduce", 5.0, 8.0, 2),
        Event("operator", "AddmmBackward0", 6.0, 8.0),
        Event("wait", "c10d::wait", 6.0, 8.0),
        # What another thread computes does not hide it.
        Event("operator", "aten::add", 6.0, 8.0, 3),
    ]
    found = attribute(events, num_steps=1, on_device=False)
    expected = {"data": 1.0, "forward": 2.0, "backward": 3.0, "communication": 2.0, "optimizer": 1.0}
    assert {name: seconds for name, seconds in found.parts_s.items() if seconds} == expected
    assert found.overlapped_communication_s == 1.0


def test_time_between_phases_and_between_steps_is_other() -> None:
    events = [
        *(Event("phase", "step", 10.0 * k, 10.0 * k + 8) for k in range(3)),
        *(Event("phase", "forward", 10.0 * k + 1, 10.0 * k + 7) for k in range(3)),
    ]
    found = attribute(events, num_steps=2, on_device=False)
    # Of 18 s from the second step's begin to the third's end.
    assert (found.step_time_s, found.parts_s) == (9.0, {"communication": 0.0, "forward": 6.0, "other": 3.0})


@pytest.mark.parametrize(
    ("events", "on_device"),
    [(BUSY[:5], True), ([*BUSY[:5], Event("device", "gemm", 1, 2, 7, 5)], True), ([], False)],
)
def test_events_that_do_not_tell_are_an_error(events: list[Event], on_device: bool) -> None:
    with pytest.raises(ProfileError):
        attribute(events, num_steps=1, on_device=on_device)


TIMES = st.floats(0, 100)


@st.composite
def any_events(draw: st.DrawFn) -> list[Event]:
    """Steps one after another with whatever else, on whatever threads, at whatever times."""
    ends = sorted(draw(st.lists(TIMES, min_size=2, max_size=20, unique=True)))
    events = [Event("phase", "step", start_s, end_s) for start_s, end_s in pairwise(ends)]
    for _ in range(draw(st.integers(0, 30))):
        kind = draw(st.sampled_from(["phase", "launch", "device", "exchange", "operator", "wait"]))
        name = draw(st.sampled_from(PHASES if kind == "phase" else ("gemm", NCCL, "Memset")))
        start_s, end_s = sorted((draw(TIMES), draw(TIMES)))
        events.append(Event(kind, name, start_s, end_s, draw(st.integers(0, 1)), draw(st.integers(0, 5))))
    return events


@given(any_events(), st.integers(1, 5), st.booleans())
def test_parts_add_up_whatever_the_events(events: list[Event], num_steps: int, on_device: bool) -> None:
    try:
        found = attribute(events, num_steps=num_steps, on_device=on_device)
    except ProfileError:
        return
    assert found.step_time_s > 0
    assert min(found.parts_s.values()) >= 0
    assert sum(found.parts_s.values()) == pytest.approx(found.step_time_s)
    assert 0 <= found.overlapped_communication_s <= found.step_time_s * (1 + 1e-9)
    assert found.parts_s.keys() <= {*PHASES, "communication", "other"}


@given(any_events())
def test_a_collective_takes_nothing_from_computation(events: list[Event]) -> None:
    # It may stand in for other parts, while nothing computes.
    exchange = Event("device", NCCL, 0.0, 100.0, 9, 77)
    with contextlib.suppress(ProfileError):
        alone = attribute(events, num_steps=1, on_device=True)
        found = attribute([*events, exchange], num_steps=1, on_device=True)
        assert found.step_time_s == alone.step_time_s
        for name in ("forward", "backward", "optimizer"):
            assert found.parts_s.get(name) == alone.parts_s.get(name)
        exposed_s = found.parts_s["communication"]
        assert exposed_s + found.overlapped_communication_s == pytest.approx(found.step_time_s)


def test_a_trace_of_torchs_is_read() -> None:
    def line(
        category: str, name: str, thread: int | str = 5, start: float = 20, **args: int
    ) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": category,
            "name": name,
            "tid": thread,
            "ts": start,
            "dur": 90.5,
            "args": args,
        }

    lines = [
        line("user_annotation", "fastlaunch:step", start=10),
        line("gpu_user_annotation", "fastlaunch:step", 7),
        line("user_annotation", "DistributedDataParallel.forward"),
        line("user_annotation", "gloo:all_reduce", 6),
        line("cpu_op", "c10d::allreduce_"),
        line("cpu_op", "aten::mm"),
        line("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0"),
        line("cuda_driver", "cuLaunchKernel", correlation=3),
        line("kernel", "triton_mm", "stream 7", correlation=3, stream=7),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "tid": 5, "ts": 1},
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    events = list(events_of({"traceEvents": lines}))
    assert [(event.kind, event.name, event.thread, event.correlation) for event in events] == [
        ("phase", "step", 5, None),
        ("exchange", "gloo:all_reduce", 6, None),
        ("wait", "c10d::allreduce_", 5, None),
        ("operator", "aten::mm", 5, None),
        ("launch", "cuLaunchKernel", 5, 3),
        ("device", "triton_mm", "stream 7", 3),
    ]
    assert (events[0].start_s, events[0].end_s) == (pytest.approx(10e-6), pytest.approx(100.5e-6))


class Broken:
    """A profiler that fails where it is told to."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def start(self) -> None:
        self._do("start")

    def stop(self) -> None:
        self._do("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._do("export")
        Path(path).write_text('{"traceEvents": []}')

    def _do(self, what: str) -> None:
        if what == self._fails_at:
            raise RuntimeError(f"no {what}\nwith details")


@pytest.mark.parametrize(
    ("fails_at", "problem"),
    [
        ("start", "RuntimeError: no start"),
        ("stop", "RuntimeError: no stop"),
        ("export", "RuntimeError: no export"),
        ("never", f"the profiler saw 0 of {NUM_STEPS} steps"),
        ("step", "ValueError: the data have ended"),
    ],
)
def test_what_fails_under_the_profiler_is_a_warning(
    fails_at: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines, done = Lines(), []
    known = {"process": ALONE, "interrupts": Interrupts(), "last_step": 20, "writer": lines}

    def step() -> None:
        done.append(1)
        if fails_at == "step":
            raise ValueError("the data have ended")

    profile_steps(cast(Training, SimpleNamespace(**known)), step, profiler=lambda on_device: Broken(fails_at))
    assert len(done) == (1 if fails_at == "step" else NUM_WARMUP_STEPS + NUM_STEPS)
    (line,) = lines
    assert isinstance(line, Profile) and (line.step, line.num_steps) == (20, NUM_STEPS)
    assert problem in (line.problem or "") and problem in caplog.text


# The entrypoint.


def profile_of(read: RankRecord) -> dict[str, float]:
    """The parts in a record's profile, which has to add up to its step time."""
    (line,) = read.profiles
    assert line.problem is None and line.step_time_s is not None
    parts = {name: getattr(line, f"{name}_s") for name in (*PHASES, "communication", "other")}
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    assert sum(known.values()) == pytest.approx(line.step_time_s)
    assert min(known.values()) >= 0
    return known


def test_a_profile_comes_after_the_steps_and_changes_none(tmp_path: Path) -> None:
    options = ("--steps", "12", "--checkpoint-every", "6")
    read = trained(tmp_path / "profiled", *options, "--step-profile")
    parts = profile_of(read)
    assert parts.keys() == {*PHASES, "communication", "other"} and parts["communication"] == 0.0
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
    plain = trained(tmp_path / "plain", *options)
    assert [step.loss for step in read.steps] == [step.loss for step in plain.steps]
    assert [block.last_step for block in read.blocks] == [block.last_step for block in plain.blocks]
    assert (plain.profiles, read.profiles[0].step) == ((), 12)
    # The checkpoint of the last step was saved before it.
    assert [phase.name for phase in read.phases][-3:] == ["checkpoint", "checkpoint-write", "profile"]


def test_a_workload_that_trains_nothing_has_a_forward_pass_alone(tmp_path: Path) -> None:
    options = ("--steps", "2", "--batch-size", "1", "--step-profile")
    parts = profile_of(trained(tmp_path, *options, workload="gelu:64x64"))
    assert parts.keys() == {"data", "forward", "communication", "other"}


@pytest.mark.parametrize("loop", ["lightning", "transformers"])
def test_steps_that_another_library_makes_are_refused(tmp_path: Path, loop: str) -> None:
    output = ended(2, arguments(tmp_path / "out", "--step-profile", "--set", f"loop={loop}"))
    assert f"loop={loop}" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "recipe", "more"),
    [("vit-tiny", "compile", ("--set", "compile_scope=model")), ("gpt2-tiny", "fp32", ())],
)
def test_the_phases_of_our_workloads_are_told_apart(
    tmp_path: Path, workload: str, recipe: str, more: tuple[str, ...]
) -> None:
    options = ("--steps", "3", "--batch-size", "2", "--step-profile", *more)
    parts = profile_of(trained(tmp_path, *options, workload=workload, recipe=recipe))
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
    assert parts["communication"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "fsdp2"])
def test_ranks_that_exchange_gradients_communicate(tmp_path: Path, recipe: str) -> None:
    more = ("--steps", "3", "--batch-size", "2", "--step-profile")
    code, output = run_command(arguments(tmp_path, *more, workload="vit-tiny", recipe=recipe), nproc=2)
    assert code == 0, output
    assert profile_of(record(tmp_path))["communication"] > 0
    # One rank's profile stands for all.
    assert record(tmp_path, rank=1).profiles == ()
