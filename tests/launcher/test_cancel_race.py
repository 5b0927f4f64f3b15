"""`fastlaunch cancel` from another terminal, while a launcher or another look waits for AWS."""

from pathlib import Path
from typing import Any

import pytest
from cloud_world import AFTER_FORGETTING_S, A, World, job, opened_world
from fake_cloud import FakeAws

from fastlaunch.aws.types import Identity, Instance
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import Billed
from fastlaunch.core.errors import NotAuthorised
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.ledger.ledger import Run
from fastlaunch.lifecycle.cancel import BY_CANCEL
from fastlaunch.lifecycle.provision import Provisioner
from fastlaunch.lifecycle.resume import is_undone


def cancel_elsewhere(world: World) -> None:
    """What `cancel` does first: it finds the machine, notes why it ends it, and ends it."""
    (run,) = world.ledger.select()
    attempt = world.ledger.attempts_of(run.id)[-1]
    handle = attempt.handle or world.backend.find(world.plan_of(run))
    assert handle is not None
    world.ledger.set_handle(attempt.id, handle)
    world.ledger.note_stop(attempt.id, BY_CANCEL, ending=Ending.CANCELLED)
    world.backend.kill(handle)


def assert_cancelled(world: World, run: Run) -> None:
    """It is over, and `sweep --resume` leaves it so."""
    now = world.ledger.get(run.id)
    assert now.state in (RunState.CANCELLED, RunState.INTERRUPTED)
    assert now.ending is Ending.CANCELLED and BY_CANCEL in (now.reason or "")
    assert not is_undone(now, world.ledger.attempts_of(run.id))
    assert world.aws.live() == [] and len({token for _, token in world.tokens()}) == 1


def test_a_cancel_while_the_timer_is_made_is_remembered(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    world.aws.when_asked = lambda: cancel_elsewhere(world)
    (run,) = world.submit()
    assert_cancelled(world, run)


def test_a_cancel_while_a_later_look_makes_the_timer_is_remembered(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    world.aws.refuse("CreateSchedule", NotAuthorised("not allowed"))
    (run,) = world.submit(detach=True)
    world.clock.sleep(30)
    world.aws.when_asked = lambda: cancel_elsewhere(world)
    world.reconcile()
    world.clock.sleep(600)
    world.reconcile()
    assert_cancelled(world, run)


def test_a_cancel_while_the_request_is_sent_again_is_remembered(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    world.aws.answers = ["lost"]
    world.clock.at(1, lambda: cancel_elsewhere(world))
    (run,) = world.submit()
    assert_cancelled(world, run)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_cancel_while_another_command_looks_for_the_machine_is_remembered(
    tmp_path: Path, is_seen: bool
) -> None:
    class Slow(FakeAws):
        """While it answers the first look, the run is cancelled."""

        def describe_instances(self, *args: Any, **more: Any) -> list[Instance]:
            found = super().describe_instances(*args, **more)
            if self.calls["describe_instances"] > 1:
                return found
            cancel_elsewhere(world)
            return found if is_seen else []

    with opened_world(tmp_path, Slow) as world:
        world.aws.node = lambda node: None
        run = world.add(noted=False)
        world.clock.sleep(30 if is_seen else AFTER_FORGETTING_S)
        world.reconcile()
        world.clock.sleep(600)
        world.reconcile()
        assert_cancelled(world, run)


def test_a_cancel_while_it_is_decided_how_it_ended_begins_no_other_attempt(world: World) -> None:
    class Backend(Ec2Backend):
        """Its `billed` is asked between the look at who stopped it and what the ledger says of its end."""

        def billed(self, *args: Any, **facts: Any) -> Billed:
            cancel_elsewhere(world)
            return super().billed(*args, **facts)

    def spot_for_a_while(node: Any) -> None:
        node.interrupt(240, "spot")
        world.clock.at(300, node.take_back)

    world.backend_type = Backend
    world.aws.node = spot_for_a_while
    (run,) = world.submit(jobs=(job(purchase="spot", checkpoint_every=20),))
    assert_cancelled(world, run)


def test_cancel_stops_the_attempt_that_a_launcher_begins_meanwhile(tmp_path: Path) -> None:
    class Asked(FakeAws):
        """Before `cancel` notes anything, the launcher has seen the machine taken, and has another one."""

        def identity(self) -> Identity:
            run = world.ledger.select()[0]
            if self.calls["identity"] == 0:
                self._called("identity")
                self.end("i-0001", "Server.SpotInstanceTermination: taken", "Server.SpotInstanceTermination")
                world.ledger.end_attempt(world.attempt(run).id, RunState.INTERRUPTED, ending=Ending.RECLAIMED)
                Provisioner(launch=world.launcher()).place((A,), lambda at: {run.id: job()}, max_minutes=60)
            return super().identity()

    with opened_world(tmp_path, Asked) as world:
        world.aws.node = lambda node: node.train(upto=0)
        run = world.add()
        assert world.cancel(run) is RunState.CANCELLED
        assert len(world.aws.instances) == 2 and world.aws.live() == []


@pytest.mark.parametrize("later", ["Ctrl-C", "fastlaunch reap, it is over its time"])
def test_whoever_stops_it_after_a_cancel_leaves_that_noted(world: World, later: str) -> None:
    run = world.add()
    attempt = world.attempt(run)
    world.ledger.note_stop(attempt.id, later)
    assert world.attempt(run).ending is Ending.STOPPED and later in (world.attempt(run).reason or "")
    world.ledger.note_stop(attempt.id, BY_CANCEL, ending=Ending.CANCELLED)
    world.ledger.note_stop(attempt.id, later)
    world.ledger.explain_attempt(attempt.id, "no answer")
    now = world.attempt(run)
    assert (now.ending, now.reason) == (Ending.CANCELLED, "stopped by fastlaunch cancel")
