"""A capacity block that is to come: schedules in the account start what nobody follows, or one waits here."""

import json
from base64 import b64decode
from dataclasses import replace
from datetime import timedelta

import pytest
from cloud_world import AFTER_FORGETTING_S, World, job
from ec2_builders import BLOCK, block_site
from fake_cloud import START

from fastlaunch.core.errors import NotAuthorised, Throttled, Unreachable, UserError
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.ledger.ledger import Run
from fastlaunch.lifecycle.schedules import waits

BEGINS = START + timedelta(hours=5)
#: Until the schedules have run, and EC2 shows what they started.
UNTIL_BEGUN_S = 5 * 3600 + 60
SITE = block_site(block=replace(BLOCK, starts_at=BEGINS.isoformat()))
IN_BLOCK = (job(purchase="capacity-block", reservation=BLOCK.reservation),)


def submit(world: World, *, detach: bool = True, account_timer: bool = True) -> Run:
    world.aws.block_begins = BEGINS
    (run,) = world.submit(SITE, jobs=IN_BLOCK, detach=detach, account_timer=account_timer)
    return run


def starts(world: World) -> list[str]:
    return [name for name in world.aws.schedules if "-start" in name]


def test_a_schedule_sends_the_very_request_of_the_plan(world: World) -> None:
    run = submit(world)
    assert world.aws.requests == [] and world.aws.live() == []
    assert starts(world) == [f"fastlaunch-{run.id}-a1-start", f"fastlaunch-{run.id}-a1-start-1"]
    plan = world.plan_of(run)
    for text in world.aws.schedules.values():
        sent = json.loads(text)
        sent["UserData"] = b64decode(sent["UserData"]).decode()
        assert sent == plan.request
    # What the machine fetches is there before it.
    assert all((stored.bucket, stored.key) in world.aws.objects for stored in plan.objects)
    assert world.state(run) == (
        RunState.PLANNED,
        "waits for its capacity block: a schedule starts it at 2026-11-21 14:00 UTC",
    )
    assert world.reported("2026-11-21 14:00 UTC", "EC2 ends", f"cancel {run.id}")


def test_nothing_has_to_run_until_it_has_ended(world: World) -> None:
    run = submit(world)
    world.clock.sleep(3600)
    world.reconcile()
    assert world.state(run)[0] is RunState.PLANNED
    world.clock.sleep(6 * 3600)
    assert len(world.aws.instances) == 1 and world.aws.live() == []
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED
    assert world.aws.schedules == {} and world.ledger.scheduled_attempts() == []
    # Waiting for it is none of its time.
    assert (world.attempt(run).billing.lived_s or 0) < 600


