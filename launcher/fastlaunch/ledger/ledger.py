"""The run ledger: what was asked for, what became of it, what it measured and what it was billed at.

One SQLite file in the home folder. It holds states and summaries; step records stay files. A run's row is
committed before anything that costs, and several launchers may use the ledger at once.

The file is long because every statement that changes the ledger is a method of one class, so that each can be
held against the rest: what is final stays final, and nothing is undone by whoever comes second.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastlaunch.backends import Plan, RunState
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import Settings
from fastlaunch.ledger.ids import new_run_id, published_run_ids
from fastlaunch.ledger.rows import Event, Run, read_runs
from fastlaunch.measure.summarize import RunSummary
from fastlaunch.run_attempts import (
    Attempt,
    insert_attempt,
    next_number,
    read_attempts,
    read_plan,
    update_attempt,
)
from fastlaunch.run_selectors import named_run, where
from fastlaunch.runs_file import LedgerFile, damaged

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Price

__all__ = ["IMPORT", "LEDGER_NAME", "Attempt", "Event", "Ledger", "Run", "new_run_id", "open_ledger"]

LEDGER_NAME = "ledger.sqlite"
#: `backend` of a run that was not started here.
IMPORT = "import"


def open_ledger(
    settings: Settings,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    randomness: random.Random | None = None,
) -> "Ledger":
    """The ledger in the home folder, which is made if need be. Raises UserError where that is impossible."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{settings.home} cannot be made: {error.strerror}",
            "set FASTLAUNCH_HOME to a folder that can be written",
        ) from None
    return Ledger(settings.home / LEDGER_NAME, clock=clock, randomness=randomness)


