"""Attribute the time of profiled steps: from a profiler's events to seconds by part. Pure, without torch.

On a GPU the parts divide the device's time. A kernel or copy belongs to the phase in which the host launched
it; launch and kernel share a correlation id. The host's thread does not matter: while autograd's threads go
backward, ours waits in the phase. A CUDA graph is launched as a whole, so its kernels belong to the phase
that replays it. While only collectives run, the time is communication, including the wait for other ranks;
while other kernels run too, the time is theirs, and the communication is overlapped. While nothing runs, the
time is `data` if the host was fetching a batch, and otherwise `other`: as a rule the host launches too
slowly. Work that was launched outside of the phases counts as `other`, too.

On a CPU the parts divide the host's time. The time is communication while a collective is under way and no
operator runs, and `other` outside of the phases.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: The marked phases, and `other` for the rest. If several run on a device at once, the first in this order
#: counts: copies of the next batch hide behind computation.
_PRECEDENCE = ("forward", "backward", "optimizer", "other", "data")


class ProfileError(ValueError):
    """The events do not tell where the time went."""


class Event(NamedTuple):
    """An event of a profiler."""

    #: `phase`: a mark of steppers/phases.py. `launch`: a call of the host that gives the device work.
    #: `device`: that work. On the CPU, `exchange`: a collective, `operator`, and `wait`: an operator that
    #: waits for other ranks.
    kind: str
    name: str
    start_s: float
    end_s: float
    thread: int | str = 0  #: or stream
    correlation: int | None = None  #: of a launch, and of the work that it gave

    @property
    def is_collective(self) -> bool:
        """Whether the event is a kernel that exchanges data between ranks."""
        return self.name.lower().startswith(("nccl", "rccl"))


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Means of a step; `parts_s`, by STEP_PARTS less the phases that were not marked, add up to it."""

    step_time_s: float
    parts_s: dict[str, float]
    overlapped_communication_s: float


def attribute(events: Iterable[Event], *, num_steps: int, on_device: bool) -> StepParts:
    """Return where the time of the last `num_steps` steps went.

    on_device: whether the steps ran on a GPU. Raises ProfileError if there are no such steps, or if nothing
    ran there.
    """
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    marks = sorted(by_kind.get("phase", ()), key=lambda mark: mark.start_s)
    steps = [mark for mark in marks if mark.name == "step"][-num_steps:]
    if len(steps) < num_steps:
        raise ProfileError(f"the profiler saw {len(steps)} of {num_steps} steps")
    begin_s, end_s = steps[0].start_s, steps[-1].end_s
    phases = [mark for mark in marks if mark.name != "step" and begin_s <= mark.start_s < end_s]
    spans = [(mark.start_s, mark.end_s, f"host {mark.name}") for mark in phases]
    if on_device:
        at_s = {event.correlation: event.start_s for event in by_kind.get("launch", ())}
        at_s.pop(None, None)
        # Each piece of the device's work, with the time of its launch; None if that is unknown.
        work = [(event, at_s.get(event.correlation)) for event in by_kind.get("device", ())]
        begin_s, end_s = _on_device(work, begin_s, end_s)
        spans += [
            (event.start_s, event.end_s, "exchange" if event.is_collective else _phase_at(marks, launched_s))
            for event, launched_s in work
        ]
    else:
        spans += [(event.start_s, event.end_s, "exchange") for event in by_kind.get("exchange", ())]
        spans += [
            (event.start_s, event.end_s, kind)
            for kind in ("operator", "wait")
            for event in by_kind.get(kind, ())
            if event.thread == steps[0].thread
        ]
    seconds, overlapped_s = _sweep(spans, begin_s, end_s, on_device=on_device)
    names = {"communication", "other", *(mark.name for mark in phases)}
    return StepParts(
        step_time_s=(end_s - begin_s) / num_steps,
        parts_s={name: seconds.get(name, 0.0) / num_steps for name in sorted(names | seconds.keys())},
        overlapped_communication_s=overlapped_s / num_steps,
    )


def _on_device(
    work: Sequence[tuple[Event, float | None]], begin_s: float, end_s: float
) -> tuple[float, float]:
    """Return the start and end of the device's work on what the host launched from begin_s to end_s.

    It starts when the device has finished all earlier work.
    """
    before = [event.end_s for event, at_s in work if at_s is not None and at_s < begin_s]
    within = [event.end_s for event, at_s in work if at_s is not None and begin_s <= at_s < end_s]
    first_s = max(before, default=begin_s)
    if not within or max(within) <= first_s:
        raise ProfileError("the profiler saw nothing that ran on the GPU")
    return first_s, max(within)


def _phase_at(marks: Sequence[Event], at_s: float | None) -> str:
    """Return the host's phase at `at_s`; `other` outside of all phases."""
    names = (mark.name for mark in marks if at_s is not None and mark.start_s <= at_s < mark.end_s)
    return next((name for name in names if name != "step"), "other")


def _sweep(
    spans: Iterable[tuple[float, float, str]], begin_s: float, end_s: float, *, on_device: bool
) -> tuple[dict[str, float], float]:
    """Return the seconds from begin_s to end_s by part, and the seconds of hidden communication.

    spans: start, end and kind: `exchange`; `host PHASE`; on a device the phase of the running work, on a CPU
    `operator` or `wait`.
    """
    edges = []
    for start_s, stop_s, what in spans:
        within = max(start_s, begin_s), min(stop_s, end_s)
        if within[0] < within[1]:
            edges += [(within[0], 1, what), (within[1], -1, what)]
    running: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    overlapped_s, last_s = 0.0, begin_s
    for at_s, change, what in [*sorted(edges), (end_s, 0, "")]:
        passed_s, last_s = at_s - last_s, at_s
        if passed_s > 0:
            part, is_computing = (_on_gpu if on_device else _on_cpu)(running)
            seconds[part] += passed_s
            overlapped_s += passed_s if is_computing and running["exchange"] else 0.0
        running[what] += change
    return seconds, overlapped_s


def _on_gpu(running: Counter[str]) -> tuple[str, bool]:
    """Return the part to which this time belongs, and whether the device computes."""
    computing = next((name for name in _PRECEDENCE if running[name]), None)
    if computing:
        return computing, True
    if running["exchange"]:
        return "communication", False
    return ("data" if running["host data"] else "other"), False


def _on_cpu(running: Counter[str]) -> tuple[str, bool]:
    is_computing = bool(running["operator"]) and not running["wait"]
    if running["exchange"] and not is_computing:
        return "communication", False
    host = next((name for name in _PRECEDENCE if running[f"host {name}"]), "other")
    return host, is_computing
