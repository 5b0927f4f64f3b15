"""A launcher on the AWS in memory, with everything that it acts on, for tests of a submission's life."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ec2_builders
import sagemaker_builders
from attempt_builders import add_attempt
from ec2_builders import site
from fake_cloud import NUM_STEPS, Clock, FakeAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import FORGOTTEN_AFTER, CloudBackend
from fastlaunch.backends.site import Site
from fastlaunch.core import locks
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.core.settings import Budgets, RegionSettings, Settings
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.ledger import LEDGER_NAME, Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.cancel import cancel
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Launcher, Submission
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.rounds import Verdicts
from fastlaunch.lifecycle.world import StopRequest

A = site(zone="us-east-1a", subnets=("subnet-a",))
B = site(zone="us-east-1b", subnets=("subnet-b",))
WEST = site(region="us-west-2", zone="us-west-2a", subnets=("subnet-w",), bucket="acme-west")
P5EN = site("p5en.48xlarge", zone="us-east-1a", subnets=("subnet-a",))
AFTER_FORGETTING_S = FORGOTTEN_AFTER.total_seconds() + 1

job = partial(ec2_builders.job, steps=NUM_STEPS)
training_job = partial(sagemaker_builders.training_job, steps=NUM_STEPS)


@dataclass(kw_only=True)
class World:
    """A launcher with everything that it acts on. reports: its lines for the user; shown: its progress."""

    home: Path
    ledger: Ledger
    #: A FakeAws, or one with another service.
    aws: Any
    backend_type: type[CloudBackend] = Ec2Backend
    #: Where `submit` goes, unless told otherwise.
    site: Site = A
    stop: StopRequest = field(default_factory=StopRequest)
    reports: list[str] = field(default_factory=list)
    shown: io.StringIO = field(default_factory=io.StringIO)
    discount: float = 0.0
    max_cost: float | None = None
    budgets: Budgets = field(default_factory=Budgets)
    scheduler_role: str | None = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"

    @property
    def clock(self) -> Clock:
        clock: Clock = self.aws.clock
        return clock

    @property
    def settings(self) -> Settings:
        region = RegionSettings(scheduler_role=self.scheduler_role)
        aws = dict.fromkeys(("us-east-1", "us-west-2"), region)
        return Settings(
            home=self.home, discount=self.discount, max_cost=self.max_cost, budgets=self.budgets, aws=aws
        )

    @property
    def backend(self) -> CloudBackend:
        return self.backend_type(aws=self.aws, home=self.home, sleep=self.clock.sleep, now=self.clock.now)

    @property
    def backends(self) -> dict[str, Any]:
        return {self.backend.name: self.backend}

    def launcher(self) -> Launcher:
        return Launcher(
            backends=self.backends,
            ledger=self.ledger,
            settings=self.settings,
            display=PlainLines(stream=self.shown, clock=lambda: self.clock.now().timestamp()),
            stop=self.stop,
            report=self.report,
        )

    def report(self, line: str) -> None:
        self.reports.append(line)

    def reported(self, *words: str) -> bool:
        """Whether a line for the user has all the words."""
        return any(all(word in line for word in words) for line in self.reports)

    def submit(
        self,
        *placements: Site,
        jobs: tuple[Job, ...] | None = None,
        max_minutes: int = 120,
        detach: bool = False,
        account_timer: bool = True,
        verdicts: Verdicts | None = None,
    ) -> list[Run]:
        given = jobs or ((job() if self.site.backend == "ec2" else training_job()),)

        def jobs_at(at: Site) -> tuple[Job, ...]:
            placed = {"instance": at.instance.name, "region": at.region, "max_minutes": max_minutes}
            return tuple(Job.from_json({**each.to_json(), **placed}) for each in given)

        submission = Submission(
            placements=placements or (self.site,),
            jobs_at=jobs_at,
            options=Options(max_minutes=max_minutes, detach=detach, account_timer=account_timer),
            verdicts=verdicts,
        )
        return self.launcher().submit(submission, command="fastlaunch submit")

    def add(
        self, *, num_runs: int = 1, sent: bool = True, noted: bool = True, region: str = "us-east-1"
    ) -> Run:
        """A run with an attempt, as a launcher leaves it that dies before sending, noting, or after."""
        at = self.backend.at(site(region=region), 120)
        attempt = add_attempt(
            self.ledger,
            *[job(region=region)] * num_runs,
            plan=lambda jobs, n: at.plan(jobs, attempt=n),
            max_minutes=120,
            usd_per_hour=55.04,
        )
        first = attempt.run_ids[0]
        if sent:
            handle = self.backend.execute(self.plan_of(first))
            if noted:
                self.ledger.set_handle(attempt.id, handle)
                for run_id in attempt.run_ids:
                    self.ledger.set_state(run_id, RunState.RUNNING)
        return self.ledger.get(first)

    def reconcile(self) -> None:
        reconcile(self.ledger, self.backends, self.settings)

    def cancel(self, run: Run) -> RunState:
        return cancel(
            run, backend=self.backend, ledger=self.ledger, sleep=self.clock.sleep, report=self.report
        )

    @contextmanager
    def followed(self, run: Run) -> Iterator[None]:
        """While a launcher of the run's submission lives."""
        lock = self.ledger.launcher_lock(run.submission_id)
        lock.parent.mkdir(exist_ok=True)
        with locks.held(lock):
            yield

    def state(self, run: Run) -> tuple[RunState, str | None]:
        now = self.ledger.get(run.id)
        return now.state, now.reason

    def attempt(self, run: Run | str) -> Attempt:
        """The run's only attempt."""
        (attempt,) = self.ledger.attempts_of(run if isinstance(run, str) else run.id)
        return attempt

    def plan_of(self, run: Run | str) -> Plan:
        plan = self.ledger.plan_of(self.attempt(run).id)
        assert plan is not None
        return plan

    def tokens(self) -> list[tuple[str, str]]:
        """Region and token of every request that would start machines."""
        names = ("ClientToken", "TrainingJobName", "jobName")
        return [
            (region, request[name])
            for region, request in self.aws.requests
            for name in names
            if name in request
        ]


@contextmanager
def opened_world(
    home: Path, aws: type[FakeAws] = FakeAws, clock: Clock | None = None, **more: Any
) -> Iterator[World]:
    """Nothing was asked for yet."""
    clock = clock or Clock()
    with Ledger(home / LEDGER_NAME, clock=clock.now) as ledger:
        yield World(home=home, ledger=ledger, aws=aws(clock), **more)
