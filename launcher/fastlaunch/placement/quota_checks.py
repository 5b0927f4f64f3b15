"""Whether an account's quota has room for a job: its limit, what runs already, and what would be added.

EC2 counts vCPUs, by family, with on-demand and spot apart; capacity blocks and other reservations need none.
SageMaker counts instances of each type under quotas of its own, which are looked up by name.
"""

from dataclasses import dataclass

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.aws.client import Aws
from fastlaunch.aws.quota_codes import QuotaCode, quota_code, quota_page
from fastlaunch.aws.quotas import Quota
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, QuotaExceeded

#: Ends of the quotas' names; `ml.p5.48xlarge for training job usage`. Codes differ by type and are looked up.
JOB, SPOT_JOB = ("training job", "spot training job")


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
        total = self.need_vcpus + (self.used_vcpus or 0)
        return QuotaExceeded(
            f"not enough quota: {self}", f"ask for {total} vCPUs: {self.page}   (or choose another region)"
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
    instance: InstanceType, *, region: str, purchase: str, num_nodes: int, aws: Aws, ask: CachedCalls
) -> QuotaUse | None:
    """Return the quota that `num_nodes` instances count against; None if no quota is known for them.

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


def _used_vcpus(quota: QuotaCode, region: str, aws: Aws, ask: CachedCalls) -> int | None:
    try:
        running = ask(aws.running_vcpus, region)
    except CloudRefused:
        return None
    return sum(vcpus for (name, how), vcpus in running.items() if quota_code(name, how) == quota)


@dataclass(frozen=True, kw_only=True)
class TrainingQuota:
    """A quota, in instances, what a job needs of it, and what fastlaunch's own jobs use now.

    num_used: None if that could not be counted. Jobs of others are not in it.
    """

    quota: Quota
    region: str
    num_used: int | None
    num_needed: int

    @property
    def fits(self) -> bool:
        """Whether there is room, as far as that can be told."""
        return self.num_needed + (self.num_used or 0) <= self.quota.value

    @property
    def refusal(self) -> QuotaExceeded:
        """The error of a job that does not fit, with the page on which more is asked for."""
        total = self.num_needed + (self.num_used or 0)
        page = quota_page(self.region, self.quota.code, service="sagemaker")
        return QuotaExceeded(
            f"not enough quota: {self}",
            f"ask for {total}: {page}   (or choose another region or instance type)",
        )

    def __str__(self) -> str:
        """`needs 2 instances of 8, 1 in use by fastlaunch: ml.p5.48xlarge for training job usage (L-1)`."""
        what = "instance" if self.num_needed == 1 else "instances"
        default = ", AWS's default" if self.quota.is_default else ""
        used = f", {self.num_used} in use by fastlaunch" if self.num_used else ""
        return (
            f"needs {self.num_needed} {what} of {self.quota.value:g}{default}{used}: {self.quota.name} "
            f"({self.quota.code})"
        )


def training_quota(
    instance: InstanceType, usage: str, *, region: str, num_nodes: int, aws: Aws, ask: CachedCalls
) -> TrainingQuota | None:
    """Return the quota that a job's instances count against; None if the region has none of that name.

    usage: JOB or SPOT_JOB. Raises CloudRefused's kinds where quotas may not be looked at.
    """
    quota = ask(aws.quotas_by_name, region, "sagemaker").get(f"ml.{instance.name} for {usage} usage")
    if quota is None:
        return None
    return TrainingQuota(
        quota=quota,
        region=region,
        num_used=_used(instance, usage, region, aws, ask),
        num_needed=num_nodes,
    )


def _used(instance: InstanceType, usage: str, region: str, aws: Aws, ask: CachedCalls) -> int | None:
    try:
        jobs = ask(aws.live_training_jobs, region)
    except CloudRefused:
        return None
    return sum(
        job.num_instances
        for job in jobs
        if job.ec2_type == instance.name and job.is_spot == (usage == SPOT_JOB)
    )
