"""What is in a trial's account and is not fastlaunch's, and what a job writes to make it look so.

Machines and jobs of others, with none of our tags, some, nearly ours, or a copy of ours; and objects in an
attempt's output that name them, name other runs, or are not what nodes write.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lives import Lives, Output
from moto_gaps import machine_image_id
from moto_server import MotoServer, backend
from moto_training_jobs import Job

_REGION = "us-east-1"
_RUN = "20260101-000000-aaaa"
_OURS = {
    "fastlaunch:run": _RUN,
    "fastlaunch:attempt": "1",
    "fastlaunch:max-minutes": "60",
    "fastlaunch:output": f"s3://runs-{_REGION}/fastlaunch/runs/{_RUN}/attempt-1",
}
#: Tags and name of what others started: the client token of an instance, the name of a job.
_LOOK_ALIKES: tuple[tuple[Mapping[str, str], str], ...] = (
    ({}, "batch"),
    ({"fastlaunch:run": "web-frontend"}, "web"),
    ({"fastlaunch:run": _RUN, "fastlaunch:max-minutes": "1"}, f"{_RUN}-a1"),
    (_OURS, "copied-tags"),
    ({**_OURS, "fastlaunch:max-minutes": "60 min"}, f"{_RUN}-a1-1"),
    ({**_OURS, "fastlaunch:attempt": "01"}, f"{_RUN}-a01"),
    ({name.title(): value for name, value in _OURS.items()}, f"{_RUN}-a1-2"),
)
_SCHEDULE = "fastlaunch-nightly"
#: What a job may write into its own output, with its weight.
_FORGERIES = {"nothing": 3, "foreign-machine": 3, "foreign-run": 2, "wrong-types": 2, "no-json": 1}


@dataclass(kw_only=True)
class Foreign:
    """What others have in the server's account, by id; names of jobs and schedules."""

    server: MotoServer
    instances: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Put it all into the account."""
        for tags, name in _LOOK_ALIKES:
            self._add_instance(_REGION, tags, name)
            self._add_job(tags, name)
        target = {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:stopInstances", "RoleArn": "role", "Input": "{}"}
        backend("scheduler", _REGION).create_schedule(
            *("", None, {"Mode": "OFF"}, None, None, _SCHEDULE, "at(2099-01-01T00:00:00)", "UTC", None),
            *("ENABLED", target, None),
        )

    def copy(self, region: str, instance_id: str) -> None:
        """Let somebody launch more like this instance: the console copies its tags."""
        tags = {tag["key"]: tag["value"] for tag in self.server.instance(instance_id).get_tags()}
        self._add_instance(region, tags, "")

    def forgeries(
        self, rng: random.Random, tags_of: Callable[[str], Mapping[str, str]], *, is_honest: bool
    ) -> Lives:
        """What jobs write that nodes do not. tags_of: of a machine or a training job. is_honest: nothing."""

        def live(region: str, name: str, fate: str, wait: Callable[[], bool]) -> None:
            # It comes before, between or after what the node writes.
            for _ in range(random.Random(name).randint(0, 6)):
                if wait():
                    return
            # The list of its runs may not be there yet.
            with suppress(ValueError):
                _forge(Output(tags=tags_of(name)), fate, self.instances[0])

        return Lives(drawn=_FORGERIES, live=live, rng=rng, fates=("nothing",) if is_honest else ())

    def problems(self, home: Path) -> Iterator[str]:
        """What was ended, deleted or written that is not the launcher's."""
        living = {instance.id for instance in self.server.instances("pending", "running")}
        for one in self.instances:
            if one not in living:
                yield f"{one}, which is somebody else's, was ended"
        for name in self.jobs:
            if self.server.training_jobs.job(name).status != "InProgress":
                yield f"the job {name}, which is somebody else's, was stopped"
        groups = backend("scheduler", _REGION).schedule_groups.values()
        if not any(_SCHEDULE in group.schedules for group in groups):
            yield f"the schedule {_SCHEDULE}, which is somebody else's, was deleted"
        for path in home.rglob(f"*{_RUN}*"):
            yield f"a job wrote to {path.relative_to(home)}"

    def owns(self, name: str) -> bool:
        """Whether an instance, a job or a schedule is somebody else's."""
        return name == _SCHEDULE or name in self.instances or name in self.jobs

    def _add_instance(self, region: str, tags: Mapping[str, str], token: str) -> None:
        made = backend("ec2", region).run_instances(
            *(machine_image_id(region), 1, None, []),
            instance_type="m5.large",
            is_instance_type_default=False,
            region_name=region,
            tags={"instance": dict(tags)},
        )
        (instance,) = made.instances
        instance.client_token = token
        self.instances.append(instance.id)

    def _add_job(self, tags: Mapping[str, str], name: str) -> None:
        resources = {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 30}
        request: dict[str, Any] = {
            "TrainingJobName": name,
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
            "ResourceConfig": resources,
            "OutputDataConfig": {"S3OutputPath": "s3://theirs/out"},
            "StoppingCondition": {"MaxRuntimeInSeconds": 86400},
        }
        jobs = self.server.training_jobs
        now = jobs.now()
        job = Job(
            region=_REGION,
            request=request,
            arn=f"arn:aws:sagemaker:{_REGION}:123456789012:training-job/{name}",
            created_at=now,
            secondary="Training",
            started_at=now,
            changed_at=now,
        )
        jobs.jobs[_REGION, name] = job
        self.jobs.append(name)


def _forge(output: Output, what: str, foreign: str) -> None:
    now = datetime.now(UTC).isoformat()
    if what == "foreign-machine":
        who = {"instance_id": foreign, "instance_type": "m5.large", "zone": "us-east-1f", "lifecycle": "spot"}
        output.put("boot.json", {**who, "booted_at": now})
        output.put("node-1/boot.json", {**who, "booted_at": now})
        output.put("node-0/status.json", {**who, "node": 0, "outcome": "interrupted", "reason": "spot"})
    elif what == "foreign-run":
        runs = [{"run_id": _RUN, "state": "completed", "exit_code": 0}]
        for name in (_RUN, f"../{_RUN}", f"{output.run_ids()[0]}/../{_RUN}"):
            output.put(f"node-0/{name}/log.txt.000000000000", b"not yours\n")
        output.put("node-0/status.json", {"node": 0, "outcome": "completed", "runs": runs})
    elif what == "wrong-types":
        report = {"instance_id": 7, "booted_at": ["now"], "boot_s": "NaN", "uptime_s": -1e308}
        output.put("boot.json", report)
        output.put("node-0/status.json", {**report, "billed_until": 1, "runs": {"a": None}, "node": "0"})
    elif what == "no-json":
        output.put("boot.json", b"\xff[" * 9999)
        output.put("node-0/status.json", b"[1, 2")
