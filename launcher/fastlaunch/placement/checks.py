"""What can be known before money is spent: whether AWS would let a job start, and what it would cost.

`doctor` shows every check; `submit` goes on where none failed. A check that is not permitted, and asks for
nothing that the job itself needs, says so and holds up nothing.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.backends.node_agent import agent_archive, agent_object, agent_sha256
from fastlaunch.backends.protocol import SERVICES
from fastlaunch.backends.site import Site
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import OLD_PRICE_DAYS, UPDATE_COMMAND
from fastlaunch.catalog.rates import dearest_rate
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity, NotAuthorised, UserError
from fastlaunch.core.plan import CodeBundle
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.option_rules import given_inputs
from fastlaunch.jobs.options import Options
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.capacity_block import block_usd_per_hour, minutes_left
from fastlaunch.placement.check import Check, Finding, Result, run_check
from fastlaunch.placement.config_checks import (
    EC2,
    SAGEMAKER,
    SCHEDULER,
    SERVICE_NAMES,
    check_bucket,
    check_role,
    configured,
    missing_rights,
    setup_command,
)
from fastlaunch.placement.network import (
    check_default_vpc,
    check_open_groups,
    check_placement_group,
    check_subnet,
    check_training_network,
    find_subnet,
    group_vpcs,
    network_exit,
    placement_group_command,
)
from fastlaunch.placement.quota_checks import quota_use
from fastlaunch.placement.resolve import (
    has_several_interfaces,
    nowhere,
)

#: Written to see whether the bucket can be; always the same, so that it never grows in number.
DOCTOR_KEY = "runs/written-by-doctor"

_ROLES = {"ec2": "the machine's role", "sagemaker": "SageMaker's execution role"}

_Subjects = Iterable[tuple[Mapping[str, str], tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The job that the checks are for, and what they look it up with."""

    lookup: AwsLookup
    options: Options
    #: Those of the options; none to check the account alone.
    instances: tuple[InstanceType, ...]
    #: What is uploaded for it: its code, as far as that is known here, and what pip installs.
    bundles: tuple[Bundle, ...] = ()

    @property
    def aws(self) -> Aws:
        return self.lookup.aws

    def region_settings(self, region: str) -> RegionSettings:
        """Return the region's part of the config file."""
        return self.lookup.settings.region_settings(region)

    @property
    def has_several_interfaces(self) -> bool:
        """Whether any of its machines would have several network interfaces."""
        return self.options.service == "ec2" and any(
            has_several_interfaces(instance, self.options.num_nodes) for instance in self.instances
        )

    def name_of(self, instance: InstanceType) -> str:
        """Return the type as the service calls it."""
        return f"ml.{instance.name}" if self.options.service == "sagemaker" else instance.name


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """One of the checks: what it is called, what it asks, and what it is run for."""

    name: str
    #: Called with the job and what `subjects` gives.
    call: Callable[..., str | Finding]
    #: Yields what it is about (`instance`, `zone`) and what to call it with, in a region.
    subjects: "Callable[[CheckContext, str], _Subjects]"
    #: The backends that it is for, and for which of their jobs.
    on: tuple[str, ...] = ("ec2", "sagemaker")
    when: Callable[[Options], bool] = lambda options: True
    #: Whether it asks AWS; offline it is run without a login too.
    asks_aws: bool = True
    #: Whether a job cannot do without what is looked at: it fails where that may not be looked at.
    needed: bool = True


def checks(job: CheckContext) -> list[Check]:
    """Run every check, in the order in which a job needs it. Raises nothing that AWS or the config says."""
    login = run_check("login", partial(_login, job))
    results = [login, run_check("price file", partial(_price_file, job))]
    for region in job.options.regions:
        obstacle = None if login.error is None else "not asked, for want of a login"
        for listed in _IN_REGION:
            is_due = job.options.service in listed.on and listed.when(job.options)
            for about, arguments in listed.subjects(job, region) if is_due else ():
                check = run_check(
                    listed.name,
                    partial(listed.call, job, *arguments),
                    region=region,
                    needed=listed.needed,
                    obstacle=obstacle if listed.asks_aws else None,
                    **about,
                )
                results.append(check)
                if listed.call is _region and check.error:
                    obstacle = f"{region} cannot be used"
    return results


