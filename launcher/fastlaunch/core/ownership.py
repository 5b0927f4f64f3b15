"""Tags, names, margins and limits, on which requests, the ledger, IAM policies and `reap` agree.

Tags and name alone decide which resources on AWS belong to fastlaunch, and when their time is over: a
resource is ours if it has all of our tags in the right form, and the name that follows from them.
"""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta

from fastlaunch.core.errors import UserError

#: The form of the ids that the ledger gives to runs: `20261121-090312-k3f9`.
RUN_ID = r"[0-9]{8}-[0-9]{6}-[a-z0-9]{4}"

#: Tags of machines and jobs. We never end a resource without all of them in the right form.
RUN_TAG = "fastlaunch:run"
ATTEMPT_TAG = "fastlaunch:attempt"
MAX_MINUTES_TAG = "fastlaunch:max-minutes"
#: URI of the folder to which the attempt uploads.
OUTPUT_TAG = "fastlaunch:output"

#: How AWS Batch begins the name of a training job that it starts.
BATCH_PREFIX = "AWSBatch"

#: Minutes that may be billed on top of the time limit. EC2: before booting, and from shutdown to terminated.
#: SageMaker: stopping, and uploading what the job wrote.
MARGIN_MINUTES = 10
#: How long a training job may wait for machines, unbilled; its time limit starts when it has them.
JOB_WAIT_MINUTES = 60

_RUN_ID = re.compile(RUN_ID)
_NUMBER = re.compile(r"[1-9][0-9]{0,6}", re.ASCII)
#: A run that was not named by the ledger may have another id.
_TOKEN = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]*)-a([0-9]+)")
#: No limit is longer, since a capacity block lasts at most half a year.
_MOST_MINUTES = 366 * 24 * 60


def make_token(run_id: str, attempt: int | str) -> str:
    """Return the token of an attempt, after which its request, training job and schedules are named."""
    return f"{run_id}-a{attempt}"


def parse_token(token: str) -> tuple[str, str]:
    """Return the run id and the attempt's number that `make_token` joined."""
    parts = _TOKEN.fullmatch(token)
    assert parts is not None, token
    return parts[1], parts[2]


def token_of(tags: Mapping[str, str], name: str | None) -> str | None:
    """Return the token of the attempt that started an instance or a training job; None if it is not ours.

    name: the client token of the instance's request, or the job's name. Tags alone prove nothing. AWS Batch
    puts a word before the name of a job from a queue, and a digest behind it.
    """
    run_id, attempt = tags.get(RUN_TAG, ""), tags.get(ATTEMPT_TAG, "")
    token = make_token(run_id, attempt)
    is_from_queue = (name or "").startswith(f"{BATCH_PREFIX}{make_token(run_id, '')}")
    is_ours = (
        (name == token or is_from_queue)
        and _RUN_ID.fullmatch(run_id)
        and _NUMBER.fullmatch(attempt)
        and max_minutes(tags) is not None
        and tags.get(OUTPUT_TAG, "").startswith("s3://")
    )
    return token if is_ours else None


def max_minutes(tags: Mapping[str, str]) -> int | None:
    """Return the time limit in the tags; None if they have none."""
    text = tags.get(MAX_MINUTES_TAG, "")
    return int(text) if _NUMBER.fullmatch(text) and int(text) <= _MOST_MINUTES else None


def instance_ends_at(tags: Mapping[str, str], token: str | None, launched_at: datetime) -> datetime | None:
    """Return when an instance's time is over, margin included; None if it is not ours."""
    minutes = max_minutes(tags)
    if minutes is None or token_of(tags, token) is None:
        return None
    return launched_at + timedelta(minutes=minutes + MARGIN_MINUTES)


def job_ends_at(tags: Mapping[str, str], name: str, created_at: datetime) -> datetime | None:
    """Return when a training job's time is over, waiting and margin included; None if it is not ours."""
    ends_at = instance_ends_at(tags, name, created_at)
    return ends_at and ends_at + timedelta(minutes=JOB_WAIT_MINUTES)


#: The person to ask, or who pays: the caller, unless the user sets this tag.
OWNER_TAG = "Owner"


def owner_in(tags: Mapping[str, str]) -> str | None:
    """Return the owner that the tags name, in whatever case an account's rules want the key."""
    return tags.get(OWNER_TAG) or next(
        (value for key, value in tags.items() if key.lower() == OWNER_TAG.lower()), None
    )


#: Limits of every service. docs.aws.amazon.com/tag-editor, "Tag naming limits and requirements".
_TAG = re.compile(r"[\w .:/=+@-]*")
_MAX_TAG_KEY, _MAX_TAG_VALUE = 128, 256
_RESERVED_TAGS = ("aws:", "fastlaunch:")

#: Prefix of every schedule's name.
SCHEDULE_PREFIX = "fastlaunch-"

#: Default number of replacements for machines that are lost or have a faulty GPU.
MAX_REPLACEMENTS = 2
#: The shortest useful time limit: it covers boot, image pull, saving and uploading.
MIN_MINUTES = 15
#: The longest time limit of a job.
MAX_MINUTES = 30 * 24 * 60
#: Below so many steps `measure.steptime` finds no step time.
FEWEST_TIMED_STEPS = 20
#: For runs that stop once every verdict is settled: the first round that is judged, the most rounds, and
#: the default number of rounds.
FIRST_LOOK, MOST_ROUNDS, DEFAULT_MOST_ROUNDS = 3, 12, 8


def check_tags(tags: Mapping[str, str]) -> None:
    """Raise UserError for a user's tag that AWS would refuse, or that would replace one of ours."""
    for key, value in tags.items():
        if not 1 <= len(key) <= _MAX_TAG_KEY or len(value) > _MAX_TAG_VALUE:
            raise UserError(
                f"tags: {key!r} has {len(key)} characters, and its value {len(value)}",
                f"AWS takes 1 to {_MAX_TAG_KEY} for the key, and up to {_MAX_TAG_VALUE} for the value",
            )
        if key.lower().startswith(_RESERVED_TAGS):
            raise UserError(
                f"tags: {key!r} begins with {key.partition(':')[0]}:, which is not yours to give",
                "give it another name, such as team or cost-center",
            )
        if not (_TAG.fullmatch(key) and _TAG.fullmatch(value)):
            raise UserError(
                f"tags: {key}={value!r} has a character that AWS does not take",
                "use letters, digits, spaces and _ . : / = + - @",
            )
    if len({key.lower() for key in tags}) < len(tags):
        raise UserError("tags: two keys differ only in upper and lower case", "keep one of them")
