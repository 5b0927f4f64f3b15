"""`fastlaunch prices`: the price in force, in three forms, and what it says when there is none."""

import csv
import io
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from fastlaunch.cli.main import run
from fastlaunch.lifecycle.world import default_context

P5 = ("--instance", "p5.48xlarge", "--service", "ec2", "--as-of", "2026-11-21")
PRICE = {
    "instance": "p5.48xlarge",
    "num_accelerators": 8,
    "accelerator": "H100",
    "service": "ec2",
    "region": "us-east-1",
    "zone": None,
    "purchase": "on-demand",
    "usd_per_hour": 55.04,
    "usd_per_accelerator_hour": 6.88,
    "paid_usd_per_hour": 55.04,
    "as_of": "2026-07-20",
    "interruption": None,
    "quota": None,
    "inferred": False,
    "secondary": False,
    "source": "AWS price list, us-east-1",
    "buying": None,
}


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert run(["prices", *argv, "--output", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == 1
    prices: list[dict[str, object]] = value["prices"]
    return prices


def test_a_price_in_json_and_in_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(capsys, *P5) == [PRICE]
    assert run(["prices", *P5, "--output", "csv"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert line == {
        **{key: "" if value is None else str(value) for key, value in PRICE.items()},
        "inferred": "false",
        "secondary": "false",
    }


def test_all_gives_the_history(capsys: pytest.CaptureFixture[str]) -> None:
    history = [(row["as_of"], row["usd_per_hour"]) for row in rows(capsys, *P5, "--all")]
    assert history == [("2023-07-31", 98.32), ("2025-06-05", 55.04), ("2026-07-20", 55.04)]
    before = rows(capsys, *P5[:4], "--as-of", "2023-11-15", "--all")
    assert [row["usd_per_hour"] for row in before] == [98.32]


def test_days_are_those_of_utc_by_the_clock_that_is_passed_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    west = timezone(timedelta(hours=-12))
    context = replace(default_context(), now=lambda: datetime(2026, 12, 1, 23, 30, tzinfo=west))
    prices = tmp_path / "own.yaml"
    prices.write_text(
        "schema: 1\nprices: [{instance: p5.48xlarge, service: ec2, regions: [us-east-1], usd_per_hour: 11.11,"
        " as_of: 2026-12-02, source: own}]\n",
        encoding="utf-8",
    )
    figures = tmp_path / "own.csv"
    figures.write_text(
        "workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source\n"
        "vit-huge,p5.48xlarge,1,bf16,64,8,0.199,,own\n",
        encoding="utf-8",
    )
    assert run(["runs", "import", str(figures)], context) == 0
    for argv, table in (
        (("prices", *P5[:4]), "prices"),
        (("compare",), "rows"),
        (("report", "--format", "json", "--measured-only"), "rows"),
    ):
        capsys.readouterr()
        output = [] if argv[0] == "report" else ["--output", "json"]
        assert run([*argv, *output, "--prices", str(prices)], context) == 0
        (found,) = json.loads(capsys.readouterr().out)[table]
        assert found.get("price", found)["usd_per_hour"] == 11.11


def test_region_and_price_file_are_the_options_else_the_config_files(
    capsys: pytest.CaptureFixture[str], isolated: Path
) -> None:
    entry = "prices: [{instance: p5.48xlarge, service: ec2, as_of: 2026-11-01, source: ours, "
    for name, usd in (("option.yaml", 41), ("config-prices.yaml", 42)):
        text = f"{entry} region: eu-west-1, usd_per_hour: {usd}}}]\n"
        (isolated.parent / name).write_text(text)
    (isolated.parent / "config.yaml").write_text("region: eu-west-1\nprices: config-prices.yaml\n")
    assert [row["usd_per_hour"] for row in rows(capsys, *P5)] == [42]
    by_option = ("--prices", str(isolated.parent / "option.yaml"))
    assert [row["usd_per_hour"] for row in rows(capsys, *P5, *by_option)] == [41]
    assert {row["region"] for row in rows(capsys, "--region", "us-west-2")} == {"us-west-2"}


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--instance", "p5.24xlarge"], "p5.48xlarge"),
        (["--gpu", "H1000"], "H100"),
        (["--gpu", "H100:3"], "H100:8"),
        (["--as-of", "2023-13-01"], "--as-of"),
        (["--region", "mars"], "eu-west-1, us-east-1"),
        (["--instance", "p5e.48xlarge"], "spot or capacity-block"),
        (["--instance", "p5.48xlarge", "--as-of", "2020-01-01"], "2023-07-31"),
        (["--prices", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
    ],
)
def test_without_a_price_it_ends_with_2_and_the_way_out(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    assert run(["prices", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and part in err


def test_the_age_of_prices_counts_no_price_of_a_third_party(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["prices", "check", "--output", "json"]) in (0, 1)
    oldest = {row["oldest"] for row in json.loads(capsys.readouterr().out)}
    assert oldest and not oldest & {"2025-06-28", "2026-01-31"}
