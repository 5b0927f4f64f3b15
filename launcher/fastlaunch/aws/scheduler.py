"""One-time schedules of EventBridge Scheduler, typed: those of fastlaunch are known by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import BadConfiguration

#: With which the name of every schedule of fastlaunch begins; IAM policies name it too.
SCHEDULE_PREFIX = "fastlaunch-"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule that has not run: its name, region and when it was made, with its time zone."""

    name: str
    region: str
    created_at: datetime


def create_schedule(aws: Aws, region: str, request: Mapping[str, Any]) -> None:
    """Make a schedule: `request` goes out as it is (scheduler:CreateSchedule).

    It is no error if there is one of the name: it holds the token of the request whose machines it ends.
    """
    assert request["Name"].startswith(SCHEDULE_PREFIX) and request["ClientToken"]
    try:
        aws.ask("scheduler", region, "CreateSchedule", subject=request["Name"], **request)
    except BadConfiguration as error:
        if error.code != "ConflictException":
            raise


def delete_schedule(aws: Aws, region: str, name: str) -> None:
    """Delete a schedule (scheduler:DeleteSchedule); it is no error if there is none of the name."""
    try:
        aws.ask("scheduler", region, "DeleteSchedule", subject=name, Name=name)
    except BadConfiguration as error:
        if error.code != "ResourceNotFoundException":
            raise


def schedules(aws: Aws, region: str) -> list[Schedule]:
    """The region's schedules of fastlaunch, sorted by name; all pages (scheduler:ListSchedules)."""
    pages = aws.pages("scheduler", region, "ListSchedules", NamePrefix=SCHEDULE_PREFIX)
    found = [
        Schedule(name=each["Name"], region=region, created_at=each["CreationDate"])
        for page in pages
        for each in page["Schedules"]
        # Asked for again here: what is not fastlaunch's is never deleted.
        if each["Name"].startswith(SCHEDULE_PREFIX) and each["GroupName"] == "default"
    ]
    return sorted(found, key=lambda one: one.name)
