"""The rehearsal of a SageMaker training job: its own request, carried out in containers on this machine."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlaunch.backends import Plan, RunState
from fastlaunch.backends.local import LocalBackend
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.jobs.spec import JobSpec

#: What SageMaker's local mode calls this machine.
LOCAL_TYPES = {False: "local_cpu", True: "local_gpu"}


@dataclass(kw_only=True)
class RehearsalBackend:
    """A local backend whose jobs are training jobs in containers; see `fastlaunch.runs.rehearsed_job`.

    site: with the image to run. code: the bundle, of the name that the request looks for; None if the image
    holds the code.
    """

    local: LocalBackend
    site: TrainingSite
    code: Path | None
    max_minutes: int
    has_gpus: bool
    name: str = "local"

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """The command line that carries out the request which SageMaker would get, but for the machine."""
        here = self.local.plan(jobs, attempt=attempt)
        planned = plan_sagemaker(jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes)
        nodes = next(iter(jobs.values())).num_nodes
        resources = {"InstanceType": LOCAL_TYPES[self.has_gpus], "InstanceCount": nodes}
        job = json.dumps({**planned.request, "ResourceConfig": resources})
        program = [sys.executable, "-m", "fastlaunch.runs.rehearsed_job"]
        argv = [*program, str(self.local.settings.home), str(self.code or ""), job]
        return replace(here, request={**here.request, "argv": argv})

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        return self.local.execute(plan)

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        return self.local.find(plan)

    def state(self, handle: Mapping[str, Any]) -> RunState:
        return self.local.state(handle)

    def states(self, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
        return self.local.states(handles)

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        return self.local.collect(handle)

    def stop(self, handle: Mapping[str, Any]) -> None:
        self.local.stop(handle)

    def kill(self, handle: Mapping[str, Any]) -> None:
        self.local.kill(handle)
