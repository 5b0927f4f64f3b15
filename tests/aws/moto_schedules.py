"""EventBridge Scheduler, whose schedules moto stores and never carries out: here the due ones are.

It may call nothing but what a schedule of fastlaunch asks for. EC2 terminates all or none of a list, and does
not know an instance that it has forgotten; the schedule is gone afterwards in either case.
"""

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from moto_server import MotoServer, backend
from server_client import server_client

_TARGET = "arn:aws:scheduler:::aws-sdk:ec2:"
#: Bytes. docs.aws.amazon.com/scheduler/latest/APIReference/API_Target.html
_MAX_INPUT = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The schedules of these regions."""

    server: MotoServer
    regions: Sequence[str]

    def names(self) -> dict[str, str]:
        """The region of every schedule that is there, by name."""
        return {each.name: region for region, each in self._schedules()}

    def carry_out(self, now: datetime) -> list[str]:
        """Ids of the instances that were ended, after every schedule that is due by `now` was carried out."""
        ended = []
        for at, region, schedule in sorted(self._dated(), key=lambda each: (each[0], each[2].name)):
            if at > now:
                continue
            target = schedule.target
            assert target["Arn"].startswith(_TARGET) and schedule.schedule_expression_timezone == "UTC"
            operation, given = target["Arn"].removeprefix(_TARGET), json.loads(target["Input"])
            assert len(target["Input"].encode()) <= _MAX_INPUT
            if operation == "runInstances":
                self._run(region, given, at)
            else:
                assert operation == "terminateInstances", operation
                ended += self._terminate(given["InstanceIds"])
            if schedule.action_after_completion == "DELETE":
                backend("scheduler", region).schedule_groups["default"].delete_schedule(schedule.name)
        return ended

    def _dated(self) -> list[tuple[datetime, str, Any]]:
        return [(_time(each.schedule_expression), region, each) for region, each in self._schedules()]

    def _run(self, region: str, given: Mapping[str, Any], at: datetime) -> None:
        """Send the request, as far as botocore's model has its parameters; EC2 may refuse it."""
        from botocore.exceptions import ClientError

        # The model's client encodes it once more.
        request = {**given, "UserData": b64decode(given["UserData"], validate=True).decode()}
        try:
            answer = server_client(self.server, "ec2", region).run_instances(**request)
        except ClientError:
            return
        for instance in answer["Instances"]:
            self.server.set_instance(instance["InstanceId"], launch_time=at)

    def _terminate(self, ids: Sequence[str]) -> list[str]:
        known = {instance.id: instance.state for instance in self.server.instances()}
        if any(one not in known for one in ids):
            return []
        living = [one for one in ids if known[one] not in ("shutting-down", "terminated")]
        for one in living:
            self.server.set_instance(
                one,
                state="terminated",
                state_reason="Client.UserInitiatedShutdown: User initiated shutdown",
                transition_reason=f"User initiated ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} GMT)",
            )
        return living

    def _schedules(self) -> list[tuple[str, Any]]:
        groups = [
            (region, group)
            for region in self.regions
            for group in backend("scheduler", region).schedule_groups.values()
        ]
        return [(region, each) for region, group in groups for each in list(group.schedules.values())]


def _time(expression: str) -> datetime:
    return datetime.strptime(expression, "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=UTC)
