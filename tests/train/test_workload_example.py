"""The workloads of the README and the guide: their code is run as it stands there, by the real entrypoint."""

import re
from pathlib import Path

import pytest
from entrypoint import ROOT, arguments, record, run


def example_of(page: str, folder: Path) -> Path:
    text = (ROOT / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# my\.py\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = folder / "my.py"
    path.write_text(code)
    return path


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_of("docs/guide.md", tmp_path_factory.mktemp("example"))


def test_the_readmes_workload_trains(tmp_path: Path) -> None:
    workload = f"{example_of('README.md', tmp_path)}:build"
    argv = arguments(tmp_path / "out", "--steps", "12", "--batch-size", "32", workload=workload)
    exit_code, output = run(argv)
    assert exit_code == 0, output


def test_the_guides_workload_learns_and_is_checked_and_evaluated(example: Path, tmp_path: Path) -> None:
    argv = arguments(tmp_path / "out", "--steps", "60", "--eval-every", "30", workload=f"{example}:build")
    exit_code, output = run([*argv, "--batch-size", "32"])
    assert exit_code == 0, output
    found = record(tmp_path / "out")
    assert found.steps[-1].loss is not None
    assert found.steps[0].loss is not None
    assert found.steps[-1].loss < 0.8 * found.steps[0].loss
    evals = found.evals
    assert [(line.step, line.split, line.num_samples, line.metric) for line in evals] == [
        (30, "validation", 1000, "accuracy"),
        (60, "validation", 1000, "accuracy"),
    ]
    assert evals[-1].metric_value is not None
    assert evals[-1].metric_value > 0.9
    assert {check.name: check.passed for check in found.checks} == {
        "equivalence": True,
        "isolation": True,
        "permutation": True,
        "as-trained": True,
    }


@pytest.mark.slow
def test_the_guides_workload_sees_the_same_batches_after_a_stop(example: Path, tmp_path: Path) -> None:
    argv = arguments(tmp_path / "whole", "--steps", "12", "--batch-size", "8", workload=f"{example}:build")
    assert run(argv)[0] == 0
    parts = arguments(tmp_path / "parts", "--batch-size", "8", workload=f"{example}:build")
    parts += ["--checkpoint-every", "5", "--resume"]
    for steps in ("5", "12"):
        exit_code, output = run([*parts, "--steps", steps])
        assert exit_code == 0, output
    whole = [step.loss for step in record(tmp_path / "whole").steps]
    assert [step.loss for step in record(tmp_path / "parts", attempt=2).steps] == whole[5:]
