"""`fastlaunch status`, `logs` and `cancel` for runs on AWS."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from cloud_commands import aws, cloud
from cloud_runs import add_rows, note_start, set_up, start_run

from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

if TYPE_CHECKING:
    from cloud_runs import CloudRun
    from moto_server import MotoServer


def started(server: "MotoServer", *recipes: str, minutes_ago: float = 10.0) -> "CloudRun":
    with open_ledger(load_settings()) as ledger:
        return start_run(ledger, server, recipes=recipes or ("bf16",), minutes_ago=minutes_ago)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cloud(*argv) == 0
    return capsys.readouterr().out


def status(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(told(capsys, "status", "--output", "json"))["runs"]
    return runs


def test_status_tells_what_a_run_does_where_and_at_what_cost(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    out = told(capsys, "status")
    # Ten minutes at $60 an hour, of 60 minutes and 10 more at most.
    in_a_line = " ".join(out.split())
    assert "waiting for the machine to boot; attempt 1 in us-east-1a; $10.0" in in_a_line
    assert "so far, at most $70.00" in out
    run.say("boot.json")
    assert "pulling the image and starting" in told(capsys, "status")
    run.record(run.run_ids[0], steps=20, status=None)
    (found,) = status(capsys)
    assert found["doing"].startswith("step 20/20")
    assert found["max_cost_usd"] == pytest.approx(70.0)
    assert found["attempts"][0]["instance_id"] == run.instance_id
    run.end()
    (found,) = status(capsys)
    assert (found["doing"], found["cost_is_final"]) == (None, True)
    assert found["cost_usd"] == pytest.approx(10.0, abs=1)


@pytest.mark.slow
def test_status_of_many_runs_asks_ec2_a_few_times(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    import moto_gaps

    num_runs = 500
    site, now = set_up(aws_server), datetime.now(UTC)
    tags = [{"Key": "fastlaunch:run", "Value": "all-of-them"}]
    instances = aws().run_instances(
        "us-east-1",
        {
            "ImageId": moto_gaps.machine_image_id("us-east-1"),
            "InstanceType": "p5.48xlarge",
            "MinCount": num_runs,
            "MaxCount": num_runs,
            "ClientToken": "all-of-them",
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
        },
    )
    with open_ledger(load_settings()) as ledger, ledger.transaction():
        for instance in instances:
            attempt_id, _, _ = add_rows(ledger, site)
            note_start(ledger, attempt_id, instance.id, now)
    before = aws_server.counts()
    assert len(status(capsys)) == num_runs
    asked = aws_server.counts() - before
    ec2 = {action: n for action, n in asked.items() if action.startswith("Describe")}
    assert 1 <= sum(ec2.values()) <= 5, asked
    assert sum(asked.values()) <= 60, asked


def test_logs_are_the_nodes_until_the_run_has_its_own(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    assert cloud("logs") == 2
    assert "has no log yet" in capsys.readouterr().err
    run.upload("node-0/log.txt.000000000000", b"pulling the image\n")
    assert told(capsys, "logs", run.run_ids[0]) == "pulling the image\n"
    run.upload(f"node-0/{run.run_ids[0]}/log.txt.000000000000", b"step 1\n")
    run.upload(f"node-0/{run.run_ids[0]}/log.txt.000000000007", b"step 2\n")
    assert told(capsys, "logs") == "step 1\nstep 2\n"


def test_logs_are_followed_until_the_run_ends(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    own = f"node-0/{run.run_ids[0]}/log.txt"
    run.upload("node-0/log.txt.000000000000", b"pulling the image\n")
    waited = 0

    def sleep(_: float) -> None:
        nonlocal waited
        waited += 1
        if waited == 1:
            run.upload("node-0/log.txt.000000000018", b"starting\n")
        elif waited == 2:
            run.upload(f"{own}.000000000000", b"step 1\n")
        elif waited == 3:
            run.upload(f"{own}.000000000007", b"done\n")
            run.record(run.run_ids[0], steps=20)
            run.end()
        assert waited < 10

    assert cloud("logs", "-f", sleep=sleep) == 0
    out, err = capsys.readouterr()
    assert out == "pulling the image\nstarting\nstep 1\ndone\n"
    assert err.endswith("next: fastlaunch compare\n")


def test_cancel_says_that_all_runs_of_the_machine_stop(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server, "bf16", "fp32")
    first, second = run.run_ids
    assert cloud("cancel", first) == 0
    out, err = capsys.readouterr()
    assert f"stopped as well: {second}" in err
    assert out == f"{first} is cancelled\n"
    assert aws_server.instance(run.instance_id).state == "terminated"
    assert [(one["state"], one["reason"]) for one in status(capsys)] == [
        ("cancelled", "stopped by fastlaunch cancel before it started")
    ] * 2


def test_status_goes_on_where_aws_does_not_answer(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    started(aws_server)
    aws_server.refuse("DescribeInstances", "UnauthorizedOperation")
    assert cloud("status") == 0
    out, err = capsys.readouterr()
    assert "1 run: 1 running." in out
    assert "shown as they were" in err
