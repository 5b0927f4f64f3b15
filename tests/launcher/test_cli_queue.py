"""`--queue` over the wire: put into a queue of AWS Batch, looked at, cancelled, reaped; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from cloud_commands import cloud, configure
from moto_server import MotoServer
from test_cli_submit_nodes import IMAGE

from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import Run, open_ledger

INSTANCE = ("--instance", "ml.p5.48xlarge")
SUBMIT = ("submit", *INSTANCE, "--image", IMAGE, "--steps", "20", "--queue", "team", "--detach", "--yes")


@pytest.fixture
def account(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account with a queue whose instances are all in use, and a config file."""
    region = aws_server.set_up_region("us-east-1")
    aws_server.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 1
    configure(isolated, region, role=aws_server.training_jobs.role())
    aws_server.queues.add("team", num_instances=0)
    return aws_server


def runs() -> list[Run]:
    with open_ledger(load_settings()) as ledger:
        return ledger.select()


def changed(server: MotoServer, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(server.queues.queues["us-east-1", "team"], name, value)


def test_a_job_is_queued_started_followed_and_collected(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud(*SUBMIT, "--priority", "7") == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "on-demand, through queue team" in err and "at most $137.14 of SageMaker instance time" in err
    (sent,) = account.sent("SubmitServiceJob")
    payload = json.loads(sent.parameters["serviceRequestPayload"])
    (run,) = runs()
    assert payload["TrainingJobName"] == sent.parameters["clientToken"] == f"{run.id}-a1"
    assert sent.parameters["schedulingPriority"] == 7 and run.state is RunState.RUNNING
    assert account.sent("CreateTrainingJob") == [] and account.training_jobs.live() == []
    assert cloud("status") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "queued (RUNNABLE, position 1 in queue team)" in shown
    # Its turn comes.
    changed(account, num_instances=1)
    account.queues.settle()
    (job,) = account.training_jobs.live()
    assert job.request == {**payload, "TrainingJobName": job.name}
    account.training_jobs.move(job.name, "Downloading", "Training")
    account.training_jobs.write_log(job.name, "hello from the container")
    assert cloud("logs", run.id) == 0
    assert "hello from the container" in capsys.readouterr().out
    account.training_jobs.end(job.name, "Failed", reason="AlgorithmError: exit code: 1")
    # Batch notices it, and then we do.
    account.queues.settle()
    assert cloud("status", run.id) in (0, 1)
    (run,) = runs()
    assert run.state is RunState.FAILED and "AlgorithmError" in str(run.reason)
    assert cloud("runs", "show", run.id, "--output", "json") == 0
    (attempt,) = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))["attempts"]
    assert attempt["handle"]["training_jobs"] == [job.arn]
    assert attempt["handle"]["arn"] == account.queues.job(f"{run.id}-a1").arn