def test_the_first_look_after_its_start_makes_the_timer(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    run = submit(world)
    world.clock.sleep(UNTIL_BEGUN_S)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.RUNNING and world.attempt(run).reason is None
    assert world.aws.schedules[f"fastlaunch-{run.id}-a1"] == '{"InstanceIds": ["i-0001"]}'
    # The second request of the start is there still, and starts nothing.
    world.clock.sleep(900)
    assert starts(world) == [] and len(world.aws.instances) == 1
    world.cancel(run)
    assert world.aws.schedules == {} and world.aws.live() == []


def test_a_declined_timer_stays_declined(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    run = submit(world, account_timer=False)
    world.clock.sleep(UNTIL_BEGUN_S)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.RUNNING
    assert world.aws.calls["CreateSchedule"] == 2


def test_a_block_that_is_active_late_is_not_missed(world: World) -> None:
    run = submit(world)
    world.aws.answers.append(NotAuthorised("the block is not active yet"))
    world.clock.sleep(UNTIL_BEGUN_S)
    world.reconcile()
    assert world.aws.instances == {} and world.state(run)[0] is RunState.PLANNED
    world.clock.sleep(7200)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED and len(world.aws.instances) == 1


def test_a_block_in_which_nothing_started_is_said_so_once_nothing_can_start(world: World) -> None:
    run = submit(world)
    world.aws.answers += [NotAuthorised("not allowed")] * 2
    world.clock.sleep(UNTIL_BEGUN_S + 600)
    world.reconcile()
    assert world.state(run)[0] is RunState.PLANNED
    world.clock.sleep(900 + AFTER_FORGETTING_S)
    world.reconcile()
    state, reason = world.state(run)
    assert state is RunState.PLANNED and "CloudTrail" in (reason or "")
    # A machine that EC2 does not show may live until its own timer has ended it.
    world.clock.sleep(3 * 3600 + 900)
    for _ in range(2):
        assert world.state(run)[0] is RunState.PLANNED
        world.clock.sleep(301)
        world.reconcile()
    state, reason = world.state(run)
    assert state is RunState.FAILED and "CloudTrail" in (reason or "") and world.aws.schedules == {}


def test_a_machine_that_ec2_does_not_show_is_found_again(world: World) -> None:
    world.aws.node = lambda node: None
    run = submit(world)
    world.clock.sleep(UNTIL_BEGUN_S + 3000)
    world.aws.is_blind = True
    for _ in range(4):
        world.reconcile()
        world.clock.sleep(301)
    assert world.state(run)[0] is RunState.PLANNED and len(world.aws.live()) == 1
    world.aws.is_blind = False
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING and world.attempt(run).absences == ()


def test_cancel_before_its_start_deletes_the_schedules(world: World) -> None:
    run = submit(world)
    world.clock.sleep(3600)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.schedules == {} and world.attempt(run).ending is Ending.CANCELLED
    world.clock.sleep(24 * 3600)
    world.reconcile()
    assert world.aws.instances == {}


def test_cancel_after_its_start_ends_the_machine(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    run = submit(world)
    world.clock.sleep(UNTIL_BEGUN_S)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == [] and world.aws.schedules == {}


def test_cancel_while_it_starts_settles_nothing_that_may_live(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    world.aws.hidden_s = 300
    run = submit(world)
    world.clock.sleep(UNTIL_BEGUN_S - 50)
    with pytest.raises(UserError, match="not known yet"):
        world.cancel(run)
    assert starts(world) == [] and world.state(run)[0] is RunState.PLANNED
    world.clock.sleep(400)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_without_an_answer_the_next_look_makes_the_schedules(world: World) -> None:
    world.aws.refuse("CreateSchedule", *[Unreachable("no answer")] * 40)
    with pytest.raises(Unreachable, match="whether a schedule was made is not known"):
        submit(world)
    (run,) = world.ledger.select()
    assert waits(world.attempt(run)) and world.state(run)[0] is RunState.PLANNED
    world.aws.refusals.clear()
    world.clock.sleep(60)
    world.reconcile()
    assert len(starts(world)) == 2
    world.clock.sleep(7 * 3600)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED and len(world.aws.instances) == 1


def test_a_launcher_that_dies_before_the_schedules_misses_no_block(world: World) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    world.aws.when_asked = die
    with pytest.raises(Killed):
        submit(world)
    world.aws.when_asked = lambda: None
    (run,) = world.ledger.select()
    world.reconcile()
    assert len(starts(world)) == 2
    world.clock.sleep(7 * 3600)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED and len(world.aws.instances) == 1


def test_a_refused_schedule_leaves_none(world: World) -> None:
    calls = iter([None, NotAuthorised("no PassRole")])

    def refuse() -> None:
        if error := next(calls):
            raise error

    world.aws.when_asked = refuse
    with pytest.raises(NotAuthorised, match="no PassRole"):
        submit(world)
    assert world.aws.schedules == {}
    (run,) = world.ledger.select()
    assert run.state is RunState.FAILED


def test_a_refused_schedule_that_cannot_be_deleted_is_not_forgotten(world: World) -> None:
    calls = iter([None, NotAuthorised("no PassRole")])

    def refuse() -> None:
        if error := next(calls, None):
            raise error

    world.aws.when_asked = refuse
    world.aws.refuse("DeleteSchedule", Throttled("slow down"))
    with pytest.raises(Unreachable, match="a schedule may be left"):
        submit(world)
    (run,) = world.ledger.select()
    assert waits(world.attempt(run))
    assert world.cancel(run) is RunState.CANCELLED and world.aws.schedules == {}


def test_without_the_role_a_later_start_is_refused_before_anything_is_made(world: World) -> None:
    world.scheduler_role = None
    with pytest.raises(UserError, match="nothing in the account would start machines") as caught:
        submit(world, account_timer=False)
    assert "leave out --detach" in (caught.value.hint or "")
    assert world.ledger.unfinished_attempts("ec2") == [] and world.aws.schedules == {}


def test_what_is_followed_waits_here_until_the_block_is_active(world: World) -> None:
    world.aws.block_begins = BEGINS + timedelta(minutes=3)
    (run,) = world.submit(SITE, jobs=IN_BLOCK)
    (machine,) = world.aws.instances.values()
    assert run.state is RunState.COMPLETED and machine.launch_time >= BEGINS + timedelta(minutes=3)
    shown = world.shown.getvalue()
    assert f"waiting here until {BLOCK.reservation} begins, 2026-11-21 14:00 UTC\n" in shown
    assert "it has begun" in shown


def test_ctrl_c_while_it_waits_leaves_nothing(world: World) -> None:
    def interrupt() -> None:
        world.stop.by = "Ctrl-C"

    world.clock.at(3600, interrupt)
    (run,) = world.submit(SITE, jobs=IN_BLOCK)
    assert run.state is RunState.CANCELLED and run.reason == "stopped by Ctrl-C"
    assert world.aws.requests == [] and world.aws.schedules == {}


def test_a_schedule_that_somebody_deleted_is_missed_before_the_block_is(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submit(world)
    schedules = dict(world.aws.schedules)
    world.aws.schedules.clear()
    world.clock.sleep(3600)
    world.reconcile()
    state, reason = world.state(run)
    assert state is RunState.PLANNED
    assert reason and "nothing starts it: its schedule is gone" in reason and f"cancel {run.id}" in reason
    assert f"warning: nothing starts {run.id}-a1" in " ".join(capsys.readouterr().err.split())
    # One answer was empty, and the next is not.
    world.aws.schedules.update(schedules)
    world.reconcile()
    assert "a schedule starts it at 2026-11-21 14:00 UTC" in (world.state(run)[1] or "")


def test_a_block_that_was_not_paid_for_is_said_so_before_its_start(world: World) -> None:
    run = submit(world)
    world.aws.lost_blocks.add(BLOCK.reservation)
    world.reconcile()
    assert f"nothing starts it: {BLOCK.reservation} is payment-failed" in (world.state(run)[1] or "")
    assert world.cancel(run) is RunState.CANCELLED and world.aws.schedules == {}


def test_what_waits_takes_no_more_than_the_block_has(world: World) -> None:
    runs = [submit(world) for _ in range(BLOCK.num_instances)]
    made = len(starts(world))
    with pytest.raises(UserError, match=r"has 4 instances, and what waits for it takes 4 of them") as caught:
        submit(world)
    assert f"fastlaunch cancel {runs[0].id}" in (caught.value.hint or "") and len(starts(world)) == made
    assert world.ledger.select()[-1].state is RunState.CANCELLED
    assert world.cancel(runs[0]) is RunState.CANCELLED
    submit(world)
