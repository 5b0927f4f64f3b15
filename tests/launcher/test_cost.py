"""Hours and dollars of a training, part by part: known answers by hand."""

import datetime
import math
from dataclasses import replace
from statistics import quantiles

import pytest
from fake_summaries import price_of

from fastlaunch.analysis.account import Account, Repeated, account_of_run
from fastlaunch.analysis.cost import ASSUMED, Assumptions, Cost, Purchase, Training, cost_of
from fastlaunch.analysis.rate import Evidence, Rate
from fastlaunch.analysis.spot import SpotJob, SpotMarket, expected_spot, market_of_rates, young_interval_s
from fastlaunch.catalog.prices import VolumePrice
from fastlaunch.core.errors import UserError
from fastlaunch.measure.published import shipped_summaries
from fastlaunch.measure.summary import Interval

#: A dollar a second, of a node.
DOLLAR = price_of(3600.0)
VOLUME = VolumePrice(
    region="us-east-1",
    usd_per_gib_month=0.08,
    usd_per_mib_per_s_month=0.04,
    as_of=datetime.date(2026, 7, 20),
    source="list",
)
ON_DEMAND = Purchase(price=DOLLAR)
BLOCK = Purchase(price=replace(DOLLAR, purchase="capacity-block"))
#: 1,000 s of steps, 900 to 1,250 s.
TRAINING = Training(
    samples=Interval(value=100_000),
    rate=Rate(
        samples_per_s=Interval(value=100, low=80, high=100_000 / 900), evidence=Evidence.PREDICTED, num_rows=3
    ),
)


def at(value: float, low: float | None = None, high: float | None = None) -> Rate:
    """A rate of so many samples/s."""
    return replace(TRAINING.rate, samples_per_s=Interval(value=value, low=low, high=high))


NOTHING = Assumptions(boot_s=0, pull_s=0, build_s=0, compile_s=0, warmup_s=0)
#: 10 s a step of 1,000 samples.
ACCOUNT = Account(
    step_time_s=Interval(value=10),
    once_s={"boot": 60.0, "pull": None, "build": 5.0, "compile": 7.0, "warmup": 2.0},
    between={
        "evaluations": Repeated(s_per_step=0.5, once_s=3.0, every=10),
        "checkpoints": Repeated(s_per_step=0.25, every=100),
    },
)


def seconds(cost: Cost) -> dict[str, float]:
    return {part.name: part.seconds.value for part in cost.parts if part.seconds}


def dollars(cost: Cost) -> dict[str, float]:
    return {part.name: part.usd.value for part in cost.parts}


def interval(quantity: Interval) -> tuple[float | None, float | None, float | None]:
    return quantity.value, quantity.low, quantity.high


def test_steps_alone_cost_their_time_on_all_nodes() -> None:
    training = replace(TRAINING, num_nodes=2)
    cost = cost_of(training, ON_DEMAND, assumptions=Assumptions(), steps_only=True)
    (part,) = cost.parts
    assert part.name == "steps" and part.evidence is Evidence.PREDICTED and "3 results" in part.source
    assert interval(cost.hours) == pytest.approx((1000 / 3600, 900 / 3600, 1250 / 3600))
    assert interval(cost.usd) == pytest.approx((2000, 1800, 2500))


def test_what_was_measured_counts_before_what_is_assumed_and_what_is_given_before_both() -> None:
    training = replace(TRAINING, account=ACCOUNT, samples_per_step=1000)
    assumptions = Assumptions(waiting_s=40, build_s=11, pull_s=13, given=frozenset({"build_s"}))
    cost = cost_of(training, ON_DEMAND, assumptions=assumptions)
    # 100 steps: evaluations take 3 + 100 x 0.5 s, checkpoints 100 x 0.25 s.
    expected = {
        **{"waiting": 40, "boot": 60, "pull": 13, "build": 11, "compile": 7, "warmup": 2},
        **{"steps": 1000, "evaluations": 53, "checkpoints": 25},
    }
    assert seconds(cost) == expected
    assert {part.name for part in cost.parts if part.seconds and part.evidence == "assumed"} == {
        *("waiting", "pull", "build")
    }
    assert cost.hours.value == pytest.approx(sum(expected.values()) / 3600)
    # Waiting is not billed.
    assert cost.usd.value == pytest.approx(sum(expected.values()) - 40)
    assert dollars(cost)["waiting"] == 0


