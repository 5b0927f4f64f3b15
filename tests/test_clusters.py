"""The jobs of docs/clusters.md: parsed, and played here by two processes in place of a cluster's GPUs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastlaunch.cli.main import run
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import Run, open_ledger

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
#: What stands for a cluster: srun runs its command once, torchrun starts two ranks on this machine.
PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": "echo this-machine",
    "torchrun": (
        'while [[ $1 == --* ]]; do shift; done\nexec "$PYTHON" -m torch.distributed.run'
        ' --standalone --nproc-per-node=2 "$@"'
    ),
}
TRAIN = """\
import argparse

import torch.distributed

import fastlaunch_train as fl

parser = argparse.ArgumentParser()
parser.add_argument("--amp", required=True)
parser.parse_args()
torch.distributed.init_process_group("gloo")
for _ in fl.steps(range(40), num_samples=4):
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def block(language: str) -> str:
    """The page's only code block of a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


SBATCH = block("bash")
JOB: dict[str, Any] = yaml.safe_load(block("yaml"))
POD = JOB["spec"]["template"]["spec"]


def play(script: str, folder: Path, **environment: str) -> None:
    """Run a job's script in `folder`, which gets the user's script and the cluster's programs."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in PROGRAMS.items():
        program = programs / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    (folder / "train.py").write_text(TRAIN)
    paths = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "train"),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def imported(folder: Path) -> list[Run]:
    """The runs of a folder after `fastlaunch runs import`."""
    assert run(["runs", "import", str(folder)]) == 0
    with open_ledger(load_settings()) as ledger:
        return ledger.select()


def round_of(each: Run) -> int:
    assert each.summary is not None and each.summary.environment.round is not None
    return each.summary.environment.round


@pytest.mark.parametrize("script", [SBATCH, POD["containers"][0]["args"][0]], ids=["slurm", "kubernetes"])
def test_the_scripts_are_bash(script: str) -> None:
    commands = [["bash", "-n"], ["shellcheck", "--shell=bash", "-"]]
    for command in commands if shutil.which("shellcheck") else commands[:1]:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_job_has_an_index_for_each_run_and_a_volume_for_the_records() -> None:
    assert (JOB["apiVersion"], JOB["kind"], JOB["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    (array,) = re.findall(r"^#SBATCH --array=0-(\d+)%1$", SBATCH, re.MULTILINE)
    assert JOB["spec"]["completions"] == int(array) + 1 and JOB["spec"]["parallelism"] == 1
    (container,) = POD["containers"]
    (mount,) = container["volumeMounts"]
    assert [volume["name"] for volume in POD["volumes"]] == [mount["name"]]
    assert f"FASTLAUNCH_OUTPUT={mount['mountPath']}/" in container["args"][0]


@pytest.mark.slow
def test_what_a_slurm_array_records_is_imported_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_JOB_ID": "78",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    for task in range(4):
        play(SBATCH, tmp_path, **slurm, SLURM_ARRAY_TASK_ID=str(task))
    runs = imported(tmp_path / "records")
    # The second round went backwards.
    assert {each.id[:4]: (round_of(each), each.recipe) for each in runs} == {
        "77-0": (1, "amp=fp32"),
        "77-1": (1, "amp=bf16"),
        "77-2": (2, "amp=bf16"),
        "77-3": (2, "amp=fp32"),
    }
    for each in runs:
        assert each.summary is not None and each.summary.problems == ()
        assert (each.workload, each.instance) == ("train.py", "p5.48xlarge")
        assert each.summary.setup.num_gpus == 2 and each.summary.timing.samples_per_step == 8
        assert each.summary.environment.session == "77"
    capsys.readouterr()
    assert run(["compare", "--baseline", "amp=fp32"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"amp=fp32 .*baseline", out) and "amp=bf16" in out


@pytest.mark.slow
def test_what_a_pod_records_is_imported(tmp_path: Path) -> None:
    (container,) = POD["containers"]
    script = container["args"][0].replace("/records/", f"{tmp_path}/records/")
    session = {"FASTLAUNCH_SESSION": "0f3c", "FASTLAUNCH_INSTANCE": "p5.48xlarge"}
    play(script, tmp_path, **session, JOB_COMPLETION_INDEX="2")
    # Preempted after its last step, it is done again in its folder.
    play(script, tmp_path, **session, JOB_COMPLETION_INDEX="2")
    (only,) = imported(tmp_path / "records")
    assert (only.recipe, round_of(only)) == ("amp=bf16", 2)
    assert only.summary is not None and only.summary.problems == ()
    assert len(list((tmp_path / "records" / "0f3c-2").iterdir())) == 4
