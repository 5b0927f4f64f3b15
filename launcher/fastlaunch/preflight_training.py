"""Checks of what SageMaker needs for a training job: role, container image, bucket, quotas."""

from functools import partial

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import NotAuthorised
from fastlaunch.job_roles import SAGEMAKER, check_role
from fastlaunch.node_rights import job_lacks
from fastlaunch.placement.check import Result, Told
from fastlaunch.placement.config_checks import making
from fastlaunch.preflight_region import bucket, container
from fastlaunch.preflight_wanted import Looking, ToMakeAll
from fastlaunch.training_quotas import JOB, SPOT_JOB, WARM_POOL, training_quota


def training_checks(look: Looking, region: str) -> ToMakeAll:
    """Those of a region, in the order in which a job needs them."""
    yield {"name": "container image"}, partial(container, look, region)
    yield {"name": "role"}, partial(_role, look, region)
    yield {"name": "bucket"}, partial(bucket, look, region)
    # A training plan's instances were granted when it was bought.
    for one in () if look.wanted.has_plan else look.wanted.instances:
        name = look.wanted.name_of(one)
        usage = SPOT_JOB if look.wanted.purchase == "spot" else JOB
        yield {"name": "quota", "instance": name}, partial(_quota, look, one, region, usage)
        if look.wanted.keep_alive_minutes:
            yield {"name": "warm pool quota", "instance": name}, partial(_quota, look, one, region, WARM_POOL)


def _role(look: Looking, region: str) -> str | Told:
    arn = look.here(region).role
    if arn is None:
        return Told(Result.NOT_CHECKED, "none is named", making(region))
    is_seen = check_role(look.aws, look.ask, region, arn, SAGEMAKER)
    try:
        problem = look.ask(look.aws.may_pass, arn, SAGEMAKER)
    except NotAuthorised as error:
        return Told(Result.NOT_CHECKED, f"whether {arn} may be passed: {error.message}", error.hint)
    if problem is not None:
        raise NotAuthorised(problem, "`fastlaunch iam print` has the policy that lets you pass it")
    told = f"{arn} {'is there, and ' if is_seen else ''}may be passed to SageMaker"
    lacking = job_lacks(look.aws, look.ask, look.here(region))
    if not lacking:
        return told
    return Told(
        Result.WARNING,
        f"{told}; its own policies do not give {' nor '.join(lacking)}",
        "`fastlaunch iam print` has the role's policy; what a job cannot upload is lost",
    )


def _quota(look: Looking, instance: InstanceType, region: str, usage: str) -> str | Told:
    found = training_quota(
        instance,
        usage,
        region=region,
        num_nodes=look.wanted.num_nodes,
        aws=look.aws,
        ask=look.ask,
    )
    if found is None:
        return Told(
            Result.NOT_CHECKED,
            f"{region} has no quota of SageMaker's for ml.{instance.name} {usage}",
            f"look for it under Service Quotas, Amazon SageMaker, in {region}; the type may not be there",
        )
    if found.fits is False:
        raise found.refusal
    return str(found)
