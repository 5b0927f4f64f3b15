"""What a test of a training job starts from: a plan's request, and machines that carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from node_scene import BUCKET, FIRST, SECOND, Account, code_bundle
from sagemaker_builders import training_job, training_site
from simulated_training_job import SimulatedTrainingJob

from fastlaunch.backends.node_agent import agent_archive
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.core.plan import CodeBundle, Plan
from fastlaunch.jobs.job import Job


def tiny_job(recipe: str = "fp32", *, num_nodes: int = 1, **changes: Any) -> Job:
    """What trains vit-tiny on a CPU for a moment, with one rank on each node."""
    small = {"workload": "vit-tiny", "batch_size": 4, "steps": 5, "instance": "g5.xlarge", "max_minutes": 60}
    nodes = {"num_nodes": num_nodes, "num_gpus": num_nodes, "allow_tcp": num_nodes > 1}
    return training_job(recipe, **{**small, **nodes, **changes})


def training_plan(
    *jobs: Job, attempt: int = 1, root: str | None = None, environment: Mapping[str, str] | None = None
) -> Plan:
    """The plan of these jobs with the code of this checkout. environment: besides the plan's."""
    site = replace(
        training_site("g5.xlarge", bucket=BUCKET, prefix="fastlaunch"),
        code=CodeBundle.under("fastlaunch", sha256=code_bundle()[1], commit="ab" * 20),
    )
    by_run = dict(zip((FIRST, SECOND), jobs or (tiny_job(),), strict=False))
    plan = plan_sagemaker(by_run, attempt=attempt, site=site, max_minutes=60, root=root)
    both = {**plan.request["Environment"], **(environment or {})}
    return replace(plan, request={**plan.request, "Environment": both})


@dataclass(kw_only=True)
class TrainingScene(Account):
    """Training jobs of SageMaker's."""

    def launch(self, plan: Plan, *, code: bytes | None = None, **job: Any) -> SimulatedTrainingJob:
        """Send the plan's request, and get machines for it. code: instead of what the bundle's name says."""
        if code is not None:
            key = CodeBundle.under("fastlaunch", sha256=code_bundle()[1], commit=None).key
            self.put(f"s3://{BUCKET}/{key}", code)
        for stored in plan.objects:
            self.put(stored.uri, agent_archive() if stored.text is None else stored.text.encode())
        request = {**plan.request, "RoleArn": self.moto.training_jobs.role()}
        self.client("sagemaker").create_training_job(**request)
        return self.simulate(plan.request["TrainingJobName"], **job)

    def simulate(self, name: str, **job: Any) -> SimulatedTrainingJob:
        """Get machines for a job that is there."""
        folder = self.folder / name
        folder.mkdir()
        simulated = SimulatedTrainingJob(self.moto, name, folder=folder, **job)
        self.started.append(simulated)
        return simulated.start()
