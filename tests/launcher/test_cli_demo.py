"""`fastlaunch demo`: the published experiment at two days' prices, without torch, AWS or a ledger."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_records import write_run
from fake_summaries import PLAIN, changed

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.demo import compared_measurements, of_one_gpu, read_summaries
from fastlaunch.cli.main import run
from fastlaunch.core.errors import BadFile
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.records.records import read_record


def test_both_dates_and_what_changed(capsys: pytest.CaptureFixture[str], isolated: Path) -> None:
    assert run(["demo"]) == 0
    out, err = capsys.readouterr()
    assert "at the prices of 2023-11-15" in out
    assert (
        "31.3% fewer images than on p4d.24xlarge at the prices of 2023-11-15 (94,206 against 137,176)" in out
    )
    assert "17.8% fewer" in out and "(168,283 against 204,740)" in out
    for usd in ("7.29", "10.62", "5.77", "4.88", "5.94", "3.23"):
        assert f" {usd} " in out
    assert err == "next: fastlaunch submit --local --recipe bf16 --repeats 3\n"
    assert not isolated.exists()


def test_it_needs_nothing_heavy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; code = run(['demo']);"
        " print(*sorted({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    modules = set(done.stdout.splitlines()[-1].split())
    assert "tabulate" in modules
    assert not modules & {"torch", "boto3", "botocore", "scipy"}


def test_measurements_are_charged_hypothetically(tmp_path: Path) -> None:
    expected = []
    for recipe, step_time_s in (("bf16", 0.14), ("te-fp8", 0.09)):
        paths = write_run(
            tmp_path / recipe, run_id=recipe, recipe=recipe, step_time_s=step_time_s, batch_size=64
        )
        expected.append(summarize([read_record(path) for path in paths]))
    assert run(["demo", "--summarise", str(tmp_path)]) == 0
    file = tmp_path / "summaries.json"
    summaries = read_summaries(file)
    assert list(summaries.values()) == expected

    comparison = compared_measurements(read_summaries(file), load_catalogue())
    for row in comparison.rows:
        assert row.price is not None and row.price.hypothetical == "1/8 of p5en.48xlarge"
    assert comparison.rows[1].verdict.speed_ratio is not None
    assert comparison.rows[1].verdict.speed_ratio.value == pytest.approx(14 / 9)
    # A record that turned out unfit is left out, and not compared as if nothing were wrong.
    good, bad = summaries
    unfit = {good: summaries[good], bad: changed(summaries[bad], problems=("ended as failed",))}
    assert [row.setup.recipe for row in compared_measurements(unfit, load_catalogue()).rows] == ["bf16"]


def test_what_cannot_be_used_is_not_left_out_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two experiments whose runs are called alike: the second would not be shipped."""
    for name, step_time_s in (("x1", 0.14), ("x2", 0.09)):
        write_run(tmp_path / name, run_id="20261121-090312-k3f9", step_time_s=step_time_s)
    assert run(["demo", "--summarise", str(tmp_path)]) == 2
    assert "run 20261121-090312-k3f9 again, differing from" in capsys.readouterr().err
    assert not (tmp_path / "summaries.json").exists()


def test_only_the_experiments_workload_on_one_gpu_is_shown() -> None:
    """Two GPUs cost two eighths, and other workloads would make the demo long."""
    others = {
        "two": changed(PLAIN, num_gpus=2),
        "h100": changed(PLAIN, device_name="NVIDIA H100 80GB HBM3"),
        "one": PLAIN,
        "gelu": changed(PLAIN, workload="gelu", sample_unit="tensors"),
    }
    assert of_one_gpu(others) == {"one": PLAIN}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run": 1}', '{"run": {"kind": "records", "x": 1}}'])
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "summaries.json"
    file.write_text(text)
    with pytest.raises(BadFile):
        read_summaries(file)
