"""Attempts in the ledger: one request to a backend each, which carries out one or more runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch.backends import Plan, RunState
from fastlaunch.runs_file import LedgerFile, damaged

_COLUMNS = (
    *("id", "token", "n", "backend", "region", "handle", "state", "reason", "started_at", "ended_at"),
    *("instance", "zone", "output", "max_minutes", "usd_per_hour", "launched_at", "lived_s"),
    *("billed_seconds", "billing", "num_nodes", "schedule", "sunk_usd", "idle_minutes"),
)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One request to a backend, which carries out one or more runs.

    token: of the request; sent again after a time-out, it starts nothing twice. handle: what finds the job
    again; None until the request was answered. reason: why it ended, or what is to be known of it meanwhile.
    The rest is None where nothing is billed. max_minutes: what the machine may take. usd_per_hour: paid, with
    the discount. launched_at: ISO 8601, of the machine. lived_s: from then to its end. billed_seconds: None
    while it lasts. billing: how they are known, one of `cloud_backend.BILLINGS`. usd_per_hour, lived_s and
    billed_seconds are of one machine, of num_nodes. schedule: in the account, which ends the machines of a
    detached attempt: `{"name", "region", "state", ...}`; see `deadline_schedule`. sunk_usd: see `Plan`.
    idle_minutes: for which a warm pool may be kept, and billed, after it.
    """

    id: int
    token: str
    n: int
    backend: str
    region: str | None
    handle: dict[str, Any] | None
    state: RunState
    started_at: str
    ended_at: str | None
    billed_seconds: float | None
    run_ids: tuple[str, ...]
    reason: str | None = None
    instance: str | None = None
    zone: str | None = None
    output: str | None = None
    max_minutes: int | None = None
    usd_per_hour: float | None = None
    launched_at: str | None = None
    lived_s: float | None = None
    billing: str | None = None
    num_nodes: int = 1
    schedule: dict[str, Any] | None = None
    sunk_usd: float | None = None
    idle_minutes: int = 0


def next_number(file: LedgerFile, run_ids: Sequence[str]) -> int:
    """The number of a new attempt at the runs: above every one that any of them had, from 1.

    So that no two attempts at a run write files of one name.
    """
    row = file.one(
        "SELECT max(n) FROM attempts JOIN attempt_runs ON attempt_id = attempts.id"
        " WHERE run_id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(run_ids)),),
    )
    return ((row and row[0]) or 0) + 1


def insert_attempt(
    file: LedgerFile,
    run_ids: Sequence[str],
    *,
    n: int,
    now: str,
    region: str | None,
    plan: Plan | None,
    max_minutes: int | None,
    usd_per_hour: float | None,
) -> tuple[int, str]:
    """Id and token of the new row. Call it within a transaction."""
    row = file.one("SELECT backend FROM runs WHERE id = ?", (run_ids[0],))
    assert row is not None, run_ids[0]
    token = f"{run_ids[0]}-a{n}"
    instance, num_nodes = machines_of(plan) if plan else (None, 1)
    columns = {
        "token": token,
        "n": n,
        "backend": row[0],
        "region": plan.region if plan else region,
        "state": str(RunState.PLANNED),
        "started_at": now,
        "max_minutes": max_minutes,
        "usd_per_hour": usd_per_hour,
        "instance": instance,
        "num_nodes": num_nodes,
        "sunk_usd": plan.sunk_usd if plan else None,
        "idle_minutes": idle_minutes_of(plan) if plan else 0,
        "output": tag_of(plan, "fastlaunch:output") if plan else None,
        "plan": dumps(plan.to_json()) if plan else None,
    }
    cursor = file.write(
        f"INSERT INTO attempts ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
        list(columns.values()),
    )
    attempt_id = cursor.lastrowid
    assert attempt_id is not None
    for position, run_id in enumerate(run_ids):
        file.write(
            "INSERT INTO attempt_runs (attempt_id, run_id, position) VALUES (?, ?, ?)",
            (attempt_id, run_id, position),
        )
    return attempt_id, token


def read_attempts(file: LedgerFile, condition: str, values: Sequence[Any]) -> list[Attempt]:
    """The attempts that the SQL condition fits, oldest first."""
    rows = file.all(f"SELECT {', '.join(_COLUMNS)} FROM attempts WHERE {condition} ORDER BY id", values)
    members: dict[int, list[str]] = {row[0]: [] for row in rows}
    for attempt_id, run_id in file.all(
        "SELECT attempt_id, run_id FROM attempt_runs"
        " WHERE attempt_id IN (SELECT value FROM json_each(?)) ORDER BY attempt_id, position",
        (json.dumps(list(members)),),
    ):
        members[attempt_id].append(run_id)
    attempts = []
    for row in rows:
        found = dict(zip(_COLUMNS, row, strict=True))
        try:
            for name in ("handle", "schedule"):
                found[name] = json.loads(found[name]) if found[name] else None
            found["state"] = RunState(found["state"])
        except ValueError as error:
            raise damaged(file.path, f"attempt {found['token']}: {error}") from None
        attempts.append(Attempt(**found, run_ids=tuple(members[found["id"]])))
    return attempts


def read_plan(file: LedgerFile, attempt_id: int) -> Plan | None:
    """The plan of the attempt's request, None if the row holds none."""
    row = file.one("SELECT plan, token FROM attempts WHERE id = ?", (attempt_id,))
    if row is None or row[0] is None:
        return None
    try:
        return Plan.from_json(json.loads(row[0]))
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(file.path, f"plan of attempt {row[1]}: {error}") from None


def update_attempt(file: LedgerFile, attempt_id: int, columns: Mapping[str, Any]) -> None:
    """Set columns of a row. Call it within a transaction."""
    file.write(
        f"UPDATE attempts SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?",
        [*columns.values(), attempt_id],
    )


def machines_of(plan: Plan) -> tuple[str | None, int]:
    """Type, as EC2 names it, and number of machines that the plan asks for; of several types the first."""
    request = plan.request
    # SageMaker's; EC2 has the type at the top.
    wanted = request.get("ResourceConfig")
    if wanted is None:
        return request.get("InstanceType"), int(request.get("MaxCount", 1))
    first = next(iter(wanted.get("InstancePreferences", ())), wanted)
    number = first.get("InstanceCount", wanted.get("InstanceCount", 1))
    return str(first["InstanceType"]).removeprefix("ml."), int(number)


def idle_minutes_of(plan: Plan) -> int:
    """For which the plan's machines may be kept after the job: SageMaker's warm pool."""
    return int(plan.request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds", 0)) // 60


def tag_of(plan: Plan, key: str) -> str | None:
    """The tag that the plan's request puts on what it creates; None if it puts none."""
    request = plan.request
    lists = [request.get("Tags", ()), *(one["Tags"] for one in request.get("TagSpecifications", ()))]
    return next((str(tag["Value"]) for tags in lists for tag in tags if tag["Key"] == key), None)


def dumps(data: object) -> str:
    """`data` as JSON without blanks. Raises ValueError for a number that JSON does not have."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
