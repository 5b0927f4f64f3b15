"""`fastlaunch demo`: the published experiment at two days' prices, without torch, AWS or a ledger."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_summaries import PLAIN, TODAY, changed

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.cli.demo import DEVICE, compared_measurements, of_one_gpu
from fastlaunch.cli.main import run
from fastlaunch.core.errors import BadFile
from fastlaunch.measure.published import read_summaries


def test_it_needs_no_home(isolated: Path) -> None:
    assert run(["demo"]) == 0
    assert not isolated.exists()


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


H100 = changed(PLAIN, device_name=DEVICE)


def test_measurements_are_charged_as_the_instance_with_their_gpu() -> None:
    summaries = {"bf16": H100, "te-fp8": changed(H100, recipe="te-fp8")}
    for row in compared_measurements(summaries, load_catalogue(), TODAY).rows:
        assert row.price is not None and row.price.instance == "p5.4xlarge" and not row.price.hypothetical


def test_only_the_experiments_workload_on_one_gpu_is_shown() -> None:
    others = {
        "two": changed(H100, num_gpus=2),
        "h200": PLAIN,
        "one": H100,
        "gelu": changed(H100, workload="gelu", sample_unit="tensors"),
    }
    assert of_one_gpu(others) == {"one": H100}


@pytest.mark.parametrize("text", ["{", "[1]", '{"run": {"kind": "records", "x": 1}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "summaries.json"
    file.write_text(text)
    with pytest.raises(BadFile):
        read_summaries(file)
