"""What an hour of a row is charged at: billed, listed, given, or as another instance; and what is refused."""

import datetime
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from fastlaunch.analysis.compare import Candidate, Comparison, PriceRequest, compare
from fastlaunch.analysis.pricing import ChargedAs
from fastlaunch.catalog.prices import Price, load_catalogue
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.measure.summarize import Interval, RunSummary

CATALOGUE = load_catalogue()
TODAY = datetime.date(2026, 11, 21)
THEN = datetime.date(2023, 11, 15)

RUN = Candidate(
    run_id="run-1",
    summary=RunSummary(
        kind="records",
        workload="vit-huge",
        sample_unit="images",
        flops_per_sample=None,
        recipe="bf16",
        precision="bf16",
        data="synthetic",
        batch_size_per_gpu=64,
        num_nodes=1,
        num_gpus=8,
        seed=0,
        status="completed",
        instance="p5.48xlarge",
        device_name="NVIDIA H100 80GB HBM3",
        host_id="host-a",
        measured_on="2026-11-01",
        source=None,
        steady=True,
        step_time_s=Interval(value=0.2, low=0.199, high=0.201),
        samples_per_step=512.0,
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


def changed(run: Candidate = RUN, **changes: Any) -> Candidate:
    return replace(run, summary=replace(run.summary, **changes))


def compared(*candidates: Candidate, **prices: Any) -> Comparison:
    return compare(candidates, catalogue=CATALOGUE, prices=PriceRequest(today=TODAY, **prices))


def charged(*candidates: Candidate, **prices: Any) -> float | None:
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
    assert row.price is not None and (row.price.usd_per_hour, row.price.as_of) == (3.6, None)
    assert row.samples_per_usd is not None and row.samples_per_usd.value == pytest.approx(2560 * 1000)
    assert comparison.prices_as_of is None


def test_nodes_multiply() -> None:
    one, two = (compared(changed(num_nodes=nodes, num_gpus=8), usd_per_hour=3.6).rows[0] for nodes in (1, 2))
    assert one.usd_per_million_samples is not None and two.usd_per_million_samples is not None
    assert two.usd_per_million_samples.value == pytest.approx(2 * one.usd_per_million_samples.value)


@pytest.mark.parametrize(
    ("run", "as_of", "told"),
    [
        (changed(instance="p99.huge"), None, "has no price: unknown instance 'p99.huge'"),
        (RUN, datetime.date(2020, 1, 1), "no ec2 on-demand price of p5.48xlarge in us-east-1 is known for"),
        (replace(RUN, region="mars-1"), None, "no ec2 on-demand price of p5.48xlarge in mars-1 is known"),
    ],
)
def test_an_unknown_price_is_none_and_told(run: Candidate, as_of: datetime.date | None, told: str) -> None:
    comparison = compared(run, as_of=as_of)
    (row,) = comparison.rows
    assert (row.price, row.samples_per_usd, row.usd_per_million_samples) == (None, None, None)
    assert row.ratio_to_baseline is None
    assert told in comparison.warnings[0]


def test_here_nothing_is_charged_and_nothing_told() -> None:
    comparison = compared(changed(instance=None))
    assert comparison.rows[0].price is None
    assert (comparison.prices_as_of, comparison.warnings) == (None, ())


def test_as_a_whole_instance() -> None:
    here = changed(instance=None)
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
        (changed(num_gpus=1), "p5.48xlarge", "bf16 ran on 1 x H100; p5.48xlarge is 8 x H100", "1/8"),
        (RUN, "p5en.48xlarge", "bf16 ran on 8 x H100; p5en.48xlarge is 8 x H200", "1"),
        (changed(device_name="AMD EPYC"), "p5.48xlarge", "ran on 8 x AMD EPYC", "1"),
        (changed(device_name=None, instance=None), "p5.48xlarge", "8 x an unknown device", "1"),
        (changed(num_nodes=2), "p5.48xlarge", "ran on 4 x H100", "1/2"),
    ],
)
def test_another_gpu_or_number_of_them_is_refused(
    run: Candidate, instance: str, told: str, share: str
) -> None:
    with pytest.raises(UserError, match=re.escape(told)) as raised:
        compared(run, price_as=(ChargedAs(instance=instance),))
    assert raised.value.hint is not None and raised.value.hint.endswith(f"--price-share {share}")


