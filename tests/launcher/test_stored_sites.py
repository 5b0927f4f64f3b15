"""Sites in the ledger: whatever was looked up about a place comes back as it was, of either backend."""

import json
from typing import Any

import pytest
from ec2_builders import site
from sagemaker_builders import training_site

from fastlaunch.backends.placements import CapacityBlock
from fastlaunch.backends.protocol import Place
from fastlaunch.core.errors import UserError
from fastlaunch.stored_sites import site_from_json, site_to_json

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
        training_site("p5.48xlarge", "p5en.48xlarge", code=None, keep_alive_minutes=30),
    ],
    ids=["ec2", "small", "group", "block", "sagemaker", "preferences"],
)
def test_a_site_comes_back_as_it_was(place: Place) -> None:
    stored = json.loads(json.dumps(site_to_json(place)))
    assert stored["backend"] == place.backend
    assert site_from_json(stored) == place


def test_sites_of_older_ledgers_are_ec2s() -> None:
    older: dict[str, Any] = site_to_json(site())
    for name in ("backend", "placement_group", "block"):
        del older[name]
    assert site_from_json(older) == site()


@pytest.mark.parametrize("data", [{}, {"instance": 3}, {**site_to_json(training_site()), "backend": "ec2"}])
def test_what_is_no_site_is_told(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds no site"):
        site_from_json(data)