def usable(sites: Sequence[Site], results: Sequence[Check]) -> tuple[list[Site], list[tuple[str, UserError]]]:
    """Return the sites that no failed check is about, and the names of the others with why.

    Raises the first error of the checks if no site is left.
    """
    skipped: list[tuple[str, UserError]] = []
    left: list[Site] = []
    for site in sites:
        error = next(filter(None, (check.error_at(site) for check in results)), None)
        if error is None:
            left.append(site)
        else:
            skipped.append((site.name, error))
    if not left:
        raise nowhere(skipped)
    return left, skipped


# What a check is run for


def _once(job: CheckContext, region: str) -> _Subjects:
    yield {}, (region,)


def _each_type(job: CheckContext, region: str) -> _Subjects:
    for instance in job.instances:
        yield {"instance": job.name_of(instance)}, (instance, region)


def _each_zone(job: CheckContext, region: str) -> _Subjects:
    for zone in job.region_settings(region).subnets:
        yield {"zone": zone}, (region, zone)


def _each_subnet(job: CheckContext, region: str) -> _Subjects:
    yield from _each_zone(job, region) if job.region_settings(region).subnets else [({}, (region, None))]


def _each_training_network(job: CheckContext, region: str) -> _Subjects:
    if job.region_settings(region).sagemaker_subnets:
        yield {}, (region,)


def _each_input(job: CheckContext, region: str) -> _Subjects:
    for uri in given_inputs(job.options).values():
        yield {}, (region, uri)


def _each_stored_object(job: CheckContext, region: str) -> _Subjects:
    """Yield the objects that the machines fetch and that are the same for many jobs."""
    bucket, prefix = job.region_settings(region).bucket, job.region_settings(region).prefix
    if bucket is None:
        return
    objects = {agent_object(bucket, prefix, agent_sha256()).key: agent_archive()}
    for bundle in job.bundles:
        objects[CodeBundle.under(prefix, sha256=bundle.sha256, commit=None).key] = bundle.data
    for key, data in objects.items():
        yield {}, (region, bucket, key, data)


# The checks


def _login(job: CheckContext) -> str:
    identity = job.aws.identity()
    return f"{identity.arn} (account {identity.account})"


def _config(job: CheckContext, region: str) -> str:
    """Return what the config file names for the region. Raises UserError if a job's needs are missing."""
    trains = job.options.service == "sagemaker"
    problems: list[UserError] = []
    for name in ("bucket", "role" if trains else "instance_profile"):
        try:
            configured(job.lookup.settings, region, name)
        except UserError as error:
            problems.append(error)
    what, entry = ("role", "role: ARN") if trains else ("instance profile", "instance_profile: NAME")
    if len(problems) > 1:
        raise UserError(
            f"neither bucket nor {what} is named for {region}",
            f"this makes and writes all that is needed: {setup_command(region)}; or by hand, as `fastlaunch "
            f"doctor --setup` says: `bucket: NAME` and `{entry}` under `aws: {region}:` in the config file",
        )
    if problems:
        raise problems[0]
    here = job.region_settings(region)
    if trains:
        return f"bucket {here.bucket}, role {here.role}"
    zones = f"subnets in {', '.join(here.subnets)}" if here.subnets else "no subnets"
    return f"bucket {here.bucket}, instance profile {here.instance_profile}, {zones}"


def _region(job: CheckContext, region: str) -> str:
    """Check that the region is switched on. Raises BadConfiguration if it is not."""
    known = job.aws.regions()
    if region not in known:
        raise BadConfiguration(
            f"{region} does not exist, or is not switched on for this account",
            f"switch it on under Account, AWS Regions in the console, or use one of {', '.join(known)}",
        )
    return f"{region} is switched on for this account"


