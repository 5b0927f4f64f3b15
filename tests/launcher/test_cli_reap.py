"""`fastlaunch reap` against an AWS that keeps tags: what goes, what is left, and what is said of both."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cloud_commands import aws, cloud

from fastlaunch.core import locks
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.lifecycle.schedules import schedule_request

if TYPE_CHECKING:
    from moto_server import MotoServer

PRICE_OF_P5 = 55.04
PRICE_OF_ML_P5 = 63.296
PLANS = Path(__file__).parents[1] / "plans"


def start(
    run_id: str = "20261121-090000-abcd",
    *,
    hours_ago: float = 0.0,
    region: str = "us-east-1",
    tags: Mapping[str, str] | None = None,
    server: "MotoServer",
) -> str:
    """Id of an instance as `submit` starts it, launched so long ago. tags: some of them, in other forms."""
    import moto_gaps

    given = {
        "fastlaunch:run": run_id,
        "fastlaunch:attempt": "1",
        "fastlaunch:max-minutes": "60",
        "fastlaunch:output": f"s3://acme/fastlaunch/runs/{run_id}/attempt-1",
        "Name": f"fastlaunch {run_id}",
        **(tags or {}),
    }
    kept = [{"Key": key, "Value": value} for key, value in given.items()]
    request = {
        **{"ImageId": moto_gaps.machine_image_id(region), "InstanceType": "p5.48xlarge"},
        **{"MinCount": 1, "MaxCount": 1, "ClientToken": f"{run_id}-a1"},
        "TagSpecifications": [{"ResourceType": "instance", "Tags": kept}],
    }
    (instance,) = aws().run_instances(region, request)
    server.set_instance(
        instance.id, state="running", launch_time=datetime.now(UTC) - timedelta(hours=hours_ago)
    )
    return instance.id


def schedule(run_id: str, instance: str, *, suffix: str = "", at: datetime | None = None) -> None:
    """Make the schedule that ends a machine of the run's first attempt."""
    role, at = "arn:aws:iam::123456789012:role/scheduler", at or datetime(2026, 11, 22, tzinfo=UTC)
    request = schedule_request(f"fastlaunch-{run_id}-a1{suffix}", instance, role=role, at=at)
    aws().create_schedule("us-east-1", request)


def scheduled() -> list[str]:
    return [each.name for each in aws().list_schedules("us-east-1")]


def states(server: "MotoServer") -> dict[str, str]:
    return {instance.id: instance.state for instance in server.instances()}


def reaped(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0, minutes_later: float = 0) -> Any:
    capsys.readouterr()
    later = datetime.now(UTC) + timedelta(minutes=minutes_later)
    assert cloud("reap", *argv, "--output", "json", now=lambda: later) == code
    return json.loads(capsys.readouterr().out)


def test_what_is_over_its_time_goes_and_the_rest_is_left(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    old = start("20261121-060000-aaaa", hours_ago=3, server=aws_server)
    young = start("20261121-090000-bbbb", hours_ago=1, server=aws_server)
    report = reaped(capsys, "--yes")
    assert states(aws_server) == {old: "shutting-down", young: "running"}
    by_id = {each["instance"]: each for each in report["instances"]}
    assert (by_id[old]["done"], by_id[young]["done"]) == ("terminated", "left")
    assert by_id[old]["cost_usd"] == pytest.approx(3 * PRICE_OF_P5, rel=1e-3)
    assert by_id[young]["run"] == "20261121-090000-bbbb"

    assert cloud("reap", "--yes") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of another ledger; within its time until " in out
    assert "1 instance in us-east-1: 1 left." in out
    assert len(aws_server.sent("TerminateInstances")) == 1


def test_a_login_that_has_expired_is_told_once(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    aws_server.refuse("GetCallerIdentity", "ExpiredToken", "The token is expired")
    assert cloud("reap") == 3
    assert capsys.readouterr().err.count("aws sso login") == 1
    assert aws_server.sent("DescribeInstances") == []


def test_a_dry_run_changes_nothing(aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]) -> None:
    old = start(hours_ago=3, server=aws_server)
    assert cloud("reap", "--dry-run") == 0
    assert "1 to terminate; cost so far about $165." in capsys.readouterr().out
    assert states(aws_server) == {old: "running"}
    assert not load_settings().home.exists()


def test_nothing_is_terminated_unasked(aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]) -> None:
    old = start(hours_ago=3, server=aws_server)
    assert cloud("reap") == 2
    err = capsys.readouterr().err
    assert f"{old} of run 20261121-090000-abcd: over its time" in err and "--yes" in err
    assert states(aws_server) == {old: "running"}


