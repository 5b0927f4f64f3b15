"""The EC2 backend: an attempt is one RunInstances request, and one machine that does its runs and ends.

Handles are `{"region", "instance_id", "token", "output", "launched_at"}`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastlaunch import s3_sync
from fastlaunch.aws import Aws, Instance
from fastlaunch.aws_errors import is_spot_interruption
from fastlaunch.backends import Plan, RunState
from fastlaunch.backends.ec2_site import Site
from fastlaunch.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.job import JobSpec

#: How long EC2 may take to show an instance that it started. After that one it does not know is no more.
FORGOTTEN_AFTER = timedelta(minutes=15)
#: Between asking a node to stop and ending it: a checkpoint, its upload, shutting down.
STOP_WAIT_S = 240.0
LOOK_INTERVAL_S = 10.0
#: For asking the node, where the bucket does not answer.
_ASK_WAIT_S = 60.0
#: Until TerminateInstances shows.
_KILL_WAIT_S = 180.0
_KILL_INTERVAL_S = 5.0
_STATE_OF_OUTCOME = {
    "completed": RunState.COMPLETED,
    "failed": RunState.FAILED,
    "configuration": RunState.FAILED,
    "interrupted": RunState.INTERRUPTED,
}


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A machine as EC2 shows it, None if it does not; whether it is terminated, or gone under every name."""

    instance: Instance | None
    has_ended: bool


