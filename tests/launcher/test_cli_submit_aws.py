"""`fastlaunch submit --instance` against an AWS on loopback: what is asked, shown and sent."""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cloud_commands import configure, on_terminal
from fake_train.launcher import app_context
from fake_train.processes import runs
from moto_server import MotoServer, backend
from sent_request import SentRequest

from fastlaunch.aws.client import Aws
from fastlaunch.backends.validate import request_problems
from fastlaunch.cli.main import run
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
#: With an image that holds the code there is nothing to fetch; detached, nothing to wait for.
DETACHED = ("submit", "--instance", "g5.xlarge", "--image", IMAGE, "--detach")
SUBMIT = (*DETACHED, "--steps", "20")
#: For all tests, since making a client takes most of their time.
AWS = Aws(attempts=2, sleep=lambda seconds: None, timeouts_s=(5, 20))
TWO_TWICE = ("--recipe", "bf16,te-bf16", "--repeats", "2")
CHANGES = {"RunInstances", "TerminateInstances", "CreateTags", "CreateBucket", "PutObject"}


@pytest.fixture
def region(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account with all that jobs in us-east-1 need, and a config file that names it."""
    for quota in ("L-DB2E81BA", "L-3819A6DF"):
        aws_server.quotas["us-east-1", quota] = 768
    configure(isolated, aws_server.set_up_region("us-east-1"))
    return aws_server


def submit(
    *argv: str, words: tuple[str, ...] = SUBMIT, sleep: Callable[[float], None] = lambda _: None
) -> int:
    """Exit code of `fastlaunch submit`, in this process."""
    argv = (*words, *argv)
    # Every command asks anew who is logged in.
    AWS._identity = None
    return run(list(argv), replace(app_context(*argv), connect=lambda: AWS, sleep=sleep))


def noted() -> tuple[str, Plan, Any]:
    """Token and plan of the only attempt, as it was noted before the request, and its list of runs."""
    with open_ledger(load_settings()) as ledger:
        (attempt,) = ledger.attempts_of(runs()[0].id)
        plan = ledger.plan_of(attempt.id)
    assert plan is not None and plan.placeholders == ()
    (listed,) = [json.loads(each.text) for each in plan.objects if each.text is not None]
    return attempt.token, plan, listed


def stored(uri: str, sha256: str) -> bytes:
    """The object, which has to have that hash."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    data: bytes = backend("s3", "aws").get_object(bucket, key).value
    assert hashlib.sha256(data).hexdigest() == sha256
    return data


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
    assert submit(*TWO_TWICE, "--tag", "team=vision", "--yes", "--output", "json") == 0
    out, err = capsys.readouterr()
    assert changes(region) == ["PutObject", "PutObject", "RunInstances"]
    (sent,) = region.sent("RunInstances")
    started = runs()
    assert [run["id"] for run in json.loads(out)["runs"]] == [run.id for run in started]
    assert [run.recipe for run in started] == ["bf16", "te-bf16", "te-bf16", "bf16"]
    assert {(run.backend, run.instance, run.state) for run in started} == {
        ("ec2", "g5.xlarge", RunState.RUNNING)
    }
    token, plan, _ = noted()
    assert sent.parameters["ClientToken"] == token == f"{started[0].id}-a1"
    # What went over the wire is the plan that was noted before: nothing was added to it or lost.
    assert sent.user_data() == plan.request["UserData"] and request_problems(plan) == []
    assert {str(value) for value in leaves({**plan.request, "UserData": ""})} - {""} <= {
        *flat(sent.parameters).values()
    }
    for kind in ("instance", "volume", "network-interface"):
        assert sent.tags(kind)["fastlaunch:max-minutes"] == "120"
        # The mock's only user.
        assert (sent.tags(kind)["Owner"], sent.tags(kind)["team"]) == ("moto", "vision")
    (run_list,) = [each for each in plan.objects if each.text is not None]
    assert run_list.uri in sent.user_data()
    assert all(run.id in str(run_list.text) for run in started)
    # Known answer: (2 h + 10 min) at $1.006.
    assert "at most $2.28 of instance time and volumes: (2 h + 10 min) x ($1.006 + $0.046)/h" in err
    assert "--detach: nobody will follow it." in err
    assert "without capacity there: g5.xlarge in us-east-1b" in err
    assert err.splitlines()[-1] == f"next: fastlaunch logs -f {started[0].id}"


def test_a_scripts_files_are_stored_before_its_machine_is_started(
    region: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()\n")
    Path(".fastlaunchignore").write_text("*.pt\n")
    Path("model.pt").touch()
    region.spot_prices["us-east-1", "g5.xlarge", "us-east-1a"] = 0.4
    script = ("-L", "lr=1,2", "--", "python", "train.py", "{lr}")
    assert submit("--yes", "--purchase", "spot", *script, words=DETACHED) == 0
    assert changes(region) == ["PutObject", "PutObject", "PutObject", "RunInstances"]
    assert [(one.workload, one.recipe) for one in runs()] == [("train.py", "lr=1"), ("train.py", "lr=2")]
    _, _, listed = noted()
    data = stored(listed["code_uri"], listed["code_sha256"])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        own = {name for name in archive.getnames() if name.startswith("user/")}
    assert own == {"user/train.py", "user/.fastlaunchignore"}
    err = capsys.readouterr().err
    assert (
        "travels  2 files" in err
        and "fl.checkpoint_due()" in err
        and "FASTLAUNCH_COMMIT" not in listed["environment"]
    )


@pytest.mark.parametrize(("backend", "start"), [("ec2", "RunInstances"), ("sagemaker", "CreateTrainingJob")])
def test_data_are_stored_before_anything_is_started(
    region: MotoServer,
    tmp_path: Path,
    isolated: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    backend: str,
    start: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"text": "abc"}\n' * 9)
    region.quotas["us-east-1", "ml.g5.xlarge for training job usage"] = 2
    config = isolated.parent / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["aws"]["us-east-1"]["role"] = region.training_jobs.role()
    config.write_text(yaml.safe_dump(settings))

    def is_data(sent: SentRequest) -> bool:
        return str(sent.parameters.get("Key")).endswith("/train.jsonl")

    tune = ("--workload", "hf-lora:llama-tiny", "--data", "./train.jsonl", "--backend", backend, "--yes")
    refusal = region.refuse("PutObject", "AccessDenied", status=403, where=is_data)
    assert submit(*tune) == 3
    assert "AccessDenied" in capsys.readouterr().err
    assert region.sent(start) == [] and runs() == []
    region.allow(refusal)
    assert submit(*tune) == 0
    sent = [one for one in region.sent() if one.action == start or (is_data(one) and one.status == 200)]
    assert [one.action for one in sent][-2:] == ["PutObject", start]


def test_what_a_script_needs_is_looked_at_before_anything_is_started(
    region: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()\n")
    Path("r.txt").write_text("pandas\n")
    bucket = "runs-us-east-1"
    argv = ("--requirements", "r.txt", "--requirements-from-index", "--input", f"d=s3://{bucket}/val")
    argv += ("--yes", "--", "python", "train.py")
    AWS.put_object("us-east-1", bucket, "val.txt", b"beside it")
    assert submit(*argv, words=DETACHED) == 3
    assert f"nothing lies under s3://{bucket}/val/" in capsys.readouterr().err
    assert "RunInstances" not in changes(region)
    AWS.put_object("us-east-1", bucket, "val/1.txt", b"data")
    assert submit(*argv, words=DETACHED) == 0
    _, _, listed = noted()
    assert listed["inputs"] == {"d": f"s3://{bucket}/val/"}
    assert stored(listed["requirements_uri"], listed["requirements_sha256"])


def leaves(value: Any) -> list[Any]:
    """Everything in a request that is neither a mapping nor a list; true and false as they are sent."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [str(value).lower() if isinstance(value, bool) else value]


@pytest.mark.parametrize(("answer", "code"), [("", 2), ("y", 0)])
def test_a_terminal_is_asked_after_the_ceiling_was_shown(region: MotoServer, answer: str, code: int) -> None:
    ended, err = on_terminal(*SUBMIT, answers=(answer,))
    assert ended == code, err
    assert max(map(err.index, ("expected: ", "at most $2.28"))) < err.index("Start it? [y/N]")
    assert changes(region) == (["PutObject", "PutObject", "RunInstances"] if code == 0 else [])
    assert len(runs()) == (1 if code == 0 else 0)


def test_without_a_terminal_or_over_the_budget_nothing_is_asked_of_anybody(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit() == 2
    assert "--yes" in capsys.readouterr().err
    assert submit("--yes", "--max-cost", "2") == 2
    assert "of $2.00" in capsys.readouterr().err
    # The config file's counts without an option.
    path = isolated.parent / "config.yaml"
    path.write_text(f"{path.read_text()}max_cost: 1.5\n")
    assert submit("--yes") == 2
    assert "of $1.50" in capsys.readouterr().err
    assert region.sent() == []
    assert not load_settings().home.exists()
    assert submit("--yes", "--max-cost", "3") == 0


@pytest.mark.parametrize(
    ("code", "times", "hint"),
    [
        # Capacity may be had in the other zone; nothing else helps.
        ("InsufficientInstanceCapacity", 2, "--region R1,R2"),
        ("VcpuLimitExceeded", 1, "L-DB2E81BA"),
        ("UnauthorizedOperation", 1, "the right ec2:RunInstances"),
    ],
)
def test_a_refusal_ends_with_3_and_leaves_nothing(
    region: MotoServer, capsys: pytest.CaptureFixture[str], code: str, times: int, hint: str
) -> None:
    region.refuse("RunInstances", code, "EC2's own words")
    assert submit("--yes") == 3
    err = " ".join(capsys.readouterr().err.split())
    assert code in err and "EC2's own words" in err and hint in err, err
    assert len(region.sent("RunInstances")) == times
    assert region.instances() == [] and all(run.state.is_final for run in runs())
