"""The ledger brought up to what is true on AWS, for attempts that nobody follows; `cancel` of cloud runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
from ec2_builders import job, site
from fake_cloud import Clock, FakeAws, FakeNode

from fastlaunch import locks
from fastlaunch.backends import RunState
from fastlaunch.backends.ec2 import FORGOTTEN_AFTER, Ec2Backend
from fastlaunch.errors import NotAuthorised, Throttled, Unreachable, UserError
from fastlaunch.runs import Ledger, Run
from fastlaunch.submission import cancel, launcher_lock, reconcile

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


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    aws = FakeAws(clock)
    with Ledger(tmp_path / "ledger.sqlite", clock=clock.now) as ledger:
        backend = Ec2Backend(aws=aws, home=tmp_path, sleep=clock.sleep, now=clock.now)
        yield World(home=tmp_path, clock=clock, aws=aws, ledger=ledger, backend=backend)


def test_a_detached_run_is_seen_and_then_ended(world: World) -> None:
    run = world.add()
    world.clock.sleep(90)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.zone, attempt.usd_per_hour) == ("us-east-1a", 55.04)
    world.clock.sleep(600)
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)
    assert world.ledger.get(run.id).summary is not None
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.billing, attempt.billed_seconds) == (RunState.COMPLETED, "times", 180.0)


def test_a_machine_that_shuts_down_has_not_ended(world: World) -> None:
    run = world.add()
    world.clock.sleep(190)
    assert world.aws.instances["i-0001"].state == "shutting-down"
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING


def test_what_ec2_has_forgotten_is_told_by_the_nodes_last_word(world: World) -> None:
    run = world.add()
    world.clock.sleep(4000)
    world.aws.instances.clear()
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.billing, attempt.billed_seconds) == ("node", 180.0)


def test_what_nobody_knows_any_more_is_lost_and_billed_at_most_its_time(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.clock.sleep(4000)
    world.aws.instances.clear()
    world.reconcile()
    assert world.state(run) == (RunState.LOST, "its machine ended without saying why")
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.billing, attempt.billed_seconds) == ("limit", 130 * 60)


def test_a_machine_that_ec2_does_not_show_yet_is_not_given_up(world: World) -> None:
    run = world.add()
    world.aws.hidden_s = 3000
    world.clock.sleep(FORGOTTEN_AFTER.total_seconds() - 1)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)


def test_a_machine_known_by_another_id_has_not_ended(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.clock.sleep(AFTER_FORGETTING_S)
    # The id that was noted is wrong; token and tags tell.
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None
    world.ledger.set_handle(attempt.id, {**attempt.handle, "instance_id": "i-9999"})
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING


# Launchers that died


def test_a_machine_that_nobody_noted_is_adopted(world: World) -> None:
    run = world.add(noted=False)
    world.reconcile()
    (attempt,) = world.ledger.attempts_of(run.id)
    assert world.state(run) == (RunState.RUNNING, None)
    assert attempt.handle is not None and attempt.handle["instance_id"] == "i-0001"
    assert attempt.handle["output"] == f"s3://acme-training/fastlaunch/runs/{run.id}/attempt-1"
    world.clock.sleep(600)
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)


def test_one_without_a_token_is_adopted_by_its_tags(world: World) -> None:
    run = world.add(noted=False)
    world.aws.instances["i-0001"] = replace(world.aws.instances["i-0001"], token=None)
    world.reconcile()
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None and attempt.handle["instance_id"] == "i-0001"


def test_a_request_that_was_never_sent_is_settled_after_fifteen_minutes(world: World) -> None:
    run = world.add(sent=False)
    world.clock.sleep(FORGOTTEN_AFTER.total_seconds())
    world.reconcile()
    assert world.state(run)[0] is RunState.PLANNED
    (attempt,) = world.ledger.unfinished_attempts("ec2")
    assert "EC2 shows none (yet)" in (attempt.reason or "")
    world.clock.sleep(2)
    world.reconcile()
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.billed_seconds) == (RunState.LOST, None)
    assert world.state(run)[0].is_final
    assert world.state(run)[1] == "its launcher ended before a machine was started"


def test_a_machine_that_shows_late_is_adopted(world: World) -> None:
    world.aws.node = lambda node: None
    world.aws.hidden_s = 300
    run = world.add(noted=False)
    world.reconcile()
    assert world.state(run)[0] is RunState.PLANNED
    world.clock.sleep(301)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)
    assert world.ledger.attempts_of(run.id)[0].reason is None


def test_a_row_without_an_attempt_is_ended(world: World) -> None:
    run = world.add(sent=False)
    (attempt,) = world.ledger.attempts_of(run.id)
    with world.ledger.transaction():
        world.ledger._file.write("DELETE FROM attempts WHERE id = ?", (attempt.id,))
    world.reconcile()
    assert world.state(run)[0] is RunState.CANCELLED


def test_a_run_between_two_attempts_is_ended_as_interrupted(world: World) -> None:
    run = world.add()
    (attempt,) = world.ledger.attempts_of(run.id)
    world.ledger.end_attempt(attempt.id, RunState.INTERRUPTED, reason="EC2 took the spot instance back")
    world.reconcile()
    assert world.state(run) == (RunState.INTERRUPTED, "EC2 took the spot instance back")


def test_a_machine_that_ends_late_does_not_end_what_another_goes_on_with(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    (first,) = world.ledger.attempts_of(run.id)
    at = world.backend.at(site(), 90)
    second, _ = world.ledger.add_attempt(
        [run.id], max_minutes=90, make_plan=lambda n: at.plan({run.id: job()}, attempt=n)
    )
    plan = world.ledger.plan_of(second)
    assert plan is not None
    world.ledger.set_handle(second, world.backend.execute(plan))
    world.aws.end("i-0001", "Server.SpotInstanceTermination: x", "Server.Spot")
    world.clock.sleep(60)
    world.reconcile()
    assert world.ledger.attempt(first.id).state is RunState.INTERRUPTED
    assert world.state(run) == (RunState.RUNNING, None)
    assert world.ledger.attempt(second).ended_at is None


def test_what_a_launcher_follows_is_left_to_it(world: World) -> None:
    run = world.add()
    world.clock.sleep(600)
    lock = launcher_lock(world.ledger, run.submission_id)
    lock.parent.mkdir()
    with locks.held(lock):
        world.reconcile()
        assert world.state(run)[0] is RunState.RUNNING
    assert world.aws.calls["describe_instances"] == 0
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED


# Requests


def test_many_runs_take_one_request_per_region(world: World) -> None:
    world.aws.node = lambda node: None
    for number in range(40):
        world.add(region=("us-east-1", "us-west-2")[number % 2])
    world.clock.sleep(30)
    world.aws.calls.clear()
    world.reconcile()
    assert dict(world.aws.calls) == {"describe_instances": 2}
    assert {run.state for run in world.ledger.select()} == {RunState.RUNNING}


def test_the_spot_price_is_asked_once_for_machines_of_a_kind(world: World) -> None:
    world.aws.node = lambda node: None
    for _ in range(6):
        run = world.add()
    for instance_id, one in list(world.aws.instances.items()):
        world.aws.instances[instance_id] = replace(one, is_spot=True)
    world.reconcile()
    assert world.aws.calls["spot_price_usd"] == 1
    assert {one.usd_per_hour for one in world.ledger.unfinished_attempts("ec2")} == {17.0}
    price = world.ledger.get(run.id).price
    assert price is not None and (price.purchase, price.usd_per_hour) == ("spot", 17.0)
    world.reconcile()
    assert world.aws.calls["spot_price_usd"] == 1


def test_many_forgotten_runs_take_three_requests_per_region(world: World) -> None:
    world.aws.node = lambda node: None
    for _ in range(20):
        world.add()
    world.clock.sleep(4000)
    world.aws.instances.clear()
    world.aws.calls.clear()
    world.reconcile()
    assert world.aws.calls["describe_instances"] == 3
    assert {run.state for run in world.ledger.select()} == {RunState.LOST}


def test_nothing_is_asked_where_nothing_is_under_way(world: World) -> None:
    run = world.add()
    world.clock.sleep(600)
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED
    world.aws.calls.clear()
    world.reconcile()
    assert not world.aws.calls


@pytest.mark.parametrize("error", [NotAuthorised("no credentials"), Unreachable("no network")])
def test_what_aws_does_not_tell_stays_as_it_is_with_a_warning(
    world: World, error: UserError, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.add()
    far = world.add(region="us-west-2", sent=False)
    world.clock.sleep(600)
    world.aws.refuse("describe_instances", error)  # type: ignore[arg-type]
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"warning: 1 attempts in us-east-1 are shown as they were: {error.message}\n"
    # The other region was looked at.
    assert "EC2 shows none" in (world.ledger.attempts_of(far.id)[0].reason or "")
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED


def test_a_bucket_that_cannot_be_read_leaves_the_run_for_later(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.add()
    world.clock.sleep(600)
    world.aws.refuse("list_objects", NotAuthorised("denied"))
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING
    assert "cannot be read: denied" in capsys.readouterr().err
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED


# Cancelling


def hang(node: FakeNode) -> None:
    node.train(upto=0)


def test_cancel_stops_the_machine_with_all_its_runs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.aws.node = hang
    run = world.add(num_runs=2)
    world.clock.sleep(120)
    other = next(one for one in world.ledger.select() if one.id != run.id)
    assert world.cancel(run) is RunState.CANCELLED
    assert other.id in capsys.readouterr().err
    assert world.state(other) == (RunState.CANCELLED, "stopped by fastlaunch cancel before it started")
    assert world.aws.live() == [] and world.aws.calls["terminate"] == 0
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.ended_at is not None and attempt.billed_seconds
    assert world.aws.instances["i-0001"].state == "terminated"


def test_cancel_is_patient_with_a_network_that_fails_for_a_while(world: World) -> None:
    world.aws.node = lambda node: node.train(
        upto=1, how=lambda run_id: {"steps": 60, "header": {"steps": 200}, "status": "interrupted"}
    )
    run = world.add()
    world.clock.sleep(200)
    # First the bucket, then the machine.
    world.aws.refuse("list_objects", Unreachable("no answer"), Throttled("slow down"))
    world.aws.refuse("put_object", Unreachable("no answer"))
    world.aws.refuse("describe_instances", *[Unreachable("no answer")] * 6)
    assert world.cancel(run) is RunState.INTERRUPTED
    assert world.aws.calls["terminate"] == 0
    assert world.aws.live() == []


def test_cancel_finds_a_machine_that_nobody_noted(world: World) -> None:
    world.aws.node = hang
    run = world.add(noted=False)
    world.clock.sleep(120)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_cancel_before_it_is_known_whether_there_is_a_machine(world: World) -> None:
    world.aws.node, world.aws.hidden_s = hang, 200
    run = world.add(noted=False)
    with pytest.raises(UserError, match="is not known yet") as raised:
        world.cancel(run)
    assert "fastlaunch reap --region us-east-1" in (raised.value.hint or "")
    world.clock.sleep(201)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.aws.live() == []


def test_cancel_of_a_request_that_was_never_sent(world: World) -> None:
    run = world.add(sent=False)
    world.clock.sleep(AFTER_FORGETTING_S)
    assert world.cancel(run) is RunState.CANCELLED
    assert world.ledger.unfinished_attempts("ec2") == []


def test_cancel_while_the_launcher_starts_it_waits_for_the_launcher(world: World) -> None:
    world.aws.node = hang
    run = world.add(noted=False)
    (attempt,) = world.ledger.attempts_of(run.id)
    plan = world.ledger.plan_of(attempt.id)
    assert plan is not None
    world.clock.at(30, lambda: world.ledger.set_handle(attempt.id, world.backend.find(plan) or {}))
    lock = launcher_lock(world.ledger, run.submission_id)
    lock.parent.mkdir()
    before = world.clock.now()
    with locks.held(lock):
        assert world.cancel(run) is RunState.CANCELLED
    assert world.clock.now() - before >= timedelta(seconds=30)
    assert world.aws.live() == []


def test_cancel_of_a_run_that_ended_says_so(world: World) -> None:
    run = world.add()
    world.clock.sleep(600)
    world.reconcile()
    assert world.cancel(run) is RunState.COMPLETED
    assert world.aws.calls["terminate"] == 0


def test_a_cancelled_run_keeps_what_it_recorded(world: World) -> None:
    world.aws.node = lambda node: node.train(
        upto=1, how=lambda run_id: {"steps": 60, "header": {"steps": 200}, "status": "interrupted"}
    )
    run = world.add()
    world.clock.sleep(200)
    assert world.cancel(run) is RunState.INTERRUPTED
    found = world.ledger.get(run.id)
    assert found.reason == "stopped by fastlaunch cancel"
    assert found.summary is not None and found.summary.num_steps == 60
