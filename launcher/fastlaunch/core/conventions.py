"""Names and times that requests, the ledger, IAM policies and `reap` agree on."""

import re
from collections.abc import Mapping

from fastlaunch.core.errors import UserError

#: Who pays, or is asked: the caller, unless a tag of the user's says otherwise.
OWNER_TAG = "Owner"
#: What every service takes. docs.aws.amazon.com/tag-editor, "Tag naming limits and requirements".
_TAG = re.compile(r"[\w .:/=+@-]*")
_MAX_TAG_KEY, _MAX_TAG_VALUE = 128, 256
_RESERVED_TAGS = ("aws:", "fastlaunch:")

#: Prefix of every schedule's name.
SCHEDULE_PREFIX = "fastlaunch-"

#: How often a machine with a faulty GPU is replaced, unless told otherwise.
MAX_REPLACEMENTS = 2
#: The shortest limit that is worth a machine: it boots, pulls the image, and keeps time to save and upload.
MIN_MINUTES = 15
#: A plan that ends when all is settled is looked at from this round on; its most rounds; the default.
FIRST_LOOK, MOST_ROUNDS, DEFAULT_MOST_ROUNDS = 3, 12, 8


def check_tags(tags: Mapping[str, str]) -> None:
    """Raise UserError for a tag of the user's that AWS would refuse, or that would stand for one of ours."""
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
