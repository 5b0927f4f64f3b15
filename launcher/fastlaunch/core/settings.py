"""Where fastlaunch keeps its files, and what the user's config file says.

    FASTLAUNCH_HOME     ledger and runs; default: the platform's user data folder
    FASTLAUNCH_CONFIG   the config file; default: config.yaml in the platform's user config folder

The config file may hold `prices` (a price file of the user's own), `region`, `discount` (the fraction of the
list price that this account does not pay) and `aws`, which says per region where jobs may run:

    aws:
      us-east-1:
        bucket: acme-training            # records, logs, code and checkpoints
        instance_profile: fastlaunch-node
        security_groups: [sg-0123]
        subnets: {us-east-1a: subnet-0a, us-east-1b: subnet-0b}
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.jobs.spec import DEFAULT_REGION

#: SSM public parameter of the machine image: the driver, docker and the container toolkit, no framework.
#: docs.aws.amazon.com/dlami, "Finding the ID of a DLAMI", read 2026-11.
DEFAULT_AMI_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)


_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")
#: As botocore 1.44.5 takes a bucket's name (handlers.py).
_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")
#: What S3's keys and IAM's policies hold without any quoting.
_PREFIX = re.compile(r"([\w.-]+(/[\w.-]+)*)?", re.ASCII)
#: docs.aws.amazon.com/IAM, "IAM identifiers".
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RegionSettings:
    """What jobs in one region use. Zones are tried in the order of `subnets`; without, EC2 chooses.

    bucket, prefix: everything of a run lies under s3://bucket/prefix/. repository: of images built here.
    placement_groups: by zone, for several nodes. role: ARN of SageMaker's execution role. scheduler_role: ARN
    of the role by which EventBridge Scheduler ends a detached job's machines.
    """

    bucket: str | None = None
    prefix: str = "fastlaunch"
    instance_profile: str | None = None
    security_groups: tuple[str, ...] = ()
    subnets: Mapping[str, str] = field(default_factory=dict)
    placement_groups: Mapping[str, str] = field(default_factory=dict)
    ami_parameter: str = DEFAULT_AMI_PARAMETER
    repository: str | None = None
    role: str | None = None
    scheduler_role: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """home: folder of ledger and runs. prices: the user's price file, merged over the shipped one.

    discount: fraction of the list price that is not paid, 0 or more and below 1. aws: by region.
    """

    home: Path
    prices: Path | None = None
    region: str = DEFAULT_REGION
    discount: float = 0.0
    aws: Mapping[str, RegionSettings] = field(default_factory=dict)


def load_settings() -> Settings:
    """Settings from the environment and the config file. Raises BadFile for a config file that is wrong."""
    import platformdirs
    import yaml

    home = _expand(os.environ.get("FASTLAUNCH_HOME") or str(platformdirs.user_data_path("fastlaunch")))
    path = config_path()
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get("FASTLAUNCH_CONFIG"):
            raise BadFile(path, "does not exist", hint="FASTLAUNCH_CONFIG names it") from None
        config = {}
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise BadFile(path, f"is not YAML: {error.problem}", line=line) from None
    # The last three come through PyYAML for an impossible date, an empty tag or a thousand brackets.
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise BadFile(path, f"is not YAML: {error}") from None
    if config is None:
        config = {}
    if not isinstance(config, dict) or not config.keys() <= {"prices", "region", "discount", "aws"}:
        raise BadFile(path, "holds something else than `prices`, `region`, `discount` and `aws`")
    if not all(
        isinstance(config.get(name, "-"), str) and config.get(name, "-") for name in ("prices", "region")
    ):
        raise BadFile(path, "`prices` and `region` are text")
    discount = config.get("discount", 0.0)
    if isinstance(discount, bool) or not isinstance(discount, int | float) or not 0 <= discount < 1:
        raise BadFile(path, f"`discount` is {discount!r}", hint="give a fraction such as 0.12 for 12%")
    regions = config.get("aws") or {}
    if not isinstance(regions, dict):
        raise BadFile(path, "`aws` is not a mapping of regions")
    prices = config.get("prices")
    for name in regions:
        if not is_region(str(name)):
            raise BadFile(path, f"`aws` has {name!r}, which is not the name of a region")
    return Settings(
        home=home,
        prices=path.parent / _expand(prices) if prices else None,
        region=config.get("region", DEFAULT_REGION),
        discount=float(discount),
        aws={str(name): _region(path, str(name), given) for name, given in regions.items()},
    )


def is_region(name: str) -> bool:
    """Whether it is written like the name of a region."""
    return bool(_REGION.fullmatch(name))


def misfit(region: str, given: RegionSettings) -> str | None:
    """What no region can have of its settings, in words; None if all may be right."""
    if given.bucket is not None and not _BUCKET.fullmatch(given.bucket):
        return f"`bucket` is {given.bucket!r}: a name without s3://, and the folder in it is `prefix`"
    if not _PREFIX.fullmatch(given.prefix):
        return f"`prefix` is {given.prefix!r}: it takes letters, digits, . _ - and / between them"
    for name in ("role", "scheduler_role"):
        arn = getattr(given, name)
        if arn is not None and not _ROLE.fullmatch(arn):
            return f"`{name}` is {arn!r}: an ARN such as arn:aws:iam::123456789012:role/fastlaunch-training"
    for group in given.security_groups:
        if not group.startswith("sg-"):
            return f"`security_groups` has {group!r}: an id such as sg-0a1b2c, not a name"
    for zone, subnet in given.subnets.items():
        if not zone.startswith(region) or zone == region:
            return f"`subnets` has {zone!r}: no zone of {region}, such as {region}a"
        if not subnet.startswith("subnet-"):
            return f"`subnets` has {subnet!r} for {zone}: an id such as subnet-0a1b2c"
    return None


def config_path() -> Path:
    """Where the config file is, or would be."""
    import platformdirs

    named = os.environ.get("FASTLAUNCH_CONFIG")
    return _expand(named) if named else platformdirs.user_config_path("fastlaunch") / "config.yaml"


def _region(path: Path, region: str, given: Any) -> RegionSettings:
    where = f"aws.{region}"
    known = {entry.name for entry in fields(RegionSettings)}
    if given is None:
        return RegionSettings()
    if not isinstance(given, dict) or not given.keys() <= known:
        raise BadFile(path, f"`{where}` holds something else than {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "security_groups":
            fits = isinstance(value, list) and all(_is_text(item) for item in value)
            values[name] = tuple(value) if fits else None
        elif name in ("subnets", "placement_groups"):
            fits = isinstance(value, dict) and all(_is_text(part) for item in value.items() for part in item)
            values[name] = value
        else:
            fits = _is_text(value)
            values[name] = value
        if not fits:
            kind = "a list of texts" if name == "security_groups" else "text"
            kind = "text by zone" if name in ("subnets", "placement_groups") else kind
            raise BadFile(path, f"`{where}.{name}` is not {kind}")
    if "prefix" in values:
        values["prefix"] = values["prefix"].strip("/")
    settings = RegionSettings(**values)
    if problem := misfit(region, settings):
        raise BadFile(path, f"under `{where}`, {problem}")
    return settings


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text!r} names no folder", "there is no such user; write the path out") from None
