"""The program of the reaper in the account, which ends what is over its time without a laptop or a ledger.

Lambda runs core/ownership.py and this file as one program, with boto3's clients passed in.
"""

import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from importlib.resources import files
from typing import Any

from fastlaunch.core.ownership import RUN_ID, RUN_TAG, instance_ends_at, job_ends_at

#: Name, when its time is over (None: not ours), and what ends it.
Found = tuple[str, Callable[[], datetime | None], Callable[[], Any]]

#: Lambda logs warnings unasked.
_LOG = logging.getLogger(__name__)

#: Only this needs boto3, which Lambda's runtime brings along.
_HANDLER = """

def handler(event, context):
    import boto3
    from datetime import UTC
    end_over_time(boto3.client("ec2"), boto3.client("sagemaker"), now=datetime.now(UTC))
"""


def program() -> str:
    """Return the source of the program; Lambda calls its `handler`."""
    parts = (files("fastlaunch.core") / "ownership.py", files("fastlaunch.account") / "reaper.py")
    text = "\n\n".join(part.read_text(encoding="utf-8") for part in parts)
    return re.sub(r"^from fastlaunch\..*\n", "", text, flags=re.MULTILINE) + _HANDLER


def end_over_time(ec2: Any, sagemaker: Any, *, now: datetime) -> None:
    """End the instances and training jobs of ours that are over their time, in the region of boto3's clients.

    One request for each, and a line in the log. Raise RuntimeError at the end if something could not be
    listed or ended: Lambda counts that as an error.
    """
    num_refused = 0
    for kind, found in (("instances", _instances(ec2)), ("training jobs", _jobs(sagemaker))):
        try:
            for name, ends_at, end in found:
                try:
                    moment = ends_at()
                    if moment and now > moment:
                        end()
                        _LOG.warning("%s: ended; its time was over at %s", name, moment)
                except Exception as error:
                    num_refused += 1
                    _LOG.warning("%s: %s", name, error)
        except Exception as error:
            num_refused += 1
            _LOG.warning("%s could not all be listed: %s", kind, error)
    if num_refused:
        raise RuntimeError(f"{num_refused} refused: see the lines above")


def _instances(ec2: Any) -> Iterator[Found]:
    filters = [
        {"Name": "tag-key", "Values": [RUN_TAG]},
        {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]},
    ]
    for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for each in (each for reserved in page["Reservations"] for each in reserved["Instances"]):
            name, token = each["InstanceId"], each.get("ClientToken")
            ends_at = partial(instance_ends_at, _by_key(each["Tags"]), token, each["LaunchTime"])
            yield name, ends_at, partial(ec2.terminate_instances, InstanceIds=[name])


def _jobs(sagemaker: Any) -> Iterator[Found]:
    def ends_at(job: dict[str, Any]) -> datetime | None:
        pages = sagemaker.get_paginator("list_tags").paginate(ResourceArn=job["TrainingJobArn"])
        tags = _by_key([tag for page in pages for tag in page["Tags"]])
        return job_ends_at(tags, job["TrainingJobName"], job["CreationTime"])

    for page in sagemaker.get_paginator("list_training_jobs").paginate(StatusEquals="InProgress"):
        for job in page["TrainingJobSummaries"]:
            name = job["TrainingJobName"]
            # Other people's jobs need no further request.
            if re.fullmatch(f"{RUN_ID}-a[0-9]+", name):
                yield name, partial(ends_at, job), partial(sagemaker.stop_training_job, TrainingJobName=name)


def _by_key(tags: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}
