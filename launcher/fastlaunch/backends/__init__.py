"""`Plan`, `RunState` and the `Backend` protocol. Backends know neither each other nor the ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from fastlaunch.jobs.spec import JobSpec


class RunState(StrEnum):
    """Where a run stands. The states from `COMPLETED` on are final."""

    PLANNED = "planned"
    RUNNING = "running"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self not in (RunState.PLANNED, RunState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The exact request that starts a job, as data: `execute` sends `request` and adds nothing.

    placeholders: names of what is not known offline and stands in `request` as `<name>`.
    max_cost_usd: the most this plan can cost; None where nothing is billed.
    region: where the request goes; None for this machine.
    sunk_usd: what was paid before and is not paid again, such as a capacity block's fee; None without.
    """

    backend: str
    operation: str
    request: Mapping[str, Any]
    placeholders: tuple[str, ...] = ()
    max_cost_usd: float | None = None
    usd_per_hour: float | None = None
    price_as_of: str | None = None
    region: str | None = None
    sunk_usd: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal plan."""
        data = {**vars(self), "request": dict(self.request), "placeholders": list(self.placeholders)}
        for name in ("region", "sunk_usd"):
            if data[name] is None:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote."""
        return cls(**{**data, "placeholders": tuple(data["placeholders"])})


class Backend(Protocol):
    """Where plans run. `handle` is JSON-able data that finds the job again from another process."""

    name: str

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """The plan that carries out `jobs`, by run id, one after another on one machine.

        Pure: no network, credentials, clock or randomness. attempt: which one of these runs it is, from 1.
        """

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request; returns the handle."""

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """The handle of the plan's job if there is one, though nobody noted that it was started."""

    def state(self, handle: Mapping[str, Any]) -> RunState:
        """What the backend says of the job now."""

    def states(self, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
        """`state` of many jobs, in few requests."""

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        """The job's record files of every rank, brought to this machine."""

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Stop the job, letting it write its end; it is not an error if it has ended already."""

    def kill(self, handle: Mapping[str, Any]) -> None:
        """End the job at once, whatever it loses."""
