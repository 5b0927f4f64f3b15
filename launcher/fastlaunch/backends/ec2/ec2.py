"""The EC2 backend: an attempt is one RunInstances request, and machines that do its runs together and end.

Handles are `{"region", "instance_id", "instance_ids", "num_nodes", "token", "output", "launched_at"}`:
instance_id is node 0's, num_nodes how many were asked for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from fastlaunch.aws.ec2 import Aws, Instance
from fastlaunch.backends import Plan, RunState, s3_sync
from fastlaunch.backends.cloud_state import records_of, states_of, sync_of
from fastlaunch.backends.ec2.observe import billed_on_ec2, sight_of
from fastlaunch.backends.placements import Site
from fastlaunch.backends.protocol import Billed, Place, Sight
from fastlaunch.core.errors import CloudRefused, NoCapacity, Throttled, Unreachable, UserError
from fastlaunch.jobs.spec import JobSpec

#: How long EC2 may take to show an instance that it started. After that one it does not know is no more.
FORGOTTEN_AFTER = timedelta(minutes=15)
#: A machine that runs boots within two or three minutes.
BOOT_LIMIT = timedelta(minutes=12)
#: Between asking a node to stop and ending it: a checkpoint, its upload, shutting down.
STOP_WAIT_S = 240.0
LOOK_INTERVAL_S = 10.0
#: For asking the node, where the bucket does not answer.
_ASK_WAIT_S = 60.0
#: Until TerminateInstances shows.
_KILL_WAIT_S = 180.0
_KILL_INTERVAL_S = 5.0


@dataclass(kw_only=True)
class Ec2Backend:
    """Runs plans on EC2, and keeps what they leave under `home`; a `CloudBackend`.

    site, max_minutes: what its plans are made for; see `at`. now: with its time zone.
    """

    aws: Aws
    home: Path
    site: Site | None = None
    max_minutes: int = 120
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    name: str = "ec2"
    service: str = "EC2"
    boot_limit: timedelta | None = BOOT_LIMIT

    def at(self, site: Place, max_minutes: int, *, root: str | None = None) -> Self:
        """This backend, making plans for `site`, a `Site`. root changes nothing: runs have folders each."""
        assert isinstance(site, Site)
        return replace(self, site=site, max_minutes=max_minutes)

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """The request that starts the machines for `jobs` at the backend's site."""
        from fastlaunch.backends.ec2.plan import plan_ec2

        assert self.site is not None
        return plan_ec2(jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes)

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request as it is; returns the handle. Raises CloudRefused's kinds.

        Of fewer machines than asked for those are ended, and NoCapacity is raised: they cannot train alone.
        """
        assert plan.region is not None
        started = self.aws.run_instances(plan.region, plan.request)
        handle = _handle(plan, started)
        if len(started) < handle["num_nodes"]:
            self._end_too_few(handle)
        return handle

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """The handle of the plan's machines, by client token or else tags; None if EC2 shows none."""
        return self.find_all([plan]).get(plan.request["ClientToken"])

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        """The handles of those plans of which EC2 shows a machine, by token, in two requests per region."""
        by_token = {plan.request["ClientToken"]: plan for plan in plans}
        asked = [{"region": plan.region, "token": token} for token, plan in by_token.items()]
        found = self._under_other_names(asked)
        return {token: _handle(by_token[token], machines) for token, machines in found.items()}

    def see(self, handles: Sequence[Mapping[str, Any]]) -> list[Sight]:
        """What EC2 shows of the attempts' machines now: one request per region (200 ids each).

        Two more, by token and by tag, for attempts all of whose machines seem to have ended, whose handle
        does not list them all, or one of which EC2 does not know though it started long ago.
        """
        known = self._by_id(handles)
        doubtful = [handle for handle in handles if self._is_doubtful(handle, known)]
        others = self._under_other_names(doubtful)
        return [self._sight(handle, known, others.get(handle["token"], ())) for handle in handles]

    def state(self, handle: Mapping[str, Any]) -> RunState:
        return self.states([handle])[0]

    def states(self, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
        """Running until all machines have ended; see `cloud_state`."""
        return states_of(self, handles)

    def sync(self, handle: Mapping[str, Any]) -> s3_sync.Synced:
        """Bring what the nodes uploaded since the last time."""
        return sync_of(self, handle)

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        """Record files of all runs of the attempt, with what is new brought here first."""
        return records_of(self, handle)

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Ask the nodes to stop, bring what they write meanwhile, and terminate those that do not end.

        Nodes that have not booted have nothing to save, and are terminated at once.
        """
        # Nor does a disk that is full keep a machine alive.
        with suppress(UserError):
            if self._ask_to_stop(handle):
                self._wait_for_end(handle)
        self.kill(handle)
        with suppress(UserError):
            self.sync(handle)

    def kill(self, handle: Mapping[str, Any]) -> None:
        """Terminate every machine of the token at once, also one that the handle does not list, and see that
        they are. Raises CloudRefused's kinds where they are not.
        """
        region = handle["region"]
        deadline = self.now() + timedelta(seconds=_KILL_WAIT_S)
        while True:
            to_end = _ids(handle)
            try:
                to_end = self._not_ended(handle)
                if not to_end:
                    return
                # Again and again for one that EC2 does not show yet: the order to end it may miss it.
                self.aws.terminate(region, to_end)
            except (Throttled, Unreachable):
                if self.now() >= deadline:
                    raise
            if self.now() >= deadline:
                raise CloudRefused(
                    f"{_named(to_end)} in {region} {'was' if len(to_end) == 1 else 'were'} told to "
                    "terminate, and not seen to",
                    f"look: aws ec2 describe-instances --region {region} --instance-ids {' '.join(to_end)}",
                )
            self.sleep(_KILL_INTERVAL_S)

    def diary(self, handle: Mapping[str, Any]) -> Path:
        """File with what the machines wrote to their consoles, kept beside the first run's records."""
        path = s3_sync.console_path(self.home, handle["token"])
        ids = _ids(handle)
        texts = [(one, self.aws.console_output(handle["region"], one)) for one in ids]
        told = [f"== {one}\n{text}\n" for one, text in texts] if len(ids) > 1 else [texts[0][1]]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(told), encoding="utf-8")
        return path

    def billed(
        self, *, launched_at: datetime, max_minutes: int, sight: Sight, status: Mapping[str, Any] | None
    ) -> Billed:
        """What one machine is billed: by EC2's own times, else the node's, else the limit."""
        return billed_on_ec2(launched_at=launched_at, max_minutes=max_minutes, sight=sight, status=status)

    def told(self, handle: Mapping[str, Any]) -> str:
        """`instance i-0ab in us-east-1`, `instances i-0ab, i-0cd in us-east-1`."""
        return f"{_named(_ids(handle))} in {handle['region']}"

    def checkpoint_folder(self, output: str, run_id: str) -> str:
        """Beside the attempts of the first run, each run has a folder: `.../runs/<run id>/checkpoints/`."""
        return f"{output.rsplit('/', 2)[0]}/{run_id}/checkpoints/"

    # What EC2 shows

    def _by_id(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, Instance]:
        """Those of the handles' machines that EC2 knows."""
        ids: dict[str, list[str]] = {}
        for handle in handles:
            ids.setdefault(handle["region"], []).extend(_ids(handle))
        return {
            one.id: one
            for region, listed in ids.items()
            for one in self.aws.describe_instances(region, ids=listed)
        }

    def _is_doubtful(self, handle: Mapping[str, Any], known: Mapping[str, Instance]) -> bool:
        """Whether the machines have to be looked for under other names than their ids."""
        shown = [known[one] for one in _ids(handle) if one in known]
        if len(_ids(handle)) < handle.get("num_nodes", 1):
            # Found again before EC2 showed them all.
            return True
        if len(shown) < len(_ids(handle)):
            return self._is_old(handle)
        return all(one.state == "terminated" for one in shown)

    def _is_old(self, handle: Mapping[str, Any]) -> bool:
        return self.now() - datetime.fromisoformat(handle["launched_at"]) > FORGOTTEN_AFTER

    def _sight(
        self, handle: Mapping[str, Any], known: Mapping[str, Instance], others: Sequence[Instance]
    ) -> Sight:
        listed = _ids(handle)
        shown = {one: known[one] for one in listed if one in known} | {one.id: one for one in others}
        num_unseen = max(sum(one not in shown for one in listed), handle.get("num_nodes", 1) - len(shown))
        return sight_of(_in_order(shown.values()), num_unseen=num_unseen, is_old=self._is_old(handle))

    def _under_other_names(self, handles: Sequence[Mapping[str, Any]]) -> dict[str, list[Instance]]:
        """Instances by the token that they carry, or that their tags say; nothing for a token without."""
        wanted: dict[str, set[str]] = {}
        for handle in handles:
            wanted.setdefault(handle["region"], set()).add(handle["token"])
        found: dict[str, dict[str, Instance]] = {}
        for region, tokens in wanted.items():
            tags = {"fastlaunch:run": sorted({token.rpartition("-a")[0] for token in tokens})}
            seen = [
                (f"{one.tags.get('fastlaunch:run')}-a{one.tags.get('fastlaunch:attempt')}", one)
                for one in self.aws.describe_instances(region, tags=tags)
            ]
            seen += [
                (one.token or "", one) for one in self.aws.describe_instances(region, tokens=sorted(tokens))
            ]
            for token, one in seen:
                if token in tokens:
                    found.setdefault(token, {})[one.id] = one
        return {token: _in_order(machines.values()) for token, machines in found.items()}

    # How machines end

    def _not_ended(self, handle: Mapping[str, Any]) -> list[str]:
        """Ids of the token's machines that are not ending, or that EC2 does not show yet."""
        shown = self._by_id([handle])
        for one in self._under_other_names([handle]).get(handle["token"], ()):
            shown[one.id] = one
        unseen = [] if self._is_old(handle) else [one for one in _ids(handle) if one not in shown]
        return [one.id for one in shown.values() if one.is_live] + unseen

    def _end_too_few(self, handle: Mapping[str, Any]) -> None:
        """Raises NoCapacity once the machines are ended, Unreachable where that is not known."""
        wanted, num = handle["num_nodes"], len(handle["instance_ids"])
        told = f"EC2 started {num} of {wanted} instances, which are of no use without the rest"
        try:
            self.kill(handle)
        except CloudRefused as error:
            raise Unreachable(f"{told}; {error.message}", error.hint) from None
        raise NoCapacity(f"{told} and were terminated", "try later, or fewer nodes: --num-nodes")

    def _ask_to_stop(self, handle: Mapping[str, Any]) -> bool:
        """Whether a booted node was asked."""
        deadline = self.now() + timedelta(seconds=_ASK_WAIT_S)
        bucket, prefix = s3_sync.split_uri(handle["output"])
        while True:
            try:
                if not self.sync(handle).num_booted:
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
                if sight.has_ended or (sight.is_seen and not sight.is_live):
                    return
                self.sync(handle)
            self.sleep(LOOK_INTERVAL_S)


def _ids(handle: Mapping[str, Any]) -> list[str]:
    """Ids of the machines; a handle from before there were several has one."""
    return list(handle.get("instance_ids") or [handle["instance_id"]])


def _named(ids: Sequence[str]) -> str:
    return f"instance{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def _in_order(instances: Any) -> list[Instance]:
    """Those that live first, each kind in the order of their ranks."""
    return sorted(instances, key=lambda one: (not one.is_live, one.launch_index, one.id))


def _handle(plan: Plan, instances: Sequence[Instance]) -> dict[str, Any]:
    machines = _in_order(instances)
    launched_at = min(one.launch_time for one in machines)
    return {
        "region": plan.region,
        "instance_id": machines[0].id,
        "instance_ids": [one.id for one in machines],
        "num_nodes": plan.request["MinCount"],
        "token": plan.request["ClientToken"],
        "output": _tags(plan)["fastlaunch:output"],
        "launched_at": launched_at.astimezone(UTC).isoformat(),
    }


def _tags(plan: Plan) -> dict[str, str]:
    return {
        tag["Key"]: tag["Value"]
        for specification in plan.request["TagSpecifications"]
        if specification["ResourceType"] == "instance"
        for tag in specification["Tags"]
    }
