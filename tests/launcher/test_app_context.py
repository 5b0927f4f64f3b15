"""What the commands act on, looked up from the environment."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastlaunch_train
from fastlaunch.cli.context import BACKENDS, commit_of, local_settings, make_backends
from fastlaunch.core.paths import training_package
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.machine import Machine, this_machine

TRAIN = str(Path(fastlaunch_train.__file__).parents[1])
CPU = Machine(devices=(), num_cores=6, modules=frozenset())
GPU = Machine(devices=("NVIDIA L4",), num_cores=6, modules=frozenset())


def test_entrypoint_is_importable_and_keeps_what_the_user_has(tmp_path: Path) -> None:
    alone = local_settings(tmp_path, CPU, {})
    assert alone.pythonpath == TRAIN
    assert alone.launch[:3] == (sys.executable, "-m", "torch.distributed.run")
    with_more = local_settings(tmp_path, CPU, {"PYTHONPATH": "/their/own"})
    assert with_more.pythonpath == os.pathsep.join([TRAIN, "/their/own"])
    assert local_settings(tmp_path, CPU, {"PYTHONPATH": f"/their/own:{TRAIN}"}).pythonpath is None


def test_threads_are_all_cores_on_a_cpu_unless_the_user_says(tmp_path: Path) -> None:
    assert local_settings(tmp_path, CPU, {}).num_cores == 6
    assert local_settings(tmp_path, CPU, {"OMP_NUM_THREADS": "1"}).num_cores is None
    assert local_settings(tmp_path, GPU, {}).num_cores is None


def test_home_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The job starts elsewhere than where the ledger is read one day.
    monkeypatch.chdir(tmp_path)
    assert local_settings(Path("home"), CPU, {}).home == tmp_path / "home"


def test_every_backend_is_made_under_its_name() -> None:
    backends = make_backends(load_settings(), lambda: CPU)
    assert list(backends) == list(BACKENDS)
    assert all(backend.name == name for name, backend in backends.items())


def test_the_commit_is_that_of_the_training_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = shutil.copytree(training_package(), tmp_path / "train", ignore=lambda *_: ["__pycache__"])
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.com")
    assert commit_of(package) is None

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(package), *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "--message", "x")
    commit_of.cache_clear()
    commit = commit_of(package)
    assert commit is not None and re.fullmatch("[0-9a-f]{40}", commit)
    (package / "__init__.py").write_text("")
    commit_of.cache_clear()
    assert commit_of(package) == f"{commit}-dirty"


def test_this_machine_hides_gpus_that_cuda_hides() -> None:
    machine = this_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert machine.devices == ()
    assert machine.num_cores >= 1
    assert "fastlaunch" not in machine.modules
