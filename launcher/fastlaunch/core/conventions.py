"""Names and times that requests, the ledger, IAM policies and `reap` agree on."""

import re
from collections.abc import Mapping

from fastlaunch.core.errors import UserError

#: The person to ask, or who pays: the caller, unless the user sets this tag.
OWNER_TAG = "Owner"
#: Limits of every service. docs.aws.amazon.com/tag-editor, "Tag naming limits and requirements".
_TAG = re.compile(r"[\w .:/=+@-]*")
_MAX_TAG_KEY, _MAX_TAG_VALUE = 128, 256
_RESERVED_TAGS = ("aws:", "fastlaunch:")

#: Prefix of every schedule's name.
SCHEDULE_PREFIX = "fastlaunch-"

#: Default number of replacements for machines with a faulty GPU.
MAX_REPLACEMENTS = 2
#: The shortest useful time limit: it covers boot, image pull, saving and uploading.
MIN_MINUTES = 15
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
