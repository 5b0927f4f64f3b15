"""What must hold of a trial: in the account, in the ledger, and between the two."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreign import Foreign
from lives import Output
from moto_schedules import Scheduler
from moto_server import MotoServer

from fastlaunch.core.plan import RunState

LIVE = ("pending", "running", "stopping", "stopped")
#: How the billed seconds of an attempt can be known.
_BILLINGS = ("times", "node", "limit", "free")
_TAGS = ("fastlaunch:run", "fastlaunch:attempt", "fastlaunch:max-minutes", "fastlaunch:output")


@dataclass(frozen=True, kw_only=True)
class Started:
    """A machine, or a training job, as the service made it. id: an instance's, or the name of a job."""

    id: str
    region: str
    tags: Mapping[str, str]

    @property
    def token(self) -> str:
        """Of the attempt that it carries out, by its tags."""
        return f"{self.tags.get('fastlaunch:run')}-a{self.tags.get('fastlaunch:attempt')}"

    @property
    def is_job(self) -> bool:
        return not self.id.startswith("i-")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong, in words, with what the service made and what the ledger says of it.

    num_nodes: machines that one request starts. is_spot: of EC2, whose price nobody knows before one was
    seen. foreign: what is not the launcher's.
    was_stale: at some look AWS did not show what lives.
    """

    server: MotoServer
    scheduler: Scheduler
    ledger: Path
    num_nodes: int
    is_spot: bool
    foreign: Foreign
    was_stale: bool

    def lives(self, one: Started) -> bool:
        """Whether it costs, or may come to."""
        if one.is_job:
            return self.server.training_jobs.job(one.id).status == "InProgress"
        return one.id in {instance.id for instance in self.server.instances(*LIVE)}

    def seems_gone(self, one: Started) -> bool:
        """Whether nothing contradicts its end: it said so itself, or its job did, and AWS did not show it."""
        output = Output(tags=one.tags)
        return self.was_stale and any(
            output.get(f"node-{node}/status.json") for node in range(self.num_nodes)
        )

    def at_any_time(self, started: Sequence[Started]) -> Iterator[str]:
        """What the ledger calls ended costs nothing more, and no schedule is in the account unknown to it."""
        living = [one for one in started if self.lives(one)]
        attempts = self.rows("SELECT token, state, reason, schedule, ended_at FROM attempts")
        ended = {row["token"]: row["reason"] for row in attempts if row["ended_at"] is not None}
        lost = {row["token"] for row in attempts if row["state"] == RunState.LOST}
        for one in living:
            if one.token in ended and (one.token in lost or not self.seems_gone(one)):
                yield f"{one.token} has ended ({ended[one.token]}), and {one.id} in {one.region} lives"
        states = {row["id"]: row for row in self.rows("SELECT id, state, reason FROM runs")}
        for one in living:
            runs = [states[run_id] for run_id in self._runs_of(one.token)]
            is_over = runs and all(RunState(run["state"]).is_final for run in runs)
            if is_over and not self.seems_gone(one):
                yield f"all runs of {one.token} have ended ({runs[0]['reason']}), and {one.id} lives"
        noted = {name for row in attempts for name in self._schedules_of(row)}
        for name, region in self.scheduler.names().items():
            if name not in noted and not self.foreign.owns(name):
                yield f"the ledger knows nothing of the schedule {name} in {region}"

    def in_the_end(self, started: Sequence[Started]) -> Iterator[str]:
        """Nothing is left, nothing was started twice, and the ledger tells the end and the cost of all."""
        yield from self._left()
        for one in started:
            # A job's name is its own.
            wanted = _TAGS if one.is_job else (*_TAGS, "Name")
            if missing := [name for name in wanted if not one.tags.get(name)]:
                yield f"{one.id} in {one.region} was started without {', '.join(missing)}"
        for token, num in Counter(one.token for one in started if not self._waits_on(one)).items():
            if num > self.num_nodes:
                yield f"{num} were started of {token}"
        yield from self._ledger(started)
        yield from self._costs(started)

    def unprotected(self, started: Sequence[Started]) -> Iterator[str]:
        """Machines that live though the ledger says that a schedule in the account was made to end them."""
        made = {
            row["token"]
            for row in self.rows("SELECT token, schedule FROM attempts")
            if row["schedule"] and _ends(json.loads(row["schedule"]))
        }
        for one in started:
            if one.token in made and self.lives(one):
                yield f"{one.id} lives, and the schedule of {one.token} was to end it"

    def unexplained(self, started: Sequence[Started]) -> Iterator[str]:
        """Machines that nobody follows, whose launcher knew of them, and no word of what protects them."""
        rows = self.rows(
            "SELECT token, reason, schedule FROM attempts WHERE ended_at IS NULL AND handle IS NOT NULL"
        )
        silent = {row["token"] for row in rows if not row["reason"] and not row["schedule"]}
        for one in started:
            if one.token in silent and self.lives(one):
                yield f"nothing in the ledger says what ends {one.id} of {one.token}"

    def _left(self) -> Iterator[str]:
        for instance in self.server.instances(*LIVE):
            if not self.foreign.owns(instance.id):
                yield f"{instance.id} lives: {instance.state}"
        for job in self.server.training_jobs.live():
            if not self.foreign.owns(job.name):
                yield f"{job.name} runs: {job.status}"
        self.server.queues.settle()
        for queued in self.server.queues.live():
            yield f"{queued.request['jobName']} is left in its queue: {queued.status}"
        for name, region in self.scheduler.names().items():
            if not self.foreign.owns(name):
                yield f"the schedule {name} is left in {region}"

    def _ledger(self, started: Sequence[Started]) -> Iterator[str]:
        attempts = self.rows("SELECT token, state, ended_at, reason, schedule FROM attempts")
        known = {row["token"] for row in attempts}
        for one in started:
            if one.token not in known:
                yield f"{one.id} in {one.region} is of no attempt in the ledger"
        for row in attempts:
            if row["ended_at"] is None:
                yield f"attempt {row['token']} is still {row['state']}: {row['reason']}"
            elif row["schedule"]:
                yield f"attempt {row['token']} has ended, and keeps a schedule: {row['schedule']}"
            if row["state"] != "completed" and not row["reason"]:
                yield f"attempt {row['token']} is {row['state']}, nobody knows why"
        for row in self.rows("SELECT id, state, reason FROM runs"):
            if not RunState(row["state"]).is_final:
                yield f"run {row['id']} is still {row['state']}: {row['reason']}"
            elif row["state"] != "completed" and not row["reason"]:
                yield f"run {row['id']} is {row['state']}, nobody knows why"

    def _costs(self, started: Sequence[Started]) -> Iterator[str]:
        columns = "token, backend, billed_seconds, billing, lived_s, usd_per_hour, sunk_usd, instance"
        rows = {row["token"]: row for row in self.rows(f"SELECT {columns} FROM attempts")}
        for one in started:
            row = rows.get(one.token)
            if row is None:
                continue
            if row["billed_seconds"] is None or row["billing"] not in _BILLINGS or row["lived_s"] is None:
                yield f"what {one.id} cost is not known: {dict(row)}"
            elif row["usd_per_hour"] is None and self.is_spot:
                continue
            elif not row["usd_per_hour"] or row["usd_per_hour"] < 1:
                yield f"an hour of {one.id} is not {row['usd_per_hour']} USD"
            elif one.is_job:
                same = (each.id for each in started if each.token == one.token)
                billed_s = sum(self.server.training_jobs.job(id).billable_s or 0 for id in same)
                if row["billed_seconds"] != billed_s:
                    yield f"{one.id} was billed {billed_s} s, and the ledger says {row['billed_seconds']}"

    def _waits_on(self, one: Started) -> bool:
        """Whether it found no capacity, after which its queue starts another."""
        if not one.id.startswith("AWSBatch"):
            return False
        job = self.server.training_jobs.job(one.id)
        return not job.is_live and job.started_at is None

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """What the query finds in the ledger; nothing before that was made."""
        if not self.ledger.exists():
            return []
        database = sqlite3.connect(self.ledger)
        try:
            database.row_factory = sqlite3.Row
            return database.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            # Its launcher died before the tables were made.
            if "no such table" in str(error):
                return []
            raise
        finally:
            database.close()

    def _runs_of(self, token: str) -> list[str]:
        """The runs that the attempt holds: a later one may have gone on with some."""
        query = (
            "SELECT run_id FROM attempt_runs JOIN attempts ON attempt_id = attempts.id WHERE token = ?"
            " AND NOT EXISTS (SELECT 1 FROM attempt_runs AS later"
            " WHERE later.run_id = attempt_runs.run_id AND later.attempt_id > attempt_id)"
        )
        return [row["run_id"] for row in self.rows(query, [token])]

    @staticmethod
    def _schedules_of(row: Any) -> list[str]:
        return list(json.loads(row["schedule"])["names"]) if row["schedule"] else []


def _ends(schedule: Mapping[str, Any]) -> bool:
    """Whether schedules were made that end machines, and not ones that start them."""
    return schedule["state"] == "created" and "starts_at" not in schedule
