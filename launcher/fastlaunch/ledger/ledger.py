"""The ledger of runs: what was asked for, what became of it, what it measured and what it was billed.

One SQLite file in the home folder. It holds states and summaries; step records stay files. A run's row is
committed before anything that costs, and several launchers may use the ledger at once. Every statement that
changes it is a method of one class: what is final stays final, and a second writer undoes nothing.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastlaunch.catalog.prices import Price
from fastlaunch.core import locks
from fastlaunch.core.data import to_data
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import LEDGER_NAME, close_to_others, make_folder, writing
from fastlaunch.core.ownership import OUTPUT_TAG, make_token, parse_token
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.core.terminal import printable
from fastlaunch.ledger.db import LedgerFile, reading
from fastlaunch.ledger.ids import named_run, new_run_id, published_run_id, shared_id, where
from fastlaunch.ledger.rows import (
    Attempt,
    Event,
    Run,
    Sweep,
    dumps,
    machines_of,
    next_number,
    read_attempts,
    read_plan,
    read_runs,
    tag_of,
)
from fastlaunch.measure.summary import RunSummary

__all__ = ["IMPORT", "LEDGER_NAME", "Attempt", "Event", "Ledger", "Run", "new_run_id", "open_ledger"]

#: For how long what removed runs were billed may count in a budget.
_LONGEST_MONTH = timedelta(days=31)
#: `backend` of a run that was not started here.
IMPORT = "import"


def open_ledger(
    settings: Settings,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    randomness: random.Random | None = None,
) -> "Ledger":
    """Open the ledger in the home folder, making both if need be. Raises UserError if that is impossible."""
    with writing(settings.home):
        make_folder(settings.home)
    close_to_others(settings.home)
    return Ledger(settings.home / LEDGER_NAME, clock=clock, randomness=randomness)


class Ledger:
    """The runs of one home folder. Use it as a context manager, or close it.

    Every method commits before it returns, except within `transaction()`. All raise UserError if the disk is
    full or read-only, and BadFile if the ledger is damaged.
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
        """Commit what is written within at its end, all or nothing. May be nested: the outermost counts."""
        return self._file.transaction()

    def launcher_lock(self, submission_id: str) -> Path:
        """Return the file whose lock the launcher of a submission holds as long as it lives."""
        return self.path.parent / "launchers" / f"{submission_id}.lock"

    def launcher_lives(self, run: Run) -> bool:
        """Whether the process that submitted `run` still follows it."""
        return locks.is_held(self.launcher_lock(run.submission_id))

    # Submissions and runs

    def add_submission(
        self, command: str, *, adds_to: str | None = None, sweep: str | None = None, part: str | None = None
    ) -> str:
        """Return the id of a new submission: the runs of one command, as it was typed.

        adds_to: the submission that is compared with it. sweep, part: the sweep that it belongs to, by its
        id, and the name of its part there. Raises UserError if there is no submission to add to.
        """
        if adds_to is not None:
            self.check_submission(adds_to)
        with self.transaction():
            while True:
                submission_id = "sub-" + new_run_id(self._clock(), self._randomness)
                if self._file.one("SELECT 1 FROM submissions WHERE id = ?", (submission_id,)) is None:
                    break
            self._file.insert(
                "submissions",
                id=submission_id,
                created_at=self._now(),
                command=command,
                adds_to=adds_to,
                sweep_id=sweep,
                part=part,
            )
        return submission_id

    def add_sweep(self, arguments: Mapping[str, Any], directory: Path) -> str:
        """Return the id of a new sweep. arguments: its options. directory: where it was typed."""
        with self.transaction():
            sweep_id = "sweep-" + new_run_id(self._clock(), self._randomness)
            self._file.insert(
                "sweeps",
                id=sweep_id,
                created_at=self._now(),
                arguments=dumps(arguments),
                directory=_text(directory),
            )
        return sweep_id

    def sweep(self, name: str | None = None) -> Sweep:
        """Return the sweep with this id, or the beginning or end of it; without a name the newest one.

        Raises UserError if there is none, or several.
        """
        rows = self._file.all("SELECT id, arguments, directory FROM sweeps ORDER BY rowid")
        fits = [row for row in rows if name and (row[0].startswith(name) or row[0].endswith(name))]
        if not rows or (name and len(fits) != 1):
            what = f"{name!r} fits {len(fits)} sweeps" if name else "there is no sweep"
            known = ", ".join(row[0] for row in rows[-3:])
            raise UserError(what, f"the newest are {known}" if known else "type: fastlaunch sweep --help")
        sweep_id, arguments, directory = fits[0] if name else rows[-1]
        return Sweep(id=sweep_id, arguments=json.loads(arguments), directory=Path(directory))

    def open_sweeps(self) -> dict[str, int]:
        """Return how many runs have not ended of each sweep that has such runs, the newest first."""
        rows = self._file.all(
            "SELECT sweep_id, count(*) FROM submissions JOIN runs ON submission_id = submissions.id"
            " WHERE sweep_id IS NOT NULL AND state IN ('planned', 'running')"
            " GROUP BY sweep_id ORDER BY max(submissions.rowid) DESC"
        )
        return dict(rows)

    def parts_of(self, sweep_id: str) -> dict[str, str]:
        """Return the sweep's submissions that have runs: their ids by part, in the order they were made."""
        rows = self._file.all(
            "SELECT part, id FROM submissions WHERE sweep_id = ?"
            " AND EXISTS (SELECT 1 FROM runs WHERE submission_id = submissions.id) ORDER BY rowid",
            (sweep_id,),
        )
        return dict(rows)

    def check_submission(self, submission_id: str) -> None:
        """Raise UserError if there is no such submission."""
        if self.command_of(submission_id) is None:
            raise UserError(
                f"there is no submission {submission_id}", "`fastlaunch runs show RUN` names that of a run"
            )

    def with_earlier(self, submission_id: str) -> list[str]:
        """Return the submission, what it adds to, what that adds to, and so on."""
        chain = [submission_id]
        while row := self._file.one("SELECT adds_to FROM submissions WHERE id = ?", (chain[-1],)):
            if row[0] is None or row[0] in chain:
                break
            chain.append(row[0])
        return chain

    def set_sites(self, submission_id: str, sites: Sequence[Mapping[str, Any]]) -> None:
        """Store where the submission's runs may be carried out, as plain data."""
        self._file.update("submissions", submission_id, sites=dumps(sites))

    def sites_of(self, submission_id: str) -> list[dict[str, Any]]:
        """Return what `set_sites` stored; empty if nothing."""
        row = self._file.one("SELECT sites FROM submissions WHERE id = ?", (submission_id,))
        with reading(self.path, f"sites of {submission_id}"):
            return list(json.loads(row[0])) if row and row[0] else []

    def last_submission(self) -> str | None:
        """Return the id of the newest submission that has a run of the user's; None without such runs."""
        row = self._file.one(
            "SELECT id FROM submissions"
            " WHERE EXISTS (SELECT 1 FROM runs WHERE submission_id = submissions.id AND owner IS NULL)"
            " ORDER BY rowid DESC LIMIT 1"
        )
        return row[0] if row else None

    def command_of(self, submission_id: str) -> str | None:
        """Return the command that made the submission."""
        row = self._file.one("SELECT command FROM submissions WHERE id = ?", (submission_id,))
        return row[0] if row else None

    def new_run_id(self) -> str:
        """Return an id that no run has, and that this ledger has not given out before."""
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
        price: Price | None = None,
        directory: Path | None = None,
    ) -> None:
        """Store a run in state `planned`. recipe: its label. plan: None if its attempts have the plans."""
        self._insert(
            id=run_id,
            submission_id=submission_id,
            backend=backend,
            state=RunState.PLANNED,
            workload=workload,
            recipe=recipe,
            instance=instance,
            directory=_text(directory),
            price=dumps(price.to_json()) if price else None,
            spec=dumps(spec),
            plan=dumps(plan) if plan is not None else None,
        )

    def place(self, run_id: str, *, spec: Mapping[str, Any], instance: str, price: Price | None) -> None:
        """Store where the run is being tried: its spec for there, instance type, price if known."""
        stored = dumps(price.to_json()) if price else None
        self._file.update("runs", run_id, spec=dumps(spec), instance=instance, price=stored)

    def set_price(self, run_id: str, price: Price) -> None:
        """Store the price of what the run got."""
        self._file.update("runs", run_id, price=dumps(price.to_json()))

    def explain(self, run_id: str, reason: str | None) -> None:
        """Store a remark on a run, unless it has ended."""
        self._file.update("runs", run_id, "state IN ('planned', 'running')", reason=reason)

    def reopen(self, run_id: str, reason: str, *, even_cancelled: bool = False) -> bool:
        """Make a run that was interrupted, failed or lost `planned` again; return whether it was one.

        even_cancelled: or cancelled.
        """
        states = "'interrupted', 'failed', 'lost'" + (", 'cancelled'" if even_cancelled else "")
        with self.transaction():
            is_open = self._file.update(
                *("runs", run_id, f"state IN ({states})"), state=RunState.PLANNED, ending=None, reason=reason
            )
            if is_open:
                self._add_event(run_id, RunState.PLANNED, reason)
        return is_open

    def set_goes_on(self, run_ids: Iterable[str], how: Mapping[str, Any] | None) -> None:
        """Store how `Launcher.go_on` continues the runs, as plain data; None if it does not."""
        with self.transaction():
            for run_id in run_ids:
                self._file.update("runs", run_id, goes_on=dumps(how) if how else None)

    def goes_on(self) -> dict[str, dict[str, Any]]:
        """Return what `set_goes_on` stored for interrupted runs, by run id, oldest first."""
        rows = self._file.all(
            "SELECT id, goes_on FROM runs WHERE goes_on IS NOT NULL AND state = 'interrupted' ORDER BY rowid"
        )
        with reading(self.path, "how runs go on"):
            return {run_id: dict(json.loads(how)) for run_id, how in rows}

    def set_state(
        self, run_id: str, state: RunState, reason: str | None = None, *, ending: Ending | None = None
    ) -> bool:
        """Let the run enter `state`, and add that to its history; return whether it did.

        False if it is there already, or would leave a final state or go back to `planned`: a launcher and
        `fastlaunch status` may both see a run end, and the second one changes nothing.
        """
        with self.transaction():
            row = self._file.one("SELECT state FROM runs WHERE id = ?", (run_id,))
            assert row is not None, run_id
            before = RunState(row[0])
            if before == state or before.is_final or state == RunState.PLANNED:
                return False
            self._file.update("runs", run_id, state=state, ending=ending, reason=reason)
            self._add_event(run_id, state, reason)
        return True

    def set_summary(self, run_id: str, summary: RunSummary) -> None:
        """Store what the run measured."""
        self._file.update("runs", run_id, summary=dumps(to_data(summary)))

    def history(self, run_id: str) -> list[Event]:
        """Return the states that the run entered, oldest first."""
        rows = self._file.all(
            "SELECT at, state, reason FROM run_events WHERE run_id = ? ORDER BY rowid", (run_id,)
        )
        with reading(self.path, f"run {run_id}"):
            return [
                Event(at=at, state=RunState(state), reason=reason and printable(reason))
                for at, state, reason in rows
            ]

    # Attempts

    def add_attempt(
        self,
        run_ids: Sequence[str],
        *,
        region: str | None = None,
        max_minutes: int | None = None,
        usd_per_hour: float | None = None,
        account: str | None = None,
        partition: str | None = None,
        make_plan: Callable[[int], Plan] | None = None,
    ) -> tuple[int, str]:
        """Store a new attempt at `run_ids` before its request is sent; return its id and token.

        The token is `<first run id>-a<n>`, where n is above that of every earlier attempt at any of the runs.
        make_plan: makes the plan that attempt n sends, which is stored in the same transaction.
        usd_per_hour: with the discount, if it is known before. account, partition: see `Attempt`.
        """
        assert run_ids
        with self.transaction():
            row = self._file.one("SELECT backend FROM runs WHERE id = ?", (run_ids[0],))
            assert row is not None, run_ids[0]
            n = next_number(self._file, run_ids)
            token = make_token(run_ids[0], n)
            plan = make_plan(n) if make_plan else None
            instance, num_nodes = machines_of(plan) if plan else (None, 1)
            attempt_id = self._file.insert(
                "attempts",
                token=token,
                n=n,
                backend=row[0],
                region=plan.region if plan else region,
                state=RunState.PLANNED,
                started_at=self._now(),
                max_minutes=max_minutes,
                usd_per_hour=usd_per_hour,
                instance=instance,
                num_nodes=num_nodes,
                sunk_usd=plan.sunk_usd if plan else None,
                account=account,
                partition=partition,
                output=tag_of(plan, OUTPUT_TAG) if plan else None,
                plan=dumps(to_data(plan)) if plan else None,
            )
            for position, run_id in enumerate(run_ids):
                self._file.insert("attempt_runs", attempt_id=attempt_id, run_id=run_id, position=position)
        return attempt_id, token

    def set_handle(self, attempt_id: int, handle: Mapping[str, Any]) -> None:
        """Store what finds the attempt's job again; the attempt is `running` then, unless it has ended.

        The first caller clears the remark that nothing was seen; a later one, such as a cancellation, stays.
        """
        with self.transaction():
            is_news = "handle IS NULL AND ended_at IS NULL AND ending IS NULL"
            self._file.update("attempts", attempt_id, is_news, reason=None)
            self._file.update("attempts", attempt_id, handle=dumps(handle))
            self._file.update("attempts", attempt_id, "ended_at IS NULL", state=RunState.RUNNING)

    def set_machine(
        self, attempt_id: int, *, zone: str | None, launched_at: datetime, usd_per_hour: float | None = None
    ) -> None:
        """Store which machine the attempt got, since when, and what an hour costs if that is known now."""
        columns: dict[str, Any] = {"zone": zone, "launched_at": _iso(launched_at)}
        if usd_per_hour is not None:
            columns["usd_per_hour"] = usd_per_hour
        self._file.update("attempts", attempt_id, **columns)

    def set_absences(self, attempt_id: int, absences: Sequence[str]) -> None:
        """Store when AWS did not show all that the attempt had started; see `Attempt`."""
        self._file.update("attempts", attempt_id, absences=dumps(list(absences)) if absences else None)

    def take_back(self, attempt_id: int, reason: str) -> bool:
        """Make an attempt that counts as lost, and the runs that ended with it, `running` again.

        Return whether it was lost.
        """
        with self.transaction():
            was_lost = self._file.update(
                *("attempts", attempt_id, "state = 'lost'"),
                **{"state": RunState.RUNNING, "ending": None, "reason": None, "ended_at": None},
                **{"absences": None},
                **{"billed_seconds": None, "billing": None, "lived_s": None},
            )
            for run_id in self.attempt(attempt_id).run_ids if was_lost else ():
                run, is_last = self.get(run_id), self.attempts_of(run_id)[-1].id == attempt_id
                # A run whose attempt never seemed to start has failed.
                if is_last and (run.state is RunState.LOST or run.ending is Ending.NEVER_STARTED):
                    self._file.update("runs", run_id, state=RunState.RUNNING, ending=None, reason=reason)
                    self._add_event(run_id, RunState.RUNNING, reason)
        return was_lost

    def set_schedule(self, attempt_id: int, schedule: Mapping[str, Any] | None) -> None:
        """Store what is known of the schedule that ends the attempt's machines; None once it is deleted."""
        self._file.update("attempts", attempt_id, schedule=dumps(schedule) if schedule else None)

    def explain_attempt(self, attempt_id: int, reason: str) -> None:
        """Store a remark on an attempt, unless it has ended or somebody asked it to stop."""
        self._file.update("attempts", attempt_id, "ended_at IS NULL AND ending IS NULL", reason=reason)

    def explain_with_runs(self, attempt_id: int, reason: str) -> None:
        """Store a remark on an attempt and on its runs, as `explain_attempt` and `explain` do."""
        with self.transaction():
            self.explain_attempt(attempt_id, reason)
            for run_id in self.attempt(attempt_id).run_ids:
                self.explain(run_id, reason)

    def note_stop(self, attempt_id: int, by: str, *, ending: Ending = Ending.STOPPED) -> None:
        """Note that somebody asked an attempt to stop, unless it has ended or was cancelled.

        by: such as `Ctrl-C`. ending: `CANCELLED` where that was `cancel`.
        """
        is_open = f"ended_at IS NULL AND ending IS NOT '{Ending.CANCELLED}'"
        self._file.update("attempts", attempt_id, is_open, ending=ending, reason=f"stopped by {by}")

    def end_attempt(
        self,
        attempt_id: int,
        state: RunState,
        *,
        ending: Ending | None = None,
        reason: str | None = None,
        billed_seconds: float | None = None,
        billing: str | None = None,
        lived_s: float | None = None,
    ) -> bool:
        """End the attempt; return False if it had ended before. ending, reason: replace what was noted."""
        assert state.is_final
        return self._file.update(
            *("attempts", attempt_id, "ended_at IS NULL"),
            state=state,
            ended_at=self._now(),
            billed_seconds=billed_seconds,
            billing=billing,
            lived_s=lived_s,
            ending=ending,
            reason=reason,
        )

    def attempts_of(self, run_id: str) -> list[Attempt]:
        """Return the attempts at the run, oldest first."""
        return read_attempts(
            self._file, "id IN (SELECT attempt_id FROM attempt_runs WHERE run_id = ?)", (run_id,)
        )

    def attempt(self, attempt_id: int) -> Attempt:
        """Return the attempt as it stands now."""
        return read_attempts(self._file, "id = ?", (attempt_id,))[0]

    def spot_attempts(self, instance: str, region: str) -> list[Attempt]:
        """Return the attempts at EC2 spot of the type, oldest first."""
        return read_attempts(
            self._file,
            "backend = 'ec2' AND instance = ? AND region = ? AND id IN (SELECT attempt_id FROM attempt_runs"
            " JOIN runs ON runs.id = run_id WHERE json_extract(spec, '$.purchase') = 'spot')",
            (instance, region),
        )

    def unfinished_attempts(self, backend: str) -> list[Attempt]:
        """Return the backend's attempts that have not ended, oldest first."""
        return read_attempts(self._file, "backend = ? AND ended_at IS NULL", (backend,))

    def attempts_since(self, since: datetime) -> list[Attempt]:
        """Return the attempts on AWS that have not ended, or did after `since`, oldest first."""
        return read_attempts(
            self._file,
            "backend IN ('ec2', 'sagemaker') AND (ended_at IS NULL OR ended_at >= ?)",
            (_iso(since),),
        )

    def times_of_attempts(self, backend: str) -> list[tuple[datetime, datetime]]:
        """Return when the backend's attempts that have ended began and ended."""
        rows = self._file.all(
            "SELECT started_at, ended_at FROM attempts WHERE backend = ? AND ended_at IS NOT NULL", (backend,)
        )
        return [(datetime.fromisoformat(began), datetime.fromisoformat(ended)) for began, ended in rows]

    def lost_attempts(self, backend: str) -> list[Attempt]:
        """Return the backend's attempts that were given up as lost within a day, oldest first."""
        since = _iso(self._clock() - timedelta(days=1))
        return read_attempts(
            self._file,
            "backend = ? AND state = 'lost' AND ended_at >= ?"
            " AND id IN (SELECT attempt_id FROM attempt_runs)",
            (backend, since),
        )

    def scheduled_attempts(self) -> list[Attempt]:
        """Return the attempts, ended or not, that may have left a schedule in the account, oldest first."""
        return read_attempts(self._file, "schedule IS NOT NULL", ())

    def attempt_regions(self, backend: str) -> set[str]:
        """Return the regions in which the backend ever made an attempt."""
        rows = self._file.all("SELECT DISTINCT region FROM attempts WHERE backend = ?", (backend,))
        return {region for (region,) in rows if region}

    def attempts_by_token(self, tokens: Sequence[str]) -> dict[str, Attempt]:
        """Return the attempts with these tokens, by token."""
        attempts = read_attempts(
            self._file, "token IN (SELECT value FROM json_each(?))", (dumps(list(tokens)),)
        )
        return {attempt.token: attempt for attempt in attempts}

    def plan_of(self, attempt_id: int) -> Plan | None:
        """Return the plan whose request the attempt sends; None if it stored none."""
        return read_plan(self._file, attempt_id)

    # Reading runs

    def get(self, name: str) -> Run:
        """Return the run called `name`: its id, or a prefix or last part of it that no other run has."""
        return read_runs(self._file, "id = ?", [named_run(self._file.all, name)])[0]

    def select(self, selectors: Sequence[str] = (), *, submission: str | None = None) -> list[Run]:
        """Return runs, oldest first: those named and those that fit all filters; all without selectors.

        A selector is a run's id, a prefix or last part of it that no other run has, a submission's id, which
        is short for `submission=ID`, or a filter `field=glob` on workload, recipe, instance, state,
        submission, sweep, backend, commit or version; of several filters on one field one must fit.
        submission: only its runs.

        Raises UnknownName for an unknown run or field, UserError for a name that fits several runs.
        """
        condition, values = where(self._file.all, selectors, [submission] if submission else None)
        return read_runs(self._file, f"{condition} ORDER BY rowid", values)

    def ended_on_aws(self, since: datetime) -> list[Run]:
        """Return the runs that have ended and whose last attempt on AWS ended after `since`, oldest first."""
        condition = (
            "state NOT IN ('planned', 'running') AND id IN"
            " (SELECT run_id FROM attempt_runs JOIN attempts ON attempts.id = attempt_id"
            " WHERE attempts.backend IN ('ec2', 'sagemaker') AND attempts.ended_at >= ?)"
        )
        return read_runs(self._file, f"{condition} ORDER BY rowid", [_iso(since)])

    def fetch_comparable(
        self, selectors: Sequence[str] = (), *, submission: str | None = None, all_runs: bool = False
    ) -> list[Run]:
        """Select runs without reading spec and plan: fast for many thousand runs.

        Without selectors, the runs of `submission`, by default the last one, and of what it adds to; with
        `all_runs`, every run. Runs without a summary are among them.
        """
        if not selectors and not all_runs:
            submission = submission or self.last_submission()
        chain = self.with_earlier(submission) if submission else None
        condition, values = where(self._file.all, selectors, chain)
        return read_runs(self._file, f"{condition} ORDER BY rowid", values, brief=True)

    def measured_workloads(self) -> set[str]:
        """Return the workloads of runs with a summary."""
        rows = self._file.all("SELECT DISTINCT workload FROM runs WHERE summary IS NOT NULL", ())
        return {workload for (workload,) in rows}

    def recorded_ids(self) -> dict[str, str]:
        """Return the ids that the records of all runs have, by the runs' ids here, oldest first."""
        return dict(self._file.all("SELECT id, ifnull(origin_id, id) FROM runs ORDER BY rowid"))

    def made_here(self) -> set[str]:
        """Return the ids of the runs that were started here."""
        return {run_id for (run_id,) in self._file.all("SELECT id FROM runs WHERE backend != ?", (IMPORT,))}

    def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Return those of `run_ids` that the ledger holds."""
        rows = self._file.all(
            "SELECT id FROM runs WHERE id IN (SELECT value FROM json_each(?))", (dumps(run_ids),)
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
        """Import summaries, each with the file or folder it was made from; return the ids of their runs.

        run_ids: of the items; by default an id follows from the summary, so a row imported twice is one run.
        A run that was imported before takes the new summary and joins the new submission; a run that was
        started here, or that somebody shared, stays as it is.
        """
        ids = list(run_ids or map(published_run_id, [summary for summary, _ in items]))
        with self.transaction():
            for run_id, (summary, path) in zip(ids, items, strict=True):
                self._import(run_id, submission_id, summary, path)
        return ids

    def add_shared(
        self,
        run_id: str,
        summary: RunSummary,
        path: Path,
        *,
        origin_id: str,
        owner: str,
        account: str | None,
        submission_id: str,
        price: Price | None,
    ) -> bool:
        """Add a run that somebody shared; return False and do nothing if there is one of this id.

        run_id: by `shared_id`. origin_id, submission_id: there; the submission and the session of its
        records are the owner's alone here. path: the archive with its records.
        """
        with self.transaction():
            if self.existing([run_id]):
                return False
            session = summary.environment.session
            apart = [name and shared_id(name, owner, account) for name in (submission_id, session)]
            assert apart[0] is not None
            if self.command_of(apart[0]) is None:
                shared = f"shared by {owner}"
                self._file.insert("submissions", id=apart[0], created_at=self._now(), command=shared)
            environment = replace(summary.environment, session=apart[1])
            self._import(run_id, apart[0], replace(summary, environment=environment), path)
            stored = dumps(price.to_json()) if price else None
            self._file.update("runs", run_id, owner=owner, account=account, origin_id=origin_id, price=stored)
        return True

    def remove(self, run_ids: Sequence[str]) -> None:
        """Forget runs by their full ids, and leave their files. Their bills still count in budgets.

        Raises UserError if one has not ended, or what was started for it alone.
        """
        with self.transaction():
            unfinished = self._file.all(
                "SELECT id, state FROM runs"
                " WHERE id IN (SELECT value FROM json_each(?)) AND state IN ('planned', 'running')",
                (dumps(run_ids),),
            )
            if unfinished:
                run_id, state = unfinished[0]
                raise UserError(f"run {run_id} is {state}", f"end it first: fastlaunch cancel {run_id}")
            for run_id in run_ids:
                self._file.write("DELETE FROM runs WHERE id = ?", (run_id,))
            self._forget_attempts()

    def _forget_attempts(self) -> None:
        """Remove the attempts that have no runs any more, but for what budgets count."""
        without_runs = "id NOT IN (SELECT attempt_id FROM attempt_runs)"
        on_aws = f"{without_runs} AND backend IN ('ec2', 'sagemaker')"
        if row := self._file.one(f"SELECT token FROM attempts WHERE {on_aws} AND ended_at IS NULL"):
            run_id, _ = parse_token(row[0])
            raise UserError(
                f"what was started for run {run_id} may not have ended yet",
                f"look for it with `fastlaunch status`, or end it: fastlaunch reap --run {run_id}",
            )
        billed_since = _iso(self._clock() - _LONGEST_MONTH)
        counts = "backend IN ('ec2', 'sagemaker') AND ended_at >= ? AND billed_seconds > 0"
        self._file.write(
            f"DELETE FROM attempts WHERE {without_runs} AND NOT coalesce({counts}, 0)", (billed_since,)
        )
        self._file.write(
            "UPDATE attempts SET reason = NULL, output = NULL, handle = NULL, schedule = NULL,"
            " absences = NULL, plan = json_object('max_cost_usd', json_extract(plan, '$.max_cost_usd'))"
            f" WHERE {on_aws}"
        )

    # SQL

    def _now(self) -> str:
        return _iso(self._clock())

    def _insert(self, **columns: str | None) -> None:
        """Insert a row of `runs`, and the first of its history."""
        with self.transaction():
            self._file.insert("runs", **columns, created_at=self._now())
            self._add_event(str(columns["id"]), str(columns["state"]), columns.get("reason"))

    def _add_event(self, run_id: str, state: str, reason: str | None) -> None:
        self._file.insert("run_events", run_id=run_id, at=self._now(), state=state, reason=reason)

    def _import(self, run_id: str, submission_id: str, summary: RunSummary, path: Path | None) -> None:
        known = self._file.one("SELECT backend, state, owner FROM runs WHERE id = ?", (run_id,))
        if known and (known[0] != IMPORT or known[2] is not None):
            return
        state, reason = _STATE_OF_STATUS.get(summary.status, RunState.FAILED), None
        if state is not RunState.COMPLETED:
            reason = next(iter(summary.problems), summary.ended)
        columns = {
            "submission_id": submission_id,
            "state": state,
            "reason": reason,
            "workload": summary.setup.workload,
            "recipe": summary.setup.recipe,
            "instance": summary.setup.instance,
            "directory": _text(path),
            "summary": dumps(to_data(summary)),
        }
        if not known:
            self._insert(id=run_id, backend=IMPORT, **columns)
            return
        self._file.update("runs", run_id, **columns)
        # It was imported before while it was under way.
        if state != known[1]:
            self._add_event(run_id, state, reason)


#: The state of an imported run, by the status that its records end with.
_STATE_OF_STATUS = {
    "completed": RunState.COMPLETED,
    "interrupted": RunState.INTERRUPTED,
    "killed": RunState.LOST,
}


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