@dataclass(kw_only=True)
class Ec2Backend:
    """Runs plans on EC2, and keeps what they leave under `home`.

    site, max_minutes: what its plans are made for; see `at`. now: with its time zone.
    """

    aws: Aws
    home: Path
    site: Site | None = None
    max_minutes: int = 120
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    name: str = "ec2"

    def at(self, site: Site, max_minutes: int) -> "Ec2Backend":
        """This backend, making plans for `site`."""
        return replace(self, site=site, max_minutes=max_minutes)

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """The request that starts a machine for `jobs` at the backend's site."""
        from fastlaunch.backends.ec2_plan import plan_ec2

        assert self.site is not None
        return plan_ec2(jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes)

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request as it is; returns the handle. Raises CloudRefused's kinds."""
        assert plan.region is not None
        started = self.aws.run_instances(plan.region, plan.request)
        return _handle(plan, started[0])

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """The handle of the plan's machine, by its client token or else its tags; None if EC2 shows none."""
        return self.find_all([plan]).get(plan.request["ClientToken"])

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        """The handles of those plans whose machine EC2 shows, by token, in two requests per region."""
        by_token = {plan.request["ClientToken"]: plan for plan in plans}
        asked = [{"region": plan.region, "token": token} for token, plan in by_token.items()]
        found: dict[str, Instance] = {}
        for region, tokens in _by_region(asked, "token").items():
            found |= self._under_other_names(region, tokens)
        return {token: _handle(by_token[token], one) for token, one in found.items() if token in by_token}

    def see(self, handles: Sequence[Mapping[str, Any]]) -> list[Sight]:
        """What EC2 says of the machines now: one request per region (200 ids each).

        For those that it does not know, and that started long ago, two more: by token and by tag.
        """
        known = {
            region: {one.id: one for one in self.aws.describe_instances(region, ids=ids)}
            for region, ids in _by_region(handles, "instance_id").items()
        }
        forgotten = [
            handle
            for handle in handles
            if handle["instance_id"] not in known[handle["region"]]
            and self.now() - datetime.fromisoformat(handle["launched_at"]) > FORGOTTEN_AFTER
        ]
        others: dict[str, Instance] = {}
        for region, tokens in _by_region(forgotten, "token").items():
            others |= self._under_other_names(region, tokens)
        sights = []
        for handle in handles:
            instance = known[handle["region"]].get(handle["instance_id"]) or others.get(handle["token"])
            gone = instance is None and handle in forgotten
            sights.append(Sight(instance=instance, has_ended=gone or _is_terminated(instance)))
        return sights

    def _under_other_names(self, region: str, tokens: Sequence[str]) -> dict[str, Instance]:
        """Instances by the token that they carry, or that their tags say; of several, one that lives."""
        tags = {"fastlaunch:run": sorted({token.rpartition("-a")[0] for token in tokens})}
        tagged = self.aws.describe_instances(region, tags=tags)
        named = [
            (f"{one.tags.get('fastlaunch:run')}-a{one.tags.get('fastlaunch:attempt')}", one) for one in tagged
        ]
        named += [(one.token or "", one) for one in self.aws.describe_instances(region, tokens=tokens)]
        return dict(sorted(named, key=lambda pair: pair[1].is_live))

    def state(self, handle: Mapping[str, Any]) -> RunState:
        return self.states([handle])[0]

    def states(self, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
        """Running until the machine has ended; then what the node said last, or else why EC2 took it."""
        return [
            self._ended_as(handle, sight.instance) if sight.has_ended else RunState.RUNNING
            for handle, sight in zip(handles, self.see(handles), strict=True)
        ]

    def sync(self, handle: Mapping[str, Any]) -> s3_sync.Synced:
        """Bring what the node uploaded since the last time."""
        return s3_sync.sync(
            self.aws, self.home, region=handle["region"], output=handle["output"], token=handle["token"]
        )

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        """Record files of all runs of the attempt, with what is new brought here first."""
        files = self.sync(handle).files
        return tuple(path for path in files if path.name.startswith("rank-") and path.is_file())

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Ask the node to stop, bring what it writes meanwhile, and terminate it if it does not end.

        A node that has not booted has nothing to save, and is terminated at once.
        """
        # Nor does a disk that is full keep a machine alive.
        with suppress(UserError):
            if self._ask_to_stop(handle):
                self._wait_for_end(handle)
        self.kill(handle)
        with suppress(UserError):
            self.sync(handle)

    def kill(self, handle: Mapping[str, Any]) -> None:
        """Terminate the machine at once, and see that it is. Raises CloudRefused's kinds where it is not."""
        region, instance_id = handle["region"], handle["instance_id"]
        deadline = self.now() + timedelta(seconds=_KILL_WAIT_S)
        while True:
            try:
                (sight,) = self.see([handle])
                if sight.has_ended or (sight.instance is not None and not sight.instance.is_live):
                    return
                # Again and again for one that EC2 does not show yet: the order to end it may miss it.
                self.aws.terminate(region, [sight.instance.id if sight.instance else instance_id])
            except (Throttled, Unreachable):
                if self.now() >= deadline:
                    raise
            if self.now() >= deadline:
                raise CloudRefused(
                    f"instance {instance_id} in {region} was told to terminate, and is not seen to",
                    f"look at it: aws ec2 describe-instances --region {region} --instance-ids {instance_id}",
                )
            self.sleep(_KILL_INTERVAL_S)

    def console(self, handle: Mapping[str, Any]) -> Path:
        """File with what the machine wrote to its console, kept beside the first run's records."""
        path = s3_sync.console_path(self.home, handle["token"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.aws.console_output(handle["region"], handle["instance_id"]), encoding="utf-8")
        return path

    def _ask_to_stop(self, handle: Mapping[str, Any]) -> bool:
        """Whether a booted node was asked."""
        deadline = self.now() + timedelta(seconds=_ASK_WAIT_S)
        bucket, prefix = s3_sync.split_uri(handle["output"])
        while True:
            try:
                if self.sync(handle).boot is None:
                    return False
                self.aws.put_object(handle["region"], bucket, f"{prefix}/abort", b"stop\n")
                return True
            except (Throttled, Unreachable):
                # What the node could save is worth a little patience.
                if self.now() >= deadline:
                    raise
            self.sleep(_KILL_INTERVAL_S)

    def _wait_for_end(self, handle: Mapping[str, Any]) -> None:
        deadline = self.now() + timedelta(seconds=STOP_WAIT_S)
        while self.now() < deadline:
            with suppress(Throttled, Unreachable):
                (sight,) = self.see([handle])
                # Shutting down takes a large machine long, after its last word.
                if sight.has_ended or (sight.instance is not None and not sight.instance.is_live):
                    return
                self.sync(handle)
            self.sleep(LOOK_INTERVAL_S)

    def _ended_as(self, handle: Mapping[str, Any], instance: Instance | None) -> RunState:
        status = self.sync(handle).status
        if status is not None:
            return _STATE_OF_OUTCOME.get(str(status.get("outcome")), RunState.LOST)
        taken = instance is not None and is_spot_interruption(instance)
        return RunState.INTERRUPTED if taken else RunState.LOST


def _is_terminated(instance: Instance | None) -> bool:
    return instance is not None and instance.state == "terminated"


def _by_region(handles: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for handle in handles:
        found.setdefault(handle["region"], []).append(handle[key])
    return found


def _handle(plan: Plan, instance: Instance) -> dict[str, Any]:
    return {
        "region": plan.region,
        "instance_id": instance.id,
        "token": plan.request["ClientToken"],
        "output": _tags(plan)["fastlaunch:output"],
        "launched_at": instance.launch_time.astimezone(UTC).isoformat(),
    }


def _tags(plan: Plan) -> dict[str, str]:
    return {
        tag["Key"]: tag["Value"]
        for specification in plan.request["TagSpecifications"]
        if specification["ResourceType"] == "instance"
        for tag in specification["Tags"]
    }
