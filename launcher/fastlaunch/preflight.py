"""What can be known before money is spent: whether AWS would let a job start, and what it would cost.

`doctor` shows every check, `submit` goes on where none failed. A check that may not be made, for want of a
right that the job itself does not need, says so and holds up nothing.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastlaunch.ask_once import AskOnce
from fastlaunch.aws import Aws
from fastlaunch.backends.ec2_site import Site
from fastlaunch.candidates import candidates
from fastlaunch.cost_ceiling import check_budget, cost_ceiling, dearest_rate
from fastlaunch.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    UserError,
)
from fastlaunch.hardware import InstanceType
from fastlaunch.network_exit import network_exit
from fastlaunch.node_rights import node_lacks
from fastlaunch.preflight_check import Check, Result, Told, made
from fastlaunch.prices import Catalogue
from fastlaunch.quotas import quota_use
from fastlaunch.resolve import (
    Resolved,
    check_bucket,
    check_default_vpc,
    check_offered,
    check_subnet,
    configured_bucket,
    configured_profile,
    container_image,
    find_subnet,
    group_vpcs,
    is_own_image_seen,
    machine_image,
    nowhere,
)
from fastlaunch.settings import RegionSettings, Settings

if TYPE_CHECKING:
    from fastlaunch.base_image_file import BaseImage

#: A list price older than this is worth a look: AWS changed those of its GPUs about once a year.
OLD_PRICE_DAYS = 180
#: Written to see whether the bucket can be; always the same, so that it never grows in number.
DOCTOR_KEY = "doctor/written-by-doctor"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The job that the checks are made for. instances: none to check the account alone.

    checkpoint_every: steps, 0 for none; None if it was not said. base: AWS's container image; image: the
    user's, by digest, instead. max_cost_usd: the budget, with max_minutes to compare it with.
    """

    instances: tuple[InstanceType, ...]
    regions: tuple[str, ...]
    purchase: str = "on-demand"
    max_price_usd: float | None = None
    num_nodes: int = 1
    checkpoint_every: int | None = None
    base: "BaseImage | None" = None
    image: str | None = None
    max_minutes: int | None = None
    max_cost_usd: float | None = None


def checks(
    wanted: Wanted,
    *,
    aws: Aws,
    settings: Settings,
    catalogue: Catalogue,
    today: datetime.date,
    sites: Sequence[Site] = (),
    ask: AskOnce | None = None,
) -> list[Check]:
    """Every check, in the order in which a job needs it. Raises nothing that AWS or the config says.

    sites: where the job may run, for its cost. ask: what was asked already is not asked again.
    """
    job = _Checks(
        wanted=wanted, aws=aws, settings=settings, catalogue=catalogue, today=today, ask=ask or AskOnce()
    )
    return [*job.account(), *job.regions(), *job.money(sites)]


def usable(sites: Sequence[Site], found: Sequence[Check]) -> Resolved:
    """The sites that no failed check is about, and the others with why.

    Raises the first error of the checks if no site is left.
    """
    failed = [check for check in found if check.error is not None]
    skipped: list[tuple[str, UserError]] = []
    left = []
    for site in sites:
        error = next((check.error for check in failed if check.concerns(site)), None)
        if error is None:
            left.append(site)
        else:
            skipped.append((site.name, error))
    if not left:
        raise nowhere(skipped)
    return Resolved(sites=tuple(left), skipped=tuple((name, error.message) for name, error in skipped))


_Call = Callable[[], str | Told]
#: What a check is called and is about, and the check.
_Made = tuple[dict[str, str], _Call]


