"""What on AWS is fastlaunch's: it has all of fastlaunch's tags, in their form, and the name they make."""

import re
from collections.abc import Mapping

from fastlaunch.core.conventions import ATTEMPT_TAG, MAX_MINUTES_TAG, OUTPUT_TAG, RUN_ID, RUN_TAG

_RUN_ID = re.compile(RUN_ID)
_NUMBER = re.compile(r"[1-9][0-9]{0,6}", re.ASCII)
#: Nobody gives a longer limit: a capacity block lasts half a year at most.
_MOST_MINUTES = 366 * 24 * 60


def token_of(tags: Mapping[str, str], name: str | None) -> str | None:
    """Return the token of the attempt that an instance or a training job is of; None if it is not ours.

    name: the client token of the instance's request, or the job's name. Tags alone may be on anything.
    """
    run_id, attempt = tags.get(RUN_TAG, ""), tags.get(ATTEMPT_TAG, "")
    token = f"{run_id}-a{attempt}"
    is_ours = (
        name == token
        and _RUN_ID.fullmatch(run_id)
        and _NUMBER.fullmatch(attempt)
        and max_minutes(tags) is not None
        and tags.get(OUTPUT_TAG, "").startswith("s3://")
    )
    return token if is_ours else None


def max_minutes(tags: Mapping[str, str]) -> int | None:
    """Return the time limit that the tags say; None if they say none."""
    text = tags.get(MAX_MINUTES_TAG, "")
    return int(text) if _NUMBER.fullmatch(text) and int(text) <= _MOST_MINUTES else None
