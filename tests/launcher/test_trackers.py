"""`runs export --format`, with the real MLflow, Weights & Biases and TensorBoard.

They are large and have dependencies of their own: they lie in an environment of their own, `make trackers`.
"""

import json
import os
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run

from fastlaunch.cli.main import run

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
RUN = "20261121-090312-k3f9"
STARTED_S = 1793534400.0
TRACKERS = ("mlflow", "wandb", "tensorboard")


def there(*words: str | Path, code: int = 0) -> str:
    """stdout of a command of the environment with the trackers; stderr of one that is to fail."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'launcher'}:{ROOT / 'train'}",
        # They would say over the network that they are used.
        "DO_NOT_TRACK": "1",
        "WANDB_ERROR_REPORTING": "false",
    }
    command = [PYTHON, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def export(tracker: str, folder: Path) -> str:
    return there("-m", "fastlaunch", "runs", "export", "recipe=*", "--format", tracker, "--to", folder)


def exported(tracker: str, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(there(Path(__file__).with_name("read_trackers.py"), tracker, folder))
    return found


@pytest.fixture
def runs(isolated: Path, tmp_path: Path) -> None:
    """Two runs in the ledger, one of which failed."""
    if not PYTHON.exists():
        pytest.skip("needs MLflow, Weights & Biases and TensorBoard: make trackers")
    write_run(tmp_path / "one", run_id=RUN, steps=40, seed=3, instance="p5.48xlarge", data_wait_s=0.25)
    failed = {"status": "failed", "message": "a test", "recipe": "fp32"}
    write_run(tmp_path / "two", run_id=f"{RUN[:-1]}x", steps=40, **failed)
    assert run(["runs", "import", str(tmp_path / "one"), str(tmp_path / "two")]) == 0


@pytest.mark.parametrize("tracker", TRACKERS)
def test_the_library_reads_what_was_exported(tracker: str, runs: None, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert export(tracker, folder).startswith("Exported 2 runs ")
    found = exported(tracker, folder)
    assert {*found} == {RUN, f"{RUN[:-1]}x"}
    one = found[RUN]
    assert "bf16" in one["name"]
    # MLflow keeps them as text, and TensorBoard as floats.
    assert float(one["params"]["seed"]) == 3 and one["params"]["instance"] == "p5.48xlarge"
    assert one["params"]["fingerprint.torch"] == "2.13.0"
    for name, value in (("loss", 2.05), ("step_time_s", 0.1), ("samples_per_s", 20), ("data_wait_s", 0.25)):
        rows = one["metrics"][name]
        assert [step for step, _, _ in rows] == list(range(1, 41))
        assert rows[19][1:] == pytest.approx([STARTED_S + 20 * 0.1, value], abs=0.001)
    assert one["metrics"]["summary/step_time_s"][0][2] == pytest.approx(0.1)
    assert one["metrics"]["summary/usd_per_million_samples"][0][2] > 0
    assert {"import", "backend:import"} & {*one["tags"]}
    statuses = {"mlflow": ("FINISHED", "FAILED"), "wandb": (0, 1), "tensorboard": (None, None)}
    assert (one.get("status"), found[f"{RUN[:-1]}x"].get("status")) == statuses[tracker]


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_second_export_replaces_what_has_changed_and_adds_what_is_new(
    tracker: str, runs: None, isolated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export(tracker, folder)
    before = exported(tracker, folder)
    assert export(tracker, folder).startswith("Exported 2 runs ")
    assert exported(tracker, folder) == before
    with sqlite3.connect(isolated / "ledger.sqlite") as database:
        database.execute("UPDATE runs SET state = 'interrupted' WHERE id = ?", (RUN,))
    database.close()
    write_run(tmp_path / "three", run_id=f"{RUN[:-1]}y", steps=40)
    assert run(["runs", "import", str(tmp_path / "three")]) == 0
    assert export(tracker, folder).startswith("Exported 3 runs ")
    after = exported(tracker, folder)
    assert len(after) == 3 and {name for name in before if after[name] != before[name]} == {RUN}
    assert any("interrupted" in tag for tag in after[RUN]["tags"])


def test_mlflows_half_of_a_run_is_written_again(runs: None, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export("mlflow", folder)
    before = exported("mlflow", folder)
    with sqlite3.connect(folder / "mlflow.db") as database:
        database.execute("DELETE FROM metrics")
        database.execute("UPDATE runs SET status = 'RUNNING'")
    database.close()
    assert export("mlflow", folder).startswith("Exported 2 runs ")
    assert exported("mlflow", folder) == before