def test_the_parts_sum_to_the_total_and_the_plain_total_is_the_same() -> None:
    training = replace(TRAINING, account=ACCOUNT, samples_per_step=1000, num_nodes=4)
    assumptions = Assumptions(waiting_s=60, storage_gib=100, transfer_gb=10)
    for purchase in (ON_DEMAND, BLOCK):
        bought = replace(purchase, volume=VOLUME)
        cost = cost_of(training, bought, assumptions=assumptions)
        assert sum(seconds(cost).values()) == pytest.approx(cost.hours.value * 3600)
        assert sum(dollars(cost).values()) == pytest.approx(cost.usd.value)
        plain = cost_of(training, bought, assumptions=assumptions, with_parts=False)
        assert plain == replace(cost, parts=())


def test_compiling_is_assumed_of_a_recipe_that_compiles_alone() -> None:
    for compiles, expected in ((True, 20), (False, 0)):
        cost = cost_of(replace(TRAINING, compiles=compiles), ON_DEMAND, assumptions=Assumptions(compile_s=20))
        assert seconds(cost)["compile"] == expected


def test_checkpoints_come_once_in_every_so_much_training_and_evaluations_so_often() -> None:
    assumptions = replace(NOTHING, checkpoint_s=5, checkpoint_every_s=100, evaluation_s=7, evaluations=3)
    cost = cost_of(TRAINING, ON_DEMAND, assumptions=assumptions)
    assert seconds(cost)["checkpoints"] == pytest.approx(50) and seconds(cost)["evaluations"] == 21
    # Checkpoints grow with the time of the steps: 5% more, also at the ends of the interval.
    assert interval(cost.usd) == pytest.approx((1071, 21 + 1.05 * 900, 21 + 1.05 * 1250))


def test_a_job_s_own_checkpoints_take_what_one_was_measured_to_take() -> None:
    """100 steps, and 25 s each were measured; on spot their writing beside the steps is no cost."""
    training = replace(TRAINING, account=ACCOUNT, samples_per_step=1000)
    for every, expected in ((50, 50), (10, 250), (0, 0)):
        job = replace(training, checkpoint_every=every)
        (part,) = (p for p in cost_of(job, ON_DEMAND, assumptions=NOTHING).parts if p.name == "checkpoints")
        assert part.seconds and (part.seconds.value, part.evidence) == (expected, training.rate.evidence)
    unknown = replace(TRAINING, samples_per_step=1000, checkpoint_every=50)
    (part,) = (p for p in cost_of(unknown, ON_DEMAND, assumptions=NOTHING).parts if p.name == "checkpoints")
    assert part.seconds and (part.seconds.value, part.evidence) == (2 * NOTHING.checkpoint_s, "assumed")


def test_two_inputs_with_an_interval_are_independent() -> None:
    training = replace(TRAINING, samples=Interval(value=100_000, low=90_000, high=120_000))
    hours = cost_of(training, ON_DEMAND, assumptions=NOTHING).hours
    assert hours.low == pytest.approx((1000 - math.hypot(100, 100)) / 3600)
    assert hours.high == pytest.approx((1000 + math.hypot(200, 250)) / 3600)


def test_a_speed_without_an_interval_gives_none() -> None:
    training = replace(TRAINING, rate=at(100))
    cost = cost_of(training, ON_DEMAND, assumptions=NOTHING)
    assert interval(cost.usd) == (1000, None, None)


def test_volumes_cost_their_month_s_part_and_storage_and_transfer_their_price() -> None:
    # (200 x 0.08 + 375 x 0.04) / 730 = $0.042466 an hour.
    assumptions = replace(
        NOTHING,
        **{"storage_gib": 1000, "storage_months": 2, "storage_usd_per_gib_month": 0.02},
        **{"transfer_gb": 50, "transfer_usd_per_gb": 0.1},
    )
    cost = cost_of(
        replace(TRAINING, num_nodes=2), Purchase(price=DOLLAR, volume=VOLUME), assumptions=assumptions
    )
    assert dollars(cost)["volumes"] == pytest.approx(2 * 1000 / 3600 * 31 / 730)
    assert dollars(cost)["storage"] == 40 and dollars(cost)["transfer"] == 5
    evidence = {part.name: part.evidence for part in cost.parts}
    assert evidence["volumes"] == "listed" and evidence["storage"] == "assumed"


