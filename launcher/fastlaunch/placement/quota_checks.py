"""Whether an account's quota has room for a job: its limit, what runs already, and what would be added.

EC2 counts vCPUs, by family, with on-demand and spot apart; capacity blocks and other reservations need none.
SageMaker counts instances of each type under quotas of its own, which are looked up by name.
"""

from contextlib import suppress
from dataclasses import dataclass

from fastlaunch.aws.account import Quota
from fastlaunch.aws.client import Aws
from fastlaunch.aws.quota_codes import QuotaCode, quota_code, quota_page
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused, QuotaExceeded
from fastlaunch.jobs.options import Options


@dataclass(frozen=True, kw_only=True)
class QuotaUse:
    """A quota, what counts against it now, and what a job needs of it."""

    #: ec2, which counts vCPUs, or sagemaker, which counts instances.
    service: str
    region: str
    #: As the Service Quotas console lists it.
    name: str
    code: str
    #: None if AWS does not say.
    limit: float | None
    #: Whether it is AWS's default, which nobody has changed for this account.
    is_default: bool
    #: By all instances in the region, or by the training jobs of fastlaunch; None if we may not count.
    used: int | None
    needed: int

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None if nobody can tell."""
        if self.limit is None:
            return None
        if self._total > self.limit:
            return False
        return None if self.used is None else True

    @property
    def page(self) -> str:
        """The address of the console's page on which to ask for more."""
        return quota_page(self.region, self.code, service=self.service)

    @property
    def refusal(self) -> QuotaExceeded:
        """The error of a job that does not fit, with the page on which to ask for more."""
        unit = " vCPUs" if self.service == "ec2" else ""
        return QuotaExceeded(
            f"not enough quota: {self}",
            f"ask for {self._total}{unit}: {self.page}   (or choose another region or instance type)",
        )

    @property
    def _total(self) -> int:
        return self.needed + (self.used or 0)

    def __str__(self) -> str:
        """`needs 192 vCPUs, 96 of 384 are in use: Running On-Demand P instances (L-417A185B)`."""
        limit = "an unknown number" if self.limit is None else f"{self.limit:g}"
        limit += ", AWS's default" if self.is_default else ""
        name = f"{self.name} ({self.code})"
        if self.service == "ec2":
            used = "an unknown number" if self.used is None else str(self.used)
            return f"needs {self.needed} vCPUs, {used} of {limit} are in use: {name}"
        used = f", {self.used} in use by fastlaunch" if self.used else ""
        return f"needs {self.needed} instance{'s' if self.needed > 1 else ''} of {limit}{used}: {name}"


def quota_use(instance: InstanceType, region: str, options: Options, aws: Aws) -> QuotaUse | None:
    """Return the quota that the job's instances count against; None if no quota is known for them.

    Raises CloudRefused's kinds where the quota may not be looked at.
    """
    used, needed, purchase = None, options.num_nodes, options.purchase
    quota: Quota | QuotaCode | None
    limit: float | None
    if options.service == "sagemaker":
        is_spot = purchase == "spot"
        # Codes differ by type, so we look for the name.
        name = f"ml.{instance.name} for {'spot ' if is_spot else ''}training job usage"
        quota = aws.quotas_by_name(region, "sagemaker").get(name)
        if quota is None:
            return None
        limit, is_default = quota.value, quota.is_default
        with suppress(CloudRefused):
            # A job in a queue waits until others have ended.
            jobs = aws.live_training_jobs(region) if options.queue is None else []
            alike = (job for job in jobs if job.ec2_type == instance.name and job.is_spot == is_spot)
            used = sum(job.num_instances for job in alike)
    else:
        needed *= instance.vcpus
        quota = quota_code(instance.name, purchase)
        if quota is None:
            return None
        applied = aws.quota(region, "ec2", quota.code)
        limit = aws.default_quota(region, "ec2", quota.code) if applied is None else applied
        is_default = applied is None and limit is not None
        with suppress(CloudRefused):
            running = aws.running_vcpus(region)
            used = sum(vcpus for (name, how), vcpus in running.items() if quota_code(name, how) == quota)
    return QuotaUse(
        service=options.service,
        region=region,
        name=quota.name,
        code=quota.code,
        limit=limit,
        is_default=is_default,
        used=used,
        needed=needed,
    )
