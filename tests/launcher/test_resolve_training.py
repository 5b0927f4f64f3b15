"""Candidates to training sites: what a site holds, and what is left out and why."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import DIGEST, ROLE, FakeAws, denied, fake_aws, settings, trusting, usual

from fastlaunch.aws.cache import AskOnce
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.catalog.container_images import training_base
from fastlaunch.cloud_request import build_cloud_request
from fastlaunch.core.errors import BadConfiguration, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.build import Request
from fastlaunch.jobs.options import CloudTerms
from fastlaunch.resolve_training import resolve_training
from fastlaunch.resolved import Inquiry, Resolved

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
OURS = replace(usual(), role=ROLE)


class Code:
    """A bundle as far as a site tells of it."""

    sha256 = "c0de"
    commit = "ab" * 20


def furnished(**changes: Any) -> FakeAws:
    return fake_aws(answers={"GetRole": trusting("sagemaker.amazonaws.com")}, **changes)


def found(
    aws: FakeAws | None = None, *, here: RegionSettings = OURS, checkpoint_every: int = 0, **terms: Any
) -> Resolved:
    usually: dict[str, Any] = {"instances": ("ml.p5.48xlarge",), "regions": ("us-east-1",)}
    made = CloudTerms(backend="sagemaker", **{**usually, **terms})
    request = build_cloud_request(Request(checkpoint_every=checkpoint_every), made, catalogue=catalogue())
    return resolve_training(
        Inquiry(
            request=request,
            aws=aws or furnished(),  # type: ignore[arg-type]
            settings=settings(us_east_1=here),
            catalogue=catalogue(),
            now=NOW,
            base=training_base(None, today=NOW.date()),
            bundle=Code(),
            ask=AskOnce(),
        )
    )


def test_a_site_holds_all_that_a_job_names() -> None:
    (site,) = found(keep_alive_minutes=30, num_nodes=2).sites
    assert isinstance(site, TrainingSite)
    assert (site.instance.name, site.region, site.role) == ("p5.48xlarge", "us-east-1", ROLE)
    assert (site.bucket, site.prefix, site.keep_alive_minutes) == ("acme", "fastlaunch", 30)
    # The image of jobs on EC2, in the region, by digest: runs on both can be compared.
    assert site.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert site.code is not None and site.code.key == "fastlaunch/code/c0de.tar.gz"
    assert (site.usd_per_hour, site.price_as_of) == (63.296, "2026-09-01")


def test_types_to_choose_among_are_one_site_and_one_question() -> None:
    aws = furnished()
    both = found(aws, instances=("ml.p4d.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge"))
    assert [site.name for site in both.sites] == ["ml.p4d.24xlarge or ml.p5.48xlarge in us-east-1"]
    assert both.sites[0].usd_per_hour == 63.296
    assert [name for name, _ in both.skipped] == ["ml.p5e.48xlarge in us-east-1"]
    assert aws.asked["GetRole", "us-east-1"] == aws.asked["bucket_exists", "us-east-1"] == 1
    # What EC2 alone needs is not asked for.
    assert aws.asked["parameter", "us-east-1"] == aws.asked["subnets", "us-east-1"] == 0


def test_spot_is_tried_type_by_type() -> None:
    types = ("ml.p4d.24xlarge", "ml.p5.48xlarge")
    sites = found(instances=types, purchase="spot", checkpoint_every=9).sites
    assert [site.name for site in sites] == ["ml.p4d.24xlarge in us-east-1", "ml.p5.48xlarge in us-east-1"]


@pytest.mark.parametrize(
    ("changes", "here", "told"),
    [
        ({"buckets": frozenset()}, OURS, "there is no bucket acme"),
        ({"digest": None}, OURS, "has no image pytorch"),
        ({}, replace(OURS, role=None), "no role is named for us-east-1"),
        ({}, replace(OURS, bucket=None), "no bucket is named for us-east-1"),
        ({"refused": {"GetRole": BadConfiguration("not so")}}, OURS, "not so"),
    ],
)
def test_what_is_missing_ends_it(changes: dict[str, Any], here: RegionSettings, told: str) -> None:
    with pytest.raises(UserError, match=told):
        found(furnished(**changes), here=here)


def test_a_role_that_may_not_be_looked_at_is_believed() -> None:
    assert found(furnished(refused={"GetRole": denied("iam:GetRole")})).sites


def test_a_region_that_is_not_configured_is_left_out() -> None:
    both = found(regions=("us-west-2", "us-east-1"))
    assert [site.region for site in both.sites] == ["us-east-1"]
    assert both.skipped[0][0] == "ml.p5.48xlarge in us-west-2"