def test_an_hour_costs_what_the_account_pays_and_nothing_where_that_is_sunk() -> None:
    for paid, usd in ((1800.0, 500), (0.0, 0)):
        cost = cost_of(TRAINING, Purchase(price=DOLLAR, usd_per_hour=paid), assumptions=NOTHING)
        assert cost.usd.value == usd
        assert cost.hours.value == pytest.approx(1000 / 3600)


@pytest.mark.parametrize(
    ("hours", "days"), [(20, 1), (23.6, 2), (14 * 24 - 0.5, 14), (14 * 24, 21), (182 * 24 - 0.5, 182)]
)
def test_a_capacity_block_is_the_shortest_that_fits_and_is_paid_as_a_whole(hours: float, days: int) -> None:
    training = replace(TRAINING, samples=Interval(value=hours * 360_000), rate=at(100))
    cost = cost_of(training, BLOCK, assumptions=NOTHING)
    assert cost.block_hours == 24 * days
    assert cost.fee_usd == cost.usd.value == pytest.approx(24 * days * 3600)
    assert cost.effective_usd.value == pytest.approx(hours * 3600)
    assert dollars(cost)["unused block"] == pytest.approx((24 * days - hours) * 3600)


def test_a_capacity_block_holds_the_upper_end_of_the_interval() -> None:
    training = replace(TRAINING, samples=Interval(value=20 * 360_000), rate=at(100, low=80, high=125))
    cost = cost_of(training, BLOCK, assumptions=NOTHING)
    # 16 to 25 h.
    assert cost.block_hours == 48
    # The fee is the same, however long the training takes.
    assert interval(cost.usd) == pytest.approx((48 * 3600,) * 3)
    (unused,) = (part.usd for part in cost.parts if part.name == "unused block")
    assert interval(unused) == pytest.approx((28 * 3600, 23 * 3600, 32 * 3600))
    by_the_hour = cost_of(TRAINING, BLOCK, assumptions=NOTHING, steps_only=True)
    assert by_the_hour.usd.value == 1000 and by_the_hour.fee_usd is None


def test_a_training_that_no_capacity_block_holds_is_refused() -> None:
    long = replace(TRAINING, samples=Interval(value=183 * 24 * 360_000))
    with pytest.raises(UserError):
        cost_of(long, BLOCK, assumptions=NOTHING)
    with pytest.raises(UserError):
        cost_of(TRAINING, BLOCK, assumptions=replace(NOTHING, block_hours=0.7))


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_an_assumption_is_a_number_of_0_or_more(value: float) -> None:
    with pytest.raises(UserError):
        Assumptions(boot_s=value)


def spot_market(losses_per_hour: float, available: float = 1.0) -> SpotMarket:
    return market_of_rates(losses_per_hour, available, source="test")


#: Half the price.
ON_SPOT = Purchase(price=replace(DOLLAR, purchase="spot", usd_per_hour=1800.0), market=spot_market(0.5))


@pytest.mark.parametrize("restart_s", [None, 500])
def test_spot_adds_what_losses_cost_to_the_first_start_and_the_work(restart_s: float | None) -> None:
    given = frozenset({"checkpoint_every_s"})
    times = {"boot_s": 100, "restart_s": restart_s, "checkpoint_s": 90, "checkpoint_every_s": 600}
    assumptions = replace(NOTHING, **times, given=given)
    job = SpotJob(work_s=1000, restart_s=restart_s or 100, checkpoint_s=90, every_s=600)
    time = expected_spot(job, spot_market(0.5))
    cost = cost_of(TRAINING, ON_SPOT, assumptions=assumptions)
    parts = seconds(cost)
    assert parts["steps"] == pytest.approx(1000) and time.rework_s > 0
    assert (parts["rework"], parts["restarts"]) == pytest.approx((time.rework_s, time.restarts_s))
    assert cost.hours.value == pytest.approx((100 + time.total_s) / 3600)
    assert cost.usd.value == pytest.approx((100 + time.billed_s) / 2)
    assert dollars(cost)["not billed"] == pytest.approx(-time.free_s / 2)
    assert sum(seconds(cost).values()) == pytest.approx(cost.hours.value * 3600)
    assert sum(dollars(cost).values()) == pytest.approx(cost.usd.value)
    plain = cost_of(TRAINING, ON_SPOT, assumptions=assumptions, with_parts=False)
    assert plain == replace(cost, parts=())