def test_cancel_and_reap_take_jobs_out_of_the_queue(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud(*SUBMIT) == 0
    assert cloud(*SUBMIT) == 0
    second, first = sorted(runs(), key=lambda run: run.id, reverse=True)
    assert cloud("cancel", first.id, "--yes") == 0
    assert account.queues.job(f"{first.id}-a1").status == "FAILED"
    capsys.readouterr()
    assert cloud("reap", "--dry-run", "--output", "json") == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert (job["job"], job["done"], job["cost_usd"]) == (f"{second.id}-a1", "left", 0.0)
    assert job["why"] == "it waits in queue team, which costs nothing"
    assert cloud("reap", "--run", second.id, "--yes") == 0
    assert account.queues.live() == [] and account.sent("StopTrainingJob") == []
    assert cloud("status") == 0
    assert {run.state for run in runs()} == {RunState.CANCELLED}


def test_who_may_not_look_into_queues_reaps_the_rest(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    account.refuse("DescribeJobQueues", "AccessDeniedException")
    assert cloud("reap", "--dry-run") == 0
    assert "AccessDenied" not in capsys.readouterr().err


def test_the_queue_takes_the_first_type_and_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--instance", "ml.p5.48xlarge,ml.p4d.24xlarge")
    assert cloud("submit", *both, "--queue", "team", "--image", IMAGE, "--dry-run") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "waiting in the queue for ml.p5.48xlarge in us-east-1 alone" in out
    assert "without capacity there" not in out


def test_the_dry_run_shows_the_request_to_batch(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*SUBMIT[:-2], "--dry-run", "--share", "vision", "--retries", "2")
    assert cloud(*argv) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "SubmitServiceJob in us-east-1" in out and "3 starts x (2 h + 10 min)" in out
    assert cloud(*argv, "--show", "request") == 0
    out = capsys.readouterr().out
    assert "  serviceRequestPayload:\n    TrainingJobName: <run-id>-a1\n" in out
    assert "  shareIdentifier: vision\n" in out
    assert cloud(*argv, "--output", "json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["operation"] == "SubmitServiceJob" and plan["max_cost_usd"] == pytest.approx(
        3 * 137.14, abs=0.1
    )


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--instance", "p5.48xlarge", "--queue", "team"), "--queue is for SageMaker"),
        ((*INSTANCE, "--priority", "1"), "--priority is for a queue of AWS Batch"),
        ((*INSTANCE, "--share", "vision"), "--share is for a queue of AWS Batch"),
        ((*INSTANCE, "--queue", "team", "--priority", "10000"), "AWS Batch takes 0 to 9999"),
        ((*INSTANCE, "--queue", "team", "--priority", "-1"), "-1"),
        ((*INSTANCE, "--queue", "team", "--retries", "10"), "AWS Batch takes 0 to 9"),
        ((*INSTANCE, "--queue", "team", "--share", "a/b"), "cannot be the name of a share"),
        ((*INSTANCE, "--queue", "arn:aws:batch:x"), "cannot be the name of a queue"),
        (("--local", "--queue", "team"), "--queue is for AWS"),
    ],
)
def test_what_no_queue_takes_is_refused_at_once(
    argv: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud("submit", *argv, "--dry-run") == 2
    assert part in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "argv", "part"),
    [
        ({}, ("--queue", "other"), "there is no queue other in us-east-1"),
        ({"kind": "ECS"}, (), "is for ECS jobs, not for training jobs"),
        ({"state": "DISABLED"}, (), "takes no jobs: it is DISABLED"),
        ({}, ("--share", "vision"), "has no fair-share policy"),
        ({"sharing": "fairsharePolicy"}, (), "add --share TEAM"),
        ({"sharing": "quotaSharePolicy"}, (), "quota-share policy"),
    ],
)
def test_a_queue_that_would_not_take_the_job_is_refused_before_anything_is_made(
    account: MotoServer,
    changes: dict[str, Any],
    argv: tuple[str, ...],
    part: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed(account, **changes)
    assert cloud(*SUBMIT, *argv) == 3
    assert part in " ".join(capsys.readouterr().err.split())
    assert account.sent("SubmitServiceJob") == [] and runs() == []
    assert cloud("doctor", *INSTANCE, "--queue", "team", *argv) == 3
    assert part in " ".join(capsys.readouterr().out.split())


def test_doctor_says_that_the_queue_is_there(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    changed(account, sharing="fairsharePolicy")
    argv = ("doctor", *INSTANCE, "--queue", "team", "--share", "vision", "--output", "json")
    cloud(*argv)
    (check,) = (one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "queue")
    assert (check["result"], check["message"]) == ("ok", "team takes training jobs, from share vision")


def test_a_sweep_puts_all_types_into_the_queue_at_once_within_one_budget(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("g5", "g6"):
        account.quotas["us-east-1", f"ml.{name}.xlarge for training job usage"] = 1
    types = ("--instance", "ml.g5.xlarge,ml.g6.xlarge", "--queue", "team", "--repeats", "1")
    argv = ("sweep", *types, "--image", IMAGE, "--steps", "20", "--yes")
    assert cloud(*argv, "--max-cost", "3") == 2
    assert "the queue gets all instance types at once" in " ".join(capsys.readouterr().err.split())
    assert account.sent("SubmitServiceJob") == []

    def end_all(seconds: float) -> None:
        # Both wait before either begins.
        if len(account.queues.live()) == 2:
            changed(account, num_instances=2)
            account.queues.settle()
        for job in account.training_jobs.live():
            account.training_jobs.end(job.name, "Failed", reason="AlgorithmError: exit code: 1")

    assert cloud(*argv, "--max-cost", "20", sleep=end_all) == 1
    payloads = [
        json.loads(sent.parameters["serviceRequestPayload"]) for sent in account.sent("SubmitServiceJob")
    ]
    assert {one["ResourceConfig"]["InstanceType"] for one in payloads} == {"ml.g5.xlarge", "ml.g6.xlarge"}
    assert len(account.training_jobs.jobs) == 2