@dataclass(frozen=True, kw_only=True)
class _Checks:
    wanted: Wanted
    aws: Aws
    settings: Settings
    catalogue: Catalogue
    today: datetime.date
    ask: AskOnce

    def account(self) -> Iterator[Check]:
        yield made("login", self._identity)

    def regions(self) -> Iterator[Check]:
        no_login = None if self._has_login() else "not asked, for want of a login"
        for region in self.wanted.regions:
            yield made("config", partial(self._config, region), region=region)
            shut = no_login
            if shut is None:
                yield (check := made("region", partial(self._region, region), region=region, needed=False))
                shut = f"{region} cannot be used" if check.error else None
            for about, call in (*self._of_region(region), *self._of_instances(region)):
                # What a job needs fails where it may not be looked at; the rest is then not known.
                needed = about["name"] not in ("quota", "spot price")
                yield made(**about, call=call, region=region, needed=needed, shut=shut)

    def money(self, sites: Sequence[Site]) -> Iterator[Check]:
        yield made("price file", self._price_file)
        for region in self.wanted.regions:
            for instance in self.wanted.instances:
                call = partial(self._price, instance, region)
                yield made("price", call, region=region, instance=instance.name)
        if self.wanted.purchase == "spot" and self.wanted.checkpoint_every is not None:
            yield made("checkpoints", self._checkpoints)
        if sites and self.wanted.max_minutes is not None:
            yield made("cost", partial(self._cost, sites))

    # Of the account

    def _has_login(self) -> bool:
        try:
            self.ask(self.aws.identity)
        except CloudRefused:
            return False
        return True

    def _identity(self) -> str:
        who = self.ask(self.aws.identity)
        return f"{who.arn} (account {who.account})"

    # Of a region

    def _of_region(self, region: str) -> Iterator["_Made"]:
        yield {"name": "machine image"}, partial(self._machine_image, region)
        yield {"name": "container image"}, partial(self._container_image, region)
        yield {"name": "instance profile"}, partial(self._profile, region)
        yield {"name": "bucket"}, partial(self._bucket, region)
        yield {"name": "security group"}, partial(self._groups, region)
        subnets = self._here(region).subnets
        if not subnets:
            yield {"name": "subnet"}, partial(self._no_subnet, region)
        for zone, subnet in subnets.items():
            yield {"name": "subnet", "zone": zone}, partial(self._subnet, region, zone, subnet)

    def _config(self, region: str) -> str:
        problems: list[UserError] = []
        for configured in (configured_bucket, configured_profile):
            try:
                configured(self.settings, region)
            except UserError as error:
                problems.append(error)
        if len(problems) > 1:
            raise UserError(
                f"neither bucket nor instance profile is named for {region}",
                f"write `bucket: NAME` and `instance_profile: NAME` under `aws: {region}:` in the config "
                "file; `fastlaunch doctor --setup` says how to make them",
            )
        if problems:
            raise problems[0]
        here = self._here(region)
        zones = f"subnets in {', '.join(here.subnets)}" if here.subnets else "no subnets"
        return f"bucket {here.bucket}, instance profile {here.instance_profile}, {zones}"

    def _region(self, region: str) -> str:
        known = self.ask(self.aws.regions)
        if region not in known:
            raise BadConfiguration(
                f"{region} does not exist, or is not switched on for this account",
                f"switch it on under Account, AWS Regions in the console, or use one of {', '.join(known)}",
            )
        return f"{region} is switched on for this account"

    def _machine_image(self, region: str) -> str:
        image = machine_image(self.aws, self.ask, self.settings, region)
        return f"{image.id}, root device {image.root_device} of {image.root_gib} GiB"

    def _container_image(self, region: str) -> str | Told:
        if own := self.wanted.image:
            if is_own_image_seen(self.aws, self.ask, own, region):
                return f"{own.rpartition('@')[0]} has {own.rpartition('@')[2][:19]}..."
            return Told(
                Result.NOT_CHECKED,
                f"{own} may not be looked at from here: the machine's role has to pull it",
                "see that the role may: `fastlaunch doctor --setup`, ImagePull",
            )
        assert self.wanted.base is not None
        uri = container_image(self.aws, self.ask, self.wanted.base, region)
        told = f"{self.wanted.base.name} is {uri.rpartition('@')[2][:19]}... now"
        doubts = self.wanted.base.doubts(self.today)
        return Told(Result.WARNING, "; ".join([told, *doubts])) if doubts else told

    def _profile(self, region: str) -> str | Told:
        profile = self._here(region).instance_profile
        if profile is None:
            return Told(Result.NOT_CHECKED, "none is named")
        try:
            problem = self.ask(self.aws.may_pass_role, profile)
        except NotAuthorised as error:
            return Told(Result.NOT_CHECKED, f"whether {profile} may be passed: {error.message}", error.hint)
        if problem is not None:
            raise NotAuthorised(
                problem,
                "`fastlaunch doctor --setup` has the role, the profile, and the policy that lets you pass it",
            )
        told = f"{profile} is there, and IAM says that its role may be passed"
        lacking = node_lacks(self.aws, self.ask, self._here(region))
        if not lacking:
            return told
        return Told(
            Result.WARNING,
            f"{told}; the role's own policies do not give {' nor '.join(lacking)}",
            "`fastlaunch doctor --setup` has the role's policy; a machine that cannot upload ends itself",
        )

    def _bucket(self, region: str) -> str | Told:
        bucket = self._here(region).bucket
        if bucket is None:
            return Told(Result.NOT_CHECKED, "none is named")
        check_bucket(self.aws, self.ask, region, bucket)
        prefix = self._here(region).prefix
        key = "/".join(filter(None, (prefix, DOCTOR_KEY)))
        self.ask(self.aws.put_object, region, bucket, key, b"written by fastlaunch doctor\n")
        return f"s3://{bucket}/{prefix} can be written"

    def _groups(self, region: str) -> str | Told:
        groups = self._here(region).security_groups
        vpcs = group_vpcs(self.aws, self.ask, region, groups)
        if not groups:
            return (
                "none is named: the VPC's default group, which lets everything out unless somebody changed it"
            )
        return f"{', '.join(groups)} of {', '.join(sorted(set(vpcs.values())))}"

    def _no_subnet(self, region: str) -> str | Told:
        groups = self._here(region).security_groups
        vpcs = group_vpcs(self.aws, self.ask, region, groups)
        default = check_default_vpc(self.aws, self.ask, region, vpcs)
        where = f"the default VPC, {default}," if default else "the default VPC, if there is one,"
        return Told(
            Result.WARNING,
            f"none is named: EC2 takes one of {where} in a zone of its choice",
            f"for the next zone to be tried, write `subnets: {{{region}a: subnet-...}}` under "
            f"`aws: {region}:` in the config file",
        )

    def _subnet(self, region: str, zone: str, subnet_id: str) -> str | Told:
        here = self._here(region)
        subnet = find_subnet(self.aws, self.ask, region, subnet_id, tuple(here.subnets.values()))
        vpcs = group_vpcs(self.aws, self.ask, region, here.security_groups)
        check_subnet(subnet, region=region, zone=zone, group_vpcs=vpcs)
        way = network_exit(region, subnet, self.aws, self.ask)
        told = f"{subnet_id}: {way.told}"
        return told if way.is_known else Told(Result.WARNING, told, way.hint)

    def _here(self, region: str) -> RegionSettings:
        return self.settings.aws.get(region, RegionSettings())

    # Of an instance type in a region

    def _of_instances(self, region: str) -> Iterator["_Made"]:
        for one in self.wanted.instances:
            yield {"name": "offered", "instance": one.name}, partial(self._offered, one, region)
            yield {"name": "quota", "instance": one.name}, partial(self._quota, one, region)
            if self.wanted.purchase == "spot":
                yield {"name": "spot price", "instance": one.name}, partial(self._spot_price, one, region)

    def _offered(self, instance: InstanceType, region: str) -> str | Told:
        zones = self.ask(self.aws.zones_offering, region, instance.name)
        refused: list[tuple[str, UserError]] = []
        where = candidates([instance], [region], self.settings)
        for candidate in where:
            try:
                check_offered(candidate, zones)
            except NoCapacity as error:
                refused.append((candidate.name, error))
        if len(refused) == len(where):
            raise nowhere(refused)
        told = f"{instance.name} is in {', '.join(zones)}"
        if refused:
            left = ", ".join(candidate.zone or "" for candidate in where if candidate.zone not in zones)
            return Told(Result.WARNING, f"{told}; {left} will be left out")
        return told

    def _quota(self, instance: InstanceType, region: str) -> str | Told:
        wanted = self.wanted
        use = quota_use(
            instance,
            region=region,
            purchase=wanted.purchase,
            num_nodes=wanted.num_nodes,
            aws=self.aws,
            ask=self.ask,
        )
        if use is None:
            return Told(
                Result.NOT_CHECKED,
                f"which quota {wanted.purchase} {instance.name} counts against is not published",
                f"look for it under Service Quotas, Amazon EC2, in {region}",
            )
        if use.fits is False:
            raise use.refusal
        return str(use) if use.fits else Told(Result.NOT_CHECKED, str(use), f"look at it: {use.page}")

    def _spot_price(self, instance: InstanceType, region: str) -> str | Told:
        newest = self.ask(self.aws.spot_price_usd, region, instance.name, None)
        if newest is None:
            return Told(Result.NOT_CHECKED, f"EC2 tells no spot price of {instance.name} in {region}")
        usd, zone = newest
        told = f"${usd:g}/h in {zone}, the cheapest zone now"
        limit = self.wanted.max_price_usd
        if limit is not None and usd > limit:
            return Told(
                Result.WARNING,
                f"{told}, above --max-price {limit:g}: EC2 would not start it",
                f"give --max-price {usd * 1.2:.2f}, or wait",
            )
        return told

    # Of money

    def _price_file(self) -> str | Told:
        newest = max(price.as_of for price in self.catalogue.prices)
        return self._dated(f"the newest price is of {newest}", newest)

    def _price(self, instance: InstanceType, region: str) -> str | Told:
        wanted = self.wanted
        rate = dearest_rate(
            instance,
            region,
            purchase=wanted.purchase,
            max_price_usd=wanted.max_price_usd,
            catalogue=self.catalogue,
            today=self.today,
        )
        told = f"at most ${rate.usd_per_hour:g}/h, as of {rate.as_of}"
        return self._dated(told, datetime.date.fromisoformat(rate.as_of))

    def _dated(self, told: str, as_of: datetime.date) -> str | Told:
        age_days = (self.today - as_of).days
        if age_days <= OLD_PRICE_DAYS:
            return told
        return Told(
            Result.WARNING,
            f"{told}, {age_days} days ago",
            "look at aws.amazon.com/ec2/pricing, and put what changed into a price file of your own "
            "(`prices: FILE` in the config file)",
        )

    def _checkpoints(self) -> str:
        if not self.wanted.checkpoint_every:
            raise UserError(
                "spot without checkpoints: an interruption would lose everything",
                "add --checkpoint-every 50, or another number of steps",
            )
        return f"every {self.wanted.checkpoint_every} steps"

    def _cost(self, sites: Sequence[Site]) -> str:
        assert self.wanted.max_minutes is not None
        ceiling = cost_ceiling(sites, num_nodes=self.wanted.num_nodes, max_minutes=self.wanted.max_minutes)
        check_budget(ceiling, self.wanted.max_cost_usd)
        return str(ceiling)
