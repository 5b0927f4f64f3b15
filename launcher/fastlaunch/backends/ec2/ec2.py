"""The EC2 backend: an attempt is one RunInstances request, whose machines do its runs together and end.

Handles also have `instance_ids` and `instance_id`, which is node 0's; `num_nodes` is the number requested.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any, ClassVar

from fastlaunch.aws.types import Instance
from fastlaunch.backends import s3_sync
from fastlaunch.backends.ec2.observe import attempt_status, billed_on_ec2
from fastlaunch.backends.node_agent import store_objects
from fastlaunch.backends.protocol import KILL_INTERVAL_S, AttemptStatus, CloudBackend
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.core.ownership import OUTPUT_TAG, RUN_TAG, parse_token, token_of
from fastlaunch.core.plan import Plan
from fastlaunch.jobs.job import Job
from fastlaunch_train.node.protocol import ABORT, STOP, skip_name

#: A machine that runs boots within two or three minutes.
BOOT_LIMIT = timedelta(minutes=12)
#: Between asking a node to stop and ending it: a checkpoint, its upload, shutting down.
STOP_WAIT_S = 240.0
LOOK_INTERVAL_S = 10.0
#: How long to try to reach the node if the bucket does not answer.
_ASK_WAIT_S = 60.0


@dataclass(kw_only=True)
class Ec2Backend(CloudBackend):
    """Runs plans on EC2."""

    name: ClassVar[str] = "ec2"
    boot_limit: ClassVar[timedelta | None] = BOOT_LIMIT

    _look_command: ClassVar[str] = "aws ec2 describe-instances --region {region} --instance-ids"
    billed = staticmethod(billed_on_ec2)

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        from fastlaunch.backends.ec2.plan import plan_ec2

        assert self.site is not None
        return plan_ec2(jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes)

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Store the plan's objects, send its request; return the handle. Raises a kind of CloudRefused.

        Ends the machines and raises NoCapacity if fewer come than were requested.
        """
        assert plan.region is not None
        store_objects(self.aws, plan)
        started = self.aws.run_instances(plan.region, plan.request)
        handle = _handle(plan, started)
        if len(started) < handle["num_nodes"]:
            self._end_too_few(handle)
        return handle

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        return self.find_all([plan]).get(plan.request["ClientToken"])

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        # By client token: a request per region.
        by_token = {plan.request["ClientToken"]: plan for plan in plans}
        handles = [{"region": plan.region, "token": token} for token, plan in by_token.items()]
        instances = self._by_token(handles)
        return {token: _handle(by_token[token], machines) for token, machines in instances.items()}

    def describe(self, handles: Sequence[Mapping[str, Any]]) -> list[AttemptStatus]:
        """Return what EC2 shows of the attempts' machines now, with one request per region (and 200 ids).

        One more request, by client token, covers attempts whose machines all seem to have ended, whose handle
        does not list them all, or with a machine that started long ago and that EC2 does not show.
        """
        known = self._by_id(handles)
        doubtful = [handle for handle in handles if self._is_doubtful(handle, known)]
        others = self._by_token(doubtful)
        return [self._status(handle, known, others.get(handle["token"], ())) for handle in handles]

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Ask the nodes to stop, bring what they write meanwhile, and terminate those that do not end.

        Nodes that have not booted have nothing to save and are terminated at once.
        """
        # A full disk here keeps no machine alive.
        with suppress(UserError):
            if self._ask_to_stop(handle):
                self._wait_for_end(handle)
        self.kill(handle)
        with suppress(UserError):
            self.sync(handle)

    def skip(self, handle: Mapping[str, Any], run_ids: Sequence[str]) -> bool:
        bucket, prefix = s3_sync.split_uri(handle["output"])
        for run_id in run_ids:
            self.aws.put_object(handle["region"], bucket, f"{prefix}/{skip_name(run_id)}", b"")
        return True

    def resource_name(self, handle: Mapping[str, Any]) -> str:
        ids = _ids(handle)
        return f"{_named(ids) if ids else 'the machine of ' + handle['token']} in {handle['region']}"

    def checkpoint_folder(self, output: str, run_id: str) -> str:
        # Beside the attempts of the first run, each run has a folder: `.../runs/<run id>/checkpoints/`.
        return f"{output.rsplit('/', 2)[0]}/{run_id}/checkpoints/"

    def _console_text(self, handle: Mapping[str, Any]) -> str:
        texts = {id: self.aws.console_output(handle["region"], id) for id in _ids(handle)}
        if len(texts) == 1:
            return next(iter(texts.values()))
        return "".join(f"== {id}\n{text}\n" for id, text in texts.items())

    # What EC2 shows

    def _by_id(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, Instance]:
        """Return those of the handles' machines that EC2 knows."""
        ids: dict[str, list[str]] = {}
        for handle in handles:
            ids.setdefault(handle["region"], []).extend(_ids(handle))
        return {
            instance.id: instance
            for region, listed in ids.items()
            for instance in self.aws.describe_instances(region, ids=listed)
        }

    def _is_doubtful(self, handle: Mapping[str, Any], known: Mapping[str, Instance]) -> bool:
        """Return whether to look for the machines by token too."""
        shown = [known[id] for id in _ids(handle) if id in known]
        if len(_ids(handle)) < handle.get("num_nodes", 1):
            # Found again before EC2 showed them all.
            return True
        if len(shown) < len(_ids(handle)):
            return self._is_old(handle)
        return all(instance.state == "terminated" for instance in shown)

    def _status(
        self, handle: Mapping[str, Any], known: Mapping[str, Instance], others: Sequence[Instance]
    ) -> AttemptStatus:
        listed = _ids(handle)
        shown = {id: known[id] for id in listed if id in known} | {other.id: other for other in others}
        num_unseen = max(sum(id not in shown for id in listed), handle.get("num_nodes", 1) - len(shown))
        return attempt_status(_in_order(shown.values()), num_unseen=num_unseen)

    def _by_token(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, list[Instance]]:
        """Return the instances of each token's request that also carry its tags."""
        tokens_in: dict[str, set[str]] = {}
        for handle in handles:
            tokens_in.setdefault(handle["region"], set()).add(handle["token"])
        instances: dict[str, dict[str, Instance]] = {}
        for region, tokens in tokens_in.items():
            for instance in self.aws.describe_instances(region, tokens=sorted(tokens)):
                token = token_of(instance.tags, instance.token)
                if token in tokens:
                    instances.setdefault(token, {})[instance.id] = instance
        return {token: _in_order(machines.values()) for token, machines in instances.items()}

    # How machines end

    def _order_end(self, handle: Mapping[str, Any]) -> list[str]:
        """Terminate every machine of the token, even if the handle does not list it or EC2 does not show it.

        Raises BadConfiguration, and ends none, if a machine that the handle lists carries other tags.
        """
        shown, listed = self._by_id([handle]), _ids(handle)
        foreign = [id for id in listed if id in shown and shown[id].tags.get(RUN_TAG) != _run_of(handle)]
        if foreign:
            raise BadConfiguration(
                f"{_named(foreign)} in {handle['region']} does not carry {RUN_TAG}={_run_of(handle)}, and is "
                "not ended",
                f"look: {self._look_command.format(region=handle['region'])} {' '.join(foreign)}",
            )
        for instance in self._by_token([handle]).get(handle["token"], ()):
            shown[instance.id] = instance
        unseen = [id for id in listed if id not in shown]
        live = [instance.id for instance in shown.values() if instance.is_live]
        if live or unseen:
            self.aws.terminate(handle["region"], live + unseen)
        # What EC2 has not shown for so long is gone, or this order would not end it either.
        return live if self._is_old(handle) else live + unseen

    def _end_too_few(self, handle: Mapping[str, Any]) -> None:
        """End the machines and raise NoCapacity, or Unreachable if they may not have ended."""
        problem = (
            f"EC2 started {len(handle['instance_ids'])} of {handle['num_nodes']} instances, "
            "which are of no use without the rest"
        )
        try:
            self.kill(handle)
        except CloudRefused as error:
            raise Unreachable(f"{problem}; {error.message}", error.hint) from None
        raise NoCapacity(f"{problem} and were terminated", "try later, or fewer nodes: --num-nodes")

    def _ask_to_stop(self, handle: Mapping[str, Any]) -> bool:
        """Return whether a booted node was asked."""
        deadline = self.now() + timedelta(seconds=_ASK_WAIT_S)
        bucket, prefix = s3_sync.split_uri(handle["output"])
        while True:
            try:
                if not self.sync(handle).num_booted:
                    return False
                self.aws.put_object(handle["region"], bucket, f"{prefix}/{ABORT}", f"{STOP}\n".encode())
                return True
            except (Throttled, Unreachable):
                # What the node could save is worth some patience.
                if self.now() >= deadline:
                    raise
            self.pause(handle, KILL_INTERVAL_S, until=deadline)

    def _wait_for_end(self, handle: Mapping[str, Any]) -> None:
        deadline = self.now() + timedelta(seconds=STOP_WAIT_S)
        while self.now() < deadline:
            with suppress(Throttled, Unreachable):
                (aws_status,) = self.describe([handle])
                # A large machine takes long to shut down after its last word.
                if aws_status.has_ended or (aws_status.is_seen and not aws_status.is_live):
                    return
                self.sync(handle)
            self.pause(handle, LOOK_INTERVAL_S, until=deadline)


