"""A submission on EC2 while its machine lives: what hangs is ended, what fails for a while is waited out."""

import json
import math
from collections.abc import Callable
from datetime import timedelta

import pytest
from cloud_world import World, job
from fake_cloud import BOOT_S, START, FakeNode

from fastlaunch.backends.s3_sync import MAX_REPORT_BYTES
from fastlaunch.core.errors import NotAuthorised, Throttled, Unreachable, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.lifecycle.collect import missing_of


def linger(node: FakeNode) -> None:
    """Say the last word, and live on."""
    node.train(upto=1)
    node.aws.clock.at(200, lambda: node.say_last("completed", {node.run_ids()[0]: "completed"}))


@pytest.mark.parametrize(
    ("fate", "max_minutes", "state", "reason", "lived_s"),
    [
        (lambda node: None, 120, RunState.FAILED, "did not boot within 12 minutes", (695, 785)),
        (lambda node: node.train(upto=0), 10, RunState.FAILED, "10 minutes after its time", (1200, 1260)),
        (linger, 120, RunState.COMPLETED, "", (440, 500)),
    ],
    ids=["never boots", "outlives its time", "lingers"],
)
def test_a_machine_that_does_not_end_is_ended(
    world: World,
    fate: Callable[[FakeNode], None],
    max_minutes: int,
    state: RunState,
    reason: str,
    lived_s: tuple[int, int],
) -> None:
    world.aws.node = fate
    (run,) = world.submit(max_minutes=max_minutes)
    attempt, told = world.attempt(run), run.reason or ""
    assert (run.state, attempt.state) == (state, state) and reason in told and bool(told) is bool(reason)
    assert world.aws.live() == []
    assert lived_s[0] <= (attempt.billing.lived_s or 0) <= lived_s[1]
    # Where it did not boot, its console tells why.
    console = world.home / "runs" / run.id / "console-a1.log"
    assert console.exists() is (str(console) in told) is ("boot" in reason)


def test_a_machine_that_shuts_down_for_long_is_not_waited_for(world: World) -> None:
    world.aws.shutdown_s = 1200
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert world.clock.now() < START + timedelta(minutes=6)
    # The attempt ends when the machine has.
    assert [each.run_ids for each in world.ledger.unfinished_attempts("ec2")] == [(run.id,)]
    world.clock.sleep(1200)
    world.reconcile()
    attempt = world.attempt(run)
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
    assert world.reported("no answer; trying again")


@pytest.mark.parametrize("error", [NotAuthorised("expired", "log in"), UserError("the ledger is in use")])
def test_what_cannot_be_followed_any_more_goes_on(world: World, error: UserError) -> None:
    def fail() -> None:
        raise error

    def expire(node: FakeNode) -> None:
        node.train()
        world.clock.at(90, fail)

    world.aws.node = expire
    with pytest.raises(type(error), match="cannot be followed any more, and goes on") as raised:
        world.submit()
    hint = raised.value.hint or ""
    assert hint.startswith(error.hint or "it turns itself off within 120 min") and "fastlaunch cancel" in hint
    assert world.aws.live() == ["i-0001"]
    assert world.ledger.select()[0].state is RunState.RUNNING


def test_following_asks_seldom(world: World) -> None:
    world.aws.node = lambda node: node.train(seconds_per_run=400)
    world.submit()
    minutes = (world.clock.now() - START).total_seconds() / 60
    assert minutes > 13
    # Every 10 s for the machine, every 20 s for what it uploads; and what is here never again but for the
    # node's first and last word, once it has said that: a job may be started anew.
    assert world.aws.calls["describe_instances"] <= 6 * minutes + 3
    assert world.aws.calls["list_objects"] <= 3 * minutes + 3
    assert world.aws.calls["download"] <= len(world.aws.objects) + 2 * 4


def test_a_jobs_output_changes_no_other_run(world: World) -> None:
    (victim,) = world.submit()
    folder = world.home / "runs" / victim.id
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def forge(node: FakeNode) -> None:
        node.train()
        for name in ("log.txt", "rank-00000-attempt-7.jsonl"):
            forged = f"node-0/{victim.id}/{name}.{0:012d}"
            world.clock.at(70, lambda forged=forged: node.put(forged, b"forged"))  # type: ignore[misc]

    world.aws.node = forge
    first, second = world.submit(jobs=(job(), job()))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # Both runs of the attempt brought theirs.
    assert (first.state, second.state) == (RunState.COMPLETED, RunState.COMPLETED)
    assert all((world.home / "runs" / run.id / "log.txt").exists() for run in (first, second))


