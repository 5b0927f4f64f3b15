"""Of whom, where and how a run's machine was rented: it is priced by that, and repeated there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import TODAY, evaluated, price_of

from fastlaunch.analysis.compare import MeasuredRun
from fastlaunch.analysis.suggest import place_of, rented
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price
from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.job import Job, Terms
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.recipes.recipes import resolve_recipe

OWN = "20261121-090312-k3f9"
H100 = "NVIDIA H100 80GB HBM3"
P5: dict[str, Any] = {"instance": "p5.48xlarge", "device_name": H100, "run_id": OWN, "batch_size": 64}
P5 |= {"world_size": 8, "steps": 40}
OF_SAGEMAKER = {
    "machine": {"host_id": "a", "device_type": "cuda", "device_name": H100, "service": "sagemaker"}
}
BILLED = replace(price_of(31.5), service="sagemaker", region="us-west-2", purchase="spot")


def listed(service: str) -> float:
    return load_catalogue().price("p5.48xlarge", service=service, on=TODAY).usd_per_hour


def row(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """The only row of `fastlaunch compare`, and what was said on stderr."""
    capsys.readouterr()
    assert run(["compare", "--every-run", "--output", "json", *argv]) == 0
    out, err = capsys.readouterr()
    (found,) = json.loads(out)["rows"]
    return found, err


def place(found: dict[str, Any]) -> tuple[str, str, str, float | None]:
    return found["service"], found["region"], found["purchase"], found["usd_per_hour"]


def collected(folder: Path, *, backend: str, region: str, purchase: str, price: Price | None = None) -> None:
    """A run on AWS in the ledger whose records are here, billed at `price`, if that is known."""
    files = write_run(folder, **P5)
    spec = Job(
        workload="vit-huge",
        recipe=resolve_recipe("bf16"),
        batch_size=64,
        steps=40,
        num_gpus=8,
        backend=backend,
        instance="p5.48xlarge",
        region=region,
        terms=Terms(purchase=purchase),
    )
    with open_ledger(load_settings()) as ledger:
        ledger.add_run(
            ledger.add_submission("fastlaunch submit"),
            OWN,
            spec=spec.to_json(),
            plan={},
            workload="vit-huge",
            recipe="bf16",
            backend=backend,
            instance="p5.48xlarge",
            price=price,
            directory=folder,
        )
        ledger.set_summary(OWN, summarize([read_record(file) for file in files]))
        ledger.set_state(OWN, RunState.COMPLETED)


@pytest.mark.parametrize(("header", "service"), [(OF_SAGEMAKER, "sagemaker"), ({}, "ec2")])
def test_imported_records_are_priced_by_whose_machine_it_was(
    header: dict[str, Any], service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older records do not say: they count as EC2's, as before."""
    write_run(tmp_path / "records", header=header, **P5)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0
    found, err = row(capsys)
    assert place(found) == (service, "us-east-1", "on-demand", listed(service))
    assert ("--service sagemaker" in err) == (service == "sagemaker")


@pytest.mark.parametrize(
    ("backend", "purchase", "region", "usd_per_hour"),
    [
        ("ec2", "on-demand", "us-west-2", "ec2"),
        ("sagemaker", "on-demand", "us-west-2", "sagemaker"),
        # No price in the list: not that of another purchase option.
        ("ec2", "spot", "us-west-2", None),
    ],
)
def test_a_run_whose_price_was_not_noted_has_that_of_its_place(
    backend: str,
    purchase: str,
    region: str,
    usd_per_hour: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    collected(tmp_path / "run", backend=backend, region=region, purchase=purchase)
    found, err = row(capsys)
    known = listed(usd_per_hour) if usd_per_hour else None
    assert place(found) == (backend, region, purchase, known)
    assert (f"no {backend} {purchase} price of p5.48xlarge in {region} is known" in err) == (known is None)
    assert (f"--region {region}" in err) == (known is not None)


def test_what_was_billed_comes_with_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collected(tmp_path / "run", backend="sagemaker", region="us-west-2", purchase="spot", price=BILLED)
    assert run(["runs", "export", OWN, "--to", str(tmp_path / "out")]) == 0
    before, _ = row(capsys)
    assert place(before) == ("sagemaker", "us-west-2", "spot", 31.5)
    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "other home"))
    assert run(["runs", "import", str(tmp_path / "out")]) == 0
    after, _ = row(capsys)
    assert after == before


@pytest.mark.parametrize(
    ("where", "changes", "options"),
    [
        ({}, {}, ""),
        ({"region": "us-west-2"}, {}, "--region us-west-2"),
        (
            {"purchase": "spot", "region": "us-west-2"},
            {"number": 3, "last_step": 90},
            "--region us-west-2 --purchase spot --checkpoint-every 30",
        ),
        ({"purchase": "capacity-block"}, {}, "--purchase capacity-block --reservation cr-..."),
        # Billed at the price on demand, for seconds of which SageMaker left none out.
        (
            {"purchase": "spot", "price": replace(BILLED, purchase="on-demand", region="eu-west-1")},
            {},
            "--purchase spot --checkpoint-every 25",
        ),
        ({"price": BILLED}, {}, "--region us-west-2 --purchase spot --checkpoint-every 25"),
    ],
)
def test_a_proposed_command_rents_the_same_once_more(
    where: dict[str, Any], changes: dict[str, Any], options: str
) -> None:
    """Where that is not what `submit` does without being told: in the user's own region, on demand."""
    summary = evaluated("bf16", 0, 2.0, **{"instance": "p5.48xlarge", "num_steps": 100, **changes})
    measured = MeasuredRun(run_id="run", summary=summary, **{"region": "eu-west-1", **where})
    _, _, *words = rented([summary], "p5.48xlarge", place_of(measured, own_region="eu-west-1"))
    assert " ".join(words) == options
