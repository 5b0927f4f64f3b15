"""`fastlaunch collect`: what is new comes home, and what is missing is told with the reason."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from cloud_commands import aws, cloud
from cloud_runs import BUCKET, start_run

from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

if TYPE_CHECKING:
    from cloud_runs import CloudRun
    from moto_server import MotoServer


def started(server: "MotoServer", *recipes: str) -> "CloudRun":
    with open_ledger(load_settings()) as ledger:
        return start_run(ledger, server, recipes=recipes or ("bf16",))


def collected(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cloud("collect", *argv, "--output", "json") == code
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return runs


def test_a_run_that_ended_comes_home_whole(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    (run_id,) = run.run_ids
    run.say("boot.json", lifecycle="on-demand", zone="us-east-1a")
    run.record(run_id, steps=20)
    run.upload(f"node-0/{run_id}/log.txt.000000000000", b"Traceback\n  all of it\n")
    run.upload("node-0/log.txt.000000000000", b"pulled\n")
    aws().put_object(
        "us-east-1", BUCKET, f"fastlaunch/runs/{run_id}/checkpoints/step-00000010.pt", b"weights"
    )
    run.end()
    (told,) = collected(capsys)
    assert told["missing"] == []
    assert (told["state"], told["num_ranks"], len(told["records"])) == ("completed", 8, 8)
    assert told["checkpoints"]["step"] == 10
    (attempt,) = told["attempts"]
    assert (attempt["instance_id"], attempt["pull_s"]) == (run.instance_id, 60.0)
    assert attempt["billed_seconds"] == pytest.approx(600, abs=60)
    assert attempt["own_seconds"] == 300
    assert told["cost_usd"] == pytest.approx(10.0, abs=1)
    home = load_settings().home / "runs" / run_id
    assert (home / "log.txt").read_text() == "Traceback\n  all of it\n"
    # It compares like a run on this machine.
    assert cloud("compare", run_id) == 0


def test_a_run_under_way_comes_as_far_as_it_has_come(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server, "bf16", "fp32")
    first, second = run.run_ids
    run.say("boot.json")
    run.record(first, steps=20, status=None)
    under_way, waiting = collected(capsys)
    assert under_way["missing"][0].startswith("under way: step ")
    assert under_way["num_ranks"] == 8
    assert (waiting["id"], waiting["num_ranks"]) == (second, 0)
    before = aws_server.counts()
    collected(capsys)
    # What is here is not fetched again: nothing but listings, and the two objects that may still come.
    assert (aws_server.counts() - before)["GetObject"] == 0


def test_what_comes_after_the_end_is_measured(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    (run_id,) = run.run_ids
    run.say("boot.json")
    run.end(outcome="failed")
    assert "no log" in collected(capsys)[0]["missing"]
    run.record(run_id, steps=20)
    collected(capsys)
    with open_ledger(load_settings()) as ledger:
        summary = ledger.get(run_id).summary
    assert summary is not None and summary.num_steps == 20
    assert (summary.startup.boot_s, summary.startup.pull_s) == (40.0, 20.0)


def test_a_bucket_that_refuses_is_named(aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]) -> None:
    started(aws_server)
    aws_server.refuse("ListObjectsV2", "AccessDenied", status=403)
    (told,) = collected(capsys, code=3)
    assert any("AccessDenied" in why for why in told["missing"])


def test_the_report_for_people(aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]) -> None:
    assert cloud("collect") == 0
    assert capsys.readouterr().out == "No runs on AWS fit.\n"
    run = started(aws_server)
    run.say("boot.json", lifecycle="on-demand")
    assert cloud("collect", run.run_ids[0]) == 0
    out = capsys.readouterr().out
    assert f"attempt 1   p5.48xlarge {run.instance_id} in us-east-1a (on-demand): $10.0" in out
    assert "0 of 1 run complete" in out
