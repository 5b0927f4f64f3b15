"""Submissions as task files of other engines: parsed by their own rules, and one of them carried out."""

import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import fastlaunch
from fastlaunch.backends.validate import model_problems
from fastlaunch.cli.main import run

ROOT = Path(__file__).parents[2]
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/fastlaunch@sha256:{'a' * 64}"
P5 = ("--instance", "p5.48xlarge", "--workload", "vit-huge", "--recipe", "bf16,te-fp8", "--max-hours", "2")
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token-AbCdEf"
SPOT = ("--purchase", "spot", "--checkpoint-every", "50")


def emitted(capsys: pytest.CaptureFixture[str], engine: str, *options: str) -> str:
    given = ["--image", IMAGE, "--bucket", "acme", *options]
    assert run(["submit", *given, "--dry-run", "--emit", engine]) == 0
    return capsys.readouterr().out


def task(capsys: pytest.CaptureFixture[str], engine: str, *options: str) -> Any:
    return yaml.safe_load(emitted(capsys, engine, *options))


def test_each_engine_gets_instance_image_purchase_limit_and_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sky = task(capsys, "skypilot", *P5, *SPOT, "--num-nodes", "2")
    assert sky["resources"] == {
        "infra": "aws/us-east-1",
        "instance_type": "p5.48xlarge",
        "use_spot": True,
        "image_id": f"docker:{IMAGE}",
        "autostop": {"idle_minutes": 5, "down": True},
        "network_tier": "best",
    }
    assert sky["num_nodes"] == 2 and sky["run"].startswith("timeout --foreground --kill-after 10m 120m bash")
    assert "FASTLAUNCH_NODE_RANK=$SKYPILOT_NODE_RANK" in sky["run"]
    dstack = task(capsys, "dstack", *P5)
    assert (dstack["image"], dstack["instance_types"]) == (IMAGE, ["p5.48xlarge"])
    assert (dstack["spot_policy"], dstack["max_duration"]) == ("on-demand", "120m")
    # The name of a dstack run is that of the next one, too.
    assert "FASTLAUNCH_SESSION=$DSTACK_RUN_NAME-$DSTACK_RUN_ID\n" in dstack["commands"][0]
    slurm = emitted(capsys, "sbatch", *P5, "--num-nodes", "2")
    assert "#SBATCH --time=02:00:00\n" in slurm and "#SBATCH --nodes=2\n" in slurm
    # A job that was requeued has its id again.
    assert "FASTLAUNCH_SESSION=$SLURM_JOB_ID-$STARTED_AT\n" in slurm
    for script in (sky["run"], *dstack["commands"], slurm):
        assert "--recipe te-fp8" in script and "FASTLAUNCH_INSTANCE=p5.48xlarge" in script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("engine", ["skypilot", "dstack", "sbatch"])
