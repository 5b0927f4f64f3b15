"""One-time schedules of EventBridge Scheduler; fastlaunch's are known by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastlaunch.aws.session import AwsSession
from fastlaunch.core.conventions import SCHEDULE_PREFIX


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule that has not run yet."""

    name: str
    region: str
    # With its time zone.
    created_at: datetime


class SchedulerCalls(AwsSession):
    def create_schedule(self, region: str, request: Mapping[str, Any]) -> None:
        """Send `request` as it is (scheduler:CreateSchedule).

        A schedule of that name is no error: the name holds the token of the request whose machines it ends.
        """
        assert request["Name"].startswith(SCHEDULE_PREFIX) and request["ClientToken"]
        absent = ["ConflictException"]
        self.call_or_none(
            "scheduler", region, "CreateSchedule", absent=absent, subject=request["Name"], **request
        )

    def delete_schedule(self, region: str, name: str) -> None:
        """Delete a schedule; do nothing if there is none of the name."""
        absent = ["ResourceNotFoundException"]
        self.call_or_none("scheduler", region, "DeleteSchedule", absent=absent, subject=name, Name=name)

    def list_schedules(self, region: str) -> list[Schedule]:
        """Return the region's schedules of fastlaunch, sorted by name; all pages."""
        pages = self.paginate("scheduler", region, "ListSchedules", NamePrefix=SCHEDULE_PREFIX)
        schedules = [
            Schedule(name=entry["Name"], region=region, created_at=entry["CreationDate"])
            for page in pages
            for entry in page["Schedules"]
            # Checked again here: what is not fastlaunch's is never deleted.
            if entry["Name"].startswith(SCHEDULE_PREFIX) and entry["GroupName"] == "default"
        ]
        return sorted(schedules, key=lambda schedule: schedule.name)
