"""The rehearsal of a SageMaker training job: its own request, carried out in containers on this machine."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.backends.placements import SageMakerPlacement
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.core.plan import Plan
from fastlaunch.jobs.spec import JobSpec

#: What SageMaker's local mode calls this machine.
LOCAL_TYPES = {False: "local_cpu", True: "local_gpu"}


class RehearsalBackend(LocalBackend):
    """A local backend whose jobs are training jobs in containers; see `fastlaunch.runs.rehearsed_job`."""

    def __init__(
        self,
        settings: LocalSettings,
        *,
        placement: SageMakerPlacement,
        code: Path | None,
        max_minutes: int,
        has_gpus: bool,
    ) -> None:
        """code: the bundle, under the name that the request looks for; None if the image holds the code."""
        super().__init__(settings)
        self._placement = placement
        self._code = code
        self._max_minutes = max_minutes
        self._machine = LOCAL_TYPES[has_gpus]

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """Return the command line that carries out the request SageMaker would get, but for the machine."""
        here = super().plan(jobs, attempt=attempt)
        planned = plan_sagemaker(jobs, attempt=attempt, site=self._placement, max_minutes=self._max_minutes)
        nodes = next(iter(jobs.values())).num_nodes
        resources = {"InstanceType": self._machine, "InstanceCount": nodes}
        job = json.dumps({**planned.request, "ResourceConfig": resources})
        (run_list,) = (each.text for each in planned.objects if each.text is not None)
        program = [sys.executable, "-m", "fastlaunch.runs.rehearsed_job"]
        argv = [*program, str(self.settings.home), str(self._code or ""), job, run_list]
        return replace(here, request={**here.request, "argv": argv})
