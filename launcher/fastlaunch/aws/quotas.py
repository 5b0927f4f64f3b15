"""Quotas by their names, for services whose codes are not to be known beforehand."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch.aws.ec2 import Aws

#: The most that one page may hold.
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A quota of a service, and its value. is_default: nobody has changed it for this account."""

    code: str
    name: str
    value: float
    is_default: bool


def quotas_by_name(aws: Aws, region: str, service: str) -> Mapping[str, Quota]:
    """Every quota of a service by its name: those of the account, and AWS's default for all others.

    servicequotas:ListServiceQuotas and ListAWSDefaultServiceQuotas, in tens of pages for SageMaker: ask once.
    """
    defaults = aws.pages(
        "servicequotas", region, "ListAWSDefaultServiceQuotas", ServiceCode=service, MaxResults=_PAGE
    )
    applied = aws.pages("servicequotas", region, "ListServiceQuotas", ServiceCode=service, MaxResults=_PAGE)
    found: dict[str, Quota] = {}
    for pages, is_default in ((defaults, True), (applied, False)):
        for page in pages:
            for each in page["Quotas"]:
                if "Value" in each:
                    name, value = each["QuotaName"], float(each["Value"])
                    found[name] = Quota(code=each["QuotaCode"], name=name, value=value, is_default=is_default)
    return found