def _container(job: CheckContext, region: str) -> str | Finding:
    """Find the container image that a job there would start from."""
    if image := job.options.image:
        if job.lookup.is_image_visible(image, region):
            return f"{image.rpartition('@')[0]} has {image.rpartition('@')[2][:19]}..."
        return Finding(
            Result.NOT_CHECKED,
            f"{image} may not be looked at from here: the machine's role has to pull it",
            "see that the role may: `fastlaunch doctor --setup`, ImagePull",
        )
    assert job.lookup.base is not None
    uri = job.lookup.base_image(region)
    message = f"{job.lookup.base.name} is {uri.rpartition('@')[2][:19]}... now"
    doubts = job.lookup.base.doubts(job.lookup.today)
    return Finding(Result.WARNING, "; ".join([message, *doubts])) if doubts else message


def _bucket(job: CheckContext, region: str) -> str | Finding:
    """Check that the bucket is there, and can be written."""
    name, prefix = job.region_settings(region).bucket, job.region_settings(region).prefix
    if name is None:
        return Finding(Result.NOT_CHECKED, "none is named")
    check_bucket(job.aws, region, name)
    key = "/".join(filter(None, (prefix, DOCTOR_KEY)))
    job.aws.put_object(region, name, key, b"written by fastlaunch doctor\n")
    return f"s3://{name}/{prefix} can be written"


def _stored_code(job: CheckContext, region: str, bucket: str, key: str, data: bytes) -> str:
    """Check that nothing else lies at the object's address. Raises BadConfiguration if there does."""
    if job.aws.is_stored(region, bucket, key, data):
        return f"s3://{bucket}/{key} is what belongs there"
    return f"s3://{bucket}/{key} is not there yet: submit uploads it"


