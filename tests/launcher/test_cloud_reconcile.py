"""The ledger brought up to what is true on AWS, for attempts that nobody follows."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from cloud_world import AFTER_FORGETTING_S, World, job, opened_world
from ec2_builders import site
from fake_cloud import FakeNode

from fastlaunch.aws.types import Identity
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, Unreachable, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.ledger import LEDGER_NAME, Ledger, Run


def test_a_detached_run_is_seen_and_then_ended(world: World) -> None:
    run = world.add()
    world.clock.sleep(90)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)
    attempt = world.attempt(run)
    assert (attempt.zone, attempt.billing.usd_per_hour) == ("us-east-1a", 55.04)
    world.clock.sleep(100)
    assert world.aws.instances["i-0001"].state == "shutting-down"
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING
    world.clock.sleep(500)
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)
    assert world.ledger.get(run.id).summary is not None
    attempt = world.attempt(run)
    assert attempt.state is RunState.COMPLETED
    assert (attempt.billing.source, attempt.billing.billed_s) == ("times", 180.0)


@pytest.mark.parametrize("noted", [True, False])
def test_what_ec2_has_forgotten_is_known_by_the_nodes_last_word(world: World, noted: bool) -> None:
    run = world.add(noted=noted)
    world.clock.sleep(4000)
    world.aws.instances.clear()
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)
    assert world.ledger.get(run.id).summary is not None
    billing = world.attempt(run).billing
    assert (billing.source, billing.billed_s) == ("node", 180.0)


def test_what_a_forged_boot_report_names_is_not_ended(world: World) -> None:
    world.aws.node = lambda node: None
    other = world.add()
    foreign = world.aws.instances[(world.attempt(other).handle or {})["instance_id"]]
    world.aws.change(foreign.id, tags={"Name": "web"}, token=None)
    run = world.add(noted=False)
    attempt = world.attempt(run)
    forged = {"schema": 1, "token": attempt.token, "instance_id": foreign.id}
    world.aws.objects["acme-training", f"fastlaunch/runs/{run.id}/attempt-1/boot.json"] = json.dumps(
        forged
    ).encode()
    del world.aws.instances["i-0002"]
    world.clock.sleep(4000)
    world.cancel(run)
    assert world.aws.live() == [foreign.id]


# Seen is seen


LIMIT_S = (120 + 10 + 60) * 60


def look_until(world: World, run: Run, *times_s: float) -> list[RunState]:
    """The run's state after a look at each of these times since the attempt's start."""
    start, states = datetime.fromisoformat(world.attempt(run).started_at), []
    for time_s in times_s:
        world.clock.sleep(time_s - (world.clock.now() - start).total_seconds())
        world.reconcile()
        states.append(world.state(run)[0])
    return states


def test_three_looks_an_hour_past_its_limit_are_absence(world: World) -> None:
    world.aws.node = lambda node: None
    run, running = world.add(), RunState.RUNNING
    world.aws.is_blind = True
    # However many looks within its time, or within five minutes; and an older one may be among the three.
    assert look_until(world, run, 1000, 1400, 1800, 2200) == [running] * 4
    assert len(world.attempt(run).absences) == 3
    assert look_until(world, run, LIMIT_S - 1, LIMIT_S + 200) == [running] * 2
    assert look_until(world, run, LIMIT_S + 301) == [RunState.LOST]
    assert world.state(run)[1] == "its machine ended without saying why"
    billing = world.attempt(run).billing
    assert (billing.source, billing.billed_s) == ("limit", 130 * 60)


def test_a_machine_whose_end_has_no_time_ended_by_now(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.clock.sleep(1200)
    (machine,) = world.aws.instances
    world.aws.change(machine, state="terminated", state_reason="Server.Unknown", transition_reason="")
    world.reconcile()
    billing = world.attempt(run).billing
    # Not the two hours and ten minutes that it might have lived.
    assert (billing.source, billing.billed_s) == ("limit", pytest.approx(1200, abs=60))


def test_looks_in_quick_succession_count_once(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.aws.is_blind = True
    times = [LIMIT_S + seconds for seconds in (1, 2, 3, 299, 302, 500)]
    assert look_until(world, run, *times) == [RunState.RUNNING] * len(times)
    assert look_until(world, run, LIMIT_S + 602) == [RunState.LOST]


def test_one_look_that_shows_it_forgets_the_absences(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.aws.is_blind = True
    look_until(world, run, LIMIT_S + 1, LIMIT_S + 400)
    world.aws.is_blind = False
    look_until(world, run, LIMIT_S + 500)
    assert world.attempt(run).absences == ()
    world.aws.is_blind = True
    assert look_until(world, run, LIMIT_S + 801, LIMIT_S + 1102) == [RunState.RUNNING] * 2


@pytest.mark.parametrize(
    ("reason", "state"), [("spot", RunState.INTERRUPTED), ("watchdog", RunState.RUNNING)]
)
def test_of_one_nodes_last_words_a_spot_notice_counts_ten_minutes_after_it(
    world: World, reason: str, state: RunState
) -> None:
    def ended(node: FakeNode) -> None:
        world.clock.at(60, node.boot)
        # The other node is never heard of again.
        if node.rank == 0:
            world.clock.at(1200, lambda: node.say_last("interrupted", {}, reason=reason))

    world.aws.node = ended
    (run,) = world.submit(jobs=(job(num_nodes=2),), detach=True)
    world.clock.sleep(1300)
    world.aws.is_blind = True
    assert look_until(world, run, 1300, 1700) == [RunState.RUNNING] * 2
    assert look_until(world, run, 1900) == [state]


def test_another_account_judges_and_ends_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.aws.caller = Identity(account="999999999999", arn="arn:aws:iam::999999999999:user/eve")
    world.aws.is_blind = True
    assert look_until(world, run, *(LIMIT_S + 400 * n for n in range(4))) == [RunState.RUNNING] * 4
    assert world.attempt(run).absences == ()
    warned = capsys.readouterr().err
    assert "1 attempt in account 123456789012" in warned and "999999999999" in warned
    world.aws.is_blind = False
    with pytest.raises(NotAuthorised, match=r"account 123456789012.*999999999999") as caught:
        world.cancel(run)
    assert "--profile" in (caught.value.hint or "")
    assert world.aws.live() == ["i-0001"]


@pytest.mark.parametrize("noted", [True, False])
def test_what_counts_as_lost_and_lives_is_taken_back(world: World, noted: bool) -> None:
    world.aws.node = lambda node: None
    run = world.add(noted=noted)
    world.aws.is_blind = True
    look_until(world, run, *(LIMIT_S + 400 * n for n in range(1, 4)))
    assert world.state(run)[0] is (RunState.LOST if noted else RunState.FAILED)
    world.aws.is_blind = False
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING
    attempt = world.attempt(run)
    assert (attempt.state, attempt.ended_at, attempt.billing.billed_s) == (RunState.RUNNING, None, None)
    assert attempt.handle is not None and attempt.handle["instance_ids"] == ["i-0001"]
    assert "lives" in (world.ledger.history(run.id)[-1].reason or "")
    world.aws.end("i-0001", "Client.UserInitiatedShutdown: x", "User initiated")
    world.clock.sleep(60)
    world.reconcile()
    assert world.attempt(run).billing.source == "times"


def test_a_machine_that_ec2_does_not_show_yet_is_not_given_up(world: World) -> None:
    run = world.add()
    world.aws.hidden_s = 3000
    world.clock.sleep(AFTER_FORGETTING_S - 2)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)


def test_a_machine_known_by_another_id_has_not_ended(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    world.clock.sleep(AFTER_FORGETTING_S)
    # The id that was noted is wrong; token and tags tell.
    attempt = world.attempt(run)
    world.ledger.set_handle(attempt.id, {**(attempt.handle or {}), "instance_id": "i-9999"})
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING


# Launchers that died


def test_a_machine_that_nobody_noted_is_adopted(world: World) -> None:
    run = world.add(noted=False)
    world.reconcile()
    assert world.state(run) == (RunState.RUNNING, None)
    handle = world.attempt(run).handle
    assert handle is not None and handle["instance_id"] == "i-0001"
    assert handle["output"] == f"s3://acme-training/fastlaunch/runs/{run.id}/attempt-1"
    world.clock.sleep(600)
    world.reconcile()
    assert world.state(run) == (RunState.COMPLETED, None)


def test_a_request_that_was_never_sent_is_settled_after_fifteen_minutes(world: World) -> None:
    run = world.add(sent=False)
    world.clock.sleep(AFTER_FORGETTING_S - 1)
    world.reconcile()
    assert world.state(run)[0] is RunState.PLANNED
    assert "EC2 shows none (yet)" in (world.attempt(run).reason or "")
    world.clock.sleep(2)
    world.reconcile()
    attempt = world.attempt(run)
    assert (attempt.state, attempt.billing.billed_s) == (RunState.LOST, None)
    assert world.state(run) == (RunState.FAILED, "its launcher ended before a machine was started")


def test_a_row_without_an_attempt_is_ended(world: World) -> None:
    run = world.add(sent=False)
    with world.ledger.transaction():
        world.ledger._file.write("DELETE FROM attempts")
    world.reconcile()
    assert world.state(run)[0] is RunState.CANCELLED


def test_a_run_between_two_attempts_is_ended_as_interrupted(world: World) -> None:
    run = world.add()
    attempt = world.attempt(run)
    world.ledger.end_attempt(attempt.id, RunState.INTERRUPTED, reason="EC2 took the spot instance back")
    world.reconcile()
    assert world.state(run) == (RunState.INTERRUPTED, "EC2 took the spot instance back")


def test_a_machine_that_ends_late_does_not_end_what_another_goes_on_with(world: World) -> None:
    world.aws.node = lambda node: None
    run = world.add()
    first = world.attempt(run)
    at = world.backend.at(site(), 90)
    second, _ = world.ledger.add_attempt(
        [run.id],
        max_minutes=90,
        account="123456789012",
        partition="aws",
        make_plan=lambda n: at.plan({run.id: job()}, attempt=n),
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
    with world.followed(run):
        world.reconcile()
        assert world.state(run)[0] is RunState.RUNNING
    assert world.aws.calls["describe_instances"] == 0
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED


# Requests


@pytest.mark.parametrize(("forgotten", "num_requests"), [(False, 1), (True, 2)])
def test_many_runs_take_few_requests_per_region(world: World, forgotten: bool, num_requests: int) -> None:
    world.aws.node = lambda node: None
    for number in range(6):
        world.add(region=("us-east-1", "us-west-2")[number % 2])
    if forgotten:
        world.clock.sleep(4000)
        world.aws.instances.clear()
    world.aws.calls.clear()
    world.reconcile()
    assert world.aws.calls["describe_instances"] == 2 * num_requests
    assert {run.state for run in world.ledger.select()} == {RunState.RUNNING}


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
    assert captured.err == f"warning: 1 attempt in us-east-1 is shown as before: {error.message}\n"
    # The other region was looked at.
    assert "EC2 shows none" in (world.attempt(far).reason or "")


def test_a_bucket_that_cannot_be_read_leaves_the_run_for_later(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.add()
    world.clock.sleep(600)
    world.aws.refuse("list_objects", NotAuthorised("denied"))
    world.reconcile()
    assert world.state(run)[0] is RunState.RUNNING
    assert "cannot be brought here: denied" in capsys.readouterr().err
    world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED


def test_without_its_bucket_a_run_ends_all_the_same(world: World) -> None:
    run, unnoted = world.add(), world.add(noted=False)
    world.aws.is_blind = True
    for _ in range(3):
        world.clock.sleep(5 * 3600)
        world.aws.refuse("list_objects", *[BadConfiguration("there is no such bucket")] * 4)
        world.reconcile()
        world.aws.refusals.clear()
    assert world.state(run)[0] is RunState.LOST
    assert world.state(unnoted) == (RunState.FAILED, "its launcher ended before a machine was started")
    assert world.ledger.unfinished_attempts("ec2") == []
    assert world.attempt(run).billing.source == "limit"


def test_a_run_that_failed_before_its_machine_was_stopped_has_failed(world: World) -> None:
    def fail_first(node: FakeNode) -> None:
        first, second = node.run_ids()
        world.clock.at(60, node.boot)
        world.clock.at(70, lambda: node.put(f"node-0/{first}/log.txt.000000000000", b"ImportError: timm\n"))
        states = {first: "failed", second: "not-started"}
        world.clock.at(100, lambda: node.say_last("interrupted", states, reason="watchdog"))
        world.clock.at(100, node.turn_off)

    world.aws.node = fail_first
    run = world.add(num_runs=2)
    world.clock.sleep(600)
    world.reconcile()
    state, reason = world.state(run)
    assert state is RunState.FAILED and "exit code 1" in (reason or "") and "ImportError" in (reason or "")
    assert world.ledger.select()[1].state is RunState.CANCELLED


@pytest.mark.slow
def test_boto3_is_imported_only_while_something_is_under_way(isolated: Path) -> None:
    script = (
        "import sys; from fastlaunch.cli.main import run; code = run(sys.argv[1:]);"
        " print('boto3' if 'boto3' in sys.modules else 'no boto3', file=sys.stderr); sys.exit(code)"
    )

    def list_runs() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, "runs", "list"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    isolated.mkdir()
    with opened_world(isolated) as world:
        run = world.add()
    # Without credentials the rows stay as they are.
    listed = list_runs()
    assert "warning: 1 attempt on EC2 is shown as before" in listed.stderr
    assert "running" in listed.stdout and run.id in listed.stdout
    assert listed.stderr.rstrip().endswith("\nboto3")
    with Ledger(isolated / LEDGER_NAME) as ledger:
        for attempt in ledger.unfinished_attempts("ec2"):
            ledger.end_attempt(attempt.id, RunState.COMPLETED)
        ledger.set_state(run.id, RunState.COMPLETED)
    listed = list_runs()
    assert "completed" in listed.stdout and listed.stderr.rstrip().endswith("no boto3")
