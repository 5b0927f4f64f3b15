"""`fastlaunch submit --instance` against an AWS on loopback: what is asked, told and sent, in which order."""

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from ec2_builders import catalogue
from fake_train.launcher import app_context
from fake_train.processes import runs
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.backends.validate import request_problems
from fastlaunch.catalog.container_images import training_base
from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.build import build_cloud_request
from fastlaunch.jobs.options import CloudOptions, SubmitOptions
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.placement.prepare import prepare, upload_code

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
#: With an image that holds the code there is nothing to fetch; detached, nothing to wait for.
SUBMIT = ("submit", "--instance", "g5.xlarge", "--image", IMAGE, "--steps", "20", "--detach")
#: For all tests, since making a client takes most of their time.
AWS = Aws(timeouts_s=(5, 20))
CHANGES = {"RunInstances", "TerminateInstances", "CreateTags", "CreateBucket", "PutObject"}


@pytest.fixture
def region(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account with all that jobs in us-east-1 need, and a config file that names it."""
    settings = aws_server.set_up_region("us-east-1")
    aws_server.quotas[("us-east-1", "L-DB2E81BA")] = 768
    aws_server.quotas[("us-east-1", "L-3819A6DF")] = 768
    subnets = dict(list(settings.subnets.items())[:2])
    config = {
        "bucket": settings.bucket,
        "instance_profile": settings.instance_profile,
        "security_groups": list(settings.security_groups),
        "subnets": subnets,
    }
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {"us-east-1": config}}))
    return aws_server


def fastlaunch(*argv: str, aws: Aws = AWS) -> int:
    """Exit code of the command in this process."""
    return run(list(argv), replace(app_context(*argv), connect=lambda: aws))


def changes(server: MotoServer) -> list[str]:
    """What was changed at AWS, in order: the actions, less the probe of the bucket."""
    return [
        sent.action
        for sent in server.sent()
        if sent.action in CHANGES and "doctor" not in str(sent.parameters.get("Key"))
    ]


def flat(parameters: dict[str, Any]) -> dict[str, str]:
    return {key: value for key, value in parameters.items() if key not in ("Action", "Version", "UserData")}


def test_a_machine_is_started_by_exactly_the_plan(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fastlaunch(*SUBMIT, "--recipe", "bf16,te-bf16", "--repeats", "2", "--yes") == 0
    out, err = capsys.readouterr()
    assert changes(region) == ["PutObject", "PutObject", "RunInstances"]
    (sent,) = region.sent("RunInstances")
    stored = runs()
    assert [run.recipe for run in stored] == ["bf16", "te-bf16", "te-bf16", "bf16"]
    assert {(run.backend, run.instance, run.state) for run in stored} == {
        ("ec2", "g5.xlarge", RunState.RUNNING)
    }
    with open_ledger(load_settings()) as ledger:
        (attempt,) = ledger.attempts_of(stored[0].id)
        plan = ledger.plan_of(attempt.id)
    assert sent.parameters["ClientToken"] == attempt.token == f"{stored[0].id}-a1"
    # What went over the wire is the plan that was noted before: nothing was added to it or lost.
    assert plan is not None
    assert sent.user_data() == plan.request["UserData"]
    assert plan.placeholders == () and request_problems(plan) == []
    assert {str(value) for value in leaves({**plan.request, "UserData": ""})} - {""} <= {
        *flat(sent.parameters).values()
    }
    assert sent.tags("volume")["fastlaunch:max-minutes"] == "120"
    (run_list,) = [one for one in plan.objects if one.text is not None]
    assert run_list.uri in sent.user_data()
    assert [run.id in str(run_list.text) for run in stored] == [True] * 4
    # Known answer: (2 h + 10 min) at $1.006.
    assert "at most $2.18 of instance time: (2 h + 10 min) x $1.006/h, g5.xlarge; price as of" in err
    assert "--detach: nobody will follow it; only its own timer ends what hangs" in err
    assert "no `scheduler_role` is in the config file for us-east-1" in err
    assert "without capacity there: g5.xlarge in us-east-1b" in err
    assert re.search(rf"^{stored[0].id} +bf16 +running", out, re.MULTILINE)
    assert err.splitlines()[-1] == f"next: fastlaunch logs -f {stored[0].id}"


def leaves(value: Any) -> list[Any]:
    """Everything in a request that is neither a mapping nor a list; true and false as they are sent."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [str(value).lower() if isinstance(value, bool) else value]


def test_json_output_is_one_object(region: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch(*SUBMIT, "--yes", "--output", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in data["runs"]] == ["running"]


def test_without_a_terminal_nothing_is_asked_of_anybody(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fastlaunch(*SUBMIT) == 2
    assert "add --yes to go ahead without being asked" in capsys.readouterr().err
    assert region.sent() == []
    assert not load_settings().home.exists()


@pytest.mark.parametrize(("answer", "code"), [("", 2), ("y", 0)])
def test_a_terminal_is_asked_after_the_ceiling_was_shown(region: MotoServer, answer: str, code: int) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fastlaunch", *SUBMIT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        _, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == code, err
    assert err.index("at most $2.18") < err.index("Start it? [y/N]")
    assert changes(region) == (["PutObject", "PutObject", "RunInstances"] if code == 0 else [])
    assert len(runs()) == (1 if code == 0 else 0)


def test_over_the_budget_nothing_is_asked_of_aws(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fastlaunch(*SUBMIT, "--yes", "--max-cost", "2") == 2
    assert "above --max-cost 2" in capsys.readouterr().err
    assert region.sent() == []


def test_without_quota_nothing_is_started(region: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    region.quotas[("us-east-1", "L-DB2E81BA")] = 0
    assert fastlaunch(*SUBMIT, "--yes") == 3
    err = capsys.readouterr().err
    assert "not enough quota: needs 4 vCPUs" in err and "L-DB2E81BA" in err
    assert changes(region) == [] and runs() == []


def test_what_cannot_be_resolved_is_left_out_by_name(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    # us-east-2 is not configured: no bucket, no profile.
    assert fastlaunch(*SUBMIT, "--yes", "--region", "us-east-2,us-east-1") == 0
    err = capsys.readouterr().err
    assert "left out: g5.xlarge in us-east-2: no bucket is named for us-east-2" in err
    assert [sent.region for sent in region.sent("RunInstances")] == ["us-east-1"]


def test_no_capacity_anywhere_exits_3_and_leaves_nothing_running(
    region: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    region.refuse("RunInstances", "InsufficientInstanceCapacity")
    assert fastlaunch(*SUBMIT, "--yes") == 3
    assert len(region.sent("RunInstances")) == 2
    assert region.instances("pending", "running") == []
    assert all(run.state.is_final for run in runs())


def test_spot_goes_out_as_spot_with_its_limit(region: MotoServer) -> None:
    region.spot_prices[("us-east-1", "g5.xlarge", "us-east-1a")] = 0.4
    argv = ("--purchase", "spot", "--max-price", "0.5", "--checkpoint-every", "5", "--yes")
    assert fastlaunch(*SUBMIT, *argv) == 0
    (sent,) = region.sent("RunInstances")
    spot = "InstanceMarketOptions.SpotOptions"
    assert sent.parameters["InstanceMarketOptions.MarketType"] == "spot"
    assert sent.parameters[f"{spot}.MaxPrice"] == "0.5"
    assert sent.parameters[f"{spot}.SpotInstanceType"] == "one-time"
    assert sent.parameters[f"{spot}.InstanceInterruptionBehavior"] == "terminate"


def test_without_credentials_that_is_told_first(
    region: MotoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert fastlaunch("submit", "--instance", "g5.xlarge", "--yes", aws=Aws()) == 3
    assert "credentials" in capsys.readouterr().err
    assert region.sent() == []
    # Nor were the wheels fetched of code that could not be stored.
    assert not (load_settings().home / "wheels").exists()


def test_the_code_is_stored_once_in_every_region_and_named_by_its_hash(region: MotoServer) -> None:
    base = training_base(None, today=NOW.date())
    digest = "sha256:" + "5" * 64
    region.images["us-east-1", "763104351884", base.repository, base.tag] = digest
    request = build_cloud_request(
        SubmitOptions(), CloudOptions(instances=("g5.xlarge",), regions=("us-east-1",)), catalogue=catalogue()
    )
    prepared = prepare(
        request,
        aws=AWS,
        settings=load_settings(),
        catalogue=catalogue(),
        now=NOW,
        commit="c0ffee",
        pins=(),
    )
    assert changes(region) == []
    assert len(prepared.placements) == 2 and prepared.bundle is not None
    upload_code(prepared, AWS)
    (stored,) = [sent for sent in region.sent("PutObject") if "/code/" in sent.parameters["Key"]]
    (site, *_) = prepared.placements
    assert site.code is not None
    assert stored.parameters["Key"] == site.code.key == f"fastlaunch/code/{prepared.bundle.sha256}.tar.gz"
    body = backend("s3", "aws").get_object(site.bucket, site.code.key).value
    assert hashlib.sha256(body).hexdigest() == site.code.sha256
    upload_code(prepared, AWS)
    # The second time S3 is asked to store it only if it is not there, and it is.
    assert [sent.status for sent in region.sent("PutObject") if "/code/" in sent.parameters["Key"]] == [
        200,
        412,
    ]
    assert site.code.commit == "c0ffee"
    assert site.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/{base.repository}@{digest}"