def test_no_line_of_an_argument_ends_the_script(
    engine: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    words = ["python", "train.py", "it's $HOME", "a\nEND\nEND_\nb"]
    given = ("--instance", "p5.48xlarge", "--image", IMAGE, "--bucket", "acme", "--emit", engine)
    assert run(["submit", "--dry-run", *given, "--", *words]) == 0
    text = capsys.readouterr().out
    if engine != "sbatch":
        fields = yaml.safe_load(text)
        text = fields["run"] if engine == "skypilot" else fields["commands"][0]
    assert text.count(shlex.join(words)) == 1
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert text.rstrip().endswith("exit $status" if engine == "dstack" else "\nEND__")


@pytest.mark.parametrize("word", ["\r\n", "\x1b[31m", "\u2028"])
def test_no_character_is_lost_on_the_way(
    word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    given = ("--instance", "p5.48xlarge", "--image", IMAGE, "--bucket", "acme", "--emit", "sbatch")
    assert run(["submit", "--dry-run", *given, "--", "python", "train.py", word]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "invisible character" in printed.err


def test_a_recommendation_is_handed_over_as_the_command_that_it_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    picked = ("recommend", "--workload", "vit-huge", "--samples", "10M")
    command = shlex.split(fastlaunch.recommend("vit-huge", "10M", with_data=False).command or "")[2:]
    assert run([*picked, "--emit", "sbatch", "--image", IMAGE]) == 0
    printed = capsys.readouterr()
    assert printed.out == emitted(capsys, "sbatch", *command)
    assert "train: fastlaunch submit" in printed.err
    lora = ("recommend", "--workload", "hf-lora:llama-3.1-8b", "--tokens", "50M", "--sequence-length", "4096")
    assert run([*lora, "--emit", "sbatch", "--image", IMAGE]) == 0
    printed = capsys.readouterr()
    assert (
        IMAGE.partition("@")[2] in printed.out
        and "URI" not in printed.err
        and "fastlaunch build" not in printed.err
    )
    assert run([*picked, "--emit", "skypilot"]) == 2
    assert "fastlaunch build --push" in capsys.readouterr().err
    assert run([*picked, "--purchase", "capacity-block", "--emit", "dstack", "--image", IMAGE]) == 2
    assert "bought as a capacity-block is handed over to no engine" in capsys.readouterr().err
    assert run([*picked, "--max-cost", "1", "--emit", "dstack", "--image", IMAGE]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "$1.00" in printed.err
    assert run([*picked, "--image", IMAGE]) == 2
    assert "--image is for --emit" in capsys.readouterr().err


@pytest.mark.parametrize("num_nodes", ["1", "2"])
def test_aws_batch_takes_the_requests(num_nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    requests = json.loads(emitted(capsys, "batch", *P5, "--num-nodes", num_nodes))
    problems = [model_problems("batch", operation, request) for operation, request in requests.items()]
    assert list(map(list, problems)) == [[], []]
    # Without its devices NCCL finds no EFA, and the training refuses to go over TCP.
    assert json.dumps(requests).count('"hostPath": "/dev/infiniband/uverbs') == 32 * (num_nodes == "2")
    assert requests["RegisterJobDefinition"]["timeout"] == {"attemptDurationSeconds": 7200}


@pytest.mark.parametrize(
    ("engine", "options", "hint"),
    [
        ("skypilot", ("--bucket", "acme"), "fastlaunch build --push"),
        ("dstack", ("--image", IMAGE), "--bucket"),
        ("dstack", ("--image", IMAGE, "--bucket", "b", "--input", "x=s3://bucket/x/"), "leave out --input"),
        ("batch", ("--image", IMAGE, "--bucket", "b", "--secret", f"TOKEN={SECRET}"), "batch set TOKEN"),
        ("sbatch", ("--image", IMAGE, *SPOT), "--emit skypilot or dstack"),
        ("batch", ("--image", IMAGE, "--bucket", "b", *SPOT), "--emit skypilot or dstack"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    engine: str, options: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", *P5, *options, "--dry-run", "--emit", engine]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and hint in printed.err


def test_at_the_time_limit_nothing_more_starts_and_the_records_go_to_the_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = task(capsys, "skypilot", *P5)["run"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "aws").write_text(f'#!/bin/bash\n[ "$1 $2" = "s3 cp" ] && cp -R "$5" {tmp_path}/bucket\n')
    # It takes a second to end when it is told to, as training does to save.
    (tmp_path / "run_train.sh").write_text(
        'mkdir -p "$2"\ntrap "sleep 1; echo saved >$2/rank0; exit 1" TERM\nwhile sleep 0.2; do :; done\n'
    )
    (programs / "aws").chmod(0o755)
    played = script.replace("/fastlaunch/run_train.sh", f"{tmp_path}/run_train.sh").replace(" 120m ", " 1s ")
    done = subprocess.run(
        ["bash", "-c", played],
        cwd=tmp_path,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "SKYPILOT_TASK_ID": "sky-1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode != 0
    kept = [str(path.relative_to(tmp_path / "bucket")) for path in (tmp_path / "bucket").rglob("*")]
    assert sorted(kept) == ["sky-1-1", "sky-1-1/rank0"], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_task_file_runs_comes_back_by_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ("--instance", "g5.xlarge", "--workload", "vit-tiny", "--batch-size", "8", "--steps", "20")
    script = task(capsys, "skypilot", *tiny, "--recipe", "fp32,bf16")["run"]
    image, home, programs = tmp_path / "image", tmp_path / "home", tmp_path / "bin"
    for folder in (image, home, programs):
        folder.mkdir()
    shutil.copy(ROOT / "containers" / "run_train.sh", image)
    (image / "train").symlink_to(ROOT / "train")
    (programs / "aws").write_text(f'#!/bin/bash\n[ "$1 $2" = "s3 cp" ] && cp -R "$5" {tmp_path}/bucket\n')
    (programs / "aws").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(home), "SKYPILOT_TASK_ID": "sky-2026-11-28_fastlaunch_1"}
    played = script.replace("/fastlaunch/run_train.sh", f"{image}/run_train.sh")
    done = subprocess.run(
        ["bash", "-c", played], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert run(["runs", "import", str(tmp_path / "bucket")]) == 0
    capsys.readouterr()
    assert run(["compare", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["recipe"], row["num_runs"], row["instance"]) for row in rows} == {
        ("fp32", 1, "g5.xlarge"),
        ("bf16", 1, "g5.xlarge"),
    }


#: SkyPilot's own loader asks a catalogue for the instance type, from the network.
PARSERS = {
    "skypilot": (
        "import sys, yaml\n"
        "from sky.utils import common_utils, schemas\n"
        "task = yaml.safe_load(open(sys.argv[1]))\n"
        "common_utils.validate_schema(task, schemas.get_task_schema(), '')\n"
        "common_utils.validate_schema(task['resources'], schemas.get_resources_schema(), '')"
    ),
    "dstack": (
        "import sys, yaml\n"
        "from dstack._internal.core.models.configurations import parse_apply_configuration\n"
        "parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))"
    ),
}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", PARSERS)
def test_an_engine_itself_reads_its_task_file(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(emitted(capsys, engine, *P5, "--num-nodes", "2"))
    venv.create(tmp_path / "engine", with_pip=True)
    python = tmp_path / "engine" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", engine], check=True)
    done = subprocess.run([python, "-c", PARSERS[engine], file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


#: A cluster of four such nodes, which nobody has started: whatever fits them could begin.
SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
NodeName=p5-[1-4] CPUs=192 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=p5-[1-4] Default=YES MaxTime=24:00:00 State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which a Slurm of the test's own answers; `apt-get install slurm-wlm` brings it."""
    if not shutil.which("slurmctld"):
        pytest.skip("no slurmctld here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "state").mkdir()
    config = tmp_path / "slurm.conf"
    host, user = socket.gethostname(), getpass.getuser()
    config.write_text(SLURM.format(host=host, port=port, user=user, folder=tmp_path))
    with subprocess.Popen(
        ["slurmctld", "-D", "-i", "-f", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as controller:
        yield {**os.environ, "SLURM_CONF": str(config)}
        controller.terminate()


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--num-nodes", "2"), "to start at"),
        # Five nodes are more than there are.
        (("--num-nodes", "5"), "node configuration is not available"),
    ],
)
def test_slurm_itself_would_start_the_batch_script(
    options: tuple[str, ...],
    answer: str,
    slurm: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "task.sh"
    script.write_text(emitted(capsys, "sbatch", *P5, *options))
    end = time.monotonic() + 60
    while True:
        done = subprocess.run(
            ["sbatch", "--test-only", script],
            env=slurm,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer in done.stderr:
            return
        # The controller is still starting.
        assert time.monotonic() < end and "contact" in done.stderr, done.stderr
        time.sleep(0.2)
