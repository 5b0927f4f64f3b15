"""Sites and jobs on SageMaker for tests, with the shipped instance types and prices."""

from dataclasses import replace
from datetime import date
from typing import Any

from ec2_builders import AGENT, IMAGE, RUN_ID, catalogue
from ec2_builders import job as ec2_job

from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.site import Site
from fastlaunch.core.plan import CodeBundle, Plan
from fastlaunch.jobs.job import Job

ROLE = "arn:aws:iam::123456789012:role/fastlaunch-job"
DIGEST = "c0de" * 16
TRAINING_PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/december"


def training_site(instance: str = "p5.48xlarge", **changes: Any) -> Site:
    """A site in us-east-1 with everything looked up."""
    day = date(2026, 11, 21)
    usual = Site(
        backend="sagemaker",
        instance=catalogue().instance(instance),
        region="us-east-1",
        role=ROLE,
        bucket="acme-training",
        prefix="fastlaunch",
        image=IMAGE,
        code=CodeBundle.under("fastlaunch", sha256=DIGEST, commit="ab" * 20),
        price=catalogue().find_price(instance, service="sagemaker", region="us-east-1", on=day),
        volume_usd_per_hour=0.0,
        volume_gib=200,
    )
    return replace(usual, **changes)


def training_job(recipe: str = "bf16", overrides: tuple[str, ...] = (), **changes: Any) -> Job:
    """A job of 200 steps of vit-huge on one p5.48xlarge of SageMaker's."""
    return ec2_job(recipe, overrides, **{"backend": "sagemaker", **changes})


def training_plan_of(
    *jobs: Job, at: Site | None = None, attempt: int = 1, max_minutes: int = 120, root: str | None = None
) -> Plan:
    """The plan of these jobs, by default one."""
    run_ids = [RUN_ID, *(f"20261121-09031{number}-k3f9" for number in range(3, 9))]
    return plan_sagemaker(
        dict(zip(run_ids, jobs or (training_job(),), strict=False)),
        attempt=attempt,
        site=at or training_site(),
        max_minutes=max_minutes,
        root=root,
        agent=AGENT,
    )
