"""The most that a job can cost: known answers, and what is refused for want of a bound."""

from dataclasses import replace
from datetime import date

import pytest
from ec2_builders import block_site, catalogue, site
from sagemaker_builders import training_site

from fastlaunch.backends.site import CapacityBlock
from fastlaunch.catalog.prices import dearest_rate, max_cost_usd
from fastlaunch.core.errors import UserError
from fastlaunch.placement.cost_ceiling import check_budget, cost_ceiling

TODAY = date(2026, 11, 21)


def rate(instance: str, **terms: object) -> tuple[float, str]:
    options = {"purchase": "on-demand", "max_price_usd": None, "region": "us-east-1", **terms}
    found = dearest_rate(catalogue().instance(instance), catalogue=catalogue(), today=TODAY, **options)  # type: ignore[arg-type]
    return found.usd_per_hour, found.as_of.isoformat()


def test_the_on_demand_price_bounds_spot_too_unless_a_limit_is_given() -> None:
    assert rate("p5.48xlarge") == (55.04, "2026-07-20")
    assert rate("p5.48xlarge", purchase="spot") == (55.04, "2026-07-20")
    assert rate("p5.48xlarge", purchase="spot", max_price_usd=20.0) == (20.0, "2026-11-21")
    assert rate("p5e.48xlarge", purchase="spot", max_price_usd=20.0) == (20.0, "2026-11-21")


@pytest.mark.parametrize(
    ("instance", "terms", "hint"),
    [
        ("p5e.48xlarge", {}, "--purchase spot --max-price USD"),
        ("p5e.48xlarge", {"purchase": "spot"}, "--max-price USD"),
        ("g5.xlarge", {"purchase": "capacity-block"}, "--purchase on-demand, or"),
        ("p5.48xlarge", {"region": "eu-north-1", "purchase": "spot"}, "give --max-price USD"),
        ("p5.48xlarge", {"region": "eu-north-1"}, "known:"),
        ("p5e.48xlarge", {"service": "sagemaker"}, "service sagemaker"),
    ],
)
def test_what_has_no_bound_is_refused(instance: str, terms: dict[str, object], hint: str) -> None:
    with pytest.raises(UserError, match=instance.replace(".", r"\.")) as caught:
        rate(instance, **terms)
    assert hint in str(caught.value.hint)


def test_the_ceiling_is_of_the_dearest_and_says_how_it_is_made() -> None:
    one = cost_ceiling([site()], num_nodes=1, max_minutes=120)
    assert str(one) == (
        "at most $119.25 of instance time: (2 h + 10 min) x $55.04/h, p5.48xlarge; price as of 2026-07-20"
    )
    sites = [site(), site(zone="us-east-1b"), site("p5en.48xlarge"), site("g5.xlarge")]
    several = cost_ceiling(sites, num_nodes=1, max_minutes=90)
    # Known answer: 100 min at $63.296.
    assert several.usd == pytest.approx(105.4933333)
    # What is printed is enough.
    check_budget(several, 105.49)
    with pytest.raises(UserError, match="may cost"):
        check_budget(several, 105.48)
    assert str(several) == (
        "at most $105.49 of instance time: (1 h 30 min + 10 min) x $63.296/h, "
        "the dearest of p5.48xlarge, p5en.48xlarge, g5.xlarge; price as of 2026-07-20"
    )
    limited = cost_ceiling([site(max_price_usd=20.0, usd_per_hour=20.0)], num_nodes=2, max_minutes=50)
    assert limited.usd == 40.0 and str(limited).endswith("your limit for spot")


def test_a_ceiling_above_the_budget_is_refused_with_what_would_fit() -> None:
    ceiling = cost_ceiling([site()], num_nodes=1, max_minutes=120)
    check_budget(ceiling, None)
    check_budget(ceiling, 119.26)
    with pytest.raises(UserError) as caught:
        check_budget(ceiling, 100)
    assert "`max_cost` in the config file) of $100.00" in caught.value.message
    # Known answer: $100 buy 109.01 min.
    assert caught.value.hint == "give --max-cost 120, or --max-hours 99min"
    with pytest.raises(UserError) as caught:
        check_budget(ceiling, 5)
    assert caught.value.hint == "give --max-cost 120"


BLOCK = CapacityBlock(
    reservation="cr-1", ends_at="2026-11-22T11:30:00+00:00", fee_usd=1887.84, hours=24.0, num_instances=2
)


#: Known answer: in us-east-1, 200 GiB at $0.08 and 375 MiB/s beyond 125 at $0.04 are $31 a month of 672 h.
VOLUME_USD_PER_HOUR = 31 / 672


