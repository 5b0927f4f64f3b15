"""The line for programs that rank 0 prints, held to the expressions by which SageMaker looks for it."""

import json
import re
from pathlib import Path

import pytest
from entrypoint import ROOT, arguments, ended, record, run

PLAN = ROOT / "tests" / "plans" / "sagemaker-p5.48xlarge-on-demand.json"


def test_what_is_printed_is_what_the_console_finds(tmp_path: Path) -> None:
    printed = ended(0, arguments(tmp_path), FASTLAUNCH_PRINT_METRICS="1")
    request = json.loads(PLAN.read_text())["request"]
    definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
    found = {one["Name"]: [float(v) for v in re.findall(one["Regex"], printed)] for one in definitions}
    recorded = record(tmp_path)
    ends = [recorded.steps[block.last_step - 1] for block in recorded.blocks]
    assert found["loss"] == pytest.approx([step.loss for step in ends], abs=1e-6)
    times_s = [b.wall_s / (b.last_step - b.first_step + 1) for b in recorded.blocks]
    assert found["step_time_s"] == pytest.approx(times_s, abs=1e-6)
    assert found["samples_per_s"] == pytest.approx([4 / time_s for time_s in times_s], abs=0.01)


def test_nobody_who_did_not_ask_is_told(tmp_path: Path) -> None:
    code, printed = run(arguments(tmp_path))
    assert code == 0 and "fastlaunch: " not in printed
