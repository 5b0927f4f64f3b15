"""What the ledger holds, read back from its rows: runs, their history, attempts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastlaunch.catalog.prices import Price
from fastlaunch.core.data import read
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.terminal import printable, printable_json
from fastlaunch.jobs.job import Job, Script
from fastlaunch.ledger.db import LedgerFile, reading
from fastlaunch.measure.summary import RunSummary

#: Columns of runs and attempts that others may have written. Ids that we give out are printable already.
_SHOWN = {
    *("reason", "workload", "recipe", "instance", "zone", "owner", "account", "region", "purchase"),
    *("id", "submission_id"),
}
#: As a column of attempts is selected, where it is none.
_CEILING = "json_extract(plan, '$.max_cost_usd') AS max_cost_usd"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A job as it happened."""

    id: str
    submission_id: str
    #: ISO 8601, UTC.
    created_at: str
    backend: str
    state: RunState
    ending: Ending | None = None
    #: A remark for people, such as why it failed.
    reason: str | None
    workload: str
    #: The label, overrides included.
    recipe: str
    #: None for this machine.
    instance: str | None
    #: Where its record files lie; of an imported run, the file or folder that it was read from.
    directory: Path | None
    #: What it was billed at, as of its start.
    price: Price | None
    summary: RunSummary | None
    #: Who shared it, and the AWS account that it ran in, or was shared from; None for the user's own.
    owner: str | None = None
    account: str | None = None
    #: Its id there, which whoever shared it chose; None for the user's own.
    origin_id: str | None = None
    #: As requested, of a run on AWS.
    region: str | None = None
    purchase: str | None = None
    #: The command that it ran; None for a workload of ours, and for an imported run.
    script: Script | None = None
    #: None for an imported run, and where the run was read in brief.
    spec: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    @property
    def job(self) -> Job:
        """What was to be done. Raises UserError for an imported run."""
        if self.spec is None:
            raise UserError(f"run {self.id} was imported", "submit it again")
        return Job.from_json(self.spec)

    @property
    def recorded_id(self) -> str:
        """The id that its records have."""
        return self.origin_id or self.id

    @property
    def is_unneeded(self) -> bool:
        """Whether its row was settled without it."""
        return self.ending is Ending.NOT_NEEDED

    @property
    def is_unstarted(self) -> bool:
        """Whether it never began, as its row was settled, an earlier run failed, or the user stopped all."""
        is_stopped = self.state is RunState.CANCELLED and self.ending is Ending.STOPPED
        return self.is_unneeded or is_stopped or self.ending is Ending.EARLIER_FAILED


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A command that makes several submissions, one after another."""

    id: str
    #: Where it was typed.
    directory: Path
    #: Its options by name, as `fastlaunch.sweep` takes them.
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A state that a run entered, and when (ISO 8601, UTC)."""

    at: str
    state: RunState
    reason: str | None


#: Column of Run -> what is selected for it.
_RUN_COLUMNS = {
    **{name: name for name in ("id", "submission_id", "created_at", "backend", "state", "ending")},
    **{name: name for name in ("reason", "workload", "recipe", "instance", "directory", "price", "summary")},
    **{name: name for name in ("owner", "account", "origin_id")},
    "region": "json_extract(spec, '$.region')",
    "purchase": "json_extract(spec, '$.purchase')",
    "script": "json_extract(spec, '$.script')",
}


def read_runs(file: LedgerFile, condition: str, values: Sequence[Any], *, brief: bool = False) -> list[Run]:
    """Return the runs that the SQL condition fits. brief: do not even read spec and plan."""
    selected = {**_RUN_COLUMNS, **({} if brief else {"spec": "spec", "plan": "plan"})}
    # Many runs share a price, and many thousand are read at once.
    prices: dict[str | None, Price | None] = {None: None}
    runs = []
    for row in file.rows(f"SELECT {', '.join(selected.values())} FROM runs WHERE {condition}", values):
        columns = _columns(selected, row)
        price, summary = columns["price"], columns["summary"]
        directory, script = columns["directory"], columns["script"]
        with reading(file.path, f"run {columns['id']}"):
            if price not in prices:
                prices[price] = read(Price, printable_json(price), "price")
            columns["state"] = RunState(columns["state"])
            columns["ending"] = columns["ending"] and Ending(columns["ending"])
            columns["price"] = prices[price]
            columns["summary"] = read(RunSummary, printable_json(summary), "run summary") if summary else None
            columns["script"] = script and Script.from_json(json.loads(script))
            columns["directory"] = Path(directory) if directory else None
            for name in selected.keys() & {"spec", "plan"}:
                columns[name] = json.loads(columns[name]) if columns[name] else None
        runs.append(Run(**columns))
    return runs


