"""Attempts on the AWS in memory as launchers leave them that are gone, and what looks at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ec2_builders import job, site
from fake_cloud import Clock, FakeAws

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import FORGOTTEN_AFTER
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.runs.cancel import cancel
from fastlaunch.runs.reconcile import reconcile

AFTER_FORGETTING_S = FORGOTTEN_AFTER.total_seconds() + 1


@dataclass
class World:
    home: Path
    clock: Clock
    aws: FakeAws
    ledger: Ledger
    backend: Ec2Backend

    def add(
        self, *, num_runs: int = 1, sent: bool = True, noted: bool = True, region: str = "us-east-1"
    ) -> Run:
        """A run with an attempt, as a launcher leaves it that dies before sending, noting, or after."""
        submission = self.ledger.add_submission("fastlaunch submit")
        ids = []
        for _ in range(num_runs):
            ids.append(self.ledger.new_run_id())
            self.ledger.add_run(
                submission,
                ids[-1],
                spec=job(region=region).to_json(),
                plan=None,
                workload="vit-huge",
                recipe="bf16",
                instance="p5.48xlarge",
                backend="ec2",
                directory=self.home / "runs" / ids[-1],
            )
        at = self.backend.at(site(region=region), 120)
        jobs = {run_id: job(region=region) for run_id in ids}
        attempt, _ = self.ledger.add_attempt(
            ids, max_minutes=120, usd_per_hour=55.04, make_plan=lambda n: at.plan(jobs, attempt=n)
        )
        plan = self.ledger.plan_of(attempt)
        assert plan is not None
        if sent:
            handle = self.backend.execute(plan)
            if noted:
                self.ledger.set_handle(attempt, handle)
                for run_id in ids:
                    self.ledger.set_state(run_id, RunState.RUNNING)
        return self.ledger.get(ids[0])

    def reconcile(self) -> None:
        reconcile(self.ledger, {"ec2": self.backend})

    def cancel(self, run: Run) -> RunState:
        return cancel(run, backend=self.backend, ledger=self.ledger, sleep=self.clock.sleep)

    def state(self, run: Run) -> tuple[RunState, str | None]:
        found = self.ledger.get(run.id)
        return found.state, found.reason


@contextmanager
def opened_world(home: Path) -> Iterator[World]:
    """Nothing was asked for yet."""
    clock = Clock()
    aws = FakeAws(clock)
    with Ledger(home / "ledger.sqlite", clock=clock.now) as ledger:
        backend = Ec2Backend(aws=aws, home=home, sleep=clock.sleep, now=clock.now)
        yield World(home=home, clock=clock, aws=aws, ledger=ledger, backend=backend)