def test_no_volume_is_paid_while_there_is_no_machine() -> None:
    scarce = replace(ON_SPOT, market=spot_market(0.5, available=0.5), volume=VOLUME)
    cost = cost_of(TRAINING, scarce, assumptions=replace(NOTHING, waiting_s=500))
    parts = seconds(cost)
    assert parts["waiting"] > 0 and parts["no capacity"] > 0
    without_s = parts["waiting"] + parts["no capacity"]
    assert dollars(cost)["volumes"] == pytest.approx((cost.hours.value - without_s / 3600) * 31 / 730)


#: Times that say how spot is used, not how long a part takes.
OF_SPOT = ("checkpoint_every_s", "restart_s", "deadline_s")


@pytest.mark.parametrize("purchase", [ON_DEMAND, ON_SPOT], ids=["on demand", "spot"])
@pytest.mark.parametrize("name", [name for name in ASSUMED if name.endswith("_s") and name not in OF_SPOT])
def test_each_assumed_time_is_in_hours_and_dollars_and_in_one_part(name: str, purchase: Purchase) -> None:
    without = replace(NOTHING, evaluations=2, checkpoint_every_s=500, given=frozenset({"checkpoint_every_s"}))
    before = cost_of(TRAINING, purchase, assumptions=without)
    after = cost_of(TRAINING, purchase, assumptions=replace(without, **{name: getattr(without, name) + 60}))
    for cost in (before, after):
        assert sum(seconds(cost).values()) == pytest.approx(cost.hours.value * 3600)
        assert sum(dollars(cost).values()) == pytest.approx(cost.usd.value)
    assert after.hours.value > before.hours.value
    assert (after.usd.value > before.usd.value) == (name != "waiting_s")
    assert seconds(after).keys() == seconds(before).keys()


def test_the_next_job_on_a_machine_does_not_start_it_again() -> None:
    assumptions = replace(Assumptions(), build_s=7.0).for_next_job()
    assert (assumptions.boot_s, assumptions.pull_s, assumptions.build_s) == (0, 0, 7)
    measured = replace(TRAINING, account=ACCOUNT)
    assert seconds(cost_of(measured, ON_DEMAND, assumptions=assumptions))["boot"] == 0


def test_sagemaker_bills_every_second_of_spot_and_gives_no_notice() -> None:
    assumptions = replace(NOTHING, checkpoint_s=8)
    on_sagemaker = replace(ON_SPOT, price=replace(ON_SPOT.price, service="sagemaker"))
    cost = cost_of(TRAINING, on_sagemaker, assumptions=assumptions)
    assert dollars(cost)["not billed"] == 0 and seconds(cost)["rework"] > 0
    assert seconds(cost_of(TRAINING, ON_SPOT, assumptions=assumptions))["rework"] == 0


def test_spot_s_checkpoints_come_at_young_s_interval_unless_it_is_given() -> None:
    # sqrt(2 x 8 s x 2 h) less 8 s, with Daly's terms.
    cost = cost_of(TRAINING, ON_SPOT, assumptions=replace(NOTHING, checkpoint_s=8))
    assert cost.checkpoint_every_s == pytest.approx(young_interval_s(8, 0.5))
    given = replace(NOTHING, checkpoint_every_s=300, given=frozenset({"checkpoint_every_s"}))
    assert cost_of(TRAINING, ON_SPOT, assumptions=given).checkpoint_every_s == 300


def test_spot_s_checkpoints_are_never_closer_than_one_is_written() -> None:
    def every_s(beside_s: float) -> float | None:
        saving = Repeated(s_per_step=0.08, every=100, beside_s=beside_s)
        account = replace(ACCOUNT, between={**ACCOUNT.between, "checkpoints": saving})
        training = replace(TRAINING, account=account, samples_per_step=1000)
        return cost_of(training, ON_SPOT, assumptions=NOTHING).checkpoint_every_s

    assert every_s(30) == every_s(0) == pytest.approx(young_interval_s(8, 0.5))
    assert every_s(4000) == 4000


def test_spot_without_checkpoints_is_refused_beyond_the_mean_time_to_a_loss() -> None:
    without = replace(NOTHING, given=frozenset({"checkpoint_every_s"}))
    assert cost_of(TRAINING, ON_SPOT, assumptions=without).checkpoint_every_s is None
    with pytest.raises(UserError, match="checkpoints"):
        cost_of(replace(TRAINING, samples=Interval(value=800_000)), ON_SPOT, assumptions=without)


@pytest.mark.parametrize("losses_per_hour", [20.0, 100.0, 1e9])
def test_a_training_that_losses_make_many_times_as_long_is_refused(losses_per_hour: float) -> None:
    purchase = replace(ON_SPOT, market=spot_market(losses_per_hour, 0.6))
    with pytest.raises(UserError, match="50 times"):
        cost_of(TRAINING, purchase, assumptions=Assumptions(restart_s=1800))


