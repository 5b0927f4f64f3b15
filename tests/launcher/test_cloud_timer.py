"""Detached submissions on EC2: a timer in the account ends what nobody follows, and goes when that ended."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_world import World, opened_world
from fake_cloud import Clock, FakeAws, FakeNode

from fastlaunch.core.errors import BadConfiguration
from fastlaunch.core.plan import RunState
from fastlaunch.runs.provision import NO_SCHEDULE

ROLE = "arn:aws:iam::123456789012:role/fastlaunch-scheduler"


class TimedAws(FakeAws):
    """With EventBridge Scheduler: `schedules` by name, with the instances that each ends.

    when_asked: called before a schedule is made.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.schedules: dict[str, str] = {}
        self.when_asked: Callable[[], None] = lambda: None

    def call(self, service: str, region: str, action: str, *, subject: str = "", **given: Any) -> Any:
        assert service == "scheduler", action
        self._called(action)
        if action == "CreateSchedule":
            self.when_asked()
            self.schedules[given["Name"]] = given["Target"]["Input"]
        elif self.schedules.pop(given["Name"], None) is None:
            error = BadConfiguration("there is none of the name")
            error.code = "ResourceNotFoundException"
            raise error
        return {}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path, TimedAws, scheduler_role=ROLE) as opened:
        yield opened


def test_what_is_detached_gets_a_timer_of_its_own(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert world.aws.schedules == {f"fastlaunch-{run.id}-a1": '{"InstanceIds": ["i-0001"]}'}
    attempt = world.attempt(run)
    assert attempt.schedule is not None and attempt.schedule["state"] == "created"
    assert attempt.reason is None
    # 120 minutes from 09:00 on, and fifteen more.
    assert world.reported("2026-11-21 11:15 UTC", f"logs -f {run.id}", f"cancel {run.id}")


def test_it_goes_when_the_attempt_has_ended(world: World) -> None:
    (run,) = world.submit(detach=True)
    world.clock.sleep(60)
    world.reconcile()
    assert len(world.aws.schedules) == 1 and world.aws.calls["DeleteSchedule"] == 0
    world.clock.sleep(600)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED
    assert world.aws.schedules == {} and world.ledger.scheduled_attempts() == []


def test_cancel_takes_it_away(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    (run,) = world.submit(detach=True)
    world.clock.sleep(120)
    world.cancel(run)
    assert world.aws.live() == [] and world.aws.schedules == {}


def test_a_launcher_that_dies_before_the_timer_leaves_it_explained(world: World) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        (attempt,) = world.ledger.unfinished_attempts("ec2")
        # The ledger names it before AWS is asked, and says what there is until then.
        assert attempt.handle is not None and attempt.reason == NO_SCHEDULE
        assert attempt.schedule is not None and attempt.schedule["state"] == "unknown"
        raise Killed

    world.aws.when_asked = die
    with pytest.raises(Killed):
        world.submit(detach=True)
    (run,) = world.ledger.select()
    assert run.state is RunState.RUNNING and world.aws.live() == ["i-0001"]
    world.clock.sleep(600)
    world.reconcile()
    # Whether the schedule was made is not known: it is deleted in any case.
    assert world.aws.calls["DeleteSchedule"] == 1 and world.ledger.scheduled_attempts() == []
    attempt = world.attempt(run)
    # What was to be known of it while it ran is true no more.
    assert (attempt.state, attempt.reason) == (RunState.COMPLETED, None)


def test_a_second_ctrl_c_while_the_timer_is_made_leaves_no_machine(world: World) -> None:
    def interrupt() -> None:
        world.stop.by = "Ctrl-C"
        raise KeyboardInterrupt

    world.aws.node = lambda node: node.train(upto=0)
    world.aws.when_asked = interrupt
    (run,) = world.submit(detach=True)
    assert run.state is RunState.CANCELLED and world.aws.live() == []
    assert world.ledger.scheduled_attempts() == []


def test_ctrl_c_before_the_timer_stops_the_machine(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        node.train(upto=0)
        world.stop.by = "Ctrl-C"

    world.aws.node = interrupt
    (run,) = world.submit(detach=True)
    assert run.state is RunState.CANCELLED and world.aws.live() == []
    assert world.aws.calls["CreateSchedule"] == 0
