"""The pieces of `make live-check`, which needs an account: its command lines, and its dry run on moto."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from dry_run_plans import efa_plans, main, moved

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
    assert [line[0] for line in lines] == [
        *("doctor", "doctor", "tests/live/dry_run_plans.py", "submit", "submit", "status", "reap")
    ]
    for name, *argv in lines:
        if name in COMMANDS:
            command = fastlaunch.get_command(fastlaunch.make_context("fastlaunch", [name]), name)
            assert command is not None
            command.make_parser(command.context_class(command)).parse_args(argv)
    for line in lines:
        if line[0] == "submit":
            assert "--max-cost" in line and "--yes" not in line and "-y" not in line


def test_it_ends_where_something_fails(tmp_path: Path) -> None:
    assert played(tmp_path, fails="dry_run_plans")[-1] == ["tests/live/dry_run_plans.py"]


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
