"""`fastlaunch demo`: the published experiment at two days' prices, without torch, AWS or a ledger."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_records import write_run
from fake_summaries import PLAIN, TODAY, changed

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.demo import compared_measurements, of_one_gpu
from fastlaunch.cli.main import run
from fastlaunch.core.errors import BadFile
from fastlaunch.measure.published import read_summaries
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.records.records import read_record


def test_both_dates_and_what_changed(capsys: pytest.CaptureFixture[str], isolated: Path) -> None:
    assert run(["demo"]) == 0
    text, err = capsys.readouterr()
    out = " ".join(text.split())
    assert (
        "31.3% fewer images than on p4d.24xlarge at the prices of 2023-11-15 (94,206 against 137,176)" in out
    )
    assert "17.8% fewer" in out and "(168,283 against 204,740)" in out
    for usd in ("7.29", "10.62", "5.77", "4.88", "5.94", "3.23"):
        assert f" {usd} " in out
    assert err.startswith("next: fastlaunch submit --local")
    assert not isolated.exists()
    assert run(["demo", "--all"]) == 0
    full = capsys.readouterr().out
    assert "time before the measured steps" in full and "compile-max-autotune" in full


@pytest.mark.slow
def test_it_needs_nothing_heavy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; code = run(['demo']);"
        " print(*sorted({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "yaml" in modules
    assert not modules & {"torch", "boto3", "botocore", "scipy"}


def test_measurements_are_charged_hypothetically(tmp_path: Path) -> None:
    expected = []
    for recipe, step_time_s in (("bf16", 0.14), ("te-fp8", 0.09)):
        paths = write_run(
            tmp_path / recipe, run_id=recipe, recipe=recipe, step_time_s=step_time_s, batch_size=64
        )
        expected.append(summarize([read_record(path) for path in paths]))
    assert run(["demo", "--summarise", str(tmp_path)]) == 0
    summaries = read_summaries(tmp_path / "summaries.json")
    assert list(summaries.values()) == expected

    rows = compared_measurements(summaries, load_catalogue(), TODAY).rows
    for row in rows:
        assert row.price is not None and row.price.hypothetical == "1/8 of p5en.48xlarge"
    assert rows[1].verdict.speed_ratio is not None
    assert rows[1].verdict.speed_ratio.value == pytest.approx(14 / 9)


def test_two_runs_of_one_id_are_not_shipped(tmp_path: Path) -> None:
    for name, step_time_s in (("x1", 0.14), ("x2", 0.09)):
        write_run(tmp_path / name, run_id="20261121-090312-k3f9", step_time_s=step_time_s)
    assert run(["demo", "--summarise", str(tmp_path)]) == 2
    assert not (tmp_path / "summaries.json").exists()


def test_only_the_experiments_workload_on_one_gpu_is_shown() -> None:
    others = {
        "two": changed(PLAIN, num_gpus=2),
        "h100": changed(PLAIN, device_name="NVIDIA H100 80GB HBM3"),
        "one": PLAIN,
        "gelu": changed(PLAIN, workload="gelu", sample_unit="tensors"),
    }
    assert of_one_gpu(others) == {"one": PLAIN}


@pytest.mark.parametrize("text", ["{", "[1]", '{"run": {"kind": "records", "x": 1}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "summaries.json"
    file.write_text(text)
    with pytest.raises(BadFile):
        read_summaries(file)