def _input(job: CheckContext, region: str, uri: str) -> str:
    """Check that something lies there. What may not be looked at from here, the job's role may still read."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not job.aws.has_objects(region, bucket, prefix):
        raise BadConfiguration(f"nothing lies under {uri}", "name a folder with objects in it, not a file")
    if job.options.service == "sagemaker":
        # SageMaker reads no other region's.
        check_bucket(job.aws, region, bucket)
    return f"{uri} holds objects; {_ROLES[job.options.service]} has to be allowed to read them"


def _machine_image(job: CheckContext, region: str) -> str:
    image = job.lookup.machine_image(region)
    return f"{image.id}, root device {image.root_device} of {image.root_gib} GiB"


def _profile(job: CheckContext, region: str) -> str | Finding:
    profile = job.region_settings(region).instance_profile
    if profile is None:
        return Finding(Result.NOT_CHECKED, "none is named")
    try:
        role = job.aws.profile_role(profile)
    except NotAuthorised as error:
        return Finding(Result.NOT_CHECKED, f"whether {profile} may be passed: {error.message}", error.hint)
    if role is None:
        raise NotAuthorised(
            f"there is no instance profile {profile.rpartition('/')[2]}, or it holds no role",
            "`fastlaunch doctor --setup` has the role, the profile, and the policy that lets you pass it",
        )
    return _passed(job, region, role, EC2)


def _role(job: CheckContext, region: str) -> str | Finding:
    arn = job.region_settings(region).role
    if arn is None:
        return Finding(Result.NOT_CHECKED, "none is named", setup_command(region))
    check_role(job.aws, region, arn, SAGEMAKER)
    return _passed(job, region, arn, SAGEMAKER)


def _scheduler_role(job: CheckContext, region: str) -> str | Finding:
    """Check the role of the timer in the account. That it may not be passed only warns."""
    arn = job.region_settings(region).scheduler_role
    alone = "without it only the machines' own timers end what is forgotten"
    if arn is None:
        write = f"write `scheduler_role: ARN` under `aws: {region}:` in the config file"
        raise UserError(
            f"no scheduler role is named: {alone}",
            f"{write}; this makes one: {setup_command(region)}; or go without it: --no-account-timer",
        )
    check_role(job.aws, region, arn, SCHEDULER)
    try:
        return _passed(job, region, arn, SCHEDULER)
    except CloudRefused as error:
        return Finding(Result.WARNING, f"{error.message}: {alone}", error.hint)


def _passed(job: CheckContext, region: str, role: str, service: str) -> str | Finding:
    """Check that you may pass the role to the service, and that jobs with it may upload.

    Raises NotAuthorised if you may not.
    """
    try:
        may_pass = job.aws.may_pass(role, service)
    except NotAuthorised as error:
        return Finding(Result.NOT_CHECKED, f"whether {role} may be passed: {error.message}", error.hint)
    if not may_pass:
        raise NotAuthorised(
            f"you may not pass {role} to {SERVICE_NAMES[service]}: iam:PassRole is not allowed",
            "`fastlaunch iam print` has the policy that lets you pass it",
        )
    message = f"{role} may be passed to {SERVICE_NAMES[service]}"
    missing = missing_rights(job.aws, role, job.region_settings(region)) if service != SCHEDULER else []
    if not missing:
        return message
    return Finding(
        Result.WARNING,
        f"{message}; its own policies do not give {' nor '.join(missing)}",
        "`fastlaunch iam print` has the role's policy; what a job cannot upload is lost",
    )


def _offered(job: CheckContext, instance: InstanceType, region: str) -> str | Finding:
    """Check in which of the region's zones the type is: sites in other zones are left out."""
    name, zones = instance.name, job.aws.zones_offering(region, instance.name)
    if not zones:
        raise NoCapacity(f"{region} has no {name}", "allow another region or instance type")
    hint = f"name a subnet in {' or '.join(zones)}: `aws.{region}.subnets` in the config file"
    subnets = job.region_settings(region).subnets
    lacking = {zone: NoCapacity(f"{zone} has no {name}", hint) for zone in subnets if zone not in zones}
    if lacking and len(lacking) == len(subnets):
        raise nowhere([(f"{name} in {zone}", error) for zone, error in lacking.items()])
    message = f"{name} is in {', '.join(zones)}"
    if lacking:
        message = f"{message}; {', '.join(lacking)} will be left out"
        return Finding(Result.WARNING, message, errors_by_zone=lacking)
    return message


def _block(job: CheckContext, instance: InstanceType, region: str) -> str:
    block = job.lookup.reservation(job.options, instance, region)
    left = minutes_left(block, job.lookup.now)
    return (
        f"{block.id} in {block.zone}: {block.num_free} of {block.num_instances} instances free, "
        f"{left // 60} h {left % 60} min left"
    )


def _quota(job: CheckContext, instance: InstanceType, region: str) -> str | Finding:
    use = quota_use(instance, region, job.options, job.aws)
    if use is None:
        service = SERVICES[job.options.service]
        return Finding(
            Result.NOT_CHECKED,
            f"{service} publishes no quota for {job.options.purchase} {job.name_of(instance)} in {region}",
            f"look for it under Service Quotas, Amazon {service}, in {region}; the type may not be there",
        )
    if use.fits is False:
        raise use.refusal
    return str(use) if use.fits else Finding(Result.NOT_CHECKED, str(use), f"look at it: {use.page}")


def _spot_price(job: CheckContext, instance: InstanceType, region: str) -> str | Finding:
    newest = job.aws.spot_price_usd(region, instance.name, None)
    if newest is None:
        return Finding(Result.NOT_CHECKED, f"EC2 tells no spot price of {instance.name} in {region}")
    usd, zone = newest
    message = f"${usd:g}/h in {zone}, the cheapest zone now"
    limit = job.options.max_price_usd
    if limit is not None and usd > limit:
        return Finding(
            Result.WARNING,
            f"{message}, above --max-price {limit:g}: EC2 would not start it",
            f"give --max-price {usd * 1.2:.2f}, or wait",
        )
    return message


