"""The scripts of docs/examples, each as a user runs it, with the libraries that it is for."""

import sys
from pathlib import Path

import pytest
from examples import BY_NAME, assert_measured, furnish, without_fastlaunch
from fake_train.launcher import fastlaunch
from fake_train.processes import runs

from fastlaunch.core.log_file import LOG
from fastlaunch.ledger.ledger import Run

pytestmark = pytest.mark.slow

#: How each is started, where it is not by `python`.
LAUNCHED = {"accelerate_loop": ("accelerate", "launch", "--multi_gpu", "--num_processes", "2")}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def log_of(run: Run) -> str:
    assert run.directory is not None
    return (run.directory / LOG).read_text()


@pytest.mark.parametrize("name", BY_NAME)
def test_an_example_is_measured(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = BY_NAME[name]
    furnish(here, example.program)
    monkeypatch.syspath_prepend(here)  # for `accelerate`, which imports torchvision before the script
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    start = LAUNCHED.get(name, ("python",))
    options = () if name in LAUNCHED or example.num_ranks == 1 else ("--nproc", str(example.num_ranks))
    code = fastlaunch("submit", "--local", *options, "--", *start, *example.command)
    (run,) = runs()
    assert code == 0, log_of(run)
    assert_measured(run, example)


def test_timms_script_as_it_is_has_its_wall_time(here: Path) -> None:
    example = BY_NAME["timm_train"]
    furnish(here, example.program)
    script = here / example.program
    script.write_text(without_fastlaunch(script.read_text()))
    code = fastlaunch("submit", "--local", "--", sys.executable, *example.command, "--epochs", "1")
    (run,) = runs()
    assert code == 0, log_of(run)
    assert run.summary is not None and run.summary.timing.step_time_s is None
    assert run.summary.figures.total_time_s
    assert run.directory is not None
    assert (run.directory / "output" / "timm_train" / "summary.csv").exists()
