"""`fastlaunch prices`: the price in force, in three forms, and what it says when there is none."""

import csv
import io
import json
from pathlib import Path

import pytest

from fastlaunch.cli.main import run


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert run(["prices", *argv]) == code
    out, err = capsys.readouterr()
    return out, err


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, object]]:
    out, _ = answer(capsys, *argv, "--output", "json")
    value = json.loads(out)
    assert value["schema"] == 1
    found: list[dict[str, object]] = value["prices"]
    return found


def test_prices_on_two_days(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--instance", "p[45]*24xlarge", "--service", "ec2")
    then = {row["instance"]: row["usd_per_hour"] for row in rows(capsys, *chosen, "--as-of", "2023-11-15")}
    now = {row["instance"]: row["usd_per_hour"] for row in rows(capsys, *chosen, "--as-of", "2026-11-21")}
    assert then == {"p4d.24xlarge": 32.7726, "p4de.24xlarge": 40.96575}
    assert now == {"p4d.24xlarge": 21.957642, "p4de.24xlarge": 27.44705}


def test_a_row_in_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--instance", "p5.48xlarge", "--service", "ec2", "--as-of", "2026-11-21")
    (row,) = rows(capsys, *chosen)
    assert row == {
        "instance": "p5.48xlarge",
        "num_accelerators": 8,
        "accelerator": "H100",
        "service": "ec2",
        "region": "us-east-1",
        "purchase": "on-demand",
        "usd_per_hour": 55.04,
        "usd_per_accelerator_hour": 6.88,
        "as_of": "2026-07-20",
        "inferred": False,
        "source": "AWS price list, us-east-1, generated 2026-07-20",
    }
    out, _ = answer(capsys, *chosen, "--output", "csv")
    (line,) = csv.DictReader(io.StringIO(out))
    assert line == {key: str(value).lower() if value is False else str(value) for key, value in row.items()}


def test_without_a_region_it_is_that_of_the_config_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {row["region"] for row in rows(capsys)} == {"us-east-1"}
    config = tmp_path / "config.yaml"
    config.write_text("region: eu-west-1\n")
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(config))
    assert {row["region"] for row in rows(capsys)} == {"eu-west-1"}
    assert {row["region"] for row in rows(capsys, "--region", "us-west-2")} == {"us-west-2"}


def test_all_gives_the_history(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--instance", "p5.48xlarge", "--service", "ec2", "--as-of", "2026-11-21")
    history = [(row["as_of"], row["usd_per_hour"]) for row in rows(capsys, *chosen, "--all")]
    assert history == [("2023-08-08", 98.32), ("2025-06-23", 55.04), ("2026-07-20", 55.04)]
    before = rows(capsys, *chosen[:4], "--as-of", "2023-11-15", "--all")
    assert [row["usd_per_hour"] for row in before] == [98.32]


def test_a_price_file_of_ones_own_by_option_or_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = (
        "prices: [{instance: p5.48xlarge, service: ec2, region: us-east-1, as_of: 2026-11-01, source: ours, "
    )
    for name, usd in (("option.yaml", 41), ("config-prices.yaml", 42)):
        (tmp_path / name).write_text(f"{entry} usd_per_hour: {usd}}}]\n")
    chosen = ("--instance", "p5.48xlarge", "--service", "ec2", "--as-of", "2026-11-21")
    by_option = (*chosen, "--prices", str(tmp_path / "option.yaml"))
    assert [row["usd_per_hour"] for row in rows(capsys, *by_option)] == [41]
    (tmp_path / "config.yaml").write_text("prices: config-prices.yaml\n")
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(tmp_path / "config.yaml"))
    assert [row["usd_per_hour"] for row in rows(capsys, *chosen)] == [42]
    assert [row["usd_per_hour"] for row in rows(capsys, *by_option)] == [41]


def test_a_fault_in_the_file_is_told_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "prices:\n  - {instance: p5.48xlarge, service: ec2, region: us-east-1,\n     usd_per_hour: 0}\n"
    )
    out, err = answer(capsys, "--prices", str(file), code=2)
    assert out == ""
    assert f"error: {file}:2: prices[1] has no `as_of` and no `source`" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--instance", "p5.24xlarge"], "p5.48xlarge"),
        (["--as-of", "2023-13-01"], "'2023-13-01' is not a date"),
        (["--region", "mars"], "there are prices in eu-west-1, us-east-1"),
        (
            ["--instance", "p5e.48xlarge"],
            "does not sell p5e.48xlarge on-demand, but as spot or capacity-block",
        ),
        (["--instance", "p5e*", "--region", "*"], None),
        (["--instance", "p5.48xlarge", "--as-of", "2020-01-01"], "the earliest known is of 2023-08-08"),
        (["--service", "gcp"], "'gcp' is not one of"),
        (["--prices", "/does/not/exist.yaml"], "/does/not/exist.yaml: does not exist"),
    ],
)
def test_what_cannot_be_answered_is_exit_2_with_the_way_out(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str | None
) -> None:
    if says is None:
        # The glob also takes p5en, which has a price: p5e is then told on stderr.
        _, err = answer(capsys, *argv)
        assert "no price known in * on" in err
        assert "p5e.48xlarge" in err
        return
    out, err = answer(capsys, *argv, code=2)
    assert out == ""
    assert says in err
