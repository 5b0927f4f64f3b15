"""Checks of what both services need of a region: config, the region itself, container image, bucket."""

from fastlaunch.core.errors import BadConfiguration, UserError
from fastlaunch.job_images import container_image, is_own_image_seen
from fastlaunch.placement.check import Result, Told
from fastlaunch.placement.config_checks import (
    check_bucket,
    configured_bucket,
    configured_profile,
    configured_role,
    making,
)
from fastlaunch.preflight_wanted import Looking

#: Written to see whether the bucket can be; always the same, so that it never grows in number.
DOCTOR_KEY = "doctor/written-by-doctor"


def config(look: Looking, region: str) -> str:
    """What the config file names for the region. Raises UserError for what a job cannot do without."""
    trains = look.wanted.backend == "sagemaker"
    problems: list[UserError] = []
    for configured in (configured_bucket, configured_role if trains else configured_profile):
        try:
            configured(look.settings, region)
        except UserError as error:
            problems.append(error)
    what, entry = ("role", "role: ARN") if trains else ("instance profile", "instance_profile: NAME")
    if len(problems) > 1:
        raise UserError(
            f"neither bucket nor {what} is named for {region}",
            f"write `bucket: NAME` and `{entry}` under `aws: {region}:` in the config file; "
            f"`fastlaunch doctor --setup` says how to make them, or all at once: {making(region)}",
        )
    if problems:
        raise problems[0]
    here = look.here(region)
    if trains:
        return f"bucket {here.bucket}, role {here.role}"
    zones = f"subnets in {', '.join(here.subnets)}" if here.subnets else "no subnets"
    return f"bucket {here.bucket}, instance profile {here.instance_profile}, {zones}"


def is_on(look: Looking, region: str) -> str:
    """That the region is switched on. Raises BadConfiguration if it is not."""
    known = look.ask(look.aws.regions)
    if region not in known:
        raise BadConfiguration(
            f"{region} does not exist, or is not switched on for this account",
            f"switch it on under Account, AWS Regions in the console, or use one of {', '.join(known)}",
        )
    return f"{region} is switched on for this account"


def container(look: Looking, region: str) -> str | Told:
    """The container image that a job there would start from."""
    if own := look.wanted.image:
        if is_own_image_seen(look.aws, look.ask, own, region):
            return f"{own.rpartition('@')[0]} has {own.rpartition('@')[2][:19]}..."
        return Told(
            Result.NOT_CHECKED,
            f"{own} may not be looked at from here: the machine's role has to pull it",
            "see that the role may: `fastlaunch doctor --setup`, ImagePull",
        )
    assert look.wanted.base is not None
    uri = container_image(look.aws, look.ask, look.wanted.base, region)
    told = f"{look.wanted.base.name} is {uri.rpartition('@')[2][:19]}... now"
    doubts = look.wanted.base.doubts(look.today)
    return Told(Result.WARNING, "; ".join([told, *doubts])) if doubts else told


def bucket(look: Looking, region: str) -> str | Told:
    """That the bucket is there, and can be written."""
    name, prefix = look.here(region).bucket, look.here(region).prefix
    if name is None:
        return Told(Result.NOT_CHECKED, "none is named")
    check_bucket(look.aws, look.ask, region, name)
    key = "/".join(filter(None, (prefix, DOCTOR_KEY)))
    look.ask(look.aws.put_object, region, name, key, b"written by fastlaunch doctor\n")
    return f"s3://{name}/{prefix} can be written"
