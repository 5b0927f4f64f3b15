"""Rates and dollars by known answers; what an hour of a row is charged at, and what is refused."""

import datetime
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from fake_summaries import PLAIN, TODAY, changed, compared, price_of
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis import pricing
from fastlaunch.analysis.compare import MeasuredRun, PriceRequest
from fastlaunch.analysis.pricing import ChargedAs
from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval

THEN = datetime.date(2023, 11, 15)
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
#: 512 images in 0.2 s are 2560/s.
RUN = MeasuredRun(
    run_id="run-1",
    summary=changed(
        PLAIN,
        flops_per_sample=None,
        num_gpus=8,
        instance="p5.48xlarge",
        device_name=H100,
        step_time_s=Interval(value=0.2),
        samples_per_step=512.0,
        fingerprint={},
    ),
)
BILLED = replace(price_of(20.0), as_of=datetime.date(2026, 10, 1))
P5 = ChargedAs(instance="p5.48xlarge")


def run_with(run: MeasuredRun = RUN, **changes: Any) -> MeasuredRun:
    return replace(run, summary=changed(run.summary, **changes))


def price(run: MeasuredRun, **prices: Any) -> Price:
    charged = compared(run, **prices).rows[0].price
    assert charged is not None
    return charged


# --- rates and dollars -----------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e6), st.floats(0.5, 0.999), st.floats(1.001, 2), st.floats(1e-3, 1e3))
def test_cost_is_linear_in_the_step_time(
    value: float, below: float, above: float, usd_per_hour: float
) -> None:
    step = Interval(value=value, low=value * below, high=value * above)
    rate = pricing.reciprocal(step, 64)
    usd = pricing.reciprocal(pricing.samples_per_usd(rate, price_of(usd_per_hour), 1), 1e6)
    assert usd.low is not None and usd.high is not None
    assert usd.low / usd.value == pytest.approx(below)
    assert usd.high / usd.value == pytest.approx(above)


# --- the price of an hour --------------------------------------------------------------------------------


def test_by_the_list_of_the_day_or_as_billed() -> None:
    assert (price(RUN).usd_per_hour, compared(RUN).prices_as_of) == (55.04, TODAY)
    assert (price(RUN, as_of=THEN).usd_per_hour, compared(RUN, as_of=THEN).prices_as_of) == (98.32, THEN)
    billed = replace(RUN, price=BILLED)
    assert (price(billed).usd_per_hour, compared(billed).prices_as_of) == (20.0, None)
    assert price(billed, as_of=THEN).usd_per_hour == 98.32


def test_runs_billed_at_several_prices_are_charged_the_latest_with_a_warning() -> None:
    latest = replace(BILLED, usd_per_hour=25.0, as_of=datetime.date(2026, 11, 1))
    comparison = compared(replace(RUN, price=latest), replace(RUN, run_id="run-2", price=BILLED))
    (row,) = comparison.rows
    assert row.num_runs == 2
    assert row.price is not None and row.price.usd_per_hour == 25.0
    assert "billed at 2 prices; the one of 2026-11-01" in comparison.warnings[0]


def test_as_given() -> None:
    (row,) = compared(RUN, usd_per_hour=3.6).rows
    assert row.price is not None and (row.price.usd_per_hour, row.price.basis) == (3.6, "given")
    assert row.cost.samples_per_usd is not None
    assert row.cost.samples_per_usd.value == pytest.approx(2560 * 1000)


@pytest.mark.parametrize(
    ("run", "as_of", "why"),
    [
        (run_with(instance="p99.huge"), None, "unknown instance 'p99.huge'"),
        (RUN, datetime.date(2020, 1, 1), "no ec2 on-demand price of p5.48xlarge in us-east-1 is known"),
        (replace(RUN, region="mars-1"), None, "in mars-1 is known"),
    ],
)
def test_an_unknown_price_is_none_with_a_warning(
    run: MeasuredRun, as_of: datetime.date | None, why: str
) -> None:
    comparison = compared(run, as_of=as_of)
    (row,) = comparison.rows
    assert (row.price, row.cost.samples_per_usd, row.cost.usd_per_million_samples) == (None, None, None)
    assert row.verdict.ratio is None
    assert why in comparison.warnings[0]


def test_as_another_instance() -> None:
    here = run_with(instance=None)
    charged = price(here, price_as=(P5,))
    assert (charged.usd_per_hour, charged.hypothetical) == (55.04, None)
    assert price(here, price_as=(P5,), as_of=THEN).usd_per_hour == 98.32
    with pytest.raises(UserError, match="in mars-1 is known"):
        compared(here, price_as=(P5,), region="mars-1")


