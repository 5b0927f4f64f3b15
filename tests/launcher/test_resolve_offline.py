"""Sites without asking AWS: what settings say, a placeholder for the rest, the unpriced skipped by name."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ec2_builders
import pytest
from ec2_builders import IMAGE, catalogue

from fastlaunch.backends.placements import Ec2Placement, SageMakerPlacement
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.build import CloudRequest, build_cloud_request, jobs_at
from fastlaunch.jobs.options import CloudOptions, SubmitOptions
from fastlaunch.placement.resolve import OfflineLookup, Resolution, check_plan, plan_at, resolve

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
OURS = RegionSettings(
    bucket="acme",
    prefix="a/b",
    instance_profile="node",
    security_groups=("sg-1",),
    subnets={"us-east-1a": "subnet-a"},
)


def request(**terms: Any) -> CloudRequest:
    asked = {"instances": ("p5.48xlarge",), "regions": ("us-east-1",), **terms}
    return build_cloud_request(
        SubmitOptions(checkpoint_every=9), CloudOptions(**asked), catalogue=catalogue()
    )


def found(aws: dict[str, RegionSettings] | None = None, **terms: Any) -> Resolution:
    return resolve(
        request(**terms),
        OfflineLookup(
            settings=Settings(home=Path("home"), aws=aws or {}),
            catalogue=catalogue(),
            now=NOW,
            base=None if terms.get("image") else training_base(None, today=NOW.date()),
            commit="c0ffee",
        ),
    )


def sites(aws: dict[str, RegionSettings] | None = None, **terms: Any) -> tuple[Ec2Placement, ...]:
    """The sites, of EC2."""
    places = found(aws, **terms).placements
    assert all(isinstance(place, Ec2Placement) for place in places)
    return tuple(place for place in places if isinstance(place, Ec2Placement))


def training_sites(
    aws: dict[str, RegionSettings] | None = None, **terms: Any
) -> tuple[SageMakerPlacement, ...]:
    """The sites, of SageMaker."""
    places = found(aws, backend="sagemaker", **terms).placements
    assert all(isinstance(place, SageMakerPlacement) for place in places)
    return tuple(place for place in places if isinstance(place, SageMakerPlacement))


def test_without_settings_everything_is_to_be_looked_up() -> None:
    (site,) = sites()
    assert site.placeholders == (
        *("ami-id", "bucket", "code-sha256", "image-digest", "instance-profile", "root-device"),
    )
    assert (site.zone, site.subnet, site.security_groups) == (None, None, ())
    assert (site.usd_per_hour, site.price_as_of, site.max_price_usd) == (55.04, "2026-07-20", None)
    assert site.code is not None
    assert (site.code.key, site.code.commit) == ("fastlaunch/code/<code-sha256>.tar.gz", "c0ffee")


def test_settings_fill_the_placeholders() -> None:
    (site,) = sites({"us-east-1": OURS})
    assert site.placeholders == ("ami-id", "code-sha256", "image-digest", "root-device")
    assert (site.bucket, site.prefix, site.instance_profile) == ("acme", "a/b", "node")
    assert (site.zone, site.subnet, site.security_groups) == ("us-east-1a", "subnet-a", ("sg-1",))
    assert site.code is not None and site.code.key == "a/b/code/<code-sha256>.tar.gz"


def test_an_image_built_here_brings_the_code() -> None:
    (site,) = sites(image=IMAGE)
    assert site.code is None and site.image == IMAGE
    assert "code-sha256" not in site.placeholders


def test_where_no_price_is_known_is_skipped_by_name() -> None:
    both = found(regions=("eu-north-1", "us-east-1"))
    assert [site.name for site in both.placements] == ["p5.48xlarge in us-east-1"]
    ((name, why),) = both.skipped
    assert name == "p5.48xlarge in eu-north-1"
    assert why == "no ec2 on-demand price of p5.48xlarge in eu-north-1 is known"
    with pytest.raises(UserError, match="in eu-north-1 is known"):
        sites(regions=("eu-north-1",))


def test_a_limit_for_spot_is_a_price_anywhere() -> None:
    (site,) = sites(regions=("eu-north-1",), purchase="spot", max_price_usd=20.0)
    assert (site.usd_per_hour, site.max_price_usd, site.price_as_of) == (20.0, 20.0, "2026-11-21")


def test_a_plan_that_ec2_would_refuse_is_refused_before() -> None:
    site = ec2_builders.site(prefix="p" * 250)
    check_plan(ec2_builders.site(), [ec2_builders.job()], max_minutes=120)
    with pytest.raises(
        UserError, match=r"refuse the request at p5.48xlarge in us-east-1a: .*fastlaunch:output"
    ):
        check_plan(site, [ec2_builders.job()], max_minutes=120)
    # The request does not grow with its runs.
    check_plan(ec2_builders.site(), [ec2_builders.job()] * 900, max_minutes=120)


def test_several_nodes_stand_in_the_zones_group() -> None:
    here = replace(OURS, placement_groups={"us-east-1a": "close"})
    assert sites({"us-east-1": here}, num_nodes=2)[0].placement_group == "close"
    assert sites({"us-east-1": here})[0].placement_group is None
    block = {"purchase": "capacity-block", "reservation": "cr-0a1b2c3d", "block_fee_usd": 944.0}
    assert sites({"us-east-1": here}, num_nodes=2, **block)[0].placement_group is None


def test_several_interfaces_name_what_must_be_given() -> None:
    (site,) = sites(num_nodes=2)
    assert {"subnet-id", "security-group-id"} <= set(site.placeholders)
    check_plan(site, jobs_at(request(num_nodes=2), site.instance, site.region), max_minutes=120)


def test_a_block_of_which_little_is_known_is_dear_and_never_free() -> None:
    block = {"purchase": "capacity-block", "reservation": "cr-0a1b2c3d"}
    (site,) = sites({"us-east-1": OURS}, **block, block_fee_usd=944.0)
    assert site.block is not None
    # Known answer: of a day, the shortest there is; $944 over 24 h.
    assert (site.usd_per_hour, site.block.fee_usd) == (pytest.approx(39.3333333), 944.0)
    assert "block-end" in site.placeholders and site.zone == "us-east-1a"
    with pytest.raises(UserError, match=r"what the capacity block of .* cost is not known") as caught:
        sites({"us-east-1": OURS}, **block)
    assert "--block-fee USD" in str(caught.value.hint) and "UpfrontFee" in str(caught.value.hint)
    asked = request(**block, block_fee_usd=944.0)
    plan = plan_at(
        {"<run-id>": jobs_at(asked, site.instance, site.region)[0]}, site, attempt=1, max_minutes=120
    )
    assert plan.sunk_usd == 944.0 and plan.max_cost_usd == pytest.approx(85.222222)
    assert "block-end" in plan.placeholders


def test_a_training_site_is_a_region() -> None:
    (site,) = training_sites({"us-east-1": replace(OURS, role="arn:aws:iam::123456789012:role/t")})
    assert (site.instance.name, site.name) == ("p5.48xlarge", "ml.p5.48xlarge in us-east-1")
    assert (site.role, site.bucket, site.prefix) == ("arn:aws:iam::123456789012:role/t", "acme", "a/b")
    # SageMaker's price, not EC2's.
    assert (site.usd_per_hour, site.price_as_of) == (63.296, "2026-09-01")
    check_plan(site, jobs_at(request(backend="sagemaker"), site.instance, site.region), max_minutes=120)


def test_types_of_sagemaker_are_tried_one_by_one() -> None:
    types = ("ml.p4d.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge")
    both = found(backend="sagemaker", instances=types)
    assert [site.name for site in both.placements] == [
        "ml.p4d.24xlarge in us-east-1",
        "ml.p5.48xlarge in us-east-1",
    ]
    assert both.skipped == (
        (
            "ml.p5e.48xlarge in us-east-1",
            "no sagemaker on-demand price of p5e.48xlarge in us-east-1 is known",
        ),
    )
    with pytest.raises(UserError, match="no sagemaker on-demand price of p5e"):
        training_sites(instances=("ml.p5e.48xlarge",))


def test_a_training_job_that_sagemaker_would_refuse_is_refused_before() -> None:
    (site,) = training_sites(instances=("ml.g5.xlarge",))
    jobs = jobs_at(request(backend="sagemaker", instances=("ml.g5.xlarge",)), site.instance, site.region)
    with pytest.raises(UserError, match=r"SageMaker would refuse the request at ml\.g5\.xlarge") as refused:
        check_plan(replace(site, prefix="p" * 1000), jobs, max_minutes=120)
    assert refused.value.hint is not None