def _ids(handle: Mapping[str, Any]) -> list[str]:
    """Return the ids of the machines; none without EC2's answer."""
    return list(handle["instance_ids"])


def _run_of(handle: Mapping[str, Any]) -> str:
    """Return the id of the attempt's first run, which its machines carry as a tag."""
    return parse_token(handle["token"])[0]


def _named(ids: Sequence[str]) -> str:
    return f"instance{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def _in_order(instances: Iterable[Instance]) -> list[Instance]:
    """Return the live ones first, each kind in the order of their ranks."""
    return sorted(instances, key=lambda instance: (not instance.is_live, instance.launch_index, instance.id))


def _handle(plan: Plan, instances: Iterable[Instance]) -> dict[str, Any]:
    machines = _in_order(instances)
    launched_at = min(machine.launch_time for machine in machines)
    tags = {tag["Key"]: tag["Value"] for tag in plan.request["TagSpecifications"][0]["Tags"]}
    return {
        "region": plan.region,
        "instance_id": machines[0].id,
        "instance_ids": [machine.id for machine in machines],
        "num_nodes": plan.request["MinCount"],
        "token": plan.request["ClientToken"],
        "output": tags[OUTPUT_TAG],
        "launched_at": launched_at.astimezone(UTC).isoformat(),
    }