def test_volumes_are_counted_where_their_price_is_known() -> None:
    volume = catalogue().find_volume_price("us-east-1", on=TODAY)
    assert volume is not None
    assert volume.max_usd_per_hour(gib=200, mib_per_s=500) == pytest.approx(VOLUME_USD_PER_HOUR)
    # What is free takes nothing off.
    assert volume.max_usd_per_hour(gib=200, mib_per_s=100) == pytest.approx(16 / 672)
    assert catalogue().find_volume_price("us-east-1", on=date(2023, 12, 7)) is None
    # Of two the one that costs more in all.
    places = [site(volume_usd_per_hour=VOLUME_USD_PER_HOUR), site(zone="us-east-1b")]
    ceiling = cost_ceiling(places, num_nodes=2, max_minutes=120)
    assert ceiling.volumes_usd == pytest.approx(2 * 130 / 60 * VOLUME_USD_PER_HOUR)
    assert ceiling.usd == pytest.approx(238.5066667 + ceiling.volumes_usd)
    assert str(ceiling) == (
        "at most $238.71 of instance time and volumes: 2 x (2 h + 10 min) x ($55.04 + $0.046)/h, "
        "p5.48xlarge; price as of 2026-07-20"
    )
    with pytest.raises(UserError) as caught:
        check_budget(ceiling, 238.6)
    assert caught.value.hint == "give --max-cost 239, or --max-hours 119min"


def test_the_ceiling_says_where_volumes_are_not_counted() -> None:
    elsewhere = site("p5en.48xlarge", region="us-west-2", volume_usd_per_hour=None)
    ceiling = cost_ceiling([site(), elsewhere, elsewhere], num_nodes=1, max_minutes=120)
    assert (ceiling.volumes_usd, ceiling.uncounted_regions) == (0.0, ("us-west-2",))
    assert str(ceiling).endswith("; volumes in us-west-2 are not counted: their price is not known")


def test_a_training_job_has_prices_of_its_own() -> None:
    # Known answer: 2 nodes, (120 + 10) min at $63.296.
    assert max_cost_usd(num_nodes=2, max_minutes=120, usd_per_hour=63.296) == pytest.approx(274.282667)
    ceiling = cost_ceiling([training_site()], num_nodes=2, max_minutes=120)
    assert str(ceiling).startswith("at most $274.28 of SageMaker instance time: 2 x (2 h + 10 min)")
    planned = cost_ceiling([training_site(training_plan="arn:x")], num_nodes=2, max_minutes=120)
    assert str(planned).endswith("though the training plan was paid for before")
    # Known answer: $200 buy 94.79 min of two nodes, 10 of which are not the job's.
    with pytest.raises(UserError) as caught:
        check_budget(ceiling, 200)
    assert caught.value.hint == "give --max-cost 275, or --max-hours 84min"


def test_a_block_costs_two_ways_and_never_nothing() -> None:
    place = block_site(block=BLOCK)
    # Known answer: $1,887.84 over 48 instance hours are $39.33; twice 130 min of it.
    ceiling = cost_ceiling([place], num_nodes=2, max_minutes=120)
    assert ceiling.usd == pytest.approx(170.43)
    assert str(ceiling) == (
        "effectively at most $170.43: 2 x (2 h + 10 min) x $39.33/h, p5.48xlarge, of the capacity block's "
        "fee of $1,887.84, which is spent already (2 for 24 h)"
    )
    # It cannot use more of the fee than all.
    assert cost_ceiling([place], num_nodes=2, max_minutes=60 * 25).usd == 1887.84
    # Its volumes are no part of the fee.
    with_volumes = replace(place, volume_usd_per_hour=0.06)
    ceiling = cost_ceiling([with_volumes], num_nodes=2, max_minutes=60 * 25 - 10)
    assert ceiling.usd == pytest.approx(1887.84 + 3.0)
    assert str(ceiling).startswith("effectively at most $1,887.84: ")
    assert str(ceiling).endswith("; volumes on top, at most $3.00")
    unknown = replace(place, block=replace(BLOCK, ends_at="<block-end>"))
    assert "fee, which is spent already; which part of it" in str(
        cost_ceiling([unknown], num_nodes=1, max_minutes=120)
    )


def test_sagemaker_has_prices_of_its_own() -> None:
    assert rate("p5.48xlarge", service="sagemaker") == (63.296, "2026-09-01")
    # Billable time holds the discount of spot already: what bounds it is the on-demand price.
    assert rate("p5.48xlarge", service="sagemaker", purchase="spot") == (63.296, "2026-09-01")
