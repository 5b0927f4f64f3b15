"""`fastlaunch submit --instance`: dry runs, and what is refused before anything is asked."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_summaries import LLAMA_8B, PLAIN, changed
from fake_train.launcher import fastlaunch

from fastlaunch.api.estimation import Estimate
from fastlaunch.api.estimation import estimate as estimate_here
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.summary import Interval

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
DRY = ("submit", "--dry-run", "--instance", "p5.48xlarge")
CONFIG = """
region: us-east-1
aws:
  us-east-1:
    bucket: acme-training
    instance_profile: fastlaunch-node
    security_groups: [sg-0123]
    subnets: {us-east-1a: subnet-0a, us-east-1b: subnet-0b}
"""


@pytest.fixture
def configured(isolated: Path) -> None:
    """A config file with everything that a job in us-east-1 uses."""
    (isolated.parent / "config.yaml").write_text(CONFIG)


def plan_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON that a dry run writes to stdout."""
    assert fastlaunch(*DRY, *argv, "--output", "json") == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def text_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The plan as it is printed for people."""
    assert fastlaunch("submit", "--dry-run", *argv) == 0
    return capsys.readouterr().out


def test_dry_run_is_one_object_with_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(capsys, "--recipe", "te-fp8")
    assert list(plan) == [
        *("backend", "operation", "request", "placeholders"),
        *("max_cost_usd", "usd_per_hour", "price_as_of", "region", "sunk_usd", "objects", "expected"),
    ]
    expected = plan["expected"]
    assert expected["usd"]["value"] > 0
    # Most of so short a run is boot and pull, which nobody measured: no range of the speed's tells about it.
    assert expected["assumed_s"]["boot"] + expected["assumed_s"]["pull"] > 0.9 * 480
    assert expected["hours"]["high"] is expected["usd"]["high"] is None
    assert (plan["backend"], plan["operation"], plan["region"]) == ("ec2", "RunInstances", "us-east-1")
    assert plan["placeholders"] == [
        *("ami-id", "bucket", "code-sha256", "image-digest", "instance-profile", "owner", "root-device"),
        *("run-id", "runs-sha256"),
    ]
    # Known answer: (2 h + 10 min) at $55.04, and at $31 for 672 h of the volume.
    assert plan["max_cost_usd"] == pytest.approx(119.2533333 + 130 / 60 * 31 / 672)
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


@pytest.mark.usefixtures("configured")
def test_settings_and_options_fill_the_request(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert plan["max_cost_usd"] == pytest.approx(43.3333333 + 130 / 60 * 31 / 672)
    assert plan["region"] == "us-east-2"
    (run,) = run_list(plan)["runs"]
    assert "--checkpoint-every 50" in " ".join(run["arguments"])


@pytest.mark.parametrize(
    ("recipe", "batch_size", "advice"),
    [("bf16", 64, "--batch-size 48"), ("bf16", 16, None), ("te-fp8", 256, "--batch-size 64")],
)
def test_a_batch_that_will_probably_not_fit_is_warned_of(
    recipe: str, batch_size: int, advice: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--instance", "g6.xlarge", "--recipe", recipe, "--batch-size", str(batch_size)]
    assert fastlaunch("submit", "--dry-run", *words) == 0
    err = capsys.readouterr().err
    assert ("does not fit in the memory of L4" in err) == (advice is not None)
    assert advice is None or advice in err


def test_a_model_that_will_not_fit_is_warned_of_with_what_would(
    capsys: pytest.CaptureFixture[str], sizes: dict[str, Any]
) -> None:
    sizes["hf-lora:llama-3.1-8b"] = LLAMA_8B
    words = ["--workload", "hf-lora:llama-3.1-8b", "--instance", "g6.xlarge", "--steps", "40"]
    words += ["--image", IMAGE]
    for batch in ([], ["--batch-size", "auto"]):
        assert fastlaunch("submit", "--dry-run", *words, *batch, "--recipe", "compile") == 0
        err = capsys.readouterr().err
        assert "does not fit in the memory of L4" in err
        assert "--recipe compile --set activation_checkpointing=block" in err and "--recipe nf4" in err
    assert fastlaunch("submit", "--dry-run", *words, "--recipe", "compile") == 0
    assert "expected: not known" in capsys.readouterr().out
    # Adapters of a high rank take more than what is left beside the frozen weights.
    wide = ("--recipe", "nf4", "--set", "activation_checkpointing=block", "--set-workload", "rank=512")
    assert fastlaunch("submit", "--dry-run", *words, *wide) == 0
    assert "does not fit in the memory of L4" in capsys.readouterr().err
    assert fastlaunch("submit", "--dry-run", *words, *wide[:4]) == 0
    assert "does not fit in the memory of L4" not in capsys.readouterr().err
    assert fastlaunch("submit", "--dry-run", *words, "--sequence-length", "512", "--output", "json") == 0
    shown = capsys.readouterr()
    assert "does not fit" not in shown.err
    (job,) = json.loads(shown.out)["expected"]["jobs"]
    assert job["tokens_per_s"]["value"] == pytest.approx(512 / job["step_time_s"])


def test_runs_with_generated_text_tell_the_speed_with_a_file_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "abc"}\n' * 50)
    words = ["--workload", "hf-lora:llama-3.1-8b", "--instance", "p5.4xlarge", "--steps", "40"]
    words += ["--sequence-length", "4096", "--image", IMAGE, "--output", "json"]
    steps = []
    for option in ([], ["--data", str(data)]):
        assert fastlaunch("submit", "--dry-run", *words, *option) == 0
        (job,) = json.loads(capsys.readouterr().out)["expected"]["jobs"]
        assert job["evidence"] == "same GPU"
        steps.append(job["step_time_s"])
    assert steps[0] == steps[1]


def topics(text: str) -> dict[str, str]:
    """What a dry run says, by topic."""
    parts = re.findall(r"^(\w+) +(.*\n(?: +.*\n)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in parts if name != "Planned"}


def cost_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    return topics(text_of(capsys, *DRY[2:], *argv))["cost"]


def test_the_expected_cost_is_that_of_estimate_with_its_evidence(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*argv: str) -> tuple[dict[str, Any], Estimate]:
        found = plan_of(capsys, *argv)["expected"]
        steps = int(argv[argv.index("--steps") + 1]) if "--steps" in argv else 200
        recipe, batch = found["jobs"][0]["job"].split()[0], int(found["jobs"][0]["job"].split()[-1])
        return found, estimate_here(
            "vit-huge", "p5.48xlarge", recipe=recipe, batch_size=batch, samples=steps * batch * 8
        )

    for argv in (("--recipe", "te-fp8"), ("--recipe", "bf16", "--batch-size", "32", "--steps", "99999")):
        found, estimate = said(*argv)
        assert [job["evidence"] for job in found["jobs"]] == ["predicted"] == [estimate.rate.evidence]
        assert found["usd"]["value"] == pytest.approx(estimate.cost.usd.value)
        assert found["assumed_s"] == estimate.cost.assumed_s
    # Only the longer of the two has a range that the assumed start does not exceed.
    assert found["usd"] == pytest.approx(vars(estimate.cost.usd))
    assert found["hours"] == pytest.approx(vars(estimate.cost.hours))
    assert "longer than --max-hours" in cost_of(capsys, "--steps", "200000", "--max-hours", "1")
    assert not load_settings().home.exists()
    like = changed(PLAIN, instance="p5.48xlarge", device_name="NVIDIA H100 80GB HBM3", num_gpus=8)
    timing = {"step_time_s": Interval(value=0.1), "samples_per_step": 512.0}
    known = changed(like, **timing, build_s=10.0, boot_s=40.0, pull_s=60.0)
    with open_ledger(load_settings()) as ledger:
        ledger.add_imported([(known, None)], submission_id=ledger.add_submission(""))
    # Known answer: 100 + 2 x (10 + 20) s and two warm-ups of 1.6 s, with the volume.
    found, estimate = said("--recipe", "bf16", "--repeats", "2")
    assert (found["jobs"][0]["evidence"], estimate.rate.evidence) == ("measured", "measured")
    seconds = 100 + 2 * (10 + 20 + 1.6)
    assert found["hours"]["value"] == pytest.approx(seconds / 3600)
    assert found["usd"]["value"] == pytest.approx(seconds / 3600 * 55.086, rel=1e-3)
    assert "probably $2.5" in cost_of(capsys, "--recipe", "bf16", "--repeats", "2")


def test_epochs_of_a_file_that_travels_are_counted_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 chats of 4,096 bytes each are 1,000 samples of a built-in shape, and 250 with a tokenizer."""
    chat = [{"role": "user", "content": "x" * 1096}, {"role": "assistant", "content": "é" * 1500}]
    (tmp_path / "train.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 1000)
    (tmp_path / "tune.txt").write_text("transformers\npeft\n")
    monkeypatch.chdir(tmp_path)
    needs = ("--requirements", "tune.txt", "--requirements-from-index", "--data", "train.jsonl")
    lora = ("--workload", "hf-lora:llama-3.1-8b", "--recipe", "compile", "--batch-size", "1", *needs)

    def expected(*argv: str) -> dict[str, Any]:
        return plan_of(capsys, *lora, *argv)["expected"]  # type: ignore[no-any-return]

    assert expected("--epochs", "16") == {
        **expected("--steps", "2000"),
        "bytes_per_token": {"value": 1.0, "low": None, "high": None},
    }
    tokenizer = ("--tokenizer", "meta-llama/Llama-3.1-8B")
    by_tokenizer, by_steps = expected("--epochs", "640", *tokenizer), expected("--steps", "20000", *tokenizer)
    assert by_tokenizer["usd"]["value"] == pytest.approx(by_steps["usd"]["value"])
    low, value, high = (by_tokenizer["usd"][name] for name in ("low", "value", "high"))
    assert low < by_steps["usd"]["low"] < value < by_steps["usd"]["high"] < high
    words = cost_of(capsys, *lora, "--instance", "p5.48xlarge", "--epochs", "64", *tokenizer)
    assert "Epochs are counted at 4 bytes of text a token (3 to 5)." in words
    elsewhere = ("--input", "a=s3://acme/a", "--data", "file:/opt/ml/input/data/a/train.jsonl")
    for more, reason in ((("--epochs", "1"), "epoch"), (("--steps", "99", "--batch-size", "auto"), "speed")):
        unknown = expected(*elsewhere, *more)
        assert unknown["usd"] is None and reason in unknown["unknown"]


def test_the_request_for_people_is_the_one_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--purchase", "spot", "--max-price", "20.5", "--checkpoint-every", "50")
    plan = plan_of(capsys, *argv)
    shown = yaml.safe_load(text_of(capsys, *DRY[2:], *argv, "--show", "request"))
    request, listed = shown.values()
    assert (request, listed) == (plan["request"], run_list(plan))
    script = text_of(capsys, *DRY[2:], *argv, "--show", "user-data")
    assert script.rstrip() == plan["request"]["UserData"].rstrip()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--instance", "ml.p5.48xlarge", "--dry-run", "--show", "user-data"), "--show request"),
        (("--instance", "p5.48xlarge", "--show", "request"), "--dry-run"),
        (("--instance", "p5.48xlarge", "--show", "request", "--dry-run", "--output", "json"), "json"),
        (("--local", "--dry-run", "--show", "request"), "--instance"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], part: str
) -> None:
    assert fastlaunch("submit", *argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A train.py in the current directory, of which git knows nothing."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("print()\n")
    (tmp_path / "model.py").write_text("x = 1\n")
    return path


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize("where", [(), ("--instance", "ml.p5.48xlarge"), ("--image", IMAGE)])
def test_a_script_is_planned_with_what_travels(
    capsys: pytest.CaptureFixture[str], where: tuple[str, ...]
) -> None:
    Path("r.txt").write_text("transformers>=5\npandas\n")
    options = ("--env", "HF_HUB_OFFLINE=1", "-L", "lr=1,2", "--input", "val=s3://acme-data/val")
    options += ("--requirements", "r.txt", *["--requirements-from-index"] * ("--image" in where))
    command = ("--", "python", "train.py", "--lr={lr}")
    assert fastlaunch(*DRY, *where, *options, "--output", "json", *command) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["files"] == ["model.py", "r.txt", "train.py"]
    assert {"code-sha256", "requirements-sha256"} <= {*plan["placeholders"]}
    listed = run_list(plan)
    assert [run["arguments"] for run in listed["runs"]] == [
        ["--checkpoints", "--", "python", "train.py", f"--lr={lr}"] for lr in "12"
    ]
    assert listed["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "FASTLAUNCH_COMMIT" not in listed["environment"]
    assert fastlaunch(*DRY, *where, *options, *command) == 0
    assert "3 files, 37 B" in capsys.readouterr().out
    assert fastlaunch(*DRY, *where, "--show", "files", *options, *command) == 0
    assert capsys.readouterr().out.split() == ["6", "model.py", "23", "r.txt", "8", "train.py"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--", "python", "gone.py"), "there is no gone.py here"),
        (("--env", "A", "--", "python", "train.py"), "is not NAME=VALUE"),
        (("--env", "FASTLAUNCH_ATTEMPT=2", "--", "python", "train.py"), "cannot be a variable"),
        (("--env", "A=1", "--env", "A=2", "--", "python", "train.py"), "given twice"),
        (("--env", "A=1\n2", "--", "python", "train.py"), "control characters"),
        (("--env", "A=1", "--secret", "A=x", "--", "python", "train.py"), "by --secret and by --env"),
        (("--recipe", "bf16", "--", "python", "train.py"), "script of your own: --recipe"),
        (("--show", "files"), "what travels with a script"),
        (("--requirements", "gone.txt", "--", "python", "train.py"), "gone.txt: cannot be read"),
    ],
)
@pytest.mark.usefixtures("train_py")
def test_what_is_wrong_with_a_script_is_said_before_money(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], part: str
) -> None:
    assert fastlaunch(*DRY, *argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err


def test_a_dry_run_above_the_config_files_budget_warns_and_is_shown(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (isolated.parent / "config.yaml").write_text(f"{CONFIG}max_cost: 25\n")
    assert fastlaunch(*DRY, "--no-account-timer") == 0
    out, err = capsys.readouterr()
    assert "Planned, not started" in out
    warning, *_, proposal = err.splitlines()
    assert warning.startswith("warning: ") and "of $25.00" in warning
    # What would be accepted.
    assert proposal.startswith("next: fastlaunch submit --max-cost 120 ")
    assert fastlaunch(*DRY, "--max-cost", "200") == 0
    assert "warning: " not in capsys.readouterr().err
    assert fastlaunch("sweep", *DRY[1:]) == 2
    assert "no instance type fits into the budget" in capsys.readouterr().err


def test_what_is_left_out_does_not_spoil_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch(*DRY, "--region", "eu-north-1,us-east-1", "--output", "json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["region"] == "us-east-1"
    assert err.startswith("left out: p5.48xlarge in eu-north-1: ")


def test_jobs_in_a_block_are_expected_to_cost_the_part_that_they_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = ("--purchase", "capacity-block", "--reservation", "cr-0a1b2c3d", "--block-fee")
    usd = [plan_of(capsys, *block, fee)["expected"]["usd"]["value"] for fee in ("500", "5000")]
    assert 0 < usd[0] < 50 and 0 < usd[1] < 500
    assert usd[0] < usd[1]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        # Of the request, one of each kind: the others where they are raised, in test_cloud_request.py.
        (["--instance", "p5.48xlarg"], "did you mean p5.48xlarge"),
        (["--purchase", "spot"], "add --checkpoint-every 50"),
        (["--region", "eu-north-1"], "eu-north-1"),
        (["--max-cost", "100"], "give --max-cost 120, or --max-hours 98min"),
        (["--max-cost", "cheap"], "--max-cost: "),
        (["--max-hours", "0.1"], "--max-hours is 6 min"),
        (["--subnet", "subnet-0a"], "is not ZONE=ID"),
        (["--subnet", "us-west-2a=subnet-0a"], "give --region us-west-2"),
        (["--subnet", "us-east-1a=x", "--subnet", "us-east-1a=y"], "given twice"),
        (["--region", "us-east-1,us-east-2", "--bucket", "b"], "--bucket belongs to one region"),
        (["--bucket", "s3://acme/runs"], "without s3://"),
        (["--instance", "ml.p5.48xlarge", "--instance-profile", "x"], "--instance-profile is for EC2"),
        (["--instance", "ml.p5.48xlarge", "--subnet", "us-east-1a=x"], "--subnet is for EC2"),
        (["--role", "arn:aws:iam::1:role/x"], "--role is for SageMaker"),
        (["--placement-group", "us-east-1a=x"], "is for several nodes"),
        (["--purchase", "capacity-block", "--placement-group", "us-east-1a=x"], "take no placement group"),
        (["--recipe", "te-fp8-block", "--base-image", "2.8", "--instance", "p6-b200.48xlarge"], "2.13.0"),
        (["--recipe", "te-fp8", "--batch-size", "250"], "give --batch-size 256"),
        (["--recipe", "bf16-fused", "--batch-size", "250"], "give --batch-size 256"),
        (["--recipe", "graph"], "on one GPU only"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    for more in ((), ("--dry-run",)):
        assert fastlaunch("submit", "--instance", "p5.48xlarge", *argv, *more) == 2
        out, err = capsys.readouterr()
        assert out == "" and part in err
    assert not load_settings().home.exists()


def test_dry_run_needs_nothing_and_opens_nothing() -> None:
    code = (
        "import sys; asked = []; sys.addaudithook("
        "lambda event, args: event.startswith(('socket.', 'subprocess.')) and asked.append(event));"
        f" from fastlaunch.cli.main import run; result = run({[*DRY, '--output', 'json']!r});"
        " print(*asked, *sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr);"
        " sys.exit(result)"
    )
    # Neither credentials nor AWS settings, and no folder with docker, git or anything else in it.
    environment = {name: value for name, value in os.environ.items() if name.startswith("FASTLAUNCH_")}
    environment |= {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["request"]["InstanceType"] == "p5.48xlarge"
    loaded = set(done.stderr.split())
    assert "fastlaunch" in loaded
    assert not {"boto3", "botocore", "urllib3", "torch", "sqlite3", "rich"} & loaded
    assert not [name for name in loaded if "." in name]


def test_prices_older_than_the_config_file_allows_are_refused(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (DRY, ("sweep", *DRY[1:], "--max-cost", "500")):
        for age, code in (("1h", 2), ("100000d", 0)):
            (isolated.parent / "config.yaml").write_text(f"max_price_age: {age}\n")
            assert fastlaunch(*argv, "--instance", "p5.48xlarge", "--recipe", "bf16") == code
            err = capsys.readouterr().err
            assert ("max_price_age" in err and "fastlaunch prices update" in err) is (code == 2)
