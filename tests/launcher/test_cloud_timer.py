"""A timer in the account ends machines on EC2 that nothing else ended, and goes when they have ended."""

import pytest
from cloud_world import World
from fake_cloud import FakeNode

from fastlaunch.aws.types import Identity
from fastlaunch.core.errors import NotAuthorised, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.lifecycle.schedules import needs_timer


def test_what_is_detached_gets_a_timer_of_its_own(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert world.aws.schedules == {f"fastlaunch-{run.id}-a1": '{"InstanceIds": ["i-0001"]}'}
    attempt = world.attempt(run)
    assert attempt.schedule is not None and attempt.schedule["state"] == "created"
    assert attempt.reason is None
    # 120 minutes from 09:00 on, and fifteen more.
    assert world.reported("2026-11-21 11:15 UTC", f"logs -f {run.id}", f"cancel {run.id}")


def test_what_is_followed_has_a_timer_while_it_lives(world: World) -> None:
    seen: list[dict[str, str]] = []
    world.clock.at(60, lambda: seen.append(dict(world.aws.schedules)))
    (run,) = world.submit()
    assert seen == [{f"fastlaunch-{run.id}-a1": '{"InstanceIds": ["i-0001"]}'}]
    assert run.state is RunState.COMPLETED and world.aws.schedules == {}


def test_without_the_role_nothing_is_started_unless_the_timer_is_declined(world: World) -> None:
    world.scheduler_role = None
    with pytest.raises(UserError, match=r"no `scheduler_role` .* for us-east-1") as caught:
        world.submit()
    assert "--no-account-timer" in (caught.value.hint or "")
    assert world.aws.requests == [] and world.ledger.select() == []
    (run,) = world.submit(account_timer=False)
    assert run.state is RunState.COMPLETED and world.aws.calls["CreateSchedule"] == 0


def test_a_timer_that_was_refused_is_made_by_the_next_look(world: World) -> None:
    world.aws.refuse("CreateSchedule", NotAuthorised("not allowed"))
    (run,) = world.submit(detach=True)
    assert world.reported("warning", "not allowed", "only the node's own timer")
    assert world.aws.schedules == {}
    world.clock.sleep(30)
    world.reconcile()
    assert list(world.aws.schedules) == [f"fastlaunch-{run.id}-a1"]
    world.reconcile()
    assert world.aws.calls["CreateSchedule"] == 2


def test_a_declined_timer_is_made_by_no_look(world: World) -> None:
    world.submit(detach=True, account_timer=False)
    world.clock.sleep(30)
    world.reconcile()
    assert world.aws.calls["CreateSchedule"] == 0
    world.clock.sleep(600)
    world.reconcile()
    assert world.ledger.scheduled_attempts() == []


def test_a_machine_whose_launcher_died_gets_a_timer(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    run = world.add(noted=False)
    world.reconcile()
    assert list(world.aws.schedules) == [f"fastlaunch-{run.id}-a1"]


def test_another_account_does_not_take_its_absence_for_its_end(world: World) -> None:
    (run,) = world.submit(detach=True)
    world.clock.sleep(600)
    world.aws.refuse("DeleteSchedule", NotAuthorised("not allowed"))
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED and len(world.aws.schedules) == 1
    own, calls = world.aws.caller, world.aws.calls["DeleteSchedule"]
    world.aws.caller = Identity(account="999999999999", arn="arn:aws:iam::999999999999:user/eve")
    world.reconcile()
    assert world.aws.calls["DeleteSchedule"] == calls and len(world.ledger.scheduled_attempts()) == 1
    world.aws.caller = own
    world.reconcile()
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
        # The ledger names it before AWS is asked, and knows that there is none until then.
        assert attempt.handle is not None and needs_timer(attempt)
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
