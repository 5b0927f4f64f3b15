"""Spot as one's own runs and traces show it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from attempt_builders import add_attempt
from ec2_builders import job

from fastlaunch.api.purchases import market_of_own_runs
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.job import Terms
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.lifecycle.world import World

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)


class Scene:
    """A ledger whose clock is set by hand, with attempts at p5.48xlarge in us-east-1."""

    def __init__(self, home: Path) -> None:
        self.now = START
        self.context = World(settings=Settings(home=home), backends={}, now=lambda: self.now)
        self.ledger = Ledger(self.context.settings.home / "ledger.sqlite", clock=lambda: self.now)

    def ask(
        self,
        ending: Ending | None = None,
        *,
        lived_h: float | None = None,
        purchase: str = "spot",
        of: str | None = None,
    ) -> str:
        """Note an attempt that ended so, of a new run or at run `of`; return the run's id."""
        machines = {"InstanceType": "p5.48xlarge", "MaxCount": 2}
        plan = Plan(backend="ec2", operation="x", region="us-east-1", request=machines)
        if of is None:
            spec = replace(job(), terms=Terms(purchase=purchase))
            attempt_id = add_attempt(self.ledger, spec, plan=lambda jobs, n: plan).id
        else:
            attempt_id, _ = self.ledger.add_attempt([of], make_plan=lambda n: plan)
        if lived_h is not None:
            self.ledger.set_handle(attempt_id, {"token": "x"})
        lived_s = None if lived_h is None else lived_h * 3600
        self.ledger.end_attempt(attempt_id, RunState.INTERRUPTED, ending=ending, lived_s=lived_s)
        return self.ledger.attempt(attempt_id).run_ids[0]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_own_runs_tell_losses_and_whether_first_requests_are_met(scene: Scene) -> None:
    taken = scene.ask(Ending.RECLAIMED, lived_h=3)
    scene.ask(Ending.NO_CAPACITY, of=taken)
    scene.now += timedelta(minutes=30)
    scene.ask(lived_h=2, of=taken)
    # Another zone had it; later would have been too late.
    scene.ask(lived_h=5, of=scene.ask(Ending.NO_CAPACITY))
    late = scene.ask(Ending.NO_CAPACITY)
    scene.now += timedelta(minutes=30)
    scene.ask(lived_h=0, of=late)
    # Neither says anything of spot's capacity.
    scene.ask()
    scene.ask(lived_h=90, purchase="on-demand")
    market = market_of_own_runs(scene.context, "p5.48xlarge", "us-east-1")
    assert market is not None
    assert market.losses_per_hour.value == pytest.approx(1 / 20)
    assert market.available.value == pytest.approx(2 / 3)
    assert market_of_own_runs(scene.context, "p4d.24xlarge", "us-east-1") is None
    assert market_of_own_runs(scene.context, "p5.48xlarge", "eu-west-1") is None