def test_what_cannot_be_terminated_is_shown(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    first = start("20261121-060000-aaaa", hours_ago=4, server=aws_server)
    second = start("20261121-070000-bbbb", hours_ago=3, server=aws_server)
    aws_server.refuse("TerminateInstances", "UnauthorizedOperation", where={"InstanceId.1": first})
    report = reaped(capsys, "--yes", code=3)
    assert [each["done"] for each in report["instances"]] == ["refused", "terminated"]
    assert states(aws_server) == {first: "running", second: "shutting-down"}


def submitted(
    ledger: Ledger, *, usd_per_hour: float | None = None, region: str = "us-east-1"
) -> tuple[str, int]:
    """Id of a run under way on EC2, and of its attempt."""
    submission = ledger.add_submission("fastlaunch submit")
    run_id = ledger.new_run_id()
    ledger.add_run(submission, run_id, spec={}, plan=None, workload="vit-tiny", recipe="bf16", backend="ec2")
    attempt, token = ledger.add_attempt(
        [run_id], region=region, max_minutes=60, account="123456789012", partition="aws"
    )
    assert token == f"{run_id}-a1"
    ledger.set_state(run_id, RunState.RUNNING)
    ledger.set_machine(attempt, zone="us-east-1a", launched_at=datetime.now(UTC), usd_per_hour=usd_per_hour)
    return run_id, attempt


def note_machine(
    ledger: Ledger, run_id: str, attempt: int, server: "MotoServer", hours_ago: float = 0.0
) -> str:
    """Id of a machine of the run's attempt, which the ledger knows."""
    server.set_up_region("us-east-1", bucket="acme")
    machine = start(run_id, hours_ago=hours_ago, server=server)
    handle = {"region": "us-east-1", "instance_ids": [machine], "token": f"{run_id}-a1"}
    handle["output"] = f"s3://acme/fastlaunch/runs/{run_id}/attempt-1"
    handle["launched_at"] = (datetime.now(UTC) - timedelta(hours=hours_ago)).isoformat()
    ledger.set_handle(attempt, handle)
    return machine


def test_the_ledger_tells_what_has_ended_and_what_it_is_billed_at(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ledger(load_settings()) as ledger:
        ended, attempt = submitted(ledger)
        ledger.end_attempt(attempt, RunState.FAILED, reason="it failed")
        ledger.set_state(ended, RunState.FAILED, "it failed")
        running, _ = submitted(ledger, usd_per_hour=40.0)
    gone = start(ended, server=aws_server)
    kept = start(running, hours_ago=0.5, server=aws_server)
    machines = {each["instance"]: each for each in reaped(capsys, "--dry-run")["instances"]}
    assert "may be shutting down" in machines[gone]["why"]
    assert machines[kept]["cost_usd"] == pytest.approx(20.0, abs=0.05)
    machines = {each["instance"]: each for each in reaped(capsys, "--dry-run", minutes_later=11)["instances"]}
    assert machines[gone]["why"].endswith("by the ledger or its own word, and still runs")
    assert "its own timer stops it" in machines[kept]["why"]


def test_a_damaged_ledger_does_not_keep_machines_alive(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    home = load_settings().home
    home.mkdir()
    (home / "ledger.sqlite").write_bytes(b"no database at all, and long enough to be taken for one" * 100)
    old = start(hours_ago=3, server=aws_server)
    assert cloud("reap", "--yes") == 0
    assert "going by tags alone" in capsys.readouterr().err
    assert states(aws_server) == {old: "shutting-down"}


def test_what_was_reaped_is_explained_in_the_ledger(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    aws_server.shutting_down_describes = 0
    with open_ledger(load_settings()) as ledger:
        run_id, attempt = submitted(ledger)
        note_machine(ledger, run_id, attempt, aws_server, hours_ago=3)
    (machine,) = reaped(capsys, "--yes")["ended_runs"]
    assert (machine["run"], machine["state"]) == (run_id, "cancelled")
    assert "fastlaunch reap, over its time: 60 minutes" in machine["reason"]
    with open_ledger(load_settings()) as ledger:
        ended = ledger.attempt(attempt)
    assert ended.ended_at is not None and "fastlaunch reap" in (ended.reason or "")


def test_a_machine_whose_launcher_lives_is_left_to_it(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ledger(load_settings()) as ledger:
        run_id, attempt = submitted(ledger)
        # Between the end of its attempt's row and that of its machine.
        ledger.end_attempt(attempt, RunState.FAILED, reason="it failed")
        lock = ledger.launcher_lock(ledger.get(run_id).submission_id)
        lock.parent.mkdir(parents=True)
        kept = start(run_id, server=aws_server)
        with locks.held(lock):
            (machine,) = reaped(capsys, "--yes")["instances"]
        assert machine["why"].startswith("followed by its launcher; within its time until ")
        assert states(aws_server) == {kept: "running"}
        assert reaped(capsys, "--yes", minutes_later=11)["instances"][0]["done"] == "terminated"


def test_a_last_word_ends_a_machine_that_lives_ten_minutes_after_it(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ledger(load_settings()) as ledger:
        run_id, attempt = submitted(ledger)
        note_machine(ledger, run_id, attempt, aws_server)
    report = {"schema": 1, "token": f"{run_id}-a1", "outcome": "completed", "runs": []}
    report["billed_until"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    key = f"fastlaunch/runs/{run_id}/attempt-1/node-0/status.json"
    aws().put_object("us-east-1", "acme", key, json.dumps(report).encode())
    assert reaped(capsys, "--yes", minutes_later=9)["instances"][0]["done"] == "left"
    assert reaped(capsys, "--yes", minutes_later=11)["instances"][0]["done"] == "terminated"


@pytest.mark.parametrize("tags", [{"fastlaunch:run": "web-frontend"}, {"fastlaunch:attempt": "x"}])
def test_a_foreign_machine_with_some_of_our_tags_is_listed_and_left(
    tags: dict[str, str], aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = start(hours_ago=30, tags=tags, server=aws_server)
    (machine,) = reaped(capsys, "--yes")["instances"]
    assert (machine["done"], machine["ends_at"]) == ("left", None)
    assert "fastlaunch's tags" in machine["why"]
    assert states(aws_server) == {foreign: "running"}


def test_regions_of_attempts_that_are_held_to_have_ended_are_looked_at(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    with open_ledger(load_settings()) as ledger:
        run_id, attempt = submitted(ledger, region="us-east-2")
        ledger.end_attempt(attempt, RunState.LOST, reason="its launcher ended before a machine was started")
        ledger.set_state(run_id, RunState.LOST)
    live = start(run_id, region="us-east-2", server=aws_server)
    report = reaped(capsys, "--yes")
    assert report["regions"] == ["us-east-1", "us-east-2"]
    assert "it counted as lost, and is taken back" in report["instances"][0]["why"]
    assert states(aws_server) == {live: "running"}


def start_job(
    server: "MotoServer",
    name: str,
    *,
    hours_ago: float,
    tags: dict[str, str] | None = None,
    more_tags: Mapping[str, str] | None = None,
) -> None:
    """A training job on two machines, as `submit` starts it, created so long ago and running since.

    tags: instead of fastlaunch's. more_tags: besides them.
    """
    plan = json.loads((PLANS / "sagemaker-2-p5.48xlarge-on-demand.json").read_text())
    for channel in plan["request"]["InputDataConfig"]:
        source = channel["DataSource"]["S3DataSource"]["S3Uri"]
        aws().put_object("us-east-1", *source.removeprefix("s3://").split("/", 1), b"code")
    run_id, _, attempt = name.rpartition("-a")
    given = {
        **{"fastlaunch:run": run_id, "fastlaunch:attempt": attempt, "fastlaunch:max-minutes": "60"},
        "fastlaunch:output": f"s3://acme-training/fastlaunch/runs/{run_id}/attempt-{attempt}",
    }
    given = {**given, **(more_tags or {})} if tags is None else tags
    asked = {
        "TrainingJobName": name,
        "RoleArn": server.training_jobs.role(),
        "Tags": [{"Key": key, "Value": value} for key, value in given.items()],
    }
    aws().create_training_job("us-east-1", {**plan["request"], **asked})
    server.training_jobs.move(name, "Training")
    job = server.training_jobs.job(name)
    job.created_at = job.started_at = datetime.now(UTC) - timedelta(hours=hours_ago)


def test_a_job_that_is_over_its_time_is_stopped(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    aws_server.set_up_region("us-east-1", bucket="acme-training")
    old, young = "20261121-060000-aaaa-a1", "20261121-090000-bbbb-a1"
    start_job(aws_server, old, hours_ago=3)
    start_job(aws_server, young, hours_ago=1)
    start_job(aws_server, "somebody-elses", hours_ago=30, tags={})
    machines = {each["job"]: each for each in reaped(capsys, "--yes")["jobs"]}
    done = {name: machine["done"] for name, machine in machines.items()}
    assert done == {old: "stopped", young: "left"}
    assert machines[young]["cost_usd"] == pytest.approx(2 * PRICE_OF_ML_P5, rel=1e-2)
    assert {job.name for job in aws_server.training_jobs.live() if job.status == "InProgress"} == {
        young,
        "somebody-elses",
    }
    again = {each["job"]: each["why"] for each in reaped(capsys, "--yes")["jobs"]}
    assert again[old] == "it is being stopped"
    assert len(aws_server.sent("StopTrainingJob")) == 1


def test_schedules_go_with_their_machines(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    old, young = "20261121-060000-aaaa", "20261121-090000-bbbb"
    schedule(old, start(old, hours_ago=3, server=aws_server))
    schedule(young, start(young, hours_ago=0.5, server=aws_server))
    schedule("20261120-090000-cccc", "i-0123")
    later = datetime.now(UTC) + timedelta(minutes=20)

    capsys.readouterr()
    assert cloud("reap", "--dry-run", now=lambda: later) == 0
    out = capsys.readouterr().out
    assert "3 schedules in us-east-1: 2 to delete, 1 left." in out
    assert len(scheduled()) == 3

    # Before the machine that it would end was terminated, its schedule is not deleted.
    aws_server.refuse("TerminateInstances", "UnauthorizedOperation", times=1)
    assert cloud("reap", "--yes", now=lambda: later) == 3
    assert scheduled() == [f"fastlaunch-{old}-a1", f"fastlaunch-{young}-a1"]
    assert cloud("reap", "--yes", now=lambda: later) == 0
    assert scheduled() == [f"fastlaunch-{young}-a1"]


def test_what_may_not_be_looked_at_hides_nothing_else(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    old = start(hours_ago=3, server=aws_server)
    aws_server.refuse("ListTrainingJobs", "AccessDeniedException")
    aws_server.refuse("ListSchedules", "AccessDeniedException", status=403)
    report = reaped(capsys, "--yes", code=3)
    assert [each["what"] for each in report["refused_regions"]] == ["training jobs", "schedules"]
    assert states(aws_server) == {old: "shutting-down"}
    # Two refusals, and what to do about them once.
    assert cloud("reap", "--dry-run") == 3
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 2
    hints = [line for line in lines if line.startswith("  ")]
    assert hints and len(hints) == len(set(hints))


def test_a_schedule_stays_where_its_machine_may_not_be_looked_at(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    schedule("20261121-050000-gone", "i-0123")
    aws_server.refuse("DescribeInstances", "UnauthorizedOperation", times=1)
    later = datetime.now(UTC) + timedelta(minutes=20)
    assert cloud("reap", "--yes", now=lambda: later) == 3
    assert "whether its machine lives is not known" in capsys.readouterr().out
    assert len(scheduled()) == 1
    assert cloud("reap", "--yes", now=lambda: later) == 0
    assert scheduled() == []


MINE, HERS = "20261121-090000-aaaa", "20261121-090000-bbbb"


def test_a_run_ends_within_its_time_by_its_tags_alone(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    aws_server.set_up_region("us-east-1", bucket="acme-training")
    machine = start(MINE, tags={"Owner": "ada"}, server=aws_server)
    other = start(HERS, tags={"Owner": "ada"}, server=aws_server)
    old = start("20261121-060000-cccc", hours_ago=3, server=aws_server)
    for run_id, instance in ((MINE, machine), (HERS, other)):
        schedule(run_id, instance)
    start_job(aws_server, f"{MINE}-a2", hours_ago=0.1)
    start_job(aws_server, f"{HERS}-a2", hours_ago=0.1)

    assert cloud("reap", "--run", MINE) == 2
    assert f"{machine} of run {MINE}, owner ada: " in capsys.readouterr().err
    report = reaped(capsys, "--run", MINE, "--dry-run")
    kinds = ("instance", "job", "schedule")
    done = {kind: [(each[kind], each["done"]) for each in report[f"{kind}s"]] for kind in kinds}
    assert done == {
        "instance": [(machine, "to terminate")],
        "job": [(f"{MINE}-a2", "to stop")],
        "schedule": [(f"fastlaunch-{MINE}-a1", "to delete")],
    }
    assert states(aws_server)[machine] == "running"

    reaped(capsys, "--run", MINE, "--yes")
    assert states(aws_server) == {machine: "shutting-down", other: "running", old: "running"}
    assert aws_server.training_jobs.job(f"{MINE}-a2").status == "Stopping"
    assert aws_server.training_jobs.job(f"{HERS}-a2").status == "InProgress"
    assert scheduled() == [f"fastlaunch-{HERS}-a1"]


def test_a_schedule_stays_for_a_machine_that_ec2_does_not_show_yet(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    machine = start(MINE, server=aws_server)
    schedule(MINE, machine)
    schedule(MINE, "i-0123", suffix="-1", at=datetime.now(UTC))
    reaped(capsys, "--run", MINE, "--yes")
    assert states(aws_server) == {machine: "shutting-down"}
    assert len(scheduled()) == 2


def test_one_ends_ones_own_and_nobody_elses(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    aws()._identity = None
    me = aws().identity().owner
    mine = start(MINE, tags={"Owner": me}, server=aws_server)
    hers = start(HERS, tags={"Owner": f"{me}-too"}, server=aws_server)
    nobodys = start("20261121-090000-cccc", server=aws_server)
    foreign = start("20261121-090000-dddd", tags={"Owner": me, "fastlaunch:attempt": "x"}, server=aws_server)
    for run_id, instance in ((MINE, mine), (HERS, hers)):
        schedule(run_id, instance)
    aws_server.set_up_region("us-east-1", bucket="acme-training")
    for run_id, owner in ((MINE, me), (HERS, f"{me}-too")):
        start_job(aws_server, f"{run_id}-a2", hours_ago=0.1, more_tags={"Owner": owner})

    listed = {each["instance"]: each["owner"] for each in reaped(capsys)["instances"]}
    assert listed == {mine: me, hers: f"{me}-too", nobodys: None, foreign: me}
    within = {each["instance"]: each["done"] for each in reaped(capsys, "--mine", "--yes")["instances"]}
    assert within == {mine: "left", foreign: "left"}
    assert cloud("reap", "--mine", "--now") == 2
    assert cloud("reap", "--mine", "--now", "--dry-run") == 0
    assert set(states(aws_server).values()) == {"running"}

    reaped(capsys, "--mine", "--now", "--yes")
    assert states(aws_server) == {
        **{mine: "shutting-down", hers: "running"},
        **{nobodys: "running", foreign: "running"},
    }
    jobs = {job.name: job.status for job in aws_server.training_jobs.live()}
    assert jobs == {f"{MINE}-a2": "Stopping", f"{HERS}-a2": "InProgress"}
    assert scheduled() == [f"fastlaunch-{HERS}-a1"]


@pytest.mark.parametrize("argv", [["--now"], ["--run", "*"], ["--run", f"{MINE}-a1"]])
def test_what_would_end_everybodys_or_nobodys_machines_is_refused(
    argv: list[str], aws_server: "MotoServer"
) -> None:
    machine = start(server=aws_server)
    assert cloud("reap", *argv, "--yes") == 2
    assert states(aws_server) == {machine: "running"}
