"""What an hour of a row is charged at: billed, listed, given, or as another instance; and what is refused."""

import datetime
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from fake_summaries import PLAIN, changed

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, compare
from fastlaunch.analysis.cost import ChargedAs
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval

CATALOGUE = load_catalogue()
TODAY = datetime.date(2026, 11, 21)
THEN = datetime.date(2023, 11, 15)

RUN = MeasuredRun(
    run_id="run-1",
    summary=changed(
        PLAIN,
        flops_per_sample=None,
        num_gpus=8,
        instance="p5.48xlarge",
        device_name="NVIDIA H100 80GB HBM3",
        step_time_s=Interval(value=0.2, low=0.199, high=0.201),
        samples_per_step=512.0,
        fingerprint={},
    ),
)
BILLED = Price(
    instance="p5.48xlarge",
    service="ec2",
    region="us-east-1",
    purchase="spot",
    usd_per_hour=20.0,
    as_of=datetime.date(2026, 10, 1),
    source="asked at AWS",
)


def run_with(run: MeasuredRun = RUN, **changes: Any) -> MeasuredRun:
    return replace(run, summary=changed(run.summary, **changes))


def compared(*candidates: MeasuredRun, **prices: Any) -> Comparison:
    return compare(candidates, catalogue=CATALOGUE, prices=PriceRequest(today=TODAY, **prices))


def charged(*candidates: MeasuredRun, **prices: Any) -> float | None:
    price = compared(*candidates, **prices).rows[0].price
    return price.usd_per_hour if price else None


def test_by_the_list_of_the_day() -> None:
    assert charged(RUN) == 55.04
    assert compared(RUN).prices_as_of == TODAY
    assert charged(RUN, as_of=THEN) == 98.32
    assert compared(RUN, as_of=THEN).prices_as_of == THEN


def test_as_billed_unless_a_day_is_asked_for() -> None:
    billed = replace(RUN, price=replace(BILLED, purchase="on-demand"))
    assert charged(billed) == 20.0
    assert compared(billed).prices_as_of is None
    assert charged(billed, as_of=THEN) == 98.32


def test_runs_billed_at_several_prices_are_charged_the_latest_with_a_warning() -> None:
    older = replace(RUN, price=BILLED)
    newer = replace(
        RUN, run_id="run-2", price=replace(BILLED, usd_per_hour=25.0, as_of=datetime.date(2026, 11, 1))
    )
    comparison = compared(newer, older)
    (row,) = comparison.rows
    assert row.num_runs == 2
    assert row.price is not None and row.price.usd_per_hour == 25.0
    assert "billed at 2 prices; the one of 2026-11-01" in comparison.warnings[0]


def test_as_given() -> None:
    comparison = compared(RUN, usd_per_hour=3.6)
    (row,) = comparison.rows
    assert row.price is not None and (row.price.usd_per_hour, row.price.basis) == (3.6, "given")
    assert row.cost.samples_per_usd is not None and row.cost.samples_per_usd.value == pytest.approx(
        2560 * 1000
    )
    assert comparison.prices_as_of is None


@pytest.mark.parametrize(
    ("run", "as_of", "told"),
    [
        (run_with(instance="p99.huge"), None, "has no price: unknown instance 'p99.huge'"),
        (RUN, datetime.date(2020, 1, 1), "no ec2 on-demand price of p5.48xlarge in us-east-1 is known for"),
        (replace(RUN, region="mars-1"), None, "no ec2 on-demand price of p5.48xlarge in mars-1 is known"),
    ],
)
def test_an_unknown_price_is_none_and_told(run: MeasuredRun, as_of: datetime.date | None, told: str) -> None:
    comparison = compared(run, as_of=as_of)
    (row,) = comparison.rows
    assert (row.price, row.cost.samples_per_usd, row.cost.usd_per_million_samples) == (None, None, None)
    assert row.verdict.ratio is None
    assert told in comparison.warnings[0]


def test_as_a_whole_instance() -> None:
    here = run_with(instance=None)
    price = compared(here, price_as=(ChargedAs(instance="p5.48xlarge"),)).rows[0].price
    assert price is not None
    assert (price.usd_per_hour, price.hypothetical) == (55.04, None)
    assert charged(here, price_as=(ChargedAs(instance="p5.48xlarge"),), as_of=THEN) == 98.32
    # The instance that it ran on need not be asked for: this is the price list of another region.
    with pytest.raises(UserError, match="in mars-1 is known"):
        compared(here, price_as=(ChargedAs(instance="p5.48xlarge"),), region="mars-1")


@pytest.mark.parametrize(
    ("run", "instance", "told", "share"),
    [
        (run_with(num_gpus=1), "p5.48xlarge", "bf16 ran on 1 x H100; p5.48xlarge is 8 x H100", "1/8"),
        (RUN, "p5en.48xlarge", "bf16 ran on 8 x H100; p5en.48xlarge is 8 x H200", "1"),
        (run_with(device_name="AMD EPYC"), "p5.48xlarge", "ran on 8 x AMD EPYC", "1"),
        (run_with(device_name=None, instance=None), "p5.48xlarge", "8 x an unknown device", "1"),
        (run_with(num_nodes=2), "p5.48xlarge", "ran on 4 x H100", "1/2"),
    ],
)
def test_another_gpu_or_number_of_them_is_refused(
    run: MeasuredRun, instance: str, told: str, share: str
) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as raised:
        compared(run, price_as=(ChargedAs(instance=instance),))
    assert raised.value.hint is not None and raised.value.hint.endswith(f"--price-share {share}")