def _groups(job: CheckContext, region: str) -> str:
    groups = job.region_settings(region).security_groups
    vpcs = group_vpcs(job.aws, region, groups)
    if not groups:
        return "none is named: the VPC's default group, which lets everything out unless somebody changed it"
    return f"{', '.join(groups)} of {', '.join(sorted(set(vpcs.values())))}"


def _no_subnet(job: CheckContext, region: str) -> str | Finding:
    write = f"write `subnets: {{{region}a: subnet-...}}` under `aws: {region}:` in the config file"
    if job.has_several_interfaces:
        raise BadConfiguration(
            "no subnet is named, and machines with several network interfaces get no public address",
            f"{write}, of subnets with a NAT or endpoints for S3 and ECR",
        )
    groups = job.region_settings(region).security_groups
    vpcs = group_vpcs(job.aws, region, groups)
    default = check_default_vpc(job.aws, region, vpcs)
    where = f"the default VPC, {default}," if default else "the default VPC, if there is one,"
    return Finding(
        Result.WARNING,
        f"none is named: EC2 takes one of {where} in a zone of its choice",
        f"for the next zone to be tried, {write}",
    )


def _subnet(job: CheckContext, region: str, zone: str | None) -> str | Finding:
    here = job.region_settings(region)
    if zone is None:
        return _no_subnet(job, region)
    subnet = find_subnet(job.aws, region, here.subnets[zone], tuple(here.subnets.values()))
    vpcs = group_vpcs(job.aws, region, here.security_groups)
    check_subnet(subnet, region=region, zone=zone, group_vpcs=vpcs)
    return network_exit(region, subnet, job.aws, several_interfaces=job.has_several_interfaces)


def _between_nodes(job: CheckContext, region: str) -> str | Finding:
    groups = job.region_settings(region).security_groups
    if job.has_several_interfaces:
        check_open_groups(job.aws, region, groups)
        return f"{', '.join(groups)} lets nodes reach each other by EFA"
    if not groups:
        return "none is named: the VPC's default group lets its own machines reach each other"
    rules = job.aws.group_rules(region, groups)
    if any(rule.lets_in & rules.keys() for rule in rules.values()):
        return f"{', '.join(groups)} lets nodes reach each other"
    return Finding(
        Result.WARNING,
        f"{', '.join(groups)} has no rule that lets in all traffic from itself: nodes may not reach each "
        "other",
        f"aws ec2 authorize-security-group-ingress --region {region} --group-id {groups[0]} --protocol -1 "
        f"--source-group {groups[0]}",
    )


def _placement_group(job: CheckContext, region: str, zone: str) -> str | Finding:
    name = job.region_settings(region).placement_groups.get(zone)
    if name is None:
        made = f"fastlaunch-{zone}"
        return Finding(
            Result.WARNING,
            f"none is named for {zone}: the nodes may stand far apart, and all-reduce then takes longer",
            f"{placement_group_command(region, made)}, and write `placement_groups: {{{zone}: {made}}}` "
            f"under `aws: {region}:` in the config file",
        )
    check_placement_group(job.aws, region, name)
    return f"{name} keeps nodes close together"


def _training_network(job: CheckContext, region: str) -> str:
    here = job.region_settings(region)
    by_efa = any(has_several_interfaces(instance, job.options.num_nodes) for instance in job.instances)
    check_training_network(job.aws, region, here, by_efa=by_efa)
    return f"{', '.join(here.sagemaker_subnets)} with {', '.join(here.sagemaker_security_groups)}"


def _price_file(job: CheckContext) -> str | Finding:
    service = job.options.service
    newest = max(price.as_of for price in job.lookup.catalogue.prices if price.service == service)
    return _dated(job, f"the newest price is of {newest}", newest)


