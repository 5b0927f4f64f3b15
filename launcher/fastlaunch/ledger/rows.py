"""What the ledger holds, read back from its rows: `Run`, `Event`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import RunState
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summarize import RunSummary
from fastlaunch.runs_file import LedgerFile, damaged

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Price


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution. spec and plan are None for an imported run, and where only a brief one was asked for.

    created_at: ISO 8601, UTC. recipe: the label, overrides included. instance: None for this machine.
    price: what it was billed at, as of when it was started. directory: where its record files lie; for
    an imported run, the file or folder that it was read from. region, purchase: asked for, of a run on AWS.
    """

    id: str
    submission_id: str
    created_at: str
    backend: str
    state: RunState
    reason: str | None
    workload: str
    recipe: str
    instance: str | None
    directory: Path | None
    price: "Price | None"
    summary: RunSummary | None
    region: str | None = None
    purchase: str | None = None
    spec: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A state that a run entered, and when (ISO 8601, UTC)."""

    at: str
    state: RunState
    reason: str | None


def read_runs(file: LedgerFile, condition: str, values: Sequence[Any], *, brief: bool = False) -> list[Run]:
    """The runs that the SQL condition fits. brief: without spec and plan, which are not even read then."""
    columns = "id, submission_id, created_at, backend, state, reason, workload, recipe, instance, directory"
    asked = "json_extract(spec, '$.region'), json_extract(spec, '$.purchase')"
    columns += f", price, summary, {asked}" + ("" if brief else ", spec, plan")
    # Many runs share a price, and many thousand are read at once.
    prices: dict[str | None, Price | None] = {None: None}
    runs = []
    for row in file.rows(f"SELECT {columns} FROM runs WHERE {condition}", values):
        try:
            if row[10] not in prices:
                prices[row[10]] = _price(row[10])
            runs.append(_run(row, prices[row[10]]))
        except (ValueError, TypeError, UserError) as error:
            raise damaged(file.path, f"run {row[0]}: {error}") from None
    return runs


def _run(row: Sequence[Any], price: "Price | None") -> Run:
    spec, plan = row[14:] or (None, None)
    return Run(
        id=row[0],
        submission_id=row[1],
        created_at=row[2],
        backend=row[3],
        state=RunState(row[4]),
        reason=row[5],
        workload=row[6],
        recipe=row[7],
        instance=row[8],
        directory=Path(row[9]) if row[9] else None,
        price=price,
        summary=RunSummary.from_json(json.loads(row[11])) if row[11] else None,
        region=row[12],
        purchase=row[13],
        spec=json.loads(spec) if spec else None,
        plan=json.loads(plan) if plan else None,
    )


def _price(text: str) -> "Price":
    from fastlaunch.catalog.prices import Price

    return Price.from_json(json.loads(text))
