"""Placements in the ledger: whatever was looked up about a place comes back as it was, of either backend."""

import json
from typing import Any

import pytest
from ec2_builders import BLOCK, NEEDS, site
from sagemaker_builders import training_site

from fastlaunch.backends.placements import Placement, placement_from_json, placement_to_json
from fastlaunch.core.errors import UserError


@pytest.mark.parametrize(
    "place",
    [
        site(placement_group="fastlaunch-us-east-1a"),
        site(secrets={"HF_TOKEN": "arn:aws:ssm:us-east-1:123456789012:parameter/hub"}),
        site("g5.xlarge", code=None, zone=None, subnet=None, max_price_usd=0.4),
        site(block=BLOCK),
        site(**NEEDS),
        training_site(),
        training_site(
            subnets=("subnet-0a",),
            security_groups=("sg-0a",),
            secrets={"HUB": "arn"},
            tags={"team": "vision"},
        ),
    ],
    ids=["group", "secret", "small", "block", "needs", "sagemaker", "vpc"],
)
def test_a_site_comes_back_as_it_was(place: Placement) -> None:
    stored = json.loads(json.dumps(placement_to_json(place)))
    assert stored["backend"] == place.backend
    assert placement_from_json(stored) == place


def test_sites_of_older_ledgers_are_ec2s() -> None:
    older: dict[str, Any] = placement_to_json(site())
    for name in ("backend", "placement_group", "block", "tags", "volume_kms_key"):
        del older[name]
    assert placement_from_json(older) == site()


def test_placements_of_older_releases_name_one_type() -> None:
    older: dict[str, Any] = placement_to_json(training_site())
    for name in ("tags", "subnets", "security_groups", "encrypts_traffic"):
        del older[name]
    assert placement_from_json(older) == training_site()


@pytest.mark.parametrize("data", [{}, {**placement_to_json(training_site()), "backend": "ec2"}])
def test_what_is_no_site_is_told(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds no placement"):
        placement_from_json(data)