def test_a_share_is_hypothetical() -> None:
    one = changed(num_gpus=1)
    price = compared(one, price_as=(ChargedAs(instance="p5.48xlarge", share=Fraction(1, 8)),)).rows[0].price
    assert price is not None
    assert (price.usd_per_hour, price.hypothetical) == (pytest.approx(6.88), "1/8 of p5.48xlarge")
    other = compared(one, price_as=(ChargedAs(instance="p5en.48xlarge", share=Fraction(1, 8)),)).rows[0].price
    assert other is not None
    assert other.hypothetical == "1/8 of p5en.48xlarge (H200), though it ran on H100"


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
    run = changed(num_gpus=num_gpus, device_name=device, instance=None)
    asked = tuple(ChargedAs(instance=name, share=share) for name, share in charges)
    price = compared(run, price_as=asked).rows[0].price
    assert price is not None
    assert (price.usd_per_hour, price.hypothetical) == (pytest.approx(per_hour), hypothetical)


@pytest.mark.parametrize(
    ("num_gpus", "device"), [(1, "NVIDIA A100-SXM4-40GB"), (2, "NVIDIA H100 80GB HBM3"), (2, "NVIDIA H200")]
)
def test_a_row_that_none_of_several_instances_fits_is_refused(num_gpus: int, device: str) -> None:
    run = changed(num_gpus=num_gpus, device_name=device, instance=None)
    asked = (ChargedAs(instance="p5.48xlarge"), ChargedAs(instance="p5en.48xlarge", share=Fraction(1, 8)))
    told = f"ran on {num_gpus} x {device.split()[1][:4]}.*none of p5.48xlarge, p5en.48xlarge:1/8 has"
    with pytest.raises(UserError, match=told) as raised:
        compared(run, price_as=asked)
    assert raised.value.hint


def test_an_unknown_instance_to_charge_names_the_nearest() -> None:
    with pytest.raises(UnknownName) as raised:
        compared(RUN, price_as=(ChargedAs(instance="p5.48xlrge"),))
    assert raised.value.hint is not None and "did you mean p5.48xlarge" in raised.value.hint


def usd_per_million(*candidates: Candidate, **prices: Any) -> float:
    found = compared(*candidates, **prices).rows[0].usd_per_million_samples
    assert found is not None
    return found.value


def test_sagemakers_runs_are_charged_what_sagemaker_lists() -> None:
    trained = replace(RUN, service="sagemaker")
    (row,) = compared(trained).rows
    assert (row.service, row.price and row.price.usd_per_hour) == ("sagemaker", 63.296)
    # 512 images in 0.2 s are 2560/s, and a million of them 390.625 s.
    assert usd_per_million(trained) == pytest.approx(63.296 * 390.625 / 3600)
    assert usd_per_million(RUN) == pytest.approx(55.04 * 390.625 / 3600)
    # One is no repeat of the other.
    assert len(compared(RUN, trained).rows) == 2


def test_what_sagemaker_billed_is_listed_anew_by_sagemaker() -> None:
    billed = replace(BILLED, service="sagemaker", purchase="on-demand", usd_per_hour=70.0)
    trained = replace(RUN, price=billed)
    assert charged(trained) == 70.0
    assert charged(trained, as_of=TODAY) == 63.296


@pytest.mark.parametrize(("service", "usd_per_hour"), [("ec2", 55.04), ("sagemaker", 63.296)])
def test_every_node_is_charged(service: str, usd_per_hour: float) -> None:
    one = replace(RUN, service=service)
    # Twice the machines, and 1.9 times the images in the same time.
    two = changed(one, num_nodes=2, num_gpus=16, samples_per_step=1024.0, step_time_s=_STEP_OF_TWO)
    assert charged(two) == usd_per_hour
    rate = 1024 / (0.2 * 2 / 1.9)
    assert usd_per_million(two) == pytest.approx(2 * usd_per_hour / 3600 / rate * 1e6)
    base, pair = compared(one, two).rows
    assert base.is_baseline and pair.ratio_to_baseline is not None
    assert pair.ratio_to_baseline.value == pytest.approx(0.95)
    assert pair.speed_ratio_to_baseline is not None
    assert pair.speed_ratio_to_baseline.value == pytest.approx(1.9)


_STEP_OF_TWO = Interval(value=0.2 * 2 / 1.9, low=0.2099, high=0.2111)
