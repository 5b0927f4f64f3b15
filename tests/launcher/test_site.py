"""Placements in the ledger: whatever was looked up about a place comes back as it was, of either backend."""

import json
from typing import Any

import pytest
from ec2_builders import BLOCK, NEEDS, site
from sagemaker_builders import training_site

from fastlaunch.backends.site import Site
from fastlaunch.core.data import read, to_data
from fastlaunch.core.errors import UserError


@pytest.mark.parametrize(
    "place",
    [
        site(placement_group="fastlaunch-us-east-1a"),
        site(secrets={"HF_TOKEN": "arn:aws:ssm:us-east-1:123456789012:parameter/hub"}),
        site("g5.xlarge", code=None, zone=None, subnets=(), max_price_usd=0.4),
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
def test_a_site_comes_back_as_it_was(place: Site) -> None:
    stored = json.loads(json.dumps(to_data(place)))
    assert read(Site, stored, "site") == place


@pytest.mark.parametrize("data", [{}, {**to_data(training_site()), "placement": "x"}])
def test_what_is_no_site_is_told(data: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^site: "):
        read(Site, data, "site")
