"""Whether an account's quota has room for a job: its limit, what runs already, and what would be added.

EC2 counts vCPUs, by family, with on-demand and spot apart; capacity blocks and other reservations need none.
SageMaker counts instances of each type under quotas of its own, which are looked up by name.
"""

from dataclasses import dataclass

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.quota_codes import QuotaCode, quota_code, quota_page
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, QuotaExceeded


@dataclass(frozen=True, kw_only=True)
class QuotaUse:
    """A quota, in vCPUs, what counts against it now, and what a job needs of it.

    limit_vcpus: None if AWS tells none. is_default: nobody has changed it for this account. used_vcpus: of
    all the account's instances in the region, None if they could not be counted.
    """

    quota: QuotaCode
    region: str
    limit_vcpus: float | None
    is_default: bool
    used_vcpus: int | None
    need_vcpus: int

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None if that cannot be told."""
        if self.limit_vcpus is None:
            return None
        if self.need_vcpus + (self.used_vcpus or 0) > self.limit_vcpus:
            return False
        return None if self.used_vcpus is None else True

    @property
    def page(self) -> str:
        """Address of the console's page on which more is asked for."""
        return quota_page(self.region, self.quota.code)

    @property
    def refusal(self) -> QuotaExceeded:
        """The error of a job that does not fit, with the page on which more is asked for."""
        wanted = self.need_vcpus + (self.used_vcpus or 0)
        return QuotaExceeded(
            f"not enough quota: {self}", f"ask for {wanted} vCPUs: {self.page}   (or choose another region)"
        )

    def __str__(self) -> str:
        """`needs 192 vCPUs, 96 of 384 are in use: Running On-Demand P instances (L-417A185B)`."""
        limit = "an unknown number" if self.limit_vcpus is None else f"{self.limit_vcpus:g}"
        used = "an unknown number" if self.used_vcpus is None else str(self.used_vcpus)
        default = ", AWS's default" if self.is_default else ""
        return (
            f"needs {self.need_vcpus} vCPUs, {used} of {limit}{default} are in use: "
            f"{self.quota.name} ({self.quota.code})"
        )


def quota_use(
    instance: InstanceType, *, region: str, purchase: str, num_nodes: int, aws: Aws, ask: AskOnce
) -> QuotaUse | None:
    """The quota that `num_nodes` instances count against; None if no quota is known for them.

    Raises CloudRefused's kinds where the quota may not be looked at.
    """
    quota = quota_code(instance.name, purchase)
    if quota is None:
        return None
    limit = ask(aws.quota, region, "ec2", quota.code)
    is_default = limit is None
    if is_default:
        limit = ask(aws.default_quota, region, "ec2", quota.code)
    return QuotaUse(
        quota=quota,
        region=region,
        limit_vcpus=limit,
        is_default=is_default and limit is not None,
        used_vcpus=_used_vcpus(quota, region, aws, ask),
        need_vcpus=num_nodes * instance.vcpus,
    )


def _used_vcpus(quota: QuotaCode, region: str, aws: Aws, ask: AskOnce) -> int | None:
    try:
        running = ask(aws.running_vcpus, region)
    except CloudRefused:
        return None
    return sum(vcpus for (name, how), vcpus in running.items() if quota_code(name, how) == quota)
