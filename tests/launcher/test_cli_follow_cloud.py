"""`fastlaunch status`, `logs`, `cancel` and `collect` for runs on AWS."""

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


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cloud(*argv) == 0
    return capsys.readouterr().out


def status(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(output(capsys, "status", "--output", "json"))["runs"]
    return runs


def test_status_shows_what_a_run_does_where_and_at_what_cost(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    out = output(capsys, "status")
    # Ten minutes at $60 an hour. At most, as planned, 60 minutes and 10 more at $55.04.
    in_a_line = " ".join(out.split())
    assert "waiting for the machine to boot; attempt 1 in us-east-1a; $10.0" in in_a_line
    assert "so far, at most $64.21" in " ".join(out.split())
    run.say("boot.json")
    assert "pulling the image and starting" in output(capsys, "status")
    run.record(run.run_ids[0], steps=20, status=None)
    run.upload("node-0/gpu-use.txt.000000000000", b"93%\n")
    (found,) = status(capsys)
    assert found["gpu_use"] == 0.93
    assert found["doing"].startswith("step 20/20")
    assert found["max_cost_usd"] == pytest.approx(64.2133333)
    assert found["attempts"][0]["instance_id"] == run.instance_id
    run.end()
    (found,) = status(capsys)
    assert (found["doing"], found["cost_is_final"]) == (None, True)
    assert found["cost_usd"] == pytest.approx(10.0, abs=1)


def test_what_ended_on_aws_is_shown_for_a_day_beside_later_submissions(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(aws_server)
    later = started(aws_server, minutes_ago=5.0)
    first.end()
    # Also by the look after the one that noticed it.
    for _ in range(2):
        assert {run["id"]: run["state"] for run in status(capsys)} == {
            first.run_ids[0]: "lost",
            later.run_ids[0]: "running",
        }


def test_a_machine_over_its_time_is_an_alarm(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    # Of 60 minutes, and 10 more.
    run = started(aws_server, minutes_ago=71)
    assert cloud("status") == 1
    shown = capsys.readouterr()
    assert "ALARM: over its time and its ceiling since" in " ".join(shown.out.split())
    assert shown.err.endswith("next: fastlaunch reap --region us-east-1\n")
    assert cloud("status", "--output", "json") == 1
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["alarm"].startswith("over its time")
    assert (found["attempts"][0]["look"], found["attempts"][0]["account"]) == ("seen", "123456789012")
    run.end()
    assert [each["alarm"] for each in status(capsys)] == [None]


def test_a_machine_that_is_not_shown_is_an_alarm(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server, minutes_ago=30)
    assert cloud("status") == 0
    aws_server.forget(run.instance_id)
    capsys.readouterr()
    assert cloud("status") == 1
    assert "whether it lives is unknown" in " ".join(capsys.readouterr().out.split())
    with open_ledger(load_settings()) as ledger:
        (attempt,) = ledger.attempts_of(run.run_ids[0])
    assert len(attempt.absences) == 1 and attempt.ended_at is None


@pytest.mark.slow
def test_status_of_many_runs_asks_ec2_a_few_times(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    import moto_gaps

    num_runs = 200
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
    assert "has no log" in capsys.readouterr().err
    run.upload("node-0/log.txt.000000000000", b"pulling the image\n")
    assert output(capsys, "logs", run.run_ids[0]) == "pulling the image\n"
    run.upload(f"node-0/{run.run_ids[0]}/log.txt.000000000000", b"step 1\n")
    run.upload(f"node-0/{run.run_ids[0]}/log.txt.000000000007", b"step 2\n")
    assert output(capsys, "logs") == "step 1\nstep 2\n"


def test_logs_do_not_steer_the_terminal_unless_asked_for_raw(
    aws_server: "MotoServer", capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = started(aws_server)
    pieces = ["\x1b[31mloss\x1b[0m \x1b]0;mine\x07 1%\r2%\r\nµ".encode(), b"\xff", b"s\n"]
    # A character may be cut by the end of what was uploaded.
    body = b"".join(pieces)
    cut = body.index("µ".encode()) + 1
    name = f"node-0/{run.run_ids[0]}/log.txt"
    run.upload(f"{name}.{0:012d}", body[:cut])

    def sleep(_: float) -> None:
        run.upload(f"{name}.{cut:012d}", body[cut:])
        run.record(run.run_ids[0], steps=20)
        run.end()

    capfdbinary.readouterr()
    assert cloud("logs", "-f", sleep=sleep) == 0
    assert capfdbinary.readouterr().out.decode() == "loss ^[]0;mine^G 1%\n2%\nµ\ufffds\n"
    assert cloud("logs", "--raw") == 0
    assert capfdbinary.readouterr().out == body


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


def test_cancel_names_the_other_runs_of_the_machine_and_asks(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server, "bf16", "fp32")
    first, second = run.run_ids
    asked: list[str] = []

    def refuse(question: str) -> bool:
        asked.append(capsys.readouterr().err)
        return False

    assert cloud("cancel", first, ask=refuse) == 2
    assert len(asked) == 1 and second in asked[0]
    assert aws_server.instance(run.instance_id).state == "running"
    # Where there is nobody to ask, what costs is stopped.
    assert cloud("cancel", first) == 0
    out, err = capsys.readouterr()
    assert second in err and out == f"{first} is cancelled\n"
    assert aws_server.instance(run.instance_id).state == "terminated"
    assert [(each["state"], each["reason"]) for each in status(capsys)] == [
        ("cancelled", "stopped by fastlaunch cancel before it started")
    ] * 2


def test_a_run_that_ended_comes_home_whole(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    (run_id,) = run.run_ids
    run.say("boot.json", lifecycle="on-demand", zone="us-east-1a")
    run.record(run_id, steps=20)
    run.upload(f"node-0/{run_id}/log.txt.000000000000", b"Traceback\n  all of it\n")
    run.upload("node-0/log.txt.000000000000", b"pulled\n")
    run.end()
    assert cloud("status", run_id) == 0
    capsys.readouterr()
    assert cloud("runs", "show", run_id, "--output", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == []
    assert report["state"] == "completed" and report["step_time_s"]
    (attempt,) = report["attempts"]
    assert (attempt["instance_id"], attempt["pull_s"]) == (run.instance_id, 60.0)
    assert attempt["billed_seconds"] == pytest.approx(600, abs=60)
    assert attempt["own_seconds"] == 300
    assert attempt["cost_usd"] == pytest.approx(10.0, abs=1)
    home = load_settings().home / "runs" / run_id
    assert len(list(home.glob("rank-*.jsonl"))) == 8
    assert (home / "log.txt").read_text() == "Traceback\n  all of it\n"
    # It compares like a run on this machine.
    assert cloud("compare", run_id) == 0


def test_a_bucket_that_refuses_is_named(aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]) -> None:
    (run_id,) = started(aws_server).run_ids
    aws_server.refuse("ListObjectsV2", "AccessDenied", status=403)
    assert cloud("status", run_id) == 3
    assert "AccessDenied" in capsys.readouterr().err
