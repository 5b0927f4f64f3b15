"""Sites without asking AWS: what settings say, a placeholder for the rest, the unpriced skipped by name."""

from datetime import date
from pathlib import Path
from typing import Any

import ec2_builders
import pytest
from ec2_builders import IMAGE, catalogue

from fastlaunch.cloud_request import CloudTerms, build_cloud_request
from fastlaunch.errors import UserError
from fastlaunch.offline_sites import OfflineSites, check_plan, offline_sites
from fastlaunch.request import Request
from fastlaunch.settings import RegionSettings, Settings

OURS = RegionSettings(
    bucket="acme",
    prefix="a/b",
    instance_profile="node",
    security_groups=("sg-1",),
    subnets={"us-east-1a": "subnet-a"},
)


def sites(
    aws: dict[str, RegionSettings] | None = None, purchase: str = "on-demand", **terms: Any
) -> OfflineSites:
    asked = {"instances": ("p5.48xlarge",), "regions": ("us-east-1",), "purchase": purchase, **terms}
    return offline_sites(
        build_cloud_request(Request(checkpoint_every=9), CloudTerms(**asked), catalogue=catalogue()),
        settings=Settings(home=Path("home"), aws=aws or {}),
        catalogue=catalogue(),
        today=date(2026, 11, 21),
        image_at=lambda region: terms.get("image") or f"{region}.example/x@<image-digest>",
        commit="c0ffee",
    )


def test_without_settings_everything_is_to_be_looked_up() -> None:
    (site,) = sites().sites
    assert site.placeholders == (
        *("ami-id", "bucket", "code-sha256", "image-digest", "instance-profile", "root-device"),
    )
    assert (site.zone, site.subnet, site.security_groups) == (None, None, ())
    assert (site.usd_per_hour, site.price_as_of, site.max_price_usd) == (55.04, "2026-07-20", None)
    assert site.code is not None
    assert (site.code.key, site.code.commit) == ("fastlaunch/code/<code-sha256>.tar.gz", "c0ffee")


def test_settings_fill_the_placeholders() -> None:
    (site,) = sites({"us-east-1": OURS}).sites
    assert site.placeholders == ("ami-id", "code-sha256", "image-digest", "root-device")
    assert (site.bucket, site.prefix, site.instance_profile) == ("acme", "a/b", "node")
    assert (site.zone, site.subnet, site.security_groups) == ("us-east-1a", "subnet-a", ("sg-1",))
    assert site.code is not None and site.code.key == "a/b/code/<code-sha256>.tar.gz"


def test_an_image_built_here_brings_the_code() -> None:
    (site,) = sites(image=IMAGE).sites
    assert site.code is None and site.image == IMAGE
    assert "code-sha256" not in site.placeholders


def test_where_no_price_is_known_is_skipped_by_name() -> None:
    found = sites(regions=("eu-north-1", "us-east-1"))
    assert [site.name for site in found.sites] == ["p5.48xlarge in us-east-1"]
    ((name, why),) = found.skipped
    assert name == "p5.48xlarge in eu-north-1"
    assert why == "no ec2 on-demand price of p5.48xlarge in eu-north-1 is known"
    with pytest.raises(UserError, match="in eu-north-1 is known"):
        sites(regions=("eu-north-1",))


def test_a_limit_for_spot_is_a_price_anywhere() -> None:
    found = sites(regions=("eu-north-1",), purchase="spot", max_price_usd=20.0)
    (site,) = found.sites
    assert (site.usd_per_hour, site.max_price_usd, site.price_as_of) == (20.0, 20.0, "2026-11-21")


def test_a_plan_that_ec2_would_refuse_is_refused_before() -> None:
    site = ec2_builders.site(prefix="p" * 250)
    check_plan(ec2_builders.site(), [ec2_builders.job()], max_minutes=120)
    with pytest.raises(
        UserError, match=r"refuse the request at p5.48xlarge in us-east-1a: .*fastlaunch:output"
    ):
        check_plan(site, [ec2_builders.job()], max_minutes=120)
    with pytest.raises(UserError, match="900 runs has"):
        check_plan(ec2_builders.site(), [ec2_builders.job()] * 900, max_minutes=120)
