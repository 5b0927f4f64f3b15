"""`fastlaunch submit --instance`: dry runs, what is refused, and what is asked before money is spent."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_train.launcher import fastlaunch

from fastlaunch.core.settings import load_settings
from fastlaunch_train.run.options import parse_options

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
DRY = ("submit", "--dry-run", "--instance", "p5.48xlarge")
CONFIG = """
aws:
  us-east-1:
    bucket: acme-training
    instance_profile: fastlaunch-node
    security_groups: [sg-0123]
    subnets: {us-east-1a: subnet-0a, us-east-1b: subnet-0b}
"""


@pytest.fixture
def configured(isolated: Path) -> Path:
    """The config file, with everything that a job in us-east-1 uses."""
    config = isolated.parent / "config.yaml"
    config.write_text(CONFIG)
    return config


def plan_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON that a dry run writes to stdout."""
    assert fastlaunch(*DRY, *argv, "--output", "json") == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is told on stderr of a command that is refused before anything is written."""
    assert fastlaunch(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert not load_settings().home.exists()
    return err


def test_dry_run_is_one_object_with_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(capsys, "--recipe", "te-fp8")
    assert list(plan) == [
        *("backend", "operation", "request", "placeholders"),
        *("max_cost_usd", "usd_per_hour", "price_as_of", "region", "objects"),
    ]
    assert (plan["backend"], plan["operation"], plan["region"]) == ("ec2", "RunInstances", "us-east-1")
    assert plan["placeholders"] == [
        *("ami-id", "bucket", "code-sha256", "image-digest", "instance-profile", "root-device", "run-id"),
        "runs-sha256",
    ]
    # Known answer: (2 h + 10 min) at $55.04.
    assert plan["max_cost_usd"] == pytest.approx(119.2533333)
    assert (plan["usd_per_hour"], plan["price_as_of"]) == (55.04, "2026-07-20")
    request = plan["request"]
    assert (request["InstanceType"], request["ImageId"]) == ("p5.48xlarge", "<ami-id>")
    assert request["UserData"].startswith("#!/bin/bash\n")
    (run,) = run_list(plan)["runs"]
    words = "--workload vit-huge --recipe te-fp8 --batch-size 64 --steps 200"
    assert " ".join(run["arguments"]).startswith(words)
    assert run_list(plan)["image"].endswith("dkr.ecr.us-east-1.amazonaws.com/pytorch@<image-digest>")


def run_list(plan: Any) -> Any:
    """What the nodes are to do."""
    (text,) = [one["text"] for one in plan["objects"] if one["text"]]
    return json.loads(text)


OWN_DATA = ("--data", "folder:/opt/data/acl Imdb's $HOME", "--model", "/opt/models/distilbert;1")
OWN_RUN = ("--image", IMAGE, "--workload", "distilbert-imdb", *OWN_DATA, "--epochs", "3")


def test_data_in_ones_own_image_are_named_in_the_request_to_ec2(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = run_list(plan_of(capsys, *OWN_RUN))["runs"]
    words = run["arguments"]
    for option, value in zip(OWN_DATA[::2], OWN_DATA[1::2], strict=True):
        assert words[words.index(option) + 1] == value


def test_data_in_ones_own_image_are_named_in_the_request_to_sagemaker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(capsys, "--instance", "ml.p5.48xlarge", "--backend", "sagemaker", *OWN_RUN)
    (run,) = run_list(plan)["runs"]
    asked = parse_options([*run["arguments"], "--output", "out"])
    assert (asked.data, asked.model, asked.epochs) == (OWN_DATA[1], OWN_DATA[3], 3)
    assert run["run_id"] == "<run-id>"


def test_the_cost_is_the_dearest_candidates_and_the_request_the_firsts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(capsys, "--instance", "g5.48xlarge,p5en.48xlarge,p5.48xlarge", "--max-hours", "50min")
    assert plan["request"]["InstanceType"] == "g5.48xlarge"
    assert plan["usd_per_hour"] == 16.288
    assert plan["max_cost_usd"] == pytest.approx(63.296)


def test_what_is_left_out_does_not_spoil_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch(*DRY, "--region", "eu-north-1,us-east-1", "--output", "json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["region"] == "us-east-1"
    assert err.startswith("left out: p5.48xlarge in eu-north-1: no ec2 on-demand price")


def test_settings_and_options_fill_the_request(capsys: pytest.CaptureFixture[str], configured: Path) -> None:
    plan = plan_of(capsys, "--image", IMAGE, "--repeats", "2")
    assert plan["placeholders"] == ["ami-id", "root-device", "run-id", "run-id-2", "runs-sha256"]
    assert plan["request"]["SubnetId"] == "subnet-0a"
    assert plan["request"]["SecurityGroupIds"] == ["sg-0123"]
    assert plan["request"]["IamInstanceProfile"] == {"Name": "fastlaunch-node"}
    assert "s3://acme-training/fastlaunch/runs/<run-id>/attempt-1" in plan["request"]["UserData"]
    typed = ("--bucket", "other", "--instance-profile", "role", "--security-group", "sg-9")
    subnets = ("--subnet", "us-east-1c=subnet-0c", "--subnet", "us-east-1a=subnet-9a")
    plan = plan_of(capsys, "--image", IMAGE, *typed, *subnets)
    assert plan["request"]["SubnetId"] == "subnet-0c"
    assert plan["request"]["SecurityGroupIds"] == ["sg-9"]
    assert plan["request"]["IamInstanceProfile"] == {"Name": "role"}
    assert "s3://other/" in plan["request"]["UserData"]


def test_spot_is_asked_for_with_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    spot = ("--purchase", "spot", "--checkpoint-every", "50")
    market = plan_of(capsys, *spot)["request"]["InstanceMarketOptions"]
    assert market["MarketType"] == "spot" and "MaxPrice" not in market["SpotOptions"]
    plan = plan_of(capsys, *spot, "--max-price", "$20", "--instance", "p5e.48xlarge", "--region", "us-east-2")
    assert plan["request"]["InstanceMarketOptions"]["SpotOptions"]["MaxPrice"] == "20"
    assert plan["max_cost_usd"] == pytest.approx(43.3333333)
    assert plan["region"] == "us-east-2"
    (run,) = run_list(plan)["runs"]
    assert "--checkpoint-every 50" in " ".join(run["arguments"])


def test_dry_run_for_people_is_readable(capsys: pytest.CaptureFixture[str], configured: Path) -> None:
    argv = ("--instance", "p5.48xlarge,p5en.48xlarge", "--region", "us-east-1,eu-north-1")
    assert fastlaunch(*DRY, *argv, "--recipe", "bf16,te-fp8", "--repeats", "2") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == (
        "bf16, 2 times; te-fp8, 2 times: vit-huge at batch 64 for 200 steps, one run after another, "
        "on one p5.48xlarge (8 x H100) in us-east-1a, on-demand."
    )
    assert "RunInstances in us-east-1:" in lines
    assert "    shutdown -P +120" in lines
    assert sum(line.startswith("      run_id: <run-id") for line in lines) == 4
    after = out.partition("Without capacity there, in this order:\n")[2].splitlines()
    assert after[:3] == [
        "  p5.48xlarge in us-east-1b",
        "  p5en.48xlarge in us-east-1a",
        "  p5en.48xlarge in us-east-1b",
    ]
    assert after[3] == "Left out:"
    assert after[4].startswith(
        "  p5.48xlarge in eu-north-1: no ec2 on-demand price of p5.48xlarge in eu-north"
    )
    assert after[-2] == (
        "Known when it is submitted: "
        "<ami-id>, <code-sha256>, <image-digest>, <root-device>, <runs-sha256>, <run-id> to <run-id-4>"
    )
    assert lines[-1] == (
        "Planned, not started: at most $137.14 of instance time: (2 h + 10 min) x $63.296/h, "
        "the dearest of p5.48xlarge, p5en.48xlarge; price as of 2026-07-20."
    )
    assert err == ""


def test_what_must_be_given_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch(*DRY) == 0
    assert (
        "To be given: <bucket>, <instance-profile>, by --bucket and --instance-profile "
        "or under `aws.us-east-1` in the config file"
    ) in capsys.readouterr().out.splitlines()


def test_the_request_for_people_is_the_one_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--purchase",
        "spot",
        "--max-price",
        "20.5",
        "--checkpoint-every",
        "50",
        "--set",
        "ddp_bucket_mb=25",
    )
    plan = plan_of(capsys, *argv)
    request = plan["request"]
    assert fastlaunch(*DRY, *argv) == 0
    text = capsys.readouterr().out.partition("RunInstances in us-east-1:\n")[2].partition("\nTo be given")[0]
    shown, _, listed = text.partition("\nWhat its machines do")
    assert yaml.safe_load(shown) == request
    assert yaml.safe_load(listed.partition("\n")[2]) == run_list(plan)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--instance", "p5.48xlarg"], "did you mean p5.48xlarge"),
        (["--instance", "p4d.24xlarge", "--recipe", "te-fp8"], "it runs on p5,"),
        (["--instance", "p5e.48xlarge"], "give --purchase spot --max-price USD"),
        (["--purchase", "spot"], "add --checkpoint-every 50"),
        (["--purchase", "capacity-block"], "does not say which capacity block"),
        (["--region", "us-east"], "is not the name of a region"),
        (["--region", "eu-north-1"], "price of p5.48xlarge in eu-north-1 is known"),
        (["--max-cost", "100"], "above --max-cost 100\n  give --max-cost 120, or --max-hours 99min"),
        (["--max-cost", "cheap"], "--max-cost: 'cheap' is not an amount of USD"),
        (["--max-price", "-1"], "--max-price: '-1' is not above 0"),
        (["--max-hours", "soon"], "--max-hours: 'soon' is not a duration"),
        (["--max-hours", "nan"], "--max-hours: 'nan' is not a time"),
        (["--max-hours", "0"], "--max-hours: '0' is not above 0"),
        (["--max-hours", "0.1"], "--max-hours is 6 min"),
        (["--data", "folder:."], "is on this machine"),
        (["--nproc", "4"], "one process per GPU"),
        (["--steps", "0"], "steps is 0"),
        (["--batch-size", "0"], "batch size is 0"),
        (["--subnet", "subnet-0a"], "is not ZONE=ID"),
        (
            ["--subnet", "us-west-2a=subnet-0a"],
            "us-west-2a is no zone of us-east-1\n  give --region us-west-2",
        ),
        (["--subnet", "us-east-1a=x", "--subnet", "us-east-1a=y"], "us-east-1a is given twice"),
        (["--region", "us-east-1,us-east-2", "--bucket", "b"], "--bucket belongs to one region"),
        (["--region", "us-east-1,us-east-2", "--security-group", "b"], "--security-group belongs to one"),
        (["--bucket", "s3://acme/runs"], "for us-east-1, `bucket` is 's3://acme/runs': a name without s3://"),
        (["--security-group", "default"], "an id such as sg-0a1b2c, not a name"),
        (["--image", "pytorch:latest"], "is not an image by its digest"),
        (["--base-image", "pytorch:0.1"], "0.1"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_what_is_wrong_is_told_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str, more: list[str]
) -> None:
    assert told in refusal(capsys, "submit", "--instance", "p5.48xlarge", *argv, *more)


def test_without_a_place_both_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "submit", "--recipe", "te-fp8")
    assert "type: fastlaunch submit --recipe te-fp8 --local\n" in err
    assert "fastlaunch submit --recipe te-fp8 --instance p5.48xlarge\n" in err


def test_ec2_without_an_instance_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(capsys, "submit", "--backend", "ec2")
    assert "type: fastlaunch submit --backend ec2 --instance p5.48xlarge" in err


@pytest.mark.parametrize(
    "argv",
    [["--detach"], ["--max-cost", "5"], ["--purchase", "spot"], ["--subnet", "a=b"], ["--max-hours", "3"]],
)
def test_what_a_run_here_would_not_heed_is_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    err = refusal(capsys, "submit", "--local", *argv)
    assert err == f"error: {argv[0]} is for AWS, and this trains here\n  leave {argv[0]} out\n"


def test_the_same_command_with_local_is_its_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--instance",
        "p5.48xlarge,p5en.48xlarge",
        "--purchase",
        "spot",
        "--max-hours",
        "1",
        "--steps",
        "20",
    )
    assert fastlaunch("submit", "--local", *argv) == 0
    assert "rehearsing for p5.48xlarge on this machine" in capsys.readouterr().err


def dry_run(*argv: str, code: str = "pass") -> subprocess.CompletedProcess[str]:
    """`fastlaunch submit --dry-run` as its own process; `code` runs after it, before it exits."""
    text = (
        "import sys; asked = []; sys.addaudithook("
        "lambda event, args: event.startswith(('socket.', 'subprocess.')) and asked.append(event));"
        " from fastlaunch.cli.main import run;"
        f" result = run({[*DRY, *argv]!r}); {code}; sys.exit(result)"
    )
    # Neither credentials nor AWS settings, and no folder with docker, git or anything else in it.
    environment = {name: value for name, value in os.environ.items() if name.startswith("FASTLAUNCH_")}
    environment |= {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/nonexistent"}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )


def test_dry_run_needs_nothing_and_is_the_same_twice() -> None:
    first, second = dry_run("--output", "json"), dry_run("--output", "json")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["request"]["InstanceType"] == "p5.48xlarge"


def test_dry_run_imports_nothing_that_reaches_aws_and_runs_and_opens_nothing() -> None:
    done = dry_run(
        code="print('events', *asked, 'loaded', *sorted({name.partition('.')[0] for name in sys.modules}))",
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert loaded[:2] == ["events", "loaded"] and "fastlaunch" in loaded
    assert not {"boto3", "botocore", "urllib3", "torch", "numpy", "sqlite3", "rich"} & set(loaded)


OLDER = """
schema: 1
accelerators:
  T4: {memory_gib: 16, bandwidth_tb_per_s: 0.3, compute_capability: "7.5", peak_tflops: {fp16: 65},
    formats: [fp32, fp16], device_names: [Tesla T4], source: somebody's own}
instances:
  g4dn.xlarge: {accelerator: T4, num_accelerators: 1, vcpus: 4, memory_gib: 16, network_gbps: 25,
    num_network_cards: 1, num_efa_interfaces: 0, local_nvme_gb: 125, purchase_options: [on-demand],
    source: somebody's own}
prices:
  - {instance: g4dn.xlarge, service: ec2, region: us-east-1, usd_per_hour: 0.526, as_of: 2026-01-01,
    source: somebody's own}
"""


def test_bf16_on_a_gpu_that_emulates_it_is_told_before_it_is_paid_for(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (isolated.parent / "prices.yaml").write_text(OLDER)
    (isolated.parent / "config.yaml").write_text(f"prices: {isolated.parent / 'prices.yaml'}\n")
    argv = ("submit", "--dry-run", "--instance", "g4dn.xlarge", "--workload", "vit-tiny", "--repeats", "2")
    assert fastlaunch(*argv, "--recipe", "bf16,fp16") == 0
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: "))
    assert warning.startswith("warning: recipe bf16: T4 emulates bf16 with compute capability 7.5")
    assert fastlaunch(*argv, "--recipe", "fp16") == 0
    assert "warning" not in capsys.readouterr().err


def test_a_base_image_too_old_for_blackwell_is_refused_there(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--recipe", "te-fp8-block", "--base-image", "2.8", "--dry-run")
    err = refusal(capsys, "submit", "--instance", "p6-b200.48xlarge", *argv)
    assert "recipe te-fp8-block cannot run in pytorch-training:2.8.0" in err
    assert "give --base-image 2.13.0 or" in err
    assert fastlaunch("submit", "--instance", "p5.48xlarge", *argv) == 0
