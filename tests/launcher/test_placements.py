"""Sites in the ledger: whatever was looked up about a place comes back as it was, of either backend."""

import json
from typing import Any

import pytest
from ec2_builders import site
from sagemaker_builders import training_site

from fastlaunch.backends.placements import CapacityBlock, Placement, placement_from_json, placement_to_json
from fastlaunch.core.errors import UserError

BLOCK = CapacityBlock(
    reservation="cr-0a1b", ends_at="2026-11-23T11:30:00+00:00", fee_usd=1888.0, hours=24.0, num_instances=2
)


@pytest.mark.parametrize(
    "place",
    [
        site(),
        site("g5.xlarge", code=None, zone=None, subnet=None, max_price_usd=0.4),
        site(placement_group="fastlaunch-us-east-1a"),
        site(block=BLOCK),
        training_site(),
    ],
    ids=["ec2", "small", "group", "block", "sagemaker"],
)
def test_a_site_comes_back_as_it_was(place: Placement) -> None:
    stored = json.loads(json.dumps(placement_to_json(place)))
    assert stored["backend"] == place.backend
    assert placement_from_json(stored) == place


def test_sites_of_older_ledgers_are_ec2s() -> None:
    older: dict[str, Any] = placement_to_json(site())
    for name in ("backend", "placement_group", "block"):
        del older[name]
    assert placement_from_json(older) == site()


def test_placements_of_older_releases_name_one_type() -> None:
    older = {**placement_to_json(training_site()), "others": [], "keep_alive_minutes": 30}
    assert placement_from_json(older) == training_site()


@pytest.mark.parametrize(
    "data", [{}, {"instance": 3}, {**placement_to_json(training_site()), "backend": "ec2"}]
)
def test_what_is_no_site_is_told(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds no placement"):
        placement_from_json(data)