@pytest.mark.parametrize(
    "forged",
    [
        {"runs": [1]},
        {"runs": {"a": 1}},
        {"runs": [{}]},
        {"runs": [{"run_id": ["x"], "state": "completed"}]},
        {"runs": [{"run_id": "RUN", "started_s": "a", "ended_s": "b"}]},
        {"outcome": "failed", "reason": "\ud800"},
        {"outcome": "failed", "reason": [1]},
        {"boot_s": "x"},
        {"boot_s": 1.0, "pull_s": math.nan},
        {"uptime_s": math.inf},
        "[" * 200_000,
    ],
    ids=lambda forged: str(forged)[:30],
)
def test_a_last_word_that_no_node_writes_is_none(world: World, forged: dict[str, object] | str) -> None:
    def forge(node: FakeNode) -> None:
        node.train(upto=1)
        said = {"token": node.token, "outcome": "completed", "uptime_s": 200.0}
        text = forged if isinstance(forged, str) else json.dumps({**said, **forged})
        body = text.replace("RUN", node.run_ids()[0]).encode()
        world.clock.at(200, lambda: node.put("node-0/status.json", body))
        world.clock.at(210, node.turn_off)

    world.aws.node = forge
    (run,) = world.submit()
    # Its record tells.
    assert run.state is RunState.COMPLETED and world.attempt(run).ended_at
    (missing,) = missing_of(run, [world.attempt(run)], world.home)
    assert "without a last word" in missing


def test_what_is_too_large_to_bring_is_told_once(world: World) -> None:
    def leave(node: FakeNode) -> None:
        node.train(seconds_per_run=200)
        report = b" " * (MAX_REPORT_BYTES + 1)
        world.clock.at(70, lambda: node.put("node-0/status.json", report))

    world.aws.node = leave
    (run,) = world.submit()
    told = [line for line in world.reports if "stays in the bucket" in line]
    assert len(told) == 1 and "node-0/status.json has 1 MiB" in told[0]
    # The last word that came later is one.
    assert run.state is RunState.COMPLETED


def test_a_full_disk_ends_no_machine(world: World) -> None:
    def fill(node: FakeNode) -> None:
        runs, other = world.home / "runs", world.home / "moved"

        def full() -> None:
            runs.rename(other)
            runs.write_text("")

        def free() -> None:
            runs.unlink()
            other.rename(runs)

        node.train()
        world.clock.at(90, full)
        world.clock.at(150, free)

    world.aws.node = fill
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED and run.summary is not None
    assert world.reported("cannot be written", "trying again")


def test_a_laptop_that_slept_waits_for_its_network(world: World) -> None:
    def close_lid() -> None:
        world.clock.moment += timedelta(hours=5)
        world.aws.refuse("describe_instances", *[Unreachable("no answer")] * 20)
        world.aws.refuse("list_objects", *[Unreachable("no bucket")] * 20)

    def sleep_long(node: FakeNode) -> None:
        node.train()
        world.clock.at(90, close_lid)

    world.aws.node = sleep_long
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    # Reported once each, not in turn every few seconds.
    assert sum("trying again" in line for line in world.reports) == 2


def test_a_clock_that_is_set_back_does_not_keep_it_from_looking(world: World) -> None:
    def set_back(node: FakeNode) -> None:
        node.train()
        # While it pauses between two looks.
        world.clock.at(95, lambda: setattr(world.clock, "behind", timedelta(hours=3)))

    world.aws.node = set_back
    world.submit()
    assert world.clock.moment - START < timedelta(minutes=6)


def test_what_an_ended_machine_uploaded_is_looked_for_later(world: World) -> None:
    def fail(node: FakeNode) -> None:
        node.train()
        world.clock.at(181, lambda: world.aws.refuse("list_objects", *[NotAuthorised("expired")] * 20))

    world.aws.node = fail
    with pytest.raises(NotAuthorised, match="i-0001 in us-east-1 has ended"):
        world.submit()
    assert world.ledger.select()[0].state is RunState.RUNNING


def test_a_run_that_left_no_record_is_not_called_lost_when_the_next_begins(world: World) -> None:
    def second_only(node: FakeNode) -> None:
        first, second = node.run_ids()
        world.clock.at(BOOT_S, node.boot)
        world.clock.at(120, lambda: node.upload_records(second))
        world.clock.at(200, lambda: node.say_last("failed", {first: "failed", second: "completed"}))
        world.clock.at(200, node.turn_off)

    world.aws.node = second_only
    first, second = world.submit(jobs=(job(), job()))
    assert (first.state, second.state) == (RunState.FAILED, RunState.COMPLETED)
    shown = world.shown.getvalue()
    assert "[1/2] bf16: ended without a record" in shown and shown.rstrip().endswith("[2/2] bf16: completed")
