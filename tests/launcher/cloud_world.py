"""A launcher on the AWS in memory, with everything that it acts on, for tests of a submission's life."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ec2_builders import job, site
from fake_cloud import Clock, FakeAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.placements import Ec2Placement
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.runs.display import PlainLines
from fastlaunch.runs.launcher import Launcher, Submission
from fastlaunch.runs.reconcile import reconcile
from fastlaunch.runs.stop_request import StopRequest

A = site(zone="us-east-1a", subnet="subnet-a")
B = site(zone="us-east-1b", subnet="subnet-b")
WEST = site(region="us-west-2", zone="us-west-2a", subnet="subnet-w", bucket="acme-west")
P5EN = site("p5en.48xlarge", zone="us-east-1a", subnet="subnet-a")


@dataclass
class World:
    """A launcher with everything that it acts on; `told`: the lines for the user."""

    home: Path
    clock: Clock
    aws: FakeAws
    ledger: Ledger
    stop: StopRequest
    told: list[str]
    shown: io.StringIO
    discount: float = 0.0
    scheduler_role: str | None = None

    @property
    def settings(self) -> Settings:
        aws = {"us-east-1": RegionSettings(scheduler_role=self.scheduler_role)}
        return Settings(home=self.home, discount=self.discount, aws=aws)

    @property
    def backend(self) -> Ec2Backend:
        return Ec2Backend(aws=self.aws, home=self.home, sleep=self.clock.sleep, now=self.clock.now)

    def launcher(self) -> Launcher:
        return Launcher(
            backends={"ec2": self.backend},
            ledger=self.ledger,
            settings=self.settings,
            display=PlainLines(stream=self.shown, clock=lambda: self.clock.now().timestamp()),
            stop=self.stop,
            report=self.told.append,
        )

    def submit(
        self,
        *sites: Ec2Placement,
        jobs: tuple[JobSpec, ...] = (job(),),
        max_minutes: int = 120,
        detach: bool = False,
    ) -> list[Run]:
        def jobs_at(at: Ec2Placement) -> tuple[JobSpec, ...]:
            placed = {"instance": at.instance.name, "region": at.region}
            return tuple(replace(one, **placed, max_minutes=max_minutes) for one in jobs)

        submission = Submission(
            placements=sites or (A,),
            jobs_at=jobs_at,
            max_minutes=max_minutes,
            detach=detach,
        )
        return self.launcher().submit(submission, command="fastlaunch submit")

    def reconcile(self) -> None:
        reconcile(self.ledger, {"ec2": self.backend})

    def runs(self) -> list[Run]:
        return self.ledger.select()

    def tokens(self) -> list[tuple[str, str]]:
        return [(region, request["ClientToken"]) for region, request in self.aws.requests]


def make_world(home: Path, connect: Callable[[Clock], FakeAws] = FakeAws) -> World:
    """A launcher whose home folder is `home`. connect: makes its AWS."""
    clock = Clock()
    return World(
        home=home,
        clock=clock,
        aws=connect(clock),
        ledger=Ledger(home / "ledger.sqlite", clock=clock.now),
        stop=StopRequest(),
        told=[],
        shown=io.StringIO(),
    )
