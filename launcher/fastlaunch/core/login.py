"""Find the AWS profile and region in AWS's own variables and files, as botocore does.

Local commands need them too, and importing botocore would take longer than everything else they do.
"""

import configparser
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fastlaunch.core.units import DEFAULT_REGION

#: By precedence. AWS's newer SDKs have AWS_REGION; boto3 reads only the other.
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_PROFILES = ("AWS_DEFAULT_PROFILE", "AWS_PROFILE")


def profile_name() -> str | None:
    """Return the profile that the environment names; None for the default one."""
    return next((os.environ[name] for name in _PROFILES if name in os.environ), None)


def login_region() -> tuple[str, str]:
    """Return the region, from the environment, the profile or the default, and the name of its source.

    The source of the default region is the empty text.
    """
    for name in _REGIONS:
        if region := os.environ.get(name, "").strip():
            return region, name
    profile = profile_name() or "default"
    in_config = [["profile", profile], *([["default"]] if profile == "default" else [])]
    # If both files name a region, botocore takes the one beside the keys.
    for variable, default, sections in (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", [[profile]]),
        ("AWS_CONFIG_FILE", "~/.aws/config", in_config),
    ):
        if in_file := _region_in(os.environ.get(variable) or default, sections):
            return in_file, f"profile {profile!r}"
    return DEFAULT_REGION, ""


def _region_in(path: str, sections: Sequence[Sequence[str]]) -> str | None:
    """Return the region in one of these sections of a file; None if there is none, or it cannot be read."""
    parser = configparser.RawConfigParser(default_section="")
    # The first call to AWS reports what is wrong with the file.
    with suppress(OSError, ValueError, RuntimeError, configparser.Error):
        parser.read(Path(os.path.expandvars(path)).expanduser(), encoding="utf-8")
        for section in parser.sections():
            if shlex.split(section) in sections and parser[section].get("region"):
                return parser[section]["region"].strip()
    return None
