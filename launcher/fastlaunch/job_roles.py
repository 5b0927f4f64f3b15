"""Roles by which AWS acts for a job: whether one is there, and trusts the service that is to take it on."""

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.iam import role
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.placement.config_checks import making

SAGEMAKER = "sagemaker.amazonaws.com"
SCHEDULER = "scheduler.amazonaws.com"
_NAMES = {SAGEMAKER: "SageMaker", SCHEDULER: "EventBridge Scheduler"}


def check_role(aws: Aws, ask: AskOnce, region: str, arn: str, service: str) -> bool:
    """Whether the role is seen to exist and to trust the service: False if it may not be looked at.

    Raises BadConfiguration if it does not exist, or does not trust the service.
    """
    try:
        found = ask(role, aws, region, arn)
    except NotAuthorised:
        return False
    if found is None:
        raise BadConfiguration(
            f"there is no role {arn}", f"`aws iam list-roles` names yours; this makes one: {making(region)}"
        )
    if service not in found.trusts:
        raise BadConfiguration(
            f"{arn} does not let {_NAMES[service]} take it on",
            f"its trust policy has to name the service {service}: `fastlaunch iam print` has one that does",
        )
    return True