class Ledger:
    """The runs of one home folder. Use it as a context manager, or close it.

    Every method commits before it returns, unless it is called within `transaction()`. All raise UserError
    for a disk that is full or read-only, and BadFile for a ledger that is damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        randomness: random.Random | None = None,
    ) -> None:
        self.path = path
        self._clock = clock
        self._randomness = randomness or random.SystemRandom()
        self._given_out: set[str] = set()
        self._file = LedgerFile(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Commits what is written within at its end, all or nothing. May be nested: the outermost counts."""
        return self._file.transaction()

    # Submissions and runs

    def add_submission(self, command: str) -> str:
        """Id of a new submission: the runs that one command asked for. command: as it was typed."""
        with self.transaction():
            submission_id = self._new_submission_id()
            self._file.write(
                "INSERT INTO submissions (id, created_at, command) VALUES (?, ?, ?)",
                (submission_id, self._now(), command),
            )
        return submission_id

    def _new_submission_id(self) -> str:
        while True:
            submission_id = "sub-" + new_run_id(self._clock(), self._randomness)
            if self._file.one("SELECT 1 FROM submissions WHERE id = ?", (submission_id,)) is None:
                return submission_id

    def set_sites(self, submission_id: str, sites: Sequence[Mapping[str, Any]]) -> None:
        """Store where the submission's runs may be carried out, as plain data."""
        with self.transaction():
            self._file.write("UPDATE submissions SET sites = ? WHERE id = ?", (_dumps(sites), submission_id))

    def sites_of(self, submission_id: str) -> list[dict[str, Any]]:
        """What `set_sites` stored; empty if that is nothing."""
        row = self._file.one("SELECT sites FROM submissions WHERE id = ?", (submission_id,))
        try:
            return list(json.loads(row[0])) if row and row[0] else []
        except (ValueError, TypeError) as error:
            raise damaged(self.path, f"sites of {submission_id}: {error}") from None

    def last_submission(self) -> str | None:
        """Id of the newest submission that has a run; None if there is no run."""
        row = self._file.one(
            "SELECT id FROM submissions"
            " WHERE EXISTS (SELECT 1 FROM runs WHERE submission_id = submissions.id)"
            " ORDER BY rowid DESC LIMIT 1"
        )
        return row[0] if row else None

    def command_of(self, submission_id: str) -> str | None:
        """The command that made the submission."""
        row = self._file.one("SELECT command FROM submissions WHERE id = ?", (submission_id,))
        return row[0] if row else None

    def new_run_id(self) -> str:
        """An id that no run has yet, and that this ledger has not given out before."""
        while True:
            run_id = new_run_id(self._clock(), self._randomness)
            if run_id not in self._given_out and not self.existing([run_id]):
                self._given_out.add(run_id)
                return run_id

    def add_run(
        self,
        submission_id: str,
        run_id: str,
        *,
        spec: Mapping[str, Any],
        plan: Mapping[str, Any] | None,
        workload: str,
        recipe: str,
        instance: str | None = None,
        backend: str,
        price: "Price | None" = None,
        directory: Path | None = None,
    ) -> None:
        """Store a run in state `planned`. spec, plan: JSON-able. recipe: the label, overrides included.

        plan: None for a run whose attempts hold the plans.
        """
        with self.transaction():
            self._insert(
                id=run_id,
                submission_id=submission_id,
                backend=backend,
                state=str(RunState.PLANNED),
                workload=workload,
                recipe=recipe,
                instance=instance,
                directory=_text(directory),
                price=_dumps(price.to_json()) if price else None,
                spec=_dumps(spec),
                plan=_dumps(plan) if plan is not None else None,
            )

    def place(self, run_id: str, *, spec: Mapping[str, Any], instance: str, price: "Price | None") -> None:
        """Store where the run is tried now: its spec as it is there, instance type, price if known."""
        with self.transaction():
            self._file.write(
                "UPDATE runs SET spec = ?, instance = ?, price = ? WHERE id = ?",
                (_dumps(spec), instance, _dumps(price.to_json()) if price else None, run_id),
            )

    def set_price(self, run_id: str, price: "Price") -> None:
        """Store the price of what the run got."""
        with self.transaction():
            self._file.write("UPDATE runs SET price = ? WHERE id = ?", (_dumps(price.to_json()), run_id))

    def explain(self, run_id: str, reason: str | None) -> None:
        """Store what is to be known of a run that has not ended; nothing if it has."""
        with self.transaction():
            self._file.write(
                "UPDATE runs SET reason = ? WHERE id = ? AND state IN (?, ?)",
                (reason, run_id, str(RunState.PLANNED), str(RunState.RUNNING)),
            )

    def reopen(self, run_id: str, reason: str) -> bool:
        """Whether the run, which was interrupted, failed or lost, is `planned` again, for a new attempt."""
        with self.transaction():
            cursor = self._file.write(
                "UPDATE runs SET state = ?, reason = ? WHERE id = ? AND state IN (?, ?, ?)",
                (
                    str(RunState.PLANNED),
                    reason,
                    run_id,
                    str(RunState.INTERRUPTED),
                    str(RunState.FAILED),
                    str(RunState.LOST),
                ),
            )
            if cursor.rowcount == 1:
                self._add_event(run_id, str(RunState.PLANNED), reason)
        return cursor.rowcount == 1

    def set_state(self, run_id: str, state: RunState, reason: str | None = None) -> bool:
        """Whether the run entered `state`; the state is added to its history.

        False if it is there already, or if it would leave a final state or go back to `planned`: whoever
        comes second (a launcher and `fastlaunch status` may both see a run end) changes nothing.
        """
        with self.transaction():
            row = self._file.one("SELECT state FROM runs WHERE id = ?", (run_id,))
            assert row is not None, run_id
            before = RunState(row[0])
            if before == state or before.is_final or state == RunState.PLANNED:
                return False
            self._file.write(
                "UPDATE runs SET state = ?, reason = ? WHERE id = ?", (str(state), reason, run_id)
            )
            self._add_event(run_id, state, reason)
        return True

    def set_summary(self, run_id: str, summary: RunSummary) -> None:
        """Store what the run measured."""
        with self.transaction():
            self._file.write("UPDATE runs SET summary = ? WHERE id = ?", (_dumps(summary.to_json()), run_id))

    def history(self, run_id: str) -> list[Event]:
        """The states that the run entered, oldest first."""
        rows = self._file.all(
            "SELECT at, state, reason FROM run_events WHERE run_id = ? ORDER BY rowid", (run_id,)
        )
        try:
            return [Event(at=at, state=RunState(state), reason=reason) for at, state, reason in rows]
        except ValueError as error:
            raise damaged(self.path, f"run {run_id}: {error}") from None

    # Attempts

    def add_attempt(
        self,
        run_ids: Sequence[str],
        *,
        region: str | None = None,
        max_minutes: int | None = None,
        usd_per_hour: float | None = None,
        make_plan: Callable[[int], Plan] | None = None,
    ) -> tuple[int, str]:
        """Id and token of a new attempt at `run_ids`, to be made before its request is sent.

        The token is `<first run id>-a<n>`; n counts from 1, and is above that of every earlier attempt at any
        of the runs. make_plan: the plan that attempt n sends; it is stored in the same transaction.
        usd_per_hour: what an hour costs, with the discount, where that is known before.
        """
        assert run_ids
        with self.transaction():
            n = next_number(self._file, run_ids)
            return insert_attempt(
                self._file,
                run_ids,
                n=n,
                now=self._now(),
                region=region,
                plan=make_plan(n) if make_plan else None,
                max_minutes=max_minutes,
                usd_per_hour=usd_per_hour,
            )

    def set_handle(self, attempt_id: int, handle: Mapping[str, Any]) -> None:
        """Store what finds the attempt's job again; the attempt is then `running`, unless it has ended."""
        with self.transaction():
            self._file.write(
                "UPDATE attempts SET handle = ?, state = CASE WHEN ended_at IS NULL THEN ? ELSE state END"
                " WHERE id = ?",
                (_dumps(handle), str(RunState.RUNNING), attempt_id),
            )

    def set_machine(
        self,
        attempt_id: int,
        *,
        zone: str | None,
        launched_at: datetime,
        usd_per_hour: float | None = None,
        instance: str | None = None,
    ) -> None:
        """Store which machine the attempt got, since when, and what an hour costs if that is known now.

        instance: its type, where several had been asked for.
        """
        columns: dict[str, Any] = {"zone": zone, "launched_at": _iso(launched_at)}
        if usd_per_hour is not None:
            columns["usd_per_hour"] = usd_per_hour
        if instance is not None:
            columns["instance"] = instance
        with self.transaction():
            update_attempt(self._file, attempt_id, columns)

    def set_schedule(self, attempt_id: int, schedule: Mapping[str, Any] | None) -> None:
        """Store what is known of the schedule that ends the attempt's machines; None once it is deleted."""
        with self.transaction():
            update_attempt(self._file, attempt_id, {"schedule": _dumps(schedule) if schedule else None})

    def explain_attempt(self, attempt_id: int, reason: str | None) -> None:
        """Store what is to be known of an attempt that has not ended; nothing if it has."""
        with self.transaction():
            self._file.write(
                "UPDATE attempts SET reason = ? WHERE id = ? AND ended_at IS NULL", (reason, attempt_id)
            )

    def end_attempt(
        self,
        attempt_id: int,
        state: RunState,
        *,
        reason: str | None = None,
        billed_seconds: float | None = None,
        billing: str | None = None,
        lived_s: float | None = None,
    ) -> bool:
        """Whether this call ended the attempt; False if it had ended before.

        reason: why it ended; what was to be known of it meanwhile is true no more.
        """
        assert state.is_final
        with self.transaction():
            cursor = self._file.write(
                "UPDATE attempts SET state = ?, ended_at = ?, billed_seconds = ?, billing = ?, lived_s = ?,"
                " reason = ? WHERE id = ? AND ended_at IS NULL",
                (str(state), self._now(), billed_seconds, billing, lived_s, reason, attempt_id),
            )
        return cursor.rowcount == 1

    def add_pool(self, attempt_id: int, seconds: float) -> None:
        """Add the seconds for which a warm pool was kept after the attempt; the second time nothing."""
        with self.transaction():
            self._file.write(
                "UPDATE attempts SET billed_seconds = coalesce(billed_seconds, 0) + ?, idle_minutes = 0"
                " WHERE id = ? AND idle_minutes > 0 AND ended_at IS NOT NULL",
                (seconds, attempt_id),
            )

    def attempts_of(self, run_id: str) -> list[Attempt]:
        """The attempts that hold the run, oldest first."""
        return read_attempts(
            self._file, "id IN (SELECT attempt_id FROM attempt_runs WHERE run_id = ?)", (run_id,)
        )

    def attempt(self, attempt_id: int) -> Attempt:
        """The attempt as it stands now."""
        return read_attempts(self._file, "id = ?", (attempt_id,))[0]

    def unfinished_attempts(self, backend: str) -> list[Attempt]:
        """The attempts of the backend that have not ended, oldest first."""
        return read_attempts(self._file, "backend = ? AND ended_at IS NULL", (backend,))

    def scheduled_attempts(self) -> list[Attempt]:
        """The attempts, ended or not, of which a schedule in the account may be left, oldest first."""
        return read_attempts(self._file, "schedule IS NOT NULL", ())

    def attempt_regions(self, backend: str) -> set[str]:
        """The regions in which attempts of the backend were ever made."""
        rows = self._file.all("SELECT DISTINCT region FROM attempts WHERE backend = ?", (backend,))
        return {region for (region,) in rows if region}

    def attempts_by_token(self, tokens: Sequence[str]) -> dict[str, Attempt]:
        """The attempts whose token is among `tokens`, by token."""
        found = read_attempts(
            self._file, "token IN (SELECT value FROM json_each(?))", (_dumps(list(tokens)),)
        )
        return {attempt.token: attempt for attempt in found}

    def plan_of(self, attempt_id: int) -> Plan | None:
        """The plan whose request the attempt sends; None if it stored none."""
        return read_plan(self._file, attempt_id)

    # Reading runs

    def get(self, name: str) -> Run:
        """The run called `name`: its id, or a prefix or last part of it that no other run has."""
        return read_runs(self._file, "id = ?", [named_run(self._file.all, name)])[0]

    def select(self, selectors: Sequence[str] = (), *, submission: str | None = None) -> list[Run]:
        """Runs, oldest first: those named, and those that all filters fit; all of them without selectors.

        A selector is a run's id, a prefix or last part of it that no other run has, or a filter
        `field=glob` on workload, recipe, instance, state, submission, backend or commit. Of several filters
        on one field, one must fit. submission: only runs of this one. Raises UnknownName for a run that does
        not exist or a field that there is not, UserError for a name that fits several runs.
        """
        condition, values = where(self._file.all, selectors, submission)
        return read_runs(self._file, f"{condition} ORDER BY rowid", values)

    def fetch_comparable(
        self, selectors: Sequence[str] = (), *, submission: str | None = None, all_runs: bool = False
    ) -> list[Run]:
        """As `select`, with spec and plan left out, so that it is fast for many thousand runs.

        Without selectors: the runs of `submission`, which is the last one unless given; with `all_runs`,
        every run. Runs without a summary are among them, for the caller to mention.
        """
        if not selectors and not all_runs:
            submission = submission or self.last_submission()
        condition, values = where(self._file.all, selectors, submission)
        return read_runs(self._file, f"{condition} ORDER BY rowid", values, brief=True)

    def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Those of `run_ids` that the ledger holds."""
        rows = self._file.all(
            "SELECT id FROM runs WHERE id IN (SELECT value FROM json_each(?))", (_dumps(run_ids),)
        )
        return {run_id for (run_id,) in rows}

    # Importing and removing

    def add_imported(
        self,
        items: Sequence[tuple[RunSummary, Path | None]],
        *,
        submission_id: str,
        run_ids: Sequence[str] | None = None,
    ) -> list[str]:
        """Ids of the runs that `items` became, in one transaction.

        items: a summary, and the file or folder it was made from. run_ids: of the items; without them an id
        follows from the summary, so that a row imported twice is one run. A run that was imported before
        takes the new summary and joins the new submission; one that was started here is left as it is.
        """
        ids = list(run_ids) if run_ids is not None else published_run_ids([summary for summary, _ in items])
        with self.transaction():
            for run_id, (summary, path) in zip(ids, items, strict=True):
                self._import(run_id, submission_id, summary, path)
        return ids

    def remove(self, run_ids: Sequence[str]) -> None:
        """Forget runs, by their full ids; their files are the caller's business.

        Raises UserError, and removes none, if one of them has not ended.
        """
        with self.transaction():
            unfinished = self._file.all(
                "SELECT id, state FROM runs WHERE id IN (SELECT value FROM json_each(?)) AND state IN (?, ?)",
                (_dumps(run_ids), str(RunState.PLANNED), str(RunState.RUNNING)),
            )
            if unfinished:
                run_id, state = unfinished[0]
                raise UserError(f"run {run_id} is {state}", f"end it first: fastlaunch cancel {run_id}")
            for run_id in run_ids:
                self._file.write("DELETE FROM runs WHERE id = ?", (run_id,))
            self._file.write("DELETE FROM attempts WHERE id NOT IN (SELECT attempt_id FROM attempt_runs)")

    # SQL

    def _now(self) -> str:
        return _iso(self._clock())

    def _insert(self, **columns: str | None) -> None:
        """A new row of `runs`, and the first of its history."""
        columns["created_at"] = self._now()
        self._file.write(
            f"INSERT INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            list(columns.values()),
        )
        self._add_event(str(columns["id"]), str(columns["state"]), columns.get("reason"))

    def _add_event(self, run_id: str, state: str, reason: str | None) -> None:
        self._file.write(
            "INSERT INTO run_events (run_id, at, state, reason) VALUES (?, ?, ?, ?)",
            (run_id, self._now(), state, reason),
        )

    def _import(self, run_id: str, submission_id: str, summary: RunSummary, path: Path | None) -> None:
        known = self._file.one("SELECT backend, state FROM runs WHERE id = ?", (run_id,))
        if known and known[0] != IMPORT:
            return
        state, reason = _STATE_OF_STATUS.get(summary.status, RunState.FAILED), None
        if state is not RunState.COMPLETED:
            reason = next(iter((*summary.problems, *summary.warnings)), None)
        columns = {
            "submission_id": submission_id,
            "state": str(state),
            "reason": reason,
            "workload": summary.workload,
            "recipe": summary.recipe,
            "instance": summary.instance,
            "directory": _text(path),
            "summary": _dumps(summary.to_json()),
        }
        if not known:
            self._insert(id=run_id, backend=IMPORT, **columns)
            return
        self._file.write(
            f"UPDATE runs SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?",
            [*columns.values(), run_id],
        )
        # It was imported while it was under way, and is imported again.
        if state != known[1]:
            self._add_event(run_id, str(state), reason)


#: The state of an imported run, by the status that its records end with.
_STATE_OF_STATUS = {
    "completed": RunState.COMPLETED,
    "interrupted": RunState.INTERRUPTED,
    "killed": RunState.LOST,
}


def _dumps(data: object) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{str(path)!r} is not a name in UTF-8", "rename it") from None
    return str(path)
