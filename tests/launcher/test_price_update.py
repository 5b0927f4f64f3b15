"""`fastlaunch prices update` against price lists as AWS gives them, and what is left after a failure."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_summaries import price_of

from fastlaunch.api.listing import prices
from fastlaunch.aws.client import Aws
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price, age_note
from fastlaunch.catalog.updates import (
    MarketPrice,
    by_time,
    interruption,
    read_market,
    with_newer,
    write_market,
    write_prices,
)
from fastlaunch.cli.main import run
from fastlaunch.core.errors import NotAuthorised, UserError
from fastlaunch.core.settings import AccountRate, load_settings
from fastlaunch.lifecycle.price_update import update_prices
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from moto_server import MotoServer

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)
TODAY = NOW.date()
P5 = ("p5.48xlarge", "55.0400000000")
#: Prices in us-east-1 before and after the night of 4 June 2025, of aws/karpenter-provider-aws
#: (zz_generated.pricing, its git history, Apache-2.0). Its own table showed the second ones on 23 June.
JUNE_2025 = {
    "p4d.24xlarge": ("32.7726", "21.957642"),
    "p4de.24xlarge": ("40.96575", "27.44705"),
    "p5.48xlarge": ("98.32", "55.04"),
    "p5en.48xlarge": ("84.80", "63.296"),
    "g5.xlarge": ("1.006", "1.006"),
}

Update = Callable[..., tuple[int, dict[str, Any]]]
Product = Callable[..., str]


@pytest.fixture
def product() -> Product:
    from moto_prices import product

    return product


@pytest.fixture
def update(
    aws: Aws, aws_server: "MotoServer", product: Product, capsys: pytest.CaptureFixture[str]
) -> Update:
    """Return the exit code of an update on a day, and its JSON."""

    def call(now: datetime = NOW, *, accept: bool = False) -> tuple[int, dict[str, Any]]:
        if not any('"ml.' in text for text in aws_server.price_lists.products):
            aws_server.price_lists.products.append(product("ml.p5.48xlarge", "63.296"))
        context = World(settings=load_settings(), backends={}, connect=lambda: aws, now=lambda: now)
        capsys.readouterr()
        code = run(["prices", "update", "--output", "json", *["--accept"] * accept], obj=context)
        return code, json.loads(capsys.readouterr().out)

    return call


def in_force(on: date = TODAY, instance: str = "p5.48xlarge", service: str = "ec2") -> Price:
    catalogue = load_catalogue(*load_settings().price_files())
    return catalogue.price(instance, service=service, on=on)


def test_an_update_notices_a_change_at_once_and_a_failed_one_never_looks_fresh(
    update: Update, product: Product, aws_server: "MotoServer"
) -> None:
    lists = aws_server.price_lists
    for day, column in ((2, 0), (4, 1)):
        lists.products = [product(name, usd[column]) for name, usd in JUNE_2025.items()]
        code, found = update(datetime(2025, 6, day, tzinfo=UTC))
        assert code == 0
        changed = {row["instance"]: row["percent"] for row in found["changes"] if row["change"] == "changed"}
        assert changed == (
            {}
            if column == 0
            else {"p4d.24xlarge": -33, "p4de.24xlarge": -33, "p5.48xlarge": -44.02, "p5en.48xlarge": -25.36}
        )
    assert in_force(date(2025, 6, 3)).usd_per_hour == 98.32
    assert in_force(date(2025, 6, 4)).usd_per_hour == 55.04
    aws_server.refuse("GetProducts", "AccessDeniedException", "no")
    failed_on = datetime(2026, 9, 16, tzinfo=UTC)
    code, found = update(failed_on)
    assert code == 3 and "AccessDenied" in found["failures"][0]
    assert in_force(failed_on.date()).as_of < failed_on.date()


def test_a_home_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAUNCH_HOME", "/dev/null/home")
    with pytest.raises(UserError, match="cannot be written"):
        update_prices(context=World(settings=load_settings(), backends={}))


def test_what_is_ambiguous_is_not_guessed(update: Update, product: Product, aws_server: "MotoServer") -> None:
    aws_server.price_lists.products = [
        product(*P5),
        # Of another kind, which the filters leave out.
        product("p5.48xlarge", "0", marketoption="CapacityBlock"),
        product("p5.48xlarge", "60", operatingSystem="Windows"),
        product("g5.xlarge", "1.1", sku="A"),
        product("g5.xlarge", "1.2", sku="B"),
        product("g6.xlarge", "5.0", currency="CNY", sku="C"),
        product("p4d.24xlarge", "22.1"),
        product("m5.large", "0.096"),
        product("ml.p5.48xlarge", "70"),
        product("ml.p5.48xlarge", "90", platoinstancetype="Hosting"),
    ]
    aws_server.refuse("GetProducts", "ThrottlingException", "slow down", times=1)
    code, found = update()
    assert code == 3
    assert [failure.partition(":")[0] for failure in found["failures"]] == [
        "ec2 g5.xlarge in us-east-1",
        "ec2 g6.xlarge in us-east-1",
    ]
    assert "A, B" in found["failures"][0]
    changes = {(row["instance"], row["service"]): row for row in found["changes"]}
    assert changes["p4d.24xlarge", "ec2"]["change"] == "changed"
    assert changes["p4de.24xlarge", "ec2"]["change"] == "gone"
    assert not {("g5.xlarge", "ec2"), ("p5.48xlarge", "ec2")} & changes.keys()
    # What is the same has a new date all the same; what was not found out, or is gone, keeps its old one.
    assert in_force().as_of == TODAY and in_force(service="sagemaker").usd_per_hour == 70
    assert (
        in_force(instance="g5.xlarge").as_of == in_force(instance="p4de.24xlarge").as_of == date(2026, 7, 20)
    )


@pytest.mark.parametrize("usd", ["0.0001", "9999999", "5.5", "551"])
def test_a_price_far_from_the_last_one_is_taken_only_if_accepted(
    usd: str, update: Update, product: Product, aws_server: "MotoServer", isolated: Path
) -> None:
    lists = aws_server.price_lists
    lists.products = [product("p5.48xlarge", usd), product("p4d.24xlarge", "22.1")]
    lists.spot = [
        ("p5.48xlarge", "us-east-1a", "2026-11-20T12:00:00.000Z", float(usd)),
        ("p4d.24xlarge", "us-east-1a", "2026-11-20T12:00:00.000Z", 9.0),
        # Its median, which is what a training pays.
        ("p4d.24xlarge", "us-east-1b", "2026-11-16T12:00:00.000Z", 0.5 if float(usd) < 50 else 500.0),
        ("p4d.24xlarge", "us-east-1b", "2026-11-24T00:00:00.000Z", 9.0),
    ]
    code, found = update()
    assert code == 3
    told = [failure.partition(":")[0] for failure in found["failures"]]
    assert told == [
        "ec2 p5.48xlarge in us-east-1",
        "spot p4d.24xlarge in us-east-1b",
        "spot p5.48xlarge in us-east-1a",
    ]
    assert in_force().usd_per_hour == 55.04 and in_force(instance="p4d.24xlarge").usd_per_hour == 22.1
    assert [each.zone for each in read_market(isolated / "market.yaml")] == ["us-east-1a"]
    code, found = update(accept=True)
    assert code == 0
    assert in_force().usd_per_hour == float(usd)
    assert len(read_market(isolated / "market.yaml")) == 3


@pytest.mark.parametrize("usd", ["", "nan", "inf", "-1", "0", "1e-3", "0x10", "fifty"])
def test_a_bad_number_leaves_out_its_price_alone(
    usd: str, update: Update, product: Product, aws_server: "MotoServer"
) -> None:
    aws_server.price_lists.products = [product("p5.48xlarge", usd), product("p4d.24xlarge", "22.1")]
    code, found = update()
    assert code == 3 and len(found["failures"]) == 1
    assert found["failures"][0].startswith("ec2 p5.48xlarge in us-east-1: ")
    assert in_force().as_of == date(2026, 7, 20) and in_force(instance="p4d.24xlarge").usd_per_hour == 22.1


def test_an_answer_that_breaks_off_changes_nothing_of_that_list(
    update: Update, product: Product, aws_server: "MotoServer"
) -> None:
    aws_server.price_lists.products = [product(*P5), product("p4d.24xlarge", "1")[:-40]]
    code, found = update()
    assert code == 3 and "cannot be read" in found["failures"][0]
    assert in_force().as_of == date(2026, 7, 20) and in_force(service="sagemaker").as_of == TODAY


def test_prices_are_also_at_the_users_rates_and_ask_for_quotas_where_they_are_to() -> None:
    class Quotas:
        """An account with room for two of p5, whose other quotas are AWS's, of which it hides one."""

        def quota(self, region: str, service: str, code: str) -> float | None:
            if code == "L-C4BD4855":
                raise NotAuthorised("not yours to know")
            return {"L-417A185B": 400.0}.get(code)

        def default_quota(self, region: str, service: str, code: str) -> float | None:
            return 0.0

    market = [
        MarketPrice(
            **{"instance": "p5.48xlarge", "region": "us-east-1", "zone": "us-east-1a", "purchase": purchase},
            **{"usd_per_hour": 20.0, "at": NOW.isoformat()},
        )
        for purchase in ("spot", "capacity-block")
    ]
    settings = replace(load_settings(), rates={"p5": AccountRate(discount=0.5)})
    write_market(settings.home / "market.yaml", market)
    aws: Any = Quotas()
    context = World(settings=settings, backends={}, connect=lambda: aws, now=lambda: NOW)
    options: Any = {"service": "ec2", "context": context}
    found = {row["purchase"]: row for row in prices(gpu="H100:8", quotas=True, **options).to_json()}
    assert {purchase: row["quota"] for purchase, row in found.items()} == {
        "on-demand": 2,
        "spot": None,
        "capacity-block": None,
    }
    paid = {purchase: row["paid_usd_per_hour"] for purchase, row in found.items()}
    assert paid == {"on-demand": pytest.approx(55.04 / 2), "spot": 20.0, "capacity-block": 20.0}
    assert {row["quota"] for row in prices(gpu="L4:1", quotas=True, **options).to_json()} == {0}
    assert {row["quota"] for row in prices(gpu="H100:8", **options).to_json()} == {None}


