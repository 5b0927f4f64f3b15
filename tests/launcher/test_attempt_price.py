"""What an hour costs: by service, in a block, and as spot."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from attempt_builders import add_attempt
from ec2_builders import block_site, job, site
from fake_cloud import Clock, FakeAws
from sagemaker_builders import training_job, training_site

from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import AttemptStatus
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price, paid_usd_per_hour
from fastlaunch.core.data import read
from fastlaunch.core.plan import Plan
from fastlaunch.core.settings import AccountRate, Settings
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.sight import managed_spot_price, note_machines

TODAY = date(2026, 11, 21)
START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
SETTINGS = Settings(home=Path("/nowhere"), discount=0.1)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", clock=lambda: START) as opened:
        yield opened


def placed(ledger: Ledger, *jobs: Job) -> Attempt:
    """An attempt at these jobs as it was placed at its first choice, $64 an hour."""
    machines: dict[str, Any] = {"InstanceType": "p5.48xlarge", "MaxCount": 1}
    if jobs[0].backend == "sagemaker":
        machines = {"ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 1}}
    plan = Plan(backend="x", operation="x", region="us-east-1", request=machines)
    attempt = add_attempt(ledger, *jobs, plan=lambda jobs, n: plan, usd_per_hour=64.0)
    ledger.set_handle(attempt.id, {"token": attempt.token})
    return ledger.attempt(attempt.id)


def note(ledger: Ledger, aws: FakeAws, *seen: tuple[Attempt, AttemptStatus]) -> None:
    backend = Ec2Backend(aws=aws, home=Path("/nowhere"), now=lambda: START)
    note_machines(ledger, backend, seen)


def test_a_discount_is_one_on_list_prices_only() -> None:
    on_demand, in_block = site().price, block_site().price
    assert on_demand is not None
    assert paid_usd_per_hour(on_demand, SETTINGS) == pytest.approx(49.536)
    assert paid_usd_per_hour(in_block, SETTINGS) == 40.0
    assert paid_usd_per_hour(replace(on_demand, purchase="spot"), SETTINGS) == 55.04
    assert paid_usd_per_hour(None, SETTINGS) is None


@pytest.mark.parametrize(
    ("rates", "service", "usd"),
    [
        ({"p5": AccountRate(discount=0.5)}, "ec2", 27.52),
        ({"p5": AccountRate(sunk=True), "p5.48xlarge": AccountRate(usd_per_hour=40.0)}, "ec2", 40.0),
        ({"p5": AccountRate(sunk=True)}, "ec2", 0.0),
        ({"p5": AccountRate(sunk=True)}, "sagemaker", 49.536),
        ({"ml.p5": AccountRate(sunk=True)}, "sagemaker", 0.0),
        ({"p5en": AccountRate(sunk=True)}, "ec2", 49.536),
    ],
)
def test_a_familys_rate_takes_the_place_of_the_discount(
    rates: dict[str, AccountRate], service: str, usd: float
) -> None:
    price = load_catalogue().price("p5.48xlarge", on=date(2026, 11, 21))
    paid = paid_usd_per_hour(replace(price, service=service), replace(SETTINGS, rates=rates))
    assert paid == pytest.approx(usd)


SPOT = AttemptStatus(
    has_ended=False, is_spot=True, instance_type="p5.48xlarge", zone="us-east-1b", launched_at=START
)


def test_spot_machines_of_one_type_and_zone_are_asked_for_once(ledger: Ledger) -> None:
    aws = FakeAws(Clock())
    attempts = [placed(ledger, job(purchase="spot")) for _ in range(2)]
    note(ledger, aws, *[(one, SPOT) for one in attempts])
    assert aws.calls["spot_price_usd"] == 1
    for attempt in (ledger.attempt(one.id) for one in attempts):
        assert (attempt.billing.usd_per_hour, attempt.zone) == (17.0, "us-east-1b")
        assert datetime.fromisoformat(attempt.launched_at or "") == START
        price = ledger.get(attempt.run_ids[0]).price
        assert price is not None and price.purchase == "spot"


def test_a_spot_price_that_aws_does_not_tell_changes_nothing(ledger: Ledger) -> None:
    aws = FakeAws(Clock())
    aws.spot_usd = None
    attempt = placed(ledger, job(purchase="spot"))
    note(ledger, aws, (attempt, SPOT))
    assert ledger.attempt(attempt.id).billing.usd_per_hour == 64.0


def test_a_job_that_waits_has_no_machine_and_says_what_it_waits_for(ledger: Ledger) -> None:
    aws, attempt = FakeAws(Clock()), placed(ledger, training_job(), training_job("fp32"))
    waiting = AttemptStatus(has_ended=False, is_live=True, detail="waiting for capacity")
    note(ledger, aws, (attempt, waiting))
    assert {ledger.get(one).reason for one in attempt.run_ids} == {"waiting for capacity"}
    assert ledger.attempt(attempt.id).launched_at is None
    note(ledger, aws, (attempt, replace(waiting, is_up=True, launched_at=START, detail="training")))
    assert {ledger.get(one).reason for one in attempt.run_ids} == {None}
    # What is known of a run that waits for no machine is not SageMaker's to say.
    ledger.explain(attempt.run_ids[0], "resumed")
    note(ledger, aws, (attempt, AttemptStatus(has_ended=True, detail="completed")))
    assert ledger.get(attempt.run_ids[0]).reason == "resumed"


def test_managed_spot_costs_the_share_that_was_billed() -> None:
    listed, on_ec2 = training_site().price, site().price
    assert listed is not None and on_ec2 is not None
    aws_status = AttemptStatus(has_ended=True, is_spot=True, billable_s=300.0, training_s=1000.0)
    price = managed_spot_price(listed, aws_status)
    assert price is not None
    assert (price.usd_per_hour, price.purchase) == (pytest.approx(63.296 * 0.3), "spot")
    assert price.source.startswith("30.0% of 63.296")
    assert read(Price, price.to_json(), "price") == price
    # Nothing off, nothing told, or nothing of SageMaker's.
    assert managed_spot_price(listed, replace(aws_status, billable_s=1000.0)) is None
    assert managed_spot_price(listed, replace(aws_status, training_s=None)) is None
    assert managed_spot_price(listed, replace(aws_status, is_spot=False)) is None
    assert managed_spot_price(on_ec2, aws_status) is None
    assert managed_spot_price(price, aws_status) is None
