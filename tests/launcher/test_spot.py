"""Known answers for what a job takes on spot, and what observations say of a market."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fastlaunch.analysis.spot import (
    HOUR_S,
    Fallback,
    SpotJob,
    binomial_interval,
    check_checkpoints,
    effective_number,
    expected_spot,
    forecast_spot,
    market_of_rates,
    market_of_runs,
    market_of_states,
    poisson_interval,
    read_trace,
    steps_between,
    young_interval_s,
)
from fastlaunch.core.errors import BadFile, UserError

MARKET = market_of_rates(0.4, 0.5, source="test")
STEADY = market_of_rates(0.0, 1.0, source="test")
STORMY = market_of_rates(1000.0, 0.5, source="test")
#: Saved at the notice, and not.
QUICK = SpotJob(work_s=10 * HOUR_S, restart_s=600, checkpoint_s=20, every_s=1800)
SLOW = SpotJob(work_s=10 * HOUR_S, restart_s=600, checkpoint_s=300, every_s=3600)


def test_without_losses_spot_takes_work_and_checkpoints() -> None:
    time = expected_spot(SLOW, STEADY)
    assert (time.work_s, time.checkpoints_s) == (36_000, 3_000)
    assert time.total_s == time.billed_s == 39_000
    assert time.num_losses == time.waiting_s == 0


def test_time_with_slow_checkpoints_is_dalys_complete_model() -> None:
    job = SpotJob(work_s=36_000, restart_s=600, checkpoint_s=300, every_s=3600, notice_s=0)
    mean_s = HOUR_S / 0.4
    segments = 10 * mean_s * math.exp(600 / mean_s) * math.expm1(3900 / mean_s)
    # The first start is the caller's: what counts of it is its own losses.
    first = mean_s * math.expm1(600 / mean_s) - 600
    assert expected_spot(job, MARKET).spot_s == pytest.approx(segments + first)


def test_a_checkpoint_at_the_notice_saves_all_work() -> None:
    assert QUICK.saves_at_notice and not SLOW.saves_at_notice
    assert not replace(QUICK, write_s=41).saves_at_notice
    assert expected_spot(QUICK, MARKET).rework_s == 0 < expected_spot(SLOW, MARKET).rework_s


@pytest.mark.parametrize("job", [QUICK, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_simulated_jobs_take_what_the_closed_form_says(job: SpotJob, num_nodes: int) -> None:
    job = replace(job, num_nodes=num_nodes)
    exact, mean = expected_spot(job, MARKET), forecast_spot(job, MARKET, num_jobs=4000).mean
    assert mean.spot_s == pytest.approx(exact.spot_s, rel=0.04)
    assert mean.billed_s == pytest.approx(exact.billed_s, rel=0.04)
    assert mean.waiting_s == pytest.approx(exact.waiting_s, rel=0.06)
    assert mean.num_losses == pytest.approx(exact.num_losses, rel=0.06)


def test_intervals_are_youngs_and_for_long_checkpoints_dalys() -> None:
    # sqrt(2 * 1 s * 100 h), less the checkpoint itself, within a thousandth.
    assert young_interval_s(1, 0.01) == pytest.approx(math.sqrt(2 * 360_000), rel=2e-3)
    assert young_interval_s(1, 0.01, num_nodes=4) == pytest.approx(math.sqrt(2 * 90_000), rel=2e-3)
    assert young_interval_s(7300, 1.0) == HOUR_S
    assert young_interval_s(0, 0.5) == 0
    assert young_interval_s(60, 0) == math.inf
    assert steps_between(100, 3.0) == 33
    assert steps_between(1, 3.0) == 1


@pytest.mark.parametrize("checkpoint_s", [10, 200, 900])
@pytest.mark.parametrize("losses_per_hour", [0.06, 0.74])
def test_the_interval_is_where_a_job_takes_least(checkpoint_s: float, losses_per_hour: float) -> None:
    market = market_of_rates(losses_per_hour, 0.5, source="test")

    def spot_s(every_s: float) -> float:
        # Without a notice: what it saves needs no interval.
        job = replace(SLOW, checkpoint_s=checkpoint_s, every_s=every_s, notice_s=0, work_s=1e6)
        return expected_spot(job, market).spot_s

    best_s = young_interval_s(checkpoint_s, losses_per_hour)
    assert all(spot_s(best_s) < spot_s(factor * best_s) for factor in (0.8, 1.25))


def test_without_checkpoints_a_job_longer_than_the_mean_time_to_a_loss_is_refused() -> None:
    job = replace(SLOW, every_s=None, work_s=2.5 * HOUR_S - 601)
    check_checkpoints(job, MARKET, step_time_s=2)
    with pytest.raises(UserError, match=r"every 2\.5 h") as refused:
        check_checkpoints(replace(job, work_s=2.5 * HOUR_S), MARKET, step_time_s=2)
    # Daly's interval for 300 s at 2.5 h: 2128 s.
    assert "--checkpoint-every 1064" in (refused.value.hint or "")
    check_checkpoints(replace(job, every_s=600, work_s=1e6), MARKET, step_time_s=2)


def test_ec2_bills_no_machine_that_it_takes_back_in_its_first_hour() -> None:
    time = expected_spot(replace(QUICK, work_s=1e8), MARKET)
    # Of exponential lives, 1 - (1 + x) exp(-x) of the time is in those shorter than x means.
    assert time.free_s / time.spot_s == pytest.approx(1 - 1.4 * math.exp(-0.4), rel=1e-3)
    assert expected_spot(replace(QUICK, free_within_s=0), MARKET).free_s == 0
    assert expected_spot(replace(QUICK, num_nodes=2), MARKET).free_s == 0


def test_waiting_is_the_spell_without_capacity_per_loss_and_its_share_at_the_start() -> None:
    # Up 2.5 h on average, so down 2.5 h as well at one half.
    assert MARKET.wait_s == pytest.approx(2.5 * HOUR_S)
    time = expected_spot(QUICK, MARKET, retry_s=0)
    assert time.waiting_s == pytest.approx((time.num_losses + 0.5) * MARKET.wait_s)


def test_a_simulated_job_that_meets_endlessly_many_spells_ends_never() -> None:
    forecast = forecast_spot(replace(QUICK, restart_s=HOUR_S), STORMY, num_jobs=5, most_spells=100)
    assert forecast.chance(1e9) == 0
    assert forecast_spot(QUICK, STEADY, most_spells=1).chance(1e9) == 1


def test_observed_spells_are_replayed() -> None:
    # Up one hour, down one, for ever: each machine is lost after an hour, which EC2 bills from then on.
    regular = replace(market_of_rates(1.0, 0.5, source="test"), spells=((HOUR_S, HOUR_S),), evidence="trace")
    job = SpotJob(work_s=2 * HOUR_S, restart_s=600, checkpoint_s=0, every_s=60, notice_s=120)
    forecast = forecast_spot(job, regular, retry_s=0, num_jobs=500)
    # A whole hour holds 48 minutes of work.
    assert 2 <= forecast.mean.num_losses <= 3
    assert forecast.mean.work_s == pytest.approx(2 * HOUR_S)
    assert forecast.mean.total_s + 600 == pytest.approx(forecast.total_s.mean())
    assert forecast.chance(7.2 * HOUR_S) == 1.0


def test_a_fallback_meets_its_deadline_on_any_market() -> None:
    market = market_of_rates(0.7, 0.3, source="test")
    deadline = Fallback(deadline_s=14 * HOUR_S, start_s=900)
    for job in (QUICK, SLOW):
        alone = forecast_spot(job, market)
        backed = forecast_spot(job, market, fallback=deadline)
        assert alone.chance(deadline.deadline_s) < 0.5
        assert backed.chance(deadline.deadline_s) == 1.0
        assert 0 < backed.mean.on_demand_s < job.run_s
        assert alone.usd(1, 3).value < backed.usd(1, 3).value < 3 * job.run_s / HOUR_S


def test_intervals_of_counts_are_exact() -> None:
    # Garwood 1936 for 5 events, Clopper and Pearson 1934 for 8 of 10.
    losses = poisson_interval(5, 10)
    assert (losses.low, losses.value, losses.high) == pytest.approx((0.16235, 0.5, 1.16683), abs=1e-5)
    assert poisson_interval(0, 10).high == pytest.approx(0.368888, abs=1e-6)
    share = binomial_interval(8, 10)
    assert (share.low, share.value, share.high) == pytest.approx((0.44390, 0.8, 0.97479), abs=1e-5)
    assert binomial_interval(10, 10).value == 0.95


def test_own_runs_give_losses_by_instance_hour_and_the_share_of_requests_met_at_once() -> None:
    market = market_of_runs(instance_hours=20, num_losses=2, num_asked=2, num_granted=1, source="runs")
    assert (market.losses_per_hour.value, market.available.value) == (0.1, 0.5)
    # None seen counts as half a one.
    lucky = market_of_runs(instance_hours=20, num_losses=0, num_asked=4, num_granted=4, source="runs")
    assert (lucky.losses_per_hour.value, lucky.available.value) == (0.025, 0.875)


TRACE = """time,state,place
2026-11-01T00:00:00Z,up,a
2026-11-01T02:00:00Z,down,a
2026-11-01T03:00:00Z,up,a
2026-11-01T00:00:00,down,b
2026-11-01T04:00:00+00:00,up,b
2026-11-01T06:00:00Z,down,a
2026-11-01T07:00:00Z,up,a
2026-11-01T08:00:00Z,up,a
2026-11-01T08:00:00Z,down,b
"""


def test_a_trace_gives_rates_and_spells() -> None:
    market = read_trace(TRACE.splitlines(), source="trace.csv")
    # Up 6 + 4 of 16 hours; three losses, the one of b at its end. Ends of a place are joined.
    assert market.num_losses == 3
    assert market.losses_per_hour.value == pytest.approx(0.3)
    assert market.available.value == pytest.approx(10 / 16)
    late = read_trace(TRACE.splitlines(), source="trace.csv", history_s=2 * HOUR_S)
    assert (late.num_losses, late.available.value) == (1, 0.75)
    assert sorted(market.spells) == [(3 * HOUR_S, HOUR_S), (3 * HOUR_S, HOUR_S), (4 * HOUR_S, 4 * HOUR_S)]


@pytest.mark.parametrize(
    "text",
    ["when,state\n", "time,state\nsoon,up\n", "time,state\n2026-11-01,on\n", "time,state\n2026-11-01,down\n"],
)
def test_another_text_is_no_trace(text: str) -> None:
    with pytest.raises(BadFile):
        read_trace(text.splitlines(), source="trace.csv")


def test_clustered_spells_tell_less_of_their_mean() -> None:
    assert effective_number([1.0, 1.0, 1.0]) == 3
    # Variance 900 at a mean of 11.
    assert effective_number([91.0] + [1.0] * 8) == pytest.approx(9 / (900 / 121))
    # Batches of four with the means 1, 5, 1, 5: variance 16 / 3, times four, at a mean of 3.
    assert effective_number(2 * (4 * [1.0] + 4 * [5.0])) == pytest.approx(16 / (64 / 3 / 9))
    places = [[(HOUR_S * hours, True), (HOUR_S, False)] for hours in (1,) * 9 + (91,)]
    market = market_of_states(places, source="test")
    losses = market.losses_per_hour
    assert losses.value == pytest.approx(0.1)
    assert losses.low is not None and losses.high is not None
    assert losses.high - losses.low > 0.2


def test_a_forecast_from_few_spells_promises_less() -> None:
    places = [[(HOUR_S * (1 + n % 3), True), (HOUR_S, False)] for n in range(80)]
    forecast = forecast_spot(QUICK, market_of_states(places, source="test"))
    # Four spells, as markets go, tell as much as one.
    assert forecast.num_spells == 20
    by = float(np.quantile(forecast.total_s, 0.9))
    assert forecast.chance(by) == pytest.approx(np.mean(forecast.total_s <= by) * 20 / 21)
    assert forecast.chance(math.inf) == pytest.approx(20 / 21)


def test_a_deadline_that_on_demand_misses_too_is_refused() -> None:
    with pytest.raises(UserError, match="on demand"):
        forecast_spot(QUICK, MARKET, fallback=Fallback(deadline_s=QUICK.work_s, start_s=600))
