"""The GitHub Action: its steps played here by bash, with the environment that a runner gives them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, COMPARE = ACTION["runs"]["steps"]
RECORDS = ROOT / "train" / "measurements" / "vit-huge-h100"


def play(step: dict[str, Any], folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does, `inputs` by their names with _ for -; the rest are the defaults."""
    given = {name.replace("_", "-"): text for name, text in inputs.items()}
    values = {name: given.get(name, about.get("default", "")) for name, about in ACTION["inputs"].items()}
    assert given.keys() <= values.keys()
    environment = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
        for name, text in step.get("env", {}).items()
    }
    runner = {
        "RUNNER_TEMP": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_ACTION_PATH": str(ROOT),
    }
    script = folder / "step.sh"
    script.write_text(step["run"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
        cwd=folder,
        env={**os.environ, **environment, **runner},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    """The temporary folder of a runner on which the first step has installed fastlaunch."""
    program = tmp_path / "fastlaunch" / "bin" / "fastlaunch"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fastlaunch "$@"\n')
    program.chmod(0o755)
    return tmp_path


def test_it_uses_no_action_that_can_change() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        # Each is pinned to a commit; there is none at present.
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"])
        # Whoever opens a pull request could write into it.
        assert "${{" not in step.get("run", "") and ("uses" in step or step["shell"] == "bash")


def test_no_module_of_a_pull_request_is_run(tmp_path: Path) -> None:
    for name in ("venv", "pip"):
        (tmp_path / f"{name}.py").write_text("open('hacked', 'w').close()\n")
    # Without pip it fails, which is soon enough.
    install = {**INSTALL, "run": INSTALL["run"].replace("-m venv", "-m venv --without-pip")}
    assert play(install, tmp_path).returncode == 1
    assert (tmp_path / "fastlaunch").is_dir() and not (tmp_path / "hacked").exists()


@pytest.mark.slow
def test_a_row_that_is_worse_fails_the_check_and_the_summary_says_which(runner: Path) -> None:
    done = play(COMPARE, runner, records=str(RECORDS), baseline="te-fp8")
    assert done.returncode == 1, done.stderr
    summary = (runner / "summary.md").read_text()
    assert re.search(r"worse than the baseline by more than 3%: .*bf16", summary)
    assert "te-fp8" in done.stdout and "next: " not in summary
    assert summary.startswith("````text\n") and summary.endswith("````\n")


@pytest.mark.slow
def test_nothing_worse_passes_and_options_reach_compare(runner: Path) -> None:
    (runner / "two words").mkdir()
    shutil.copy(RECORDS / "records.tar.xz", runner / "two words")
    records = "\n".join(["", str(runner / "two words"), str(RECORDS), ""])
    options = "--price-as p5.4xlarge --columns recipe,verdict"
    done = play(COMPARE, runner, records=records, baseline="bf16", options=options)
    assert done.returncode == 0, done.stdout
    assert "p5.4xlarge" in (runner / "summary.md").read_text()


@pytest.mark.slow
def test_records_that_are_not_there_fail_and_say_so(runner: Path) -> None:
    done = play(COMPARE, runner, records="--nothing\n$(touch hacked)")
    assert done.returncode == 2 and not (runner / "hacked").exists()
    assert "--nothing does not exist" in (runner / "summary.md").read_text()


@pytest.mark.parametrize(
    "said",
    [
        "::error title=x::y\n::stop-commands::z\n::z::\nbf16 0.1",
        "````\n## [merge it](https://example.com)\n`````````text\n",
        "next: rm -r .\n ```` a ````` b",
        "",
    ],
    ids=["command", "fence", "in-a-line", "nothing"],
)
def test_what_is_printed_is_no_command_and_ends_no_fence(runner: Path, said: str) -> None:
    (runner / "said").write_text(said)
    program = runner / "fastlaunch" / "bin" / "fastlaunch"
    program.write_text(f'#!/bin/sh\n[ "$1" = runs ] || cat "{runner}/said"\n')
    tokens = set()
    for _ in range(2):
        (runner / "summary.md").unlink(missing_ok=True)
        done = play(COMPARE, runner, records="x")
        assert done.returncode == 0 and done.stderr == ""
        first, *lines, last = done.stdout.splitlines()
        token = first.removeprefix("::stop-commands::")
        assert re.fullmatch("[0-9a-f]{32}", token) and last == f"::{token}::" and last not in lines
        tokens.add(token)
        shown = [line for line in said.splitlines() if not line.startswith("next: ")]
        assert lines == shown
        fence, *lines, last = (runner / "summary.md").read_text().splitlines()
        # The fence is longer than any in the text.
        assert lines == shown and fence == f"{last}text" and set(last) == {"`"}
        assert len(last) > max([3, *map(len, re.findall("`+", said))])
    assert len(tokens) == 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_it_installs_what_it_needs(tmp_path: Path) -> None:
    done = play(INSTALL, tmp_path)
    assert done.returncode == 0, done.stderr
    done = play(COMPARE, tmp_path, records=str(RECORDS), baseline="bf16")
    assert done.returncode == 0 and "te-fp8" in done.stdout