@pytest.mark.parametrize(
    ("run", "charge", "why", "hint"),
    [
        (run_with(num_gpus=1), P5, "bf16 ran on 1 x H100; p5.48xlarge is 8 x H100", "-share 1/8"),
        (
            RUN,
            ChargedAs(instance="p5en.48xlarge"),
            "8 x H100; p5en.48xlarge is 8 x H200",
            "--price-as p5.48xlarge",
        ),
        (run_with(device_name="AMD EPYC"), P5, "ran on 8 x AMD EPYC", "--usd-per-hour USD"),
        (run_with(device_name=None, instance=None), P5, "8 x an unknown device", "--usd-per-hour USD"),
        (run_with(num_nodes=2), P5, "ran on 4 x H100", "-share 1/2"),
        (run_with(num_gpus=2), replace(P5, share=Fraction(1, 8)), "1/8 of p5.48xlarge is 1", "-share 1/4"),
    ],
)
def test_other_gpus_or_more_of_them_are_refused(
    run: MeasuredRun, charge: ChargedAs, why: str, hint: str
) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as raised:
        compared(run, price_as=(charge,))
    assert str(raised.value.hint).endswith(hint)


def test_the_refusal_of_other_gpus_names_what_charges_every_row() -> None:
    both = [
        run_with(num_gpus=1, recipe=recipe, device_name=gpu)
        for recipe, gpu in (("bf16", H100), ("fp32", H200))
    ]
    with pytest.raises(UserError) as raised:
        compared(*both, price_as=(ChargedAs(instance="p5.4xlarge"),))
    charges = str(raised.value.hint).split("--price-as ")[1:]
    compared(*both, price_as=tuple(ChargedAs.parse(charge.strip()) for charge in charges))


def test_a_share_is_hypothetical() -> None:
    one, eighth = run_with(num_gpus=1), Fraction(1, 8)
    charged = price(one, price_as=(replace(P5, share=eighth),))
    assert (charged.usd_per_hour, charged.hypothetical) == (pytest.approx(6.88), "1/8 of p5.48xlarge")
    other = price(one, price_as=(ChargedAs(instance="p5en.48xlarge", share=eighth),))
    assert other.hypothetical == "1/8 of p5en.48xlarge (H200), though it ran on H100"
    assert (charged.other_gpu, other.other_gpu) == (None, "H200")


@pytest.mark.parametrize(
    "options",
    [
        {"usd_per_hour": 0.0},
        {"usd_per_hour": float("nan")},
        {"usd_per_hour": 1.0, "price_as": (P5,)},
        {"usd_per_hour": 1.0, "as_of": THEN},
    ],
)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError) as raised:
        PriceRequest(today=TODAY, **options)
    assert raised.value.hint
    for share in (Fraction(0), Fraction(9, 8)):
        with pytest.raises(UserError, match="is no share"):
            replace(P5, share=share)


@pytest.mark.parametrize(
    ("num_gpus", "device", "per_hour", "hypothetical"),
    [
        (1, H100, 6.88, None),
        (8, H100, 55.04, None),
        (1, H200, 63.296 / 8, "1/8 of p5en.48xlarge"),
        # The smallest part that has so many.
        (2, H200, 63.296 / 2, "1/2 of p5en.48xlarge"),
        (8, H200, 63.296, None),
    ],
)
def test_of_several_instances_each_row_is_charged_as_the_one_with_its_gpus(
    num_gpus: int, device: str, per_hour: float, hypothetical: str | None
) -> None:
    p5en = ChargedAs(instance="p5en.48xlarge")
    shares = [replace(p5en, share=Fraction(1, part)) for part in (2, 8)]
    charges = (P5, p5en, *shares, ChargedAs(instance="p5.4xlarge"))
    charged = price(run_with(num_gpus=num_gpus, device_name=device, instance=None), price_as=charges)
    assert (charged.usd_per_hour, charged.hypothetical) == (pytest.approx(per_hour), hypothetical)


@pytest.mark.parametrize(("service", "usd_per_hour"), [("ec2", 55.04), ("sagemaker", 63.296)])
def test_every_node_is_charged_what_its_service_lists(service: str, usd_per_hour: float) -> None:
    one = replace(RUN, service=service)
    # Twice the machines, and 1.9 times the images in the same time.
    two = run_with(
        one, num_nodes=2, num_gpus=16, samples_per_step=1024.0, step_time_s=Interval(value=0.4 / 1.9)
    )
    base, pair = compared(one, two).rows
    for row, images_per_s, num_nodes in ((base, 2560, 1), (pair, 1.9 * 2560, 2)):
        assert row.price is not None and row.price.usd_per_hour == usd_per_hour
        usd = row.cost.usd_per_million_samples
        assert usd is not None
        assert usd.value == pytest.approx(num_nodes * usd_per_hour / 3600 / images_per_s * 1e6)
    assert base.is_baseline and pair.verdict.ratio is not None and pair.verdict.speed_ratio is not None
    assert pair.verdict.ratio.value == pytest.approx(0.95)
    assert pair.verdict.speed_ratio.value == pytest.approx(1.9)