def test_a_share_is_hypothetical() -> None:
    one = run_with(num_gpus=1)
    price = compared(one, price_as=(ChargedAs(instance="p5.48xlarge", share=Fraction(1, 8)),)).rows[0].price
    assert price is not None
    assert (price.usd_per_hour, price.hypothetical) == (pytest.approx(6.88), "1/8 of p5.48xlarge")
    other = compared(one, price_as=(ChargedAs(instance="p5en.48xlarge", share=Fraction(1, 8)),)).rows[0].price
    assert other is not None
    assert other.hypothetical == "1/8 of p5en.48xlarge (H200), though it ran on H100"


def test_a_share_that_is_smaller_than_what_ran_is_refused() -> None:
    eighth = ChargedAs(instance="p5.48xlarge", share=Fraction(1, 8))
    with pytest.raises(UserError, match=r"ran on 2 x H100; 1/8 of p5\.48xlarge is 1") as raised:
        compared(run_with(num_gpus=2), price_as=(eighth,))
    assert raised.value.hint is not None and raised.value.hint.endswith("--price-share 1/4")


@pytest.mark.parametrize(
    "options",
    [
        {"usd_per_hour": 0.0},
        {"usd_per_hour": -1.0},
        {"usd_per_hour": float("nan")},
        {"usd_per_hour": float("inf")},
        {"usd_per_hour": 1.0, "price_as": (ChargedAs(instance="p5.48xlarge"),)},
        {"usd_per_hour": 1.0, "as_of": THEN},
    ],
)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        PriceRequest(today=TODAY, **options)
    assert raised.value.hint


@pytest.mark.parametrize("share", [Fraction(0), Fraction(9, 8), Fraction(-1, 8)])
def test_what_is_no_share_is_refused(share: Fraction) -> None:
    with pytest.raises(UserError, match=r"of p5\.48xlarge is no share") as raised:
        ChargedAs(instance="p5.48xlarge", share=share)
    assert raised.value.hint


H200 = "NVIDIA H200"


@pytest.mark.parametrize(
    ("num_gpus", "device", "per_hour", "hypothetical"),
    [
        (1, "NVIDIA H100 80GB HBM3", 6.88, None),
        (8, "NVIDIA H100 80GB HBM3", 55.04, None),
        (1, H200, 63.296 / 8, "1/8 of p5en.48xlarge"),
        # The smallest part that has so many.
        (2, H200, 63.296 / 2, "1/2 of p5en.48xlarge"),
        (4, H200, 63.296 / 2, "1/2 of p5en.48xlarge"),
        (8, H200, 63.296, None),
    ],
)
def test_of_several_instances_each_row_is_charged_as_the_one_with_its_gpus(
    num_gpus: int, device: str, per_hour: float, hypothetical: str | None
) -> None:
    charges = [("p5.48xlarge", None), ("p5en.48xlarge", None), ("p5en.48xlarge", Fraction(1, 2))]
    charges += [("p5en.48xlarge", Fraction(1, 8)), ("p5.4xlarge", None)]
    run = run_with(num_gpus=num_gpus, device_name=device, instance=None)
    asked = tuple(ChargedAs(instance=name, share=share) for name, share in charges)
    price = compared(run, price_as=asked).rows[0].price
    assert price is not None
    assert (price.usd_per_hour, price.hypothetical) == (pytest.approx(per_hour), hypothetical)


def usd_per_million(*candidates: MeasuredRun, **prices: Any) -> float:
    found = compared(*candidates, **prices).rows[0].cost.usd_per_million_samples
    assert found is not None
    return found.value


def test_sagemakers_runs_are_charged_what_sagemaker_lists() -> None:
    trained = replace(RUN, service="sagemaker")
    (row,) = compared(trained).rows
    assert (row.offer.service, row.price and row.price.usd_per_hour) == ("sagemaker", 63.296)
    # 512 images in 0.2 s are 2560/s, and a million of them 390.625 s.
    assert usd_per_million(trained) == pytest.approx(63.296 * 390.625 / 3600)
    assert usd_per_million(RUN) == pytest.approx(55.04 * 390.625 / 3600)
    # One is no repeat of the other.
    assert len(compared(RUN, trained).rows) == 2


@pytest.mark.parametrize(("service", "usd_per_hour"), [("ec2", 55.04), ("sagemaker", 63.296)])
def test_every_node_is_charged(service: str, usd_per_hour: float) -> None:
    one = replace(RUN, service=service)
    # Twice the machines, and 1.9 times the images in the same time.
    two = run_with(one, num_nodes=2, num_gpus=16, samples_per_step=1024.0, step_time_s=_STEP_OF_TWO)
    assert charged(two) == usd_per_hour
    rate = 1024 / (0.2 * 2 / 1.9)
    assert usd_per_million(two) == pytest.approx(2 * usd_per_hour / 3600 / rate * 1e6)
    base, pair = compared(one, two).rows
    assert base.is_baseline and pair.verdict.ratio is not None
    assert pair.verdict.ratio.value == pytest.approx(0.95)
    assert pair.verdict.speed_ratio is not None
    assert pair.verdict.speed_ratio.value == pytest.approx(1.9)


_STEP_OF_TWO = Interval(value=0.2 * 2 / 1.9, low=0.2099, high=0.2111)