@pytest.mark.parametrize("name", ["prices.yaml", "market.yaml"])
def test_a_damaged_file_of_an_update_is_to_be_removed(isolated: Path, name: str) -> None:
    path = isolated / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("schema: 1\nprices: [")
    context = World(settings=load_settings(), backends={}, now=lambda: NOW)
    with pytest.raises(UserError) as error:
        update_prices(context=context)
    assert str(path) in error.value.message and f"rm {path}" in (error.value.hint or "")


def test_spot_and_capacity_blocks_are_kept_by_zone(
    update: Update,
    product: Product,
    aws_server: "MotoServer",
    isolated: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lists = aws_server.price_lists
    lists.products = [product(*P5)]
    lists.spot = [
        ("p5.48xlarge", "us-east-1a", f"2026-11-{day}T12:00:00.000Z", usd)
        for day, usd in (("16", 9.0), ("20", 20.0), ("24", 30.0))
    ]
    lists.blocks = [
        ("p5.48xlarge", "us-east-1b", "2026-11-25T11:30:00.000Z", 24, usd) for usd in (900.0, 720.0)
    ]
    lists.plans = [("ml.p5.48xlarge", "us-east-1c", 1_764_000_000.0, 24, fee) for fee in (960.0, 840.0)]
    assert update()[0] == 0
    spot, block, plan = read_market(isolated / "market.yaml")
    assert (plan.purchase, plan.zone, plan.usd_per_hour) == ("training-plan", "us-east-1c", 35.0)
    assert (block.starts_at, block.hours) == ("2026-11-25T11:30+00:00", 24)
    assert "24 h of one instance from 2026-11-25T11:30+00:00" in block.price.source
    assert block.price.buying == (
        "aws ec2 purchase-capacity-block --region us-east-1 --capacity-block-offering-id cb-0a1 "
        "--instance-platform Linux/UNIX   # $720.00"
    )
    assert "--training-plan-offering-id tpo-1   # $840.00" in (plan.price.buying or "")
    assert spot.price.buying is None
    assert (spot.zone, spot.usd_per_hour, spot.median_usd_per_hour, spot.p90_usd_per_hour) == (
        *("us-east-1a", 30.0, 20.0, 20.0),
    )
    context = World(settings=load_settings(), backends={}, now=lambda: NOW)
    capsys.readouterr()
    ask = ["prices", "--gpu", "h100:8", "--service", "ec2", "--output", "json"]
    assert run([*ask, "--sort", "machine"], obj=context) == 0
    rows = json.loads(capsys.readouterr().out)["prices"]
    assert run(["prices", "--gpu", "h100:8"], obj=context) == 0
    assert f"  {block.price.buying}\n" in capsys.readouterr().out
    assert [(row["purchase"], row["zone"], row["usd_per_hour"], row["interruption"]) for row in rows] == [
        ("capacity-block", "us-east-1b", 30.0, None),
        ("spot", "us-east-1a", 30.0, interruption("p5.48xlarge", "us-east-1")),
        ("on-demand", None, 55.04, None),
    ]
    assert rows[1]["interruption"] is not None
    options = ["--purchase", "on-demand,capacity-block,training-plan", "--output", "json"]
    assert run(["recommend", "--workload", "vit-huge", "--samples", "100M", *options], obj=context) == 0
    by_purchase = {each["purchase"]: each for each in json.loads(capsys.readouterr().out)["by_purchase"]}
    planned = by_purchase["training-plan"]
    assert (planned["usd_per_hour"], planned["block_hours"] % 24) == (35.0, 0.0)
    assert planned["unused_usd"] > 0
    alone = ["--purchase", "training-plan", "--output", "json"]
    assert run(["recommend", "--workload", "vit-huge", "--samples", "100M", *alone], obj=context) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert "--instance ml.p5.48xlarge" in command and "--training-plan arn:..." in command
    assert run([*ask, "--purchase", "spot", "--region", "eu-west-1"], obj=context) == 2
    # What AWS's markets ask now was not in force on another day.
    capsys.readouterr()
    assert run([*ask, "--as-of", "2026-11-01"], obj=context) == 0
    (row,) = json.loads(capsys.readouterr().out)["prices"]
    assert row["purchase"] == "on-demand"
    assert (block.purchase, block.zone, block.usd_per_hour) == ("capacity-block", "us-east-1b", 30.0)


@pytest.mark.slow
def test_an_update_that_is_killed_leaves_what_was(
    update: Update, product: Product, aws_server: "MotoServer", isolated: Path
) -> None:
    aws_server.price_lists.products = [product(*P5)]
    assert update()[0] == 0
    before = {path.name: path.read_bytes() for path in isolated.iterdir()}
    started: list[subprocess.Popen[bytes]] = []

    def kill(action: str) -> None:
        if action == "DescribeSpotPriceHistory":
            os.kill(started[0].pid, signal.SIGKILL)

    aws_server.price_lists.products = [product("p5.48xlarge", "50")]
    aws_server.price_lists.when_asked = kill
    started.append(subprocess.Popen([sys.executable, "-m", "fastlaunch", "prices", "update"]))
    assert started[0].wait(timeout=60) == -signal.SIGKILL
    assert {name: (isolated / name).read_bytes() for name in before} == before
    aws_server.price_lists.when_asked = lambda action: None
    update()
    assert in_force().usd_per_hour == 50


@pytest.mark.parametrize(("days", "is_old"), [(7, False), (8, True)])
def test_prices_are_old_after_a_week_and_those_of_markets_after_an_hour(
    days: int, is_old: bool, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    isolated.mkdir()
    at = NOW - timedelta(minutes=61 if is_old else 59)
    spot = {"instance": "p5.48xlarge", "region": "eu-west-3", "zone": "eu-west-3a", "purchase": "spot"}
    write_market(isolated / "market.yaml", [MarketPrice(**spot, usd_per_hour=20, at=at.isoformat())])
    write_prices(isolated / "prices.yaml", [price_of(5.0, region="eu-west-3")])
    now = datetime(2026, 11, 1 + days, 23, tzinfo=UTC)
    for clock, service in ((now, "ec2"), (NOW, "spot")):
        context = World(settings=load_settings(), backends={}, now=lambda clock=clock: clock)
        assert run(["prices", "check", "--output", "json"], obj=context) == 0
        rows = {(row["service"], row["region"]): row for row in json.loads(capsys.readouterr().out)}
        assert rows[service, "eu-west-3"]["old"] is is_old
    assert (age_note([now.date(), date(2026, 11, 1)], now.date()) is not None) is is_old


def test_of_a_price_that_stays_the_first_and_the_last_day_are_kept() -> None:
    kept: list[Price] = []
    for day, usd in enumerate((5.0, 5.0, 5.0, 4.0, 4.0, 4.0, 5.0), start=1):
        kept = with_newer(kept, [price_of(usd, as_of=date(2026, 11, day))])
    assert [(one.as_of.day, one.usd_per_hour) for one in kept] == [(1, 5), (3, 5), (4, 4), (6, 4), (7, 5)]


@pytest.mark.parametrize(("share", "usd"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.74, 2.0), (0.9, 3.0)])
def test_shares_of_a_spot_price_are_of_time(share: float, usd: float) -> None:
    day = [datetime(2026, 11, number, tzinfo=UTC) for number in range(1, 8)]
    changes = [(day[0], 3.0), (day[3], 2.0), (day[5], 1.0)]
    assert by_time(changes, since=day[2], now=day[6], share=share) == usd


def test_the_users_own_price_stays_over_a_newer_update(isolated: Path) -> None:
    entry = "- {instance: p5.48xlarge, service: ec2, region: us-east-1, source: x, "
    isolated.mkdir()
    (isolated / "prices.yaml").write_text(
        f"prices:\n{entry} usd_per_hour: 50, as_of: 2026-10-01}}\n"
        f"{entry} usd_per_hour: 51, as_of: 2026-11-01}}\n"
    )
    assert in_force().usd_per_hour == 51
    (isolated.parent / "own.yaml").write_text(f"prices:\n{entry} usd_per_hour: 40, as_of: 2026-10-15}}\n")
    (isolated.parent / "config.yaml").write_text("prices: own.yaml\n")
    assert [in_force(date(2026, 10, day)).usd_per_hour for day in (14, 15)] == [50, 40]
    assert in_force().usd_per_hour == 40
