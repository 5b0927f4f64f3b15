"""Candidates to training sites: what a site holds, and what is left out and why."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import DIGEST, ROLE, FakeAws, denied, fake_aws, settings, trusting, usual

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.backends.placements import SageMakerPlacement
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.build import build_cloud_request
from fastlaunch.jobs.options import CloudOptions, SubmitOptions
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.resolve import Resolution, resolve

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
) -> Resolution:
    usually: dict[str, Any] = {"instances": ("ml.p5.48xlarge",), "regions": ("us-east-1",)}
    made = CloudOptions(backend="sagemaker", **{**usually, **terms})
    request = build_cloud_request(
        SubmitOptions(checkpoint_every=checkpoint_every), made, catalogue=catalogue()
    )
    return resolve(
        request,
        AwsLookup(
            aws=aws or furnished(),  # type: ignore[arg-type]
            settings=settings(us_east_1=here),
            catalogue=catalogue(),
            now=NOW,
            base=training_base(None, today=NOW.date()),
            bundle=Code(),
            ask=CachedCalls(),
        ),
    )


def test_a_site_holds_all_that_a_job_names() -> None:
    (site,) = found(num_nodes=2).placements
    assert isinstance(site, SageMakerPlacement)
    assert (site.instance.name, site.region, site.role) == ("p5.48xlarge", "us-east-1", ROLE)
    assert (site.bucket, site.prefix) == ("acme", "fastlaunch")
    # The image of jobs on EC2, in the region, by digest: runs on both can be compared.
    assert site.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert site.code is not None and site.code.key == "fastlaunch/code/c0de.tar.gz"
    assert (site.usd_per_hour, site.price_as_of) == (63.296, "2026-09-01")


def test_several_types_are_one_question() -> None:
    aws = furnished()
    both = found(aws, instances=("ml.p4d.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge"))
    assert [site.name for site in both.placements] == [
        "ml.p4d.24xlarge in us-east-1",
        "ml.p5.48xlarge in us-east-1",
    ]
    assert [name for name, _ in both.skipped] == ["ml.p5e.48xlarge in us-east-1"]
    assert aws.asked["GetRole", "us-east-1"] == aws.asked["bucket_exists", "us-east-1"] == 1
    # What EC2 alone needs is not asked for.
    assert aws.asked["parameter", "us-east-1"] == aws.asked["subnets", "us-east-1"] == 0


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
    assert found(furnished(refused={"GetRole": denied("iam:GetRole")})).placements


def test_a_region_that_is_not_configured_is_left_out() -> None:
    both = found(regions=("us-west-2", "us-east-1"))
    assert [site.region for site in both.placements] == ["us-east-1"]
    assert both.skipped[0][0] == "ml.p5.48xlarge in us-west-2"