def _columns(names: Iterable[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return a row's values by column, those of others `printable`."""
    return {
        name: printable(value) if name in _SHOWN and isinstance(value, str) else value
        for name, value in zip(names, row, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class Billing:
    """What one machine of an attempt costs; None where that is not known, or nothing is billed."""

    #: Paid, with the discount.
    usd_per_hour: float | None = None
    #: From the machine's start to its end.
    lived_s: float | None = None
    #: None while it lasts, and where no machine was started.
    billed_s: float | None = None
    #: How the seconds are known; see `protocol.Billed`.
    source: str | None = None
    #: Paid before, for the whole capacity block; see `Plan`.
    sunk_usd: float | None = None


#: Field of Billing -> column of attempts.
_BILLING_COLUMNS = {
    "usd_per_hour": "usd_per_hour",
    "lived_s": "lived_s",
    "billed_s": "billed_seconds",
    "source": "billing",
    "sunk_usd": "sunk_usd",
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One request to a backend, which carries out one or more runs. Times are ISO 8601, UTC."""

    id: int
    #: The request's token: sent again after a time-out, it starts nothing twice.
    token: str
    #: Counts the attempts at a run, from 1.
    n: int
    backend: str
    region: str | None
    run_ids: tuple[str, ...]
    state: RunState
    #: What ended it; of an open attempt, that somebody asked it to stop.
    ending: Ending | None = None
    #: Why it ended; of an open attempt, a remark for people.
    reason: str | None = None
    started_at: str
    ended_at: str | None
    #: Identifies the job, with `run_ids`; None until the request was answered.
    handle: dict[str, Any] | None
    #: The machines, what each may take, and where they upload to; None on this machine.
    instance: str | None = None
    zone: str | None = None
    num_nodes: int = 1
    launched_at: str | None = None
    max_minutes: int | None = None
    output: str | None = None
    billing: Billing = Billing()
    #: In the account, to start an attempt later or to end its machines: `{"name", "region", "state", ...}`;
    #: see `schedules`.
    schedule: dict[str, Any] | None = None
    #: The AWS account that the request was sent with, and its partition, such as `aws`; None on this machine.
    account: str | None = None
    partition: str | None = None
    #: The last looks at which AWS did not show all that was started; empty while it does. See `runs.sight`.
    absences: tuple[str, ...] = ()
    #: The ceiling of its plan; None on this machine.
    max_cost_usd: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as flat plain data, under the names of the columns."""
        billing = {column: getattr(self.billing, name) for name, column in _BILLING_COLUMNS.items()}
        lists = {"run_ids": list(self.run_ids), "absences": list(self.absences)}
        return {**vars(self), "state": str(self.state), **lists, **billing}


#: Columns of attempts that are read, from the first field, `id`.
_COLUMNS = (
    *(of.name for of in fields(Attempt) if of.name not in ("run_ids", "billing", "max_cost_usd")),
    *_BILLING_COLUMNS.values(),
)


def next_number(file: LedgerFile, run_ids: Sequence[str]) -> int:
    """Return the number of a new attempt: above every one that any of the runs had, from 1.

    No two attempts at a run may write files of one name.
    """
    row = file.one(
        "SELECT max(n) FROM attempts JOIN attempt_runs ON attempt_id = attempts.id"
        " WHERE run_id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(run_ids)),),
    )
    return ((row and row[0]) or 0) + 1


def read_attempts(file: LedgerFile, condition: str, values: Sequence[Any]) -> list[Attempt]:
    """Return the attempts that the SQL condition fits, oldest first."""
    selected = ", ".join((*_COLUMNS, _CEILING))
    rows = file.all(f"SELECT {selected} FROM attempts WHERE {condition} ORDER BY id", values)
    members: dict[int, list[str]] = {row[0]: [] for row in rows}
    for attempt_id, run_id in file.all(
        "SELECT attempt_id, run_id FROM attempt_runs"
        " WHERE attempt_id IN (SELECT value FROM json_each(?)) ORDER BY attempt_id, position",
        (json.dumps(list(members)),),
    ):
        members[attempt_id].append(run_id)
    attempts = []
    for row in rows:
        columns = _columns((*_COLUMNS, "max_cost_usd"), row)
        billing = Billing(**{name: columns.pop(column) for name, column in _BILLING_COLUMNS.items()})
        with reading(file.path, f"attempt {columns['token']}"):
            for name in ("handle", "schedule"):
                columns[name] = json.loads(columns[name]) if columns[name] else None
            columns["absences"] = tuple(json.loads(columns["absences"] or "[]"))
            columns["state"] = RunState(columns["state"])
            columns["ending"] = columns["ending"] and Ending(columns["ending"])
            if columns["handle"] is not None:
                columns["handle"]["run_ids"] = members[columns["id"]]
        attempts.append(Attempt(**columns, billing=billing, run_ids=tuple(members[columns["id"]])))
    return attempts


def read_plan(file: LedgerFile, attempt_id: int) -> Plan | None:
    """Return the plan of the attempt's request; None if the row holds none."""
    row = file.one("SELECT plan, token FROM attempts WHERE id = ?", (attempt_id,))
    if row is None or row[0] is None:
        return None
    with reading(file.path, f"plan of attempt {row[1]}"):
        return read(Plan, json.loads(row[0]), "plan")


def machines_of(plan: Plan) -> tuple[str | None, int]:
    """Return type, as EC2 names it, and number of the machines that the plan asks for."""
    request = plan.payload
    # SageMaker's; EC2 has the type at the top.
    resources = request.get("ResourceConfig")
    if resources is None:
        return request.get("InstanceType"), int(request.get("MaxCount", 1))
    return str(resources["InstanceType"]).removeprefix("ml."), int(resources["InstanceCount"])


def tag_of(plan: Plan, key: str) -> str | None:
    """Return the tag that the plan's request puts on what it creates; None if it puts none."""
    # SageMaker has one list; EC2 has one for each kind of resource.
    holders = [plan.payload, *plan.payload.get("TagSpecifications", ())]
    tags = (tag for holder in holders for tag in holder.get("Tags", ()))
    return next((str(tag["Value"]) for tag in tags if tag["Key"] == key), None)


def dumps(data: object) -> str:
    """Return `data` as JSON without blanks. Raises ValueError for a number that JSON does not have."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
