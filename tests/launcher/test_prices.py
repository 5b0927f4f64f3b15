"""Prices: what was in force when, what is known instead, and the user's file over the shipped one."""

import contextlib
import datetime
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import parse_date

DATE = datetime.date
TODAY = DATE(2026, 11, 21)
NOVEMBER_2023 = DATE(2023, 11, 15)
INSTANCES = load_catalogue().instances


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return load_catalogue()


@pytest.mark.parametrize(
    ("instance", "on", "usd_per_hour"),
    [
        ("p4d.24xlarge", NOVEMBER_2023, 32.7726),
        ("p5.48xlarge", NOVEMBER_2023, 98.32),
        ("p4d.24xlarge", TODAY, 21.957642),
        ("p5.48xlarge", TODAY, 55.04),
        ("p5.48xlarge", DATE(2025, 6, 22), 98.32),
        ("p5.48xlarge", DATE(2025, 6, 23), 55.04),
        ("p4de.24xlarge", NOVEMBER_2023, 40.96575),
        ("p5en.48xlarge", DATE(2025, 4, 1), 84.80),
        ("p5en.48xlarge", TODAY, 63.296),
        ("p6-b200.48xlarge", TODAY, 113.9328),
        ("p6-b300.48xlarge", TODAY, 142.416),
        ("p5.4xlarge", TODAY, 6.88),
    ],
)
def test_known_prices(shipped: Catalogue, instance: str, on: datetime.date, usd_per_hour: float) -> None:
    assert shipped.price(instance, on=on).usd_per_hour == usd_per_hour


def test_price_of_another_region_and_service(shipped: Catalogue) -> None:
    assert shipped.price("p4d.24xlarge", region="eu-west-1", on=TODAY).usd_per_hour == 23.71569
    training = shipped.price("p4d.24xlarge", service="sagemaker", on=TODAY)
    assert training.usd_per_hour == 25.251286
    assert training.inferred


def test_no_price_before_the_first_one(shipped: Catalogue) -> None:
    with pytest.raises(UserError, match=r"no ec2 on-demand price of p5\.48xlarge") as caught:
        shipped.price("p5.48xlarge", on=DATE(2023, 1, 1))
    assert caught.value.hint == "the earliest known is of 2023-08-08: $98.32 per hour"


@pytest.mark.parametrize(
    ("instance", "region", "purchase", "hint"),
    [
        ("p5e.48xlarge", "us-east-2", "on-demand", "as spot or capacity-block"),
        ("p5.48xlarge", "eu-west-1", "on-demand", "known: ec2 us-east-1 on-demand"),
        ("p5.48xlarge", "us-east-1", "spot", "by the hour"),
    ],
)
def test_an_unknown_price_is_never_another_one(
    shipped: Catalogue, instance: str, region: str, purchase: str, hint: str
) -> None:
    with pytest.raises(UserError, match="is known") as caught:
        shipped.price(instance, region=region, purchase=purchase, on=TODAY)
    assert hint in str(caught.value.hint)


def test_every_shipped_price_has_its_source_and_date_and_is_of_a_known_accelerator(
    shipped: Catalogue,
) -> None:
    assert len(shipped.prices) > 100
    for price in shipped.prices:
        assert len(price.source) > 10
        assert DATE(2022, 1, 1) <= price.as_of <= TODAY
        assert shipped.accelerator_of(price.instance).source
        assert price.purchase == "on-demand"
        if price.service == "sagemaker" and price.instance != "g5.2xlarge":
            assert price.inferred


def _price(day: datetime.date, usd_per_hour: float, region: str = "us-east-1") -> Price:
    return Price(
        instance="p5.48xlarge",
        service="ec2",
        region=region,
        purchase="on-demand",
        usd_per_hour=usd_per_hour,
        as_of=day,
        source="a test",
    )


@given(
    days=st.lists(st.dates(DATE(2020, 1, 1), DATE(2030, 1, 1)), unique=True, max_size=8),
    on=st.dates(DATE(2019, 1, 1), DATE(2031, 1, 1)),
)
def test_the_price_in_force_is_the_latest_on_or_before_the_day(
    days: list[datetime.date], on: datetime.date
) -> None:
    # The same days in another region, at prices that must not come back.
    prices = [_price(day, 1 + n) for n, day in enumerate(days)] + [
        _price(day, 99, "eu-west-1") for day in days
    ]
    catalogue = Catalogue(accelerators={}, instances=INSTANCES, prices=tuple(prices))
    past = [day for day in days if day <= on]
    if not past:
        with pytest.raises(UserError):
            catalogue.price("p5.48xlarge", on=on)
    else:
        price = catalogue.price("p5.48xlarge", on=on)
        assert price.as_of == max(past)
        assert price.usd_per_hour == 1 + days.index(max(past))


def test_the_users_file_replaces_entry_by_entry_and_adds(shipped: Catalogue, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        """
instances:
  lab-8xh100: {accelerator: H100, num_accelerators: 8, vcpus: 64, memory_gib: 1024, network_gbps: 100,
    num_network_cards: 1, num_efa_interfaces: 0, local_nvme_gb: 0, purchase_options: [on-demand],
    source: me}
prices:
  - {as_of: 2026-07-20, instance: p5.48xlarge, service: ec2, region: us-east-1, usd_per_hour: 40, source: me}
  - {as_of: 2026-11-01, instance: p5.48xlarge, service: ec2, region: eu-west-1, usd_per_hour: 66, source: me}
  - {as_of: 2026-01-01, instance: lab-8xh100, service: ec2, region: us-east-1, usd_per_hour: 9, source: me}
"""
    )
    merged = load_catalogue(file)
    assert merged.price("p5.48xlarge", on=TODAY).usd_per_hour == 40
    assert merged.price("p5.48xlarge", on=DATE(2026, 7, 19)).usd_per_hour == 55.04
    assert merged.price("p5.48xlarge", region="eu-west-1", on=TODAY).usd_per_hour == 66
    assert merged.price("lab-8xh100", on=TODAY).usd_per_hour == 9
    assert merged.accelerator_of("lab-8xh100").name == "H100"
    assert len(merged.prices) == len(shipped.prices) + 2
    assert merged.price("p4d.24xlarge", on=TODAY) == shipped.price("p4d.24xlarge", on=TODAY)


def test_json_round_trip() -> None:
    price = _price(NOVEMBER_2023, 98.32)
    assert price.to_json()["as_of"] == "2023-11-15"
    assert Price.from_json(price.to_json()) == price


@pytest.mark.parametrize(
    "change",
    [
        {"as_of": "soon"},
        {"as_of": 5},
        {"usd_per_hour": 0},
        {"usd_per_hour": "x"},
        {"service": "gcp"},
        {"x": 1},
    ],
)
def test_json_that_is_no_price(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Price.from_json(_price(NOVEMBER_2023, 98.32).to_json() | change)


@pytest.mark.parametrize("usd_per_hour", [0.0, -1.0, float("inf"), float("nan")])
def test_a_price_is_finite_and_above_zero(usd_per_hour: float) -> None:
    with pytest.raises(UserError, match=r"of p5\.48xlarge is"):
        _price(NOVEMBER_2023, usd_per_hour)


@given(st.text())
def test_a_date_or_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_date(text).isoformat() == text


def test_importing_brings_neither_yaml_nor_numpy() -> None:
    code = "import fastlaunch.catalog.prices, sys; print({'yaml', 'numpy'} & set(sys.modules))"
    path = str(Path(__file__).parents[2] / "launcher")
    answer = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "set()"
