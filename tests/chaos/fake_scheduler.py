"""EventBridge Scheduler of a trial, which moto's never does: it carries out the schedules that are due.

It may call nothing but what a schedule of fastlaunch asks for. EC2 terminates all or none of a list, and does
not know an instance that it has forgotten; the schedule is gone afterwards in either case.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from moto_server import MotoServer, backend

_TARGET = "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"


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
        for region, schedule in list(self._schedules()):
            at = datetime.strptime(schedule.schedule_expression, "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=UTC)
            if at > now:
                continue
            assert schedule.target["Arn"] == _TARGET and schedule.schedule_expression_timezone == "UTC"
            ended += self._terminate(json.loads(schedule.target["Input"])["InstanceIds"])
            if schedule.action_after_completion == "DELETE":
                backend("scheduler", region).schedule_groups["default"].delete_schedule(schedule.name)
        return ended

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
