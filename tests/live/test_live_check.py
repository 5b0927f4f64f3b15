"""The pieces of `make live-check`, which needs an account: its command lines, and its dry run on moto."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from cloud_commands import configure
from cloud_runs import BUCKET, CloudRun
from dry_run_plans import efa_plans, main, moved
from look import QUESTIONS
from server_client import server_client

from fastlaunch.catalog.container_images import training_base
from fastlaunch.cli.main import COMMANDS, fastlaunch
from fastlaunch.core.settings import RegionSettings

if TYPE_CHECKING:
    from moto_server import MotoServer

    from fastlaunch.aws.client import Aws

SCRIPT = Path(__file__).parent / "live_check.sh"
HERE = RegionSettings(
    bucket="acme",
    instance_profile="own-profile",
    security_groups=("sg-0own",),
    subnets={"us-east-1a": "subnet-0own"},
    placement_groups={"us-east-1a": "own-group"},
)


def played(folder: Path, *, fails: str = "") -> list[list[str]]:
    """The command lines that the script types, its programs being played; fails: a word of one that fails."""
    log, program = folder / "log", folder / "program"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\ncase "$*" in *{fails or "no-such-word"}*) exit 3;; esac\n'
    )
    program.chmod(0o755)
    environ = {"PATH": "/usr/bin:/bin", "PYTHON": str(program), "FASTLAUNCH": str(program)}
    ended = subprocess.run([SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) is (not fails), ended.stderr
    return [shlex.split(line) for line in log.read_text().splitlines()]


def test_its_command_lines_can_be_typed_and_all_that_costs_asks_first(tmp_path: Path) -> None:
    lines = played(tmp_path)
    assert [line[0] for line in lines if line[0] != "tests/live/look.py"] == [
        *("doctor", "doctor", "tests/live/dry_run_plans.py", "submit", "watch", "submit"),
        *("submit", "reap", "reap", "status", "reap"),
    ]
    for name, *argv in lines:
        if name == "tests/live/look.py":
            assert argv[0] in QUESTIONS
        if name in COMMANDS:
            command = fastlaunch.get_command(fastlaunch.make_context("fastlaunch", [name]), name)
            assert command is not None
            command.make_parser(command.context_class(command)).parse_args(argv)
    for line in lines:
        if line[0] == "submit":
            assert "--max-cost" in line and "--yes" not in line and "-y" not in line


def test_it_ends_where_something_fails(tmp_path: Path) -> None:
    assert played(tmp_path, fails="dry_run_plans")[-1] == ["tests/live/dry_run_plans.py"]


def test_where_something_fails_the_look_alike_is_ended(tmp_path: Path) -> None:
    assert played(tmp_path, fails="ml.g5.xlarge?--workload")[-1] == ["tests/live/look.py", "end"]


def train(server: "MotoServer", region: str, instance_id: str) -> None:
    """What a machine that does its runs uploads, and its end."""
    tags = {tag["key"]: tag["value"] for tag in server.instance(instance_id).get_tags()}
    if len(server.instances()) > 1 or "fastlaunch:output" not in tags:
        return
    bucket, _, prefix = tags["fastlaunch:output"].removeprefix("s3://").partition("/")
    assert bucket == BUCKET
    run_id = tags["fastlaunch:run"]
    node = CloudRun(
        attempt_id=1,
        token=f"{run_id}-a1",
        run_ids=(run_id,),
        instance_id=instance_id,
        prefix=prefix,
        server=server,
    )

    def live() -> None:
        # While the script looks at its timer and its tags.
        time.sleep(20)
        node.say("boot.json", instance_id=instance_id)
        record = {"world_size": 1, "batch_size": 8, "workload": "vit-tiny", "steps": 200}
        node.record(run_id, **record)
        node.end()

    Thread(target=live, daemon=True).start()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_on_moto_it_finds_all_that_it_looks_for(
    aws_server: "MotoServer", isolated: Path, tmp_path: Path
) -> None:
    """All but what moto has not: EFA's plans, and SageMaker's machine."""
    for quota in ("L-DB2E81BA", "L-3819A6DF"):
        aws_server.quotas["us-east-1", quota] = 768
    base = training_base(None, today=datetime.now(UTC).date())
    registry = ("us-east-1", "763104351884", base.repository, base.tag)
    aws_server.images[registry] = "sha256:" + "5" * 64
    configure(isolated, aws_server.set_up_region("us-east-1", bucket=BUCKET))
    aws_server.when_launched.append(partial(train, aws_server))
    command = f"exec {sys.executable} -m fastlaunch"
    fastlaunch, python = tmp_path / "fastlaunch", tmp_path / "python"
    skipped = "*ml.g5*) exit 0;;"
    fastlaunch.write_text(
        f'#!/bin/bash\ncase "$*" in {skipped} submit*) {command} "$@" --yes;; *) {command} "$@";; esac\n'
    )
    python.write_text(f'#!/bin/bash\ncase "$*" in *dry_run*) exit 0;; *) exec {sys.executable} "$@";; esac\n')
    for program in (fastlaunch, python):
        program.chmod(0o755)
    role = {"RoleArn": "arn:aws:iam::999999999999:role/ada", "RoleSessionName": "ada"}
    given = server_client(aws_server, "sts", "us-east-1").assume_role(**role)["Credentials"]
    logins = tmp_path / "credentials"
    logins.write_text(
        f"[other]\naws_access_key_id = {given['AccessKeyId']}\n"
        f"aws_secret_access_key = {given['SecretAccessKey']}\naws_session_token = {given['SessionToken']}\n"
    )
    environ = {
        **os.environ,
        "PYTHON": str(python),
        "FASTLAUNCH": str(fastlaunch),
        "OTHER_PROFILE": "other",
        "AWS_SHARED_CREDENTIALS_FILE": str(logins),
    }
    ended = subprocess.run([SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(aws_server.instances()) == 3 and not aws_server.instances("pending", "running")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck here")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


def test_a_plan_takes_the_accounts_names_and_nothing_else_changes() -> None:
    plans = dict(efa_plans())
    assert any("p5.48xlarge" in name for name in plans) and not any("block" in name for name in plans)
    for name, request in plans.items():
        asked = moved(request, here=HERE, zone="us-east-1a", ami="ami-0own")
        changed = {key for key in asked if asked[key] != request[key]}
        assert changed <= {"ImageId", "NetworkInterfaces", "IamInstanceProfile", "Placement", "UserData"}, (
            name
        )
        kinds = [one["InterfaceType"] for one in asked["NetworkInterfaces"]]
        assert kinds == [one["InterfaceType"] for one in request["NetworkInterfaces"]]
        assert not re.search(r"(subnet|sg)-0(?!own)", str(asked["NetworkInterfaces"]))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_plan_goes_out_as_a_dry_run_that_starts_nothing(
    aws: "Aws", aws_server: "MotoServer", isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = aws_server.set_up_region("us-east-1", bucket="acme")
    data: dict[str, Any] = {
        "bucket": here.bucket,
        "instance_profile": here.instance_profile,
        "security_groups": list(here.security_groups),
        "subnets": dict(here.subnets),
        "placement_groups": {zone: f"fastlaunch-{zone}" for zone in here.subnets},
    }
    config = isolated.parent / "config.yaml"
    config.write_text(yaml.safe_dump({"aws": {"us-east-1": data}}))
    assert main(aws) == 0
    told = capsys.readouterr().out.splitlines()
    plans = dict(efa_plans())
    assert len(told) == len(plans) > 3
    sent = aws_server.sent("RunInstances")
    assert len(sent) == sum("DryRunOperation" in line for line in told) > 3
    assert all(one.parameters["DryRun"] == "true" for one in sent)
    assert aws_server.instances() == []

    aws_server.refuse("RunInstances", "InvalidNetworkInterface.Something", "no", times=1)
    assert main(aws) == 1
    assert sum(line.startswith("REFUSED") for line in capsys.readouterr().out.splitlines()) == 1
