"""Whether SageMaker's quota of an instance type has room for a job; it counts instances."""

from dataclasses import dataclass

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.quota_codes import quota_page
from fastlaunch.aws.quotas import Quota, quotas_by_name
from fastlaunch.aws.sagemaker import live_training_jobs
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, QuotaExceeded

#: Ends of the quotas' names; `ml.p5.48xlarge for training job usage`. Codes differ by type and are looked up.
JOB, SPOT_JOB, WARM_POOL = ("training job", "spot training job", "training warm pool")


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
        wanted = self.num_needed + (self.num_used or 0)
        page = quota_page(self.region, self.quota.code, service="sagemaker")
        return QuotaExceeded(
            f"not enough quota: {self}",
            f"ask for {wanted}: {page}   (or choose another region or instance type)",
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
    instance: InstanceType, usage: str, *, region: str, num_nodes: int, aws: Aws, ask: AskOnce
) -> TrainingQuota | None:
    """The quota that a job's instances count against; None if the region has none of that name.

    usage: JOB, SPOT_JOB or WARM_POOL. Raises CloudRefused's kinds where quotas may not be looked at.
    """
    quota = ask(quotas_by_name, aws, region, "sagemaker").get(f"ml.{instance.name} for {usage} usage")
    if quota is None:
        return None
    return TrainingQuota(
        quota=quota,
        region=region,
        num_used=_used(instance, usage, region, aws, ask),
        num_needed=num_nodes,
    )


def _used(instance: InstanceType, usage: str, region: str, aws: Aws, ask: AskOnce) -> int | None:
    if usage == WARM_POOL:
        # No call tells which warm pools are kept now.
        return None
    try:
        jobs = ask(live_training_jobs, aws, region)
    except CloudRefused:
        return None
    return sum(
        job.num_instances
        for job in jobs
        if job.ec2_type == instance.name and job.is_spot == (usage == SPOT_JOB)
    )