def test_spot_whose_losses_are_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="not known"):
        cost_of(TRAINING, replace(ON_SPOT, market=None), assumptions=NOTHING)
    # Published steps are compared by the price alone.
    steps = cost_of(TRAINING, replace(ON_SPOT, market=None), assumptions=NOTHING, steps_only=True)
    assert steps.usd.value == 500


def test_what_is_not_known_of_losses_widens_the_interval() -> None:
    assumptions = replace(NOTHING, boot_s=100, checkpoint_s=90)
    sure = cost_of(TRAINING, ON_SPOT, assumptions=assumptions).hours
    market = replace(spot_market(0.5), losses_per_hour=Interval(value=0.5, low=0.0, high=2.0))
    unsure = cost_of(TRAINING, replace(ON_SPOT, market=market), assumptions=assumptions).hours
    assert sure.low and sure.high and unsure.low and unsure.high
    assert unsure.value == sure.value
    assert unsure.high > sure.high and unsure.low < sure.low
    mean = cost_of(TRAINING, ON_SPOT, assumptions=assumptions, with_interval=False).hours
    assert interval(mean) == (sure.value, None, None)


def test_with_a_deadline_the_rest_is_done_on_demand() -> None:
    scarce = replace(ON_SPOT, market=spot_market(2.0, 0.1), on_demand_usd_per_hour=3600.0)
    assumptions = replace(NOTHING, boot_s=60, deadline_s=2000)
    cost = cost_of(replace(TRAINING, rate=at(100)), scarce, assumptions=assumptions)
    assert seconds(cost)["on demand"] > 100
    assert dollars(cost)["on demand"] == pytest.approx(seconds(cost)["on demand"])
    assert cost.hours.value < cost_of(TRAINING, scarce, assumptions=replace(NOTHING, boot_s=60)).hours.value
    with pytest.raises(UserError):
        cost_of(TRAINING, replace(scarce, on_demand_usd_per_hour=None), assumptions=assumptions)


def test_nine_of_ten_shipped_runs_took_less_than_is_assumed() -> None:
    runs = [run for run in shipped_summaries().values() if run.timing.step_time_s]
    accounts = [account for run in runs if (account := account_of_run(run))]
    compiles = [run.startup.compile_s for run in runs if run.startup.compile_s is not None]
    taken = {
        "build_s": [each for account in accounts if (each := account.once_s["build"]) is not None],
        "compile_s": compiles,
        "warmup_s": [each for account in accounts if (each := account.once_s["warmup"]) is not None],
    }
    for name, seconds in taken.items():
        assert quantiles(seconds, n=10)[-1] == pytest.approx(getattr(Assumptions(), name), rel=0.2)


def test_on_spot_each_uncertain_input_moves_the_total_by_itself() -> None:
    exact = replace(TRAINING, rate=at(100, low=100, high=100))
    market = replace(spot_market(0.5), losses_per_hour=Interval(value=0.5, low=0.2, high=0.9))
    unsure = replace(ON_SPOT, market=market)
    assumptions = replace(NOTHING, boot_s=100, checkpoint_s=90)

    def off(training: Training, purchase: Purchase) -> tuple[float, float]:
        hours = cost_of(training, purchase, assumptions=assumptions).hours
        assert hours.low is not None and hours.high is not None
        return hours.value - hours.low, hours.high - hours.value

    by_speed, by_losses, by_both = off(TRAINING, ON_SPOT), off(exact, unsure), off(TRAINING, unsure)
    assert min(*by_speed, *by_losses) > 0
    assert by_both == pytest.approx([math.hypot(*pair) for pair in zip(by_speed, by_losses, strict=True)])


def test_waiting_is_a_part_of_the_time_to_a_deadline() -> None:
    scarce = replace(ON_SPOT, market=spot_market(2.0, 0.1), on_demand_usd_per_hour=3600.0)
    at_once = replace(NOTHING, boot_s=60, deadline_s=2000)
    later = replace(at_once, waiting_s=500, deadline_s=2500)
    first, second = (cost_of(TRAINING, scarce, assumptions=each) for each in (at_once, later))
    assert second.usd.value == pytest.approx(first.usd.value)
    assert second.hours.value == pytest.approx(first.hours.value + 500 / 3600)
