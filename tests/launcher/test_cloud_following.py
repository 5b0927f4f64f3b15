"""A submission on EC2 while its machine lives: what hangs is ended, what fails for a while is waited out."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cloud_world import A, World, make_world
from ec2_builders import job
from fake_cloud import BOOT_S, Clock, FakeNode

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.errors import NotAuthorised, Throttled, Unreachable, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.runs.launcher import Submission
from fastlaunch.runs.reconcile import reconcile


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def test_a_machine_that_never_boots_is_ended_and_its_console_kept(world: World) -> None:
    world.aws.node = lambda node: None
    (run,) = world.submit()
    assert run.state is RunState.FAILED
    console = world.home / "runs" / run.id / "console-a1.log"
    assert console.read_text() == "Kernel panic - not syncing"
    assert run.reason == (f"its node did not boot within 12 minutes; what it printed is in {console}")
    assert world.aws.live() == []
    assert world.ledger.attempts_of(run.id)[0].billing.billed_s == pytest.approx(20 + 12 * 60, abs=45)


def test_a_machine_that_outlives_its_time_is_ended(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    (run,) = world.submit(max_minutes=30)
    assert run.state is RunState.FAILED and "10 minutes after its time" in (run.reason or "")
    assert world.aws.live() == []
    assert 40 * 60 <= (world.ledger.attempts_of(run.id)[0].billing.lived_s or 0) <= 41 * 60


def test_a_machine_that_lingers_after_its_last_word_is_ended(world: World) -> None:
    def linger(node: FakeNode) -> None:
        node.train(upto=1)
        world.clock.at(200, lambda: node.say_last("completed", {node.run_ids()[0]: "completed"}))

    world.aws.node = linger
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.state is RunState.COMPLETED
    assert 200 + 240 <= (attempt.billing.lived_s or 0) <= 200 + 300
    assert world.aws.live() == []


def test_a_machine_that_shuts_down_for_long_is_not_waited_for(world: World) -> None:
    world.aws.shutdown_s = 1200
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert world.clock.now() < Clock().now() + timedelta(minutes=6)
    # The attempt ends when the machine has.
    assert [one.run_ids for one in world.ledger.unfinished_attempts("ec2")] == [(run.id,)]
    world.clock.sleep(1200)
    backend = Ec2Backend(aws=world.aws, home=world.home, sleep=world.clock.sleep, now=world.clock.now)
    reconcile(world.ledger, {"ec2": backend})
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.billing.billed_s) == (RunState.COMPLETED, 180.0)


def test_a_machine_that_ec2_does_not_show_yet_is_waited_for(world: World) -> None:
    world.aws.hidden_s = 90
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED


def test_silence_and_haste_while_following_are_waited_out(world: World) -> None:
    world.aws.refuse("describe_instances", Throttled("slow down"), Unreachable("no answer"))
    world.aws.refuse("list_objects", Unreachable("no answer"), Throttled("slow down"))
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert any("no answer; trying again" in line for line in world.told)


def test_credentials_that_expire_while_following_leave_the_machine_alone(world: World) -> None:
    def expire(node: FakeNode) -> None:
        node.train()
        world.clock.at(90, lambda: world.aws.refuse("describe_instances", NotAuthorised("expired", "log in")))

    world.aws.node = expire
    with pytest.raises(NotAuthorised, match="cannot be followed any more, and goes on: expired") as raised:
        world.submit()
    hint = raised.value.hint or ""
    assert hint.startswith("log in; it turns itself off within 120 min") and "fastlaunch cancel" in hint
    assert world.aws.live() == ["i-0001"]
    assert world.runs()[0].state is RunState.RUNNING


def test_a_node_that_could_not_start_a_run_says_why(world: World) -> None:
    def fail(node: FakeNode) -> None:
        world.clock.at(BOOT_S, node.boot)
        states = dict.fromkeys(node.run_ids(), "not-started")
        world.clock.at(
            100, lambda: node.say_last("configuration", states, reason="the image cannot be pulled")
        )
        world.clock.at(101, node.turn_off)

    world.aws.node = fail
    runs = world.submit(jobs=(job(), job("fp32")))
    assert [(run.state, run.reason) for run in runs] == [
        (RunState.FAILED, "the image cannot be pulled"),
        (RunState.FAILED, "the image cannot be pulled"),
    ]


def test_a_run_that_fails_before_its_record_is_told_by_its_log(world: World) -> None:
    def fail(node: FakeNode) -> None:
        (run_id,) = node.run_ids()
        world.clock.at(BOOT_S, node.boot)
        log = f"node-0/{run_id}/log.txt.000000000000"
        world.clock.at(90, lambda: node.put(log, b"Traceback\n  File\nImportError: no timm\n"))
        world.clock.at(100, lambda: node.say_last("failed", {run_id: "failed"}))
        world.clock.at(101, node.turn_off)

    world.aws.node = fail
    (run,) = world.submit()
    assert (run.state, run.reason) == (
        RunState.FAILED,
        "it ended before its first record (exit code 1): ImportError: no timm",
    )


def test_following_asks_seldom(world: World) -> None:
    world.aws.node = lambda node: node.train(seconds_per_run=1200)
    world.submit()
    minutes = (world.clock.now() - Clock().now()).total_seconds() / 60
    assert minutes > 40
    # Every 10 s for the machine, every 20 s for what it uploads; and what is here never again but for the
    # node's first and last word, once it has said that: a job may be started anew.
    assert world.aws.calls["describe_instances"] <= 6 * minutes + 3
    assert world.aws.calls["list_objects"] <= 3 * minutes + 3
    assert world.aws.calls["get_object"] <= len(world.aws.objects) + 2 * 4


def test_a_full_disk_ends_no_machine(world: World) -> None:
    def fill(node: FakeNode) -> None:
        node.train()
        runs, other = world.home / "runs", world.home / "moved"

        def full() -> None:
            runs.rename(other)
            runs.write_text("")

        def free() -> None:
            runs.unlink()
            other.rename(runs)

        world.clock.at(90, full)
        world.clock.at(150, free)

    world.aws.node = fill
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED and run.summary is not None
    assert any("cannot be written" in line and "trying again" in line for line in world.told)


def test_a_ledger_that_cannot_be_read_ends_no_machine(world: World) -> None:
    def lock(node: FakeNode) -> None:
        def fail() -> None:
            raise UserError("the ledger has been in use for 30 s", "end the one that hangs")

        node.train()
        world.clock.at(90, fail)

    world.aws.node = lock
    with pytest.raises(UserError, match="cannot be followed any more, and goes on: the ledger") as raised:
        world.submit()
    assert "fastlaunch cancel" in (raised.value.hint or "")
    assert world.aws.live() == ["i-0001"]


def test_a_laptop_that_slept_waits_for_its_network(world: World) -> None:
    def sleep_long(node: FakeNode) -> None:
        node.train()

        def close_lid() -> None:
            world.clock.moment += timedelta(hours=5)
            world.aws.refuse("describe_instances", *[Unreachable("no answer")] * 20)
            world.aws.refuse("list_objects", *[Unreachable("no bucket")] * 20)

        world.clock.at(90, close_lid)

    world.aws.node = sleep_long
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    # Told once each, not in turn every few seconds.
    assert sum("trying again" in line for line in world.told) == 2


def test_a_clock_that_is_set_back_does_not_keep_it_from_looking(world: World) -> None:
    behind: list[timedelta] = []

    def set_back(node: FakeNode) -> None:
        node.train()
        # While it pauses between two looks.
        world.clock.at(95, lambda: behind.append(timedelta(hours=3)))

    world.aws.node = set_back
    backend = Ec2Backend(
        aws=world.aws,
        home=world.home,
        sleep=world.clock.sleep,
        now=lambda: world.clock.now() - sum(behind, timedelta()),
    )
    launcher = replace(world.launcher(), backends={"ec2": backend})
    submission = Submission(placements=(A,), jobs_at=lambda at: (job(),), max_minutes=120)
    launcher.submit(submission, command="x")
    assert world.clock.now() - Clock().now() < timedelta(minutes=6)


def test_what_an_ended_machine_uploaded_is_looked_for_later(world: World) -> None:
    def fail(node: FakeNode) -> None:
        node.train()
        world.clock.at(181, lambda: world.aws.refuse("list_objects", *[NotAuthorised("expired")] * 20))

    world.aws.node = fail
    with pytest.raises(NotAuthorised, match="i-0001 in us-east-1 has ended; what it uploaded") as raised:
        world.submit()
    assert raised.value.hint == "to look again: fastlaunch status"
    assert world.runs()[0].state is RunState.RUNNING


def test_a_run_that_left_no_record_is_not_called_lost_when_the_next_begins(world: World) -> None:
    def second_only(node: FakeNode) -> None:
        first, second = node.run_ids()
        world.clock.at(BOOT_S, node.boot)
        world.clock.at(120, lambda: node.upload_records(second, steps=200, batch_size=64, world_size=8))
        world.clock.at(200, lambda: node.say_last("failed", {first: "failed", second: "completed"}))
        world.clock.at(200, node.turn_off)

    world.aws.node = second_only
    first, second = world.submit(jobs=(job(), job(steps=200)))
    assert (first.state, second.state) == (RunState.FAILED, RunState.COMPLETED)
    shown = world.shown.getvalue()
    assert "[1/2] bf16: ended without a record" in shown and shown.rstrip().endswith("[2/2] bf16: completed")