def _price(job: CheckContext, instance: InstanceType, region: str) -> str | Finding:
    if job.options.reservation is not None:
        if (fee_usd := job.options.block_fee_usd) is not None:
            return f"${fee_usd:,.2f} paid up front"
        usd_per_hour = block_usd_per_hour(instance, region, job.lookup.catalogue, job.lookup.today)
        return f"${usd_per_hour:g}/h paid up front"
    rate = dearest_rate(
        instance,
        region,
        purchase=job.options.purchase,
        max_price_usd=job.options.max_price_usd,
        catalogue=job.lookup.catalogue,
        today=job.lookup.today,
        service=job.options.service,
    )
    message = f"at most ${rate.usd_per_hour:g}/h, as of {rate.as_of}"
    return _dated(job, message, rate.as_of)


def _dated(job: CheckContext, message: str, as_of: datetime.date) -> str | Finding:
    age_days = (job.lookup.today - as_of).days
    if age_days <= OLD_PRICE_DAYS:
        return message
    return Finding(
        Result.WARNING,
        f"{message}, {age_days} days ago",
        f"ask AWS for today's: {UPDATE_COMMAND}",
    )


def _is_spot(options: Options) -> bool:
    return options.purchase == "spot"


def _in_block(options: Options) -> bool:
    return options.purchase == "capacity-block"


def _has_nodes(options: Options) -> bool:
    return options.num_nodes > 1


def _takes_group(options: Options) -> bool:
    # A block's instances stand together by themselves.
    return _has_nodes(options) and not _in_block(options)


def _takes_quota(options: Options) -> bool:
    # A block's or a training plan's instances were granted when it was bought.
    return not _in_block(options) and not options.training_plan


_EC2, _SAGEMAKER = ("ec2",), ("sagemaker",)
#: All of them, in the order in which a job needs them in a region. A new one is a line here.
_IN_REGION = (
    _Listed(name="config", call=_config, subjects=_once, asks_aws=False),
    _Listed(name="region", call=_region, subjects=_once, needed=False),
    _Listed(name="price", call=_price, subjects=_each_type, asks_aws=False),
    _Listed(name="machine image", call=_machine_image, subjects=_once, on=_EC2),
    _Listed(name="container image", call=_container, subjects=_once),
    _Listed(name="instance profile", call=_profile, subjects=_once, on=_EC2),
    _Listed(name="role", call=_role, subjects=_once, on=_SAGEMAKER),
    _Listed(
        name="scheduler role",
        call=_scheduler_role,
        subjects=_once,
        on=_EC2,
        when=lambda options: options.account_timer,
    ),
    _Listed(name="bucket", call=_bucket, subjects=_once),
    _Listed(name="stored code", call=_stored_code, subjects=_each_stored_object, needed=False),
    _Listed(name="input", call=_input, subjects=_each_input, needed=False),
    _Listed(name="network", call=_training_network, subjects=_each_training_network, on=_SAGEMAKER),
    _Listed(name="security group", call=_groups, subjects=_once, on=_EC2),
    _Listed(name="subnet", call=_subnet, subjects=_each_subnet, on=_EC2),
    _Listed(
        name="between nodes", call=_between_nodes, subjects=_once, on=_EC2, when=_has_nodes, needed=False
    ),
    _Listed(
        name="placement group",
        call=_placement_group,
        subjects=_each_zone,
        on=_EC2,
        when=_takes_group,
        needed=False,
    ),
    _Listed(name="offered", call=_offered, subjects=_each_type, on=_EC2),
    _Listed(name="capacity block", call=_block, subjects=_each_type, when=_in_block),
    _Listed(name="quota", call=_quota, subjects=_each_type, when=_takes_quota, needed=False),
    _Listed(
        name="spot price",
        call=_spot_price,
        subjects=_each_type,
        on=_EC2,
        when=lambda options: options.purchase == "spot",
        needed=False,
    ),
)
