"""Read where fastlaunch keeps its files, and the user's config file.

    FASTLAUNCH_HOME     ledger and runs; default: the platform's user data folder
    FASTLAUNCH_CONFIG   the config file; default: config.yaml in the platform's user config folder

The config file may hold `prices` (a price file of your own), `region`, `discount` (the fraction of the list
price that this account does not pay), `rates`, `max_price_age`, `max_cost` (of a submission, in USD),
`budgets` (of a day or a month), `tags` (of everything that is started) and `aws`, which says for each region
where jobs may run:

    aws:
      us-east-1:
        bucket: acme-training            # records, logs, code and checkpoints
        instance_profile: fastlaunch-node
        security_groups: [sg-0123]
        subnets: {us-east-1a: subnet-0a, us-east-1b: subnet-0b}
"""

import configparser
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.ownership import check_tags
from fastlaunch.core.units import DEFAULT_REGION, is_region, parse_duration_s
from fastlaunch.core.yaml_file import YamlFile

#: SSM public parameter of the machine image: the driver, docker and the container toolkit, no framework.
#: docs.aws.amazon.com/dlami, "Finding the ID of a DLAMI", read 2026-11.
DEFAULT_AMI_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)

#: The file in the home that `fastlaunch prices update` writes.
UPDATED_PRICES = "prices.yaml"
#: Names of buckets that botocore 1.44.5 accepts (handlers.py).
_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")
#: Text that needs no quoting in S3's keys and IAM's policies.
_PREFIX = re.compile(r"([\w.-]+(/[\w.-]+)*)?", re.ASCII)
#: docs.aws.amazon.com/IAM, "IAM identifiers".
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]+", re.ASCII)
_KEY = re.compile(r"arn:aws[a-z-]*:kms:([a-z0-9-]+):[0-9]{12}:key/[\w-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RegionSettings:
    """What jobs in one region use."""

    # Everything of a run lies under s3://bucket/prefix/.
    bucket: str | None = None
    prefix: str = "fastlaunch"
    instance_profile: str | None = None
    security_groups: tuple[str, ...] = ()
    # By zone. Zones are tried in this order; without any, EC2 chooses.
    subnets: Mapping[str, str] = field(default_factory=dict)
    # By zone, for several nodes.
    placement_groups: Mapping[str, str] = field(default_factory=dict)
    ami_parameter: str = DEFAULT_AMI_PARAMETER
    # ARN of the key that encrypts machines' volumes; None for the account's default.
    volume_kms_key: str | None = None
    # For images built here.
    repository: str | None = None
    # ARN of SageMaker's execution role.
    role: str | None = None
    # The network of training jobs: set both or neither. Without them, jobs use SageMaker's own network.
    sagemaker_subnets: tuple[str, ...] = ()
    sagemaker_security_groups: tuple[str, ...] = ()
    # ARN of the key that encrypts what SageMaker itself writes to the bucket; None for the bucket's own key.
    output_kms_key: str | None = None
    # Whether SageMaker encrypts what a job's containers send to each other.
    encrypt_between_containers: bool = False
    # ARN of the role by which EventBridge Scheduler ends machines, and starts those that wait for a block.
    scheduler_role: str | None = None


@dataclass(frozen=True, kw_only=True)
class AccountRate:
    """What this account pays on demand for an instance family or type. Exactly one field is set."""

    # Fraction of the list price that is not paid, for example because of a Savings Plan.
    discount: float | None = None
    # For a type, not for a family.
    usd_per_hour: float | None = None
    # Already paid, used or not, such as a reservation: another hour costs nothing.
    sunk: bool = False

    def __post_init__(self) -> None:
        if (self.discount is not None) + (self.usd_per_hour is not None) + self.sunk != 1:
            raise UserError("a rate needs one of `discount`, `usd_per_hour` and `sunk: true`", "give one")
        if self.discount is not None and not 0 <= self.discount < 1:
            raise UserError(f"discount is {self.discount}", "give a fraction such as 0.12 for 12%")
        if self.usd_per_hour is not None and not 0 < self.usd_per_hour < math.inf:
            raise UserError(f"usd_per_hour is {self.usd_per_hour:g}", "give more than 0, or `sunk: true`")


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The most that runs may cost in a day or a month of UTC, in USD; None for no limit.

    With `owner_`: yours alone. Otherwise, machines of everybody in the account count, too.
    """

    day: float | None = None
    month: float | None = None
    owner_day: float | None = None
    owner_month: float | None = None

    def __post_init__(self) -> None:
        for name, usd in vars(self).items():
            if usd is not None and not 0 < usd < math.inf:
                raise UserError(f"{name} is {usd:g}", "give an amount of USD above 0, or leave it out")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The environment and the config file."""

    # Folder of the ledger and the runs.
    home: Path
    # The user's price file, put over the shipped one.
    prices: Path | None = None
    region: str = DEFAULT_REGION
    # The source of the region if the config file names none, such as AWS_REGION; empty for the default.
    region_from: str | None = field(default=None, compare=False)
    # Fraction of the list price that is not paid.
    discount: float = 0.0
    # By instance family or type, such as p5, ml.p5 or p5.48xlarge; the type counts first, `discount` last.
    rates: Mapping[str, AccountRate] = field(default_factory=dict)
    # Such as `7d`: `submit` and `sweep` refuse older prices. None for any age.
    max_price_age: str | None = None
    # USD. `submit`, `sweep` and `resume` refuse what may cost more; --max-cost takes precedence.
    max_cost: float | None = None
    # For a day or a month: nothing starts that may exceed one.
    budgets: Budgets = Budgets()
    # For machines, their volumes and network interfaces, and training jobs.
    tags: Mapping[str, str] = field(default_factory=dict)
    # By region.
    aws: Mapping[str, RegionSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.discount < 1:
            raise UserError(f"discount is {self.discount}", "give a fraction such as 0.12 for 12%")
        check_tags(self.tags)
        if self.max_cost is not None and not 0 < self.max_cost < math.inf:
            raise UserError(
                f"max_cost is {self.max_cost:g}", "give an amount of USD above 0, or leave it out"
            )
        if self.max_price_age is not None:
            try:
                parse_duration_s(self.max_price_age)
            except UserError as error:
                raise UserError(f"max_price_age: {error.message}", error.hint) from None

    def price_files(self, file: Path | None = None) -> tuple[Path, ...]:
        """Return the price files over the shipped one, by increasing precedence: the updated and the user's.

        file: replaces the config file's.
        """
        updated, file = self.home / UPDATED_PRICES, file or self.prices
        return *((updated,) if updated.exists() else ()), *((file,) if file else ())

    def paid_usd_per_hour(self, instance: str, list_usd_per_hour: float) -> float:
        """Return what an hour on demand costs this account. instance: with `ml.` on SageMaker."""
        family = instance.rpartition(".")[0]
        rate = self.rates.get(instance) or self.rates.get(family) or AccountRate(discount=self.discount)
        if rate.usd_per_hour is not None:
            return rate.usd_per_hour
        return 0.0 if rate.discount is None else list_usd_per_hour * (1 - rate.discount)

    def budget_usd(self, max_cost_usd: float | None) -> float | None:
        """Return the most that a submission may cost. max_cost_usd: --max-cost, which takes precedence."""
        return self.max_cost if max_cost_usd is None else max_cost_usd

    def region_settings(self, region: str) -> RegionSettings:
        """Return what jobs in the region use: the defaults, if the config file does not name it."""
        return self.aws.get(region, RegionSettings())


def load_settings(*, config_may_lack: bool = False) -> Settings:
    """Return the settings. Raises BadFile for an invalid config file.

    config_may_lack: whether FASTLAUNCH_CONFIG may name a file that is yet to be written.
    """
    import platformdirs

    home = _expand(os.environ.get("FASTLAUNCH_HOME") or str(platformdirs.user_data_path("fastlaunch")))
    path = config_path()
    if not path.exists():
        if os.environ.get("FASTLAUNCH_CONFIG") and not config_may_lack:
            hint = "FASTLAUNCH_CONFIG names it; `fastlaunch init` writes one; without AWS make an empty file"
            raise BadFile(path, "does not exist", hint=hint)
        region, region_from = login_region()
        return Settings(home=home, region=region, region_from=region_from)
    file = YamlFile(path)
    aws = {region: _region(file, region) for region in file.mapping("aws")}
    rates = {name: _rate(file, name) for name in file.mapping("rates")}
    settings = file.record(
        Settings,
        without=("aws", "rates", "budgets"),
        home=home,
        aws=aws,
        rates=rates,
        budgets=file.record(Budgets, "budgets"),
        region_from=None,
    )
    if "region" not in file.mapping():
        region, region_from = login_region()
        settings = replace(settings, region=region, region_from=region_from)
    if settings.prices is None:
        return settings
    return replace(settings, prices=path.parent / _expand(str(settings.prices)))


def misfit(region: str, settings: RegionSettings) -> str | None:
    """Return which setting is invalid, and why; None if none is."""
    if settings.bucket is not None and not _BUCKET.fullmatch(settings.bucket):
        return f"`bucket` is {settings.bucket!r}, not a name without s3://; `prefix` names a folder in it"
    if not _PREFIX.fullmatch(settings.prefix):
        return f"`prefix` is {settings.prefix!r}: it takes letters, digits, . _ - and / between them"
    for name in ("role", "scheduler_role"):
        arn = getattr(settings, name)
        if arn is not None and not _ROLE.fullmatch(arn):
            return f"`{name}` is {arn!r}, not an ARN such as arn:aws:iam::123456789012:role/fastlaunch"
    for name in ("volume_kms_key", "output_kms_key"):
        arn = getattr(settings, name)
        if arn is not None and (not (match := _KEY.fullmatch(arn)) or match[1] != region):
            example = f"arn:aws:kms:{region}:123456789012:key/0a1b2c3d"
            return f"`{name}` is {arn!r}, not the ARN of a key in {region}, such as {example}"
    for name in ("security_groups", "sagemaker_security_groups"):
        for group in getattr(settings, name):
            if not group.startswith("sg-"):
                return f"`{name}` has {group!r}, not an id such as sg-0a1b2c"
    for subnet in settings.sagemaker_subnets:
        if not subnet.startswith("subnet-"):
            return f"`sagemaker_subnets` has {subnet!r}, not an id such as subnet-0a1b2c"
    given, other = "sagemaker_subnets", "sagemaker_security_groups"
    if settings.sagemaker_security_groups and not settings.sagemaker_subnets:
        given, other = other, given
    if getattr(settings, given) and not getattr(settings, other):
        return f"`{given}` needs `{other}`: SageMaker takes both, or neither"
    for zone, subnet in settings.subnets.items():
        if not zone.startswith(region) or zone == region:
            return f"`subnets` has {zone!r}, not a zone of {region} such as {region}a"
        if not subnet.startswith("subnet-"):
            return f"`subnets` has {subnet!r} for {zone}, not an id such as subnet-0a1b2c"
    return None


def config_path() -> Path:
    """Return where the config file is, or would be."""
    import platformdirs

    named = os.environ.get("FASTLAUNCH_CONFIG")
    return _expand(named) if named else platformdirs.user_config_path("fastlaunch") / "config.yaml"


def _rate(file: YamlFile, name: str) -> AccountRate:
    rate = file.record(AccountRate, "rates", name)
    if rate.usd_per_hour is not None and "." not in name.removeprefix("ml."):
        problem = f"`rates.{name}` is for a whole family, whose types cost different amounts"
        raise file.fault(problem, "rates", name, hint=f"name a type such as {name}.48xlarge, or a `discount`")
    return rate


def _region(file: YamlFile, region: str) -> RegionSettings:
    if not is_region(region):
        raise file.fault(f"`aws` has {region!r}, which is not the name of a region", "aws", region)
    settings = file.record(RegionSettings, "aws", region)
    settings = replace(settings, prefix=settings.prefix.strip("/"))
    if problem := misfit(region, settings):
        field = problem.split("`")[1]
        raise file.fault(f"under `aws.{region}`, {problem}", "aws", region, field)
    return settings


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text!r} names no folder", "there is no such user; write the path out") from None


#: By precedence. AWS's newer SDKs read AWS_REGION; boto3 reads only AWS_DEFAULT_REGION.
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
