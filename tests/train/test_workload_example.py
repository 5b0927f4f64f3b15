"""The workload of docs/train.md: its code is run as it stands there, by the real entrypoint."""

import re
from pathlib import Path

import pytest
from entrypoint import ROOT, trained


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# my\.py\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = tmp_path_factory.mktemp("example") / "my.py"
    path.write_text(code)
    return f"{path}:build"


def test_the_guides_workload_learns_and_is_checked_and_evaluated(example: str, tmp_path: Path) -> None:
    more = ("--steps", "150", "--eval-every", "75", "--batch-size", "32")
    found = trained(tmp_path, *more, workload=example)
    first, last = found.steps[0].loss, found.steps[-1].loss
    assert first is not None and last is not None and last < 0.8 * first
    assert [(line.step, line.split, line.num_samples, line.metric) for line in found.evals] == [
        (75, "validation", 1000, "accuracy"),
        (150, "validation", 1000, "accuracy"),
    ]
    assert (found.evals[-1].metric_value or 0) > 0.8
    assert all(check.passed for check in found.checks)
    names = {check.name for check in found.checks}
    assert names == {
        *("equivalence", "isolation", "permutation"),
        "gradients",
        "gradients-by-tensor",
        "as-trained",
    }


@pytest.mark.slow
def test_the_guides_workload_sees_the_same_batches_after_a_stop(example: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", "--steps", "12", workload=example)
    more = ("--checkpoint-every", "5", "--resume")
    trained(tmp_path / "parts", *more, "--steps", "5", workload=example)
    again = trained(tmp_path / "parts", *more, "--steps", "12", workload=example, attempt=2)
    assert [step.loss for step in again.steps] == [step.loss for step in whole.steps[5:]]
