"""What can be known before money is spent: whether AWS would let a job start, and what it would cost.

`doctor` shows every check; `submit` goes on where none failed. A check that is not permitted, and asks for
nothing that the job itself needs, says so and holds up nothing.
"""

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastlaunch.aws.account import Permission
from fastlaunch.aws.batch import TRAINING, Sharing
from fastlaunch.backends.node_agent import agent_archive, agent_object, agent_sha256
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import OLD_PRICE_DAYS, UPDATE_COMMAND, dearest_rate
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.core.units import utc_minute
from fastlaunch.jobs.option_rules import given_inputs
from fastlaunch.jobs.options import SERVICES
from fastlaunch.placement.capacity_block import block_usd_per_hour, minutes_left, starts_at
from fastlaunch.placement.check import Check, CheckContext, Finding, Result, nowhere
from fastlaunch.placement.lookup import setup_command
from fastlaunch.placement.network import (
    between_nodes,
    placement_group,
    security_groups,
    subnet,
    training_network,
)
from fastlaunch.placement.quota_checks import quota_use

#: Written to see whether the bucket can be; always the same, so that it never grows in number.
DOCTOR_KEY = "runs/written-by-doctor"
#: Services that roles trust, as they and as the user know them.
_EC2, _SAGEMAKER, _SCHEDULER = "ec2.amazonaws.com", "sagemaker.amazonaws.com", "scheduler.amazonaws.com"
_SERVICE_NAMES = {_EC2: "EC2", _SAGEMAKER: "SageMaker", _SCHEDULER: "EventBridge Scheduler"}

#: What a check is about (`instance`, `zone`), and what to call it with besides the job.
_Subject = tuple[Mapping[str, str], tuple[Any, ...]]


@dataclass(frozen=True)
class _Listed:
    """One of the checks: its name, what it asks, and the jobs and subjects that it runs for."""

    name: str
    #: Called with the job and the arguments that `subjects` yields. A returned text means that all is well.
    call: Callable[..., str | Finding]
    #: Yields what the check is about, in the job's region.
    subjects: Callable[[CheckContext], Iterable[_Subject]] = lambda job: [({}, ())]
    #: Returns whether the check is for the job.
    when: Callable[[CheckContext], bool] = lambda job: True
    #: Whether it asks AWS. Other checks run without a login, too.
    asks_aws: bool = True
    #: Whether a job needs what the check looks at: then the check fails where it may not look.
    needed: bool = True


def checks(job: CheckContext) -> list[Check]:
    """Run every check, in the order in which a job needs it. Raises nothing that AWS or the config says."""
    login = _run(_Listed("login", _login), job)
    results = [login, _run(_Listed("price file", _price_file), job)]
    for region in job.options.regions:
        there = replace(job, region=region)
        obstacle = None if login.error is None else "not asked, for want of a login"
        for listed in _IN_REGION:
            for about, arguments in listed.subjects(there) if listed.when(there) else ():
                why_not = obstacle if listed.asks_aws else None
                check = _run(listed, there, *arguments, obstacle=why_not, region=region, **about)
                results.append(check)
                if listed.call is _region and check.error:
                    obstacle = f"{region} cannot be used"
    return results


def _run(
    listed: _Listed, job: CheckContext, *arguments: Any, obstacle: str | None = None, **about: Any
) -> Check:
    """Run a check, unless there is an obstacle; return what it says, or the error that it raises."""
    error: UserError | None = None
    try:
        answer = Finding(Result.NOT_CHECKED, obstacle) if obstacle else listed.call(job, *arguments)
        finding = answer if isinstance(answer, Finding) else Finding(Result.OK, answer)
    except UserError as refusal:
        if isinstance(refusal, NotAuthorised | Throttled | Unreachable) and not listed.needed:
            finding = Finding(Result.NOT_CHECKED, refusal.message, refusal.hint)
        else:
            finding, error = Finding(Result.FAILED, refusal.message, refusal.hint), refusal
    return Check(**vars(finding), name=listed.name, error=error, **about)


# What a check is about


def _each_type(job: CheckContext) -> Iterator[_Subject]:
    for instance in job.instances:
        yield {"instance": job.name_of(instance)}, (instance,)


def _each_zone(job: CheckContext) -> list[_Subject]:
    return [({"zone": zone}, (zone,)) for zone in job.here.subnets]


def _each_stored_object(job: CheckContext) -> Iterator[_Subject]:
    """Yield the objects that the machines fetch and that are the same for many jobs."""
    bucket, prefix = job.here.bucket, job.here.prefix
    if bucket is None:
        return
    objects = {agent_object(bucket, prefix, agent_sha256()).key: agent_archive()}
    for bundle in job.bundles:
        objects[bundle.stored(prefix).key] = bundle.data
    for key, data in objects.items():
        yield {}, (bucket, key, data)


# The checks


def _login(job: CheckContext) -> str:
    identity = job.aws.identity()
    return f"{identity.arn} (account {identity.account})"


def _config(job: CheckContext) -> str:
    """Return what the config file names for the region. Raises UserError if a job's needs are missing."""
    region, here = job.region, job.here
    problems: list[UserError] = []
    for name in ("bucket", "role" if job.trains else "instance_profile"):
        try:
            job.lookup.setting(region, name)
        except UserError as error:
            problems.append(error)
    if len(problems) > 1:
        what, entry = ("role", "role: ARN") if job.trains else ("instance profile", "instance_profile: NAME")
        raise UserError(
            f"neither bucket nor {what} is named for {region}",
            f"this makes and writes all that is needed: {setup_command(region)}; or by hand, as `fastlaunch "
            f"doctor --setup` says: `bucket: NAME` and `{entry}` under `aws: {region}:` in the config file",
        )
    if problems:
        raise problems[0]
    if job.trains:
        return f"bucket {here.bucket}, role {here.role}"
    zones = f"subnets in {', '.join(here.subnets)}" if here.subnets else "no subnets"
    return f"bucket {here.bucket}, instance profile {here.instance_profile}, {zones}"


def _region(job: CheckContext) -> str:
    known = job.aws.regions()
    if job.region not in known:
        raise BadConfiguration(
            f"{job.region} does not exist, or is not switched on for this account",
            f"switch it on under Account, AWS Regions in the console, or use one of {', '.join(known)}",
        )
    return f"{job.region} is switched on for this account"


def _container(job: CheckContext) -> str | Finding:
    """Find the container image that a job there would start from."""
    if image := job.options.image:
        if job.lookup.is_image_visible(image, job.region):
            return f"{image.rpartition('@')[0]} has {image.rpartition('@')[2][:19]}..."
        return Finding(
            Result.NOT_CHECKED,
            f"{image} may not be looked at from here: the machine's role has to pull it",
            "see that the role may: `fastlaunch doctor --setup`, ImagePull",
        )
    assert job.lookup.base is not None
    uri = job.lookup.base_image(job.region)
    message = f"{job.lookup.base.name} is {uri.rpartition('@')[2][:19]}... now"
    doubts = job.lookup.base.doubts(job.lookup.today)
    return Finding(Result.WARNING, "; ".join([message, *doubts])) if doubts else message


def _bucket(job: CheckContext) -> str | Finding:
    """Check that the bucket is there, and can be written."""
    name, prefix = job.here.bucket, job.here.prefix
    if name is None:
        return Finding(Result.NOT_CHECKED, "none is named")
    _check_bucket(job, name)
    key = "/".join(filter(None, (prefix, DOCTOR_KEY)))
    job.aws.put_object(job.region, name, key, b"written by fastlaunch doctor\n")
    return f"s3://{name}/{prefix} can be written"


def _check_bucket(job: CheckContext, bucket: str) -> None:
    """Raise BadConfiguration if the bucket is known not to exist, or to be in another region.

    HeadBucket needs s3:ListBucket on all of the bucket. Without that right, writing to it says more.
    """
    try:
        exists = job.aws.bucket_exists(job.region, bucket)
    except NotAuthorised:
        return
    if not exists:
        raise BadConfiguration(
            f"there is no bucket {bucket}", f"create it: aws s3 mb s3://{bucket} --region {job.region}"
        )


def _stored_code(job: CheckContext, bucket: str, key: str, data: bytes) -> str:
    """Check that nothing else lies at the object's address. Raises BadConfiguration if something does."""
    if job.aws.is_stored(job.region, bucket, key, data):
        return f"s3://{bucket}/{key} is what belongs there"
    return f"s3://{bucket}/{key} is not there yet: submit uploads it"


def _input(job: CheckContext, uri: str) -> str:
    """Check that objects lie there. The job's role may read what may not be looked at from here."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    if not job.aws.has_objects(job.region, bucket, prefix):
        raise BadConfiguration(f"nothing lies under {uri}", "name a folder with objects in it, not a file")
    if job.trains:
        # SageMaker reads no other region's.
        _check_bucket(job, bucket)
    role = "SageMaker's execution role" if job.trains else "the machine's role"
    return f"{uri} holds objects; {role} has to be allowed to read them"


def _machine_image(job: CheckContext) -> str:
    image = job.lookup.machine_image(job.region)
    return f"{image.id}, root device {image.root_device} of {image.root_gib} GiB"


def _profile(job: CheckContext) -> str | Finding:
    profile = job.here.instance_profile
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
    return _passed(job, role, _EC2)


def _role(job: CheckContext) -> str | Finding:
    arn = job.here.role
    if arn is None:
        return Finding(Result.NOT_CHECKED, "none is named", setup_command(job.region))
    _check_role(job, arn, _SAGEMAKER)
    return _passed(job, arn, _SAGEMAKER)


def _queue(job: CheckContext) -> str | Finding:
    """Check the queue of AWS Batch. Raises BadConfiguration if it would not take the job."""
    name, share = job.options.queue, job.options.share
    assert name is not None
    queue = job.aws.job_queue(job.region, name)
    if queue is None:
        raise BadConfiguration(
            f"there is no queue {name} in {job.region}",
            "`aws batch describe-job-queues` lists yours; this makes one: "
            f"{setup_command(job.region)} --queue {name}",
        )
    if queue.kind != TRAINING:
        raise BadConfiguration(
            f"queue {name} in {job.region} is for {queue.kind} jobs, not for training jobs",
            f"name one of the type {TRAINING}; this makes one: {setup_command(job.region)} --queue NAME",
        )
    if not queue.is_enabled or queue.status != "VALID":
        state = queue.status if queue.is_enabled else "DISABLED"
        raise BadConfiguration(
            f"queue {name} in {job.region} takes no jobs: it is {state}",
            f"aws batch update-job-queue --region {job.region} --job-queue {name} --state ENABLED",
        )
    if queue.sharing is Sharing.QUOTA:
        raise BadConfiguration(
            f"queue {name} in {job.region} has a quota-share policy, which fastlaunch does not know",
            "name a queue with a fair-share policy, or without one",
        )
    if share is not None and queue.sharing is None:
        raise BadConfiguration(
            f"queue {name} in {job.region} has no fair-share policy, and so no shares", "leave out --share"
        )
    if share is None and queue.sharing is Sharing.FAIR:
        raise BadConfiguration(
            f"queue {name} in {job.region} shares its capacity, and has to know whose share a job takes",
            "add --share TEAM",
        )
    if queue.sharing is None and job.options.priority is not None:
        return Finding(
            Result.WARNING,
            f"queue {name} in {job.region} has no fair-share policy: AWS Batch may start its jobs in the "
            "order in which they came, whatever their --priority",
        )
    return f"{name} takes training jobs" + (f", from share {share}" if share else "")


def _scheduler_role(job: CheckContext) -> str | Finding:
    """Check the role of the timer in the account. It is only a warning if it may not be passed."""
    arn = job.here.scheduler_role
    alone = "without it only the machines' own timers end what is forgotten"
    if arn is None:
        raise UserError(
            f"no scheduler role is named: {alone}",
            f"write `scheduler_role: ARN` under `aws: {job.region}:` in the config file; this makes one: "
            f"{setup_command(job.region)}; or go without it: --no-account-timer",
        )
    _check_role(job, arn, _SCHEDULER)
    # What waits for its block is not started without it.
    starts = _is_started_later(job)
    try:
        passed = _passed(job, arn, _SCHEDULER)
    except CloudRefused as error:
        if starts:
            raise
        return Finding(Result.WARNING, f"{error.message}: {alone}", error.hint)
    # The one right to start machines that depends on no tag.
    right = (f"arn:PARTITION:ec2:{job.region}::image/ami-0", ("ec2:RunInstances",))
    if starts and (missing := _missing_rights(job, arn, (right,))):
        raise NotAuthorised(
            f"{arn} may not start machines when the block begins: its policies do not give "
            f"{' nor '.join(missing)}",
            f"this adds that to the role: {setup_command(job.region)}; or leave out --detach, and wait here",
        )
    return passed


def _is_started_later(job: CheckContext) -> bool:
    """Return whether a schedule starts the job, since its block is to come and nobody waits for it."""
    if not (_has_block(job) and job.options.detach):
        return False
    (instance,) = job.instances
    try:
        block = job.lookup.reservation(job.options, instance, job.region)
    except UserError:
        # The check of the block says it.
        return False
    return starts_at(block, job.lookup.now) is not None


def _check_role(job: CheckContext, arn: str, service: str) -> None:
    """Raise BadConfiguration if the role is seen not to exist, or not to trust the service."""
    try:
        role = job.aws.role(job.region, arn)
    except NotAuthorised:
        return
    if role is None:
        raise BadConfiguration(
            f"there is no role {arn}",
            f"`aws iam list-roles` names yours; this makes one: {setup_command(job.region)}",
        )
    if service not in role.trusts:
        raise BadConfiguration(
            f"{arn} does not let {_SERVICE_NAMES[service]} take it on",
            f"its trust policy has to name the service {service}: `fastlaunch iam print` has one that does",
        )


def _passed(job: CheckContext, role: str, service: str) -> str | Finding:
    """Check that you may pass the role to the service, and that jobs with it may upload.

    Raises NotAuthorised if you may not.
    """
    try:
        may_pass = job.aws.may_pass(role, service)
    except NotAuthorised as error:
        return Finding(Result.NOT_CHECKED, f"whether {role} may be passed: {error.message}", error.hint)
    if not may_pass:
        raise NotAuthorised(
            f"you may not pass {role} to {_SERVICE_NAMES[service]}: iam:PassRole is not allowed",
            "`fastlaunch iam print` has the policy that lets you pass it",
        )
    message = f"{role} may be passed to {_SERVICE_NAMES[service]}"
    missing = [] if service == _SCHEDULER else _missing_rights(job, role, _rights_of_a_job(job))
    if not missing:
        return message
    return Finding(
        Result.WARNING,
        f"{message}; its own policies do not give {' nor '.join(missing)}",
        "`fastlaunch iam print` has the role's policy; what a job cannot upload is lost",
    )


def _rights_of_a_job(job: CheckContext) -> tuple[Permission, ...]:
    rights: tuple[Permission, ...] = (("*", ("ecr:GetAuthorizationToken",)),)
    if job.here.bucket is not None:
        key = "/".join(filter(None, (job.here.bucket, job.here.prefix, "runs/RUN/boot.json")))
        rights += ((f"arn:PARTITION:s3:::{key}", ("s3:GetObject", "s3:PutObject")),)
    return rights


def _missing_rights(job: CheckContext, role: str, rights: tuple[Permission, ...]) -> list[str]:
    """Return the rights that the role's policies do not give; none where IAM does not tell.

    The policy of a bucket or a registry may still give such a right: we do not see those.
    """
    try:
        return job.aws.role_lacks(role, rights)
    except CloudRefused:
        return []


def _offered(job: CheckContext, instance: InstanceType) -> str | Finding:
    """Check in which of the region's zones the type is: sites in other zones are left out."""
    name, region = instance.name, job.region
    zones = job.aws.zones_offering(region, name)
    if not zones:
        raise NoCapacity(f"{region} has no {name}", "allow another region or instance type")
    hint = f"name a subnet in {' or '.join(zones)}: `aws.{region}.subnets` in the config file"
    subnets = job.here.subnets
    lacking = {zone: NoCapacity(f"{zone} has no {name}", hint) for zone in subnets if zone not in zones}
    if lacking and len(lacking) == len(subnets):
        raise nowhere([(f"{name} in {zone}", error) for zone, error in lacking.items()])
    message = f"{name} is in {', '.join(zones)}"
    if lacking:
        message = f"{message}; {', '.join(lacking)} will be left out"
        return Finding(Result.WARNING, message, errors_by_zone=lacking)
    return message


def _block(job: CheckContext, instance: InstanceType) -> str | Finding:
    block = job.lookup.reservation(job.options, instance, job.region)
    left = minutes_left(block, job.lookup.now)
    if begins_at := starts_at(block, job.lookup.now):
        message = (
            f"{block.id} in {block.zone} is {block.state}: {block.num_instances} instances from "
            f"{utc_minute(begins_at)} on, for {left // 60} h"
        )
        if block.state != "scheduled":
            return Finding(Result.WARNING, message, "what AWS does not get paid for, or assign, never begins")
        return message
    return (
        f"{block.id} in {block.zone}: {block.num_free} of {block.num_instances} instances free, "
        f"{left // 60} h {left % 60} min left"
    )


def _training_plan(job: CheckContext) -> str | Finding:
    """Check that the plan takes the job, now or when it begins: until then SageMaker itself queues it."""
    assert job.options.training_plan is not None
    plan = job.aws.training_plan(job.region, job.options.training_plan)
    if plan is None or plan.status not in ("Pending", "Scheduled", "Active"):
        raise BadConfiguration(
            f"there is no training plan {job.options.training_plan} in {job.region}"
            if plan is None
            else f"training plan {plan.name} is {plan.status.lower()}",
            f"`aws sagemaker list-training-plans --region {job.region}` lists yours",
        )
    message = f"{plan.name}: {plan.num_free} of {plan.num_instances} instances free"
    begins_at = job.lookup.now
    if plan.status != "Active" and plan.starts_at:
        begins_at = plan.starts_at
        message = (
            f"{plan.name} is {plan.status.lower()}, and begins at {utc_minute(begins_at)}: SageMaker queues "
            "the job until then, without anything running here"
        )
    if plan.ends_at and plan.ends_at - begins_at < datetime.timedelta(minutes=job.options.max_minutes):
        return Finding(
            Result.WARNING,
            f"{message}; it ends at {utc_minute(plan.ends_at)}, before --max-hours is over",
            "what the job has not saved by then is lost: give --checkpoint-every, or a lower --max-hours",
        )
    if plan.status == "Pending":
        return Finding(Result.WARNING, message, "what AWS does not get paid for never begins")
    return message


def _quota(job: CheckContext, instance: InstanceType) -> str | Finding:
    region = job.region
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


def _spot_price(job: CheckContext, instance: InstanceType) -> str | Finding:
    newest = job.aws.spot_price_usd(job.region, instance.name, None)
    if newest is None:
        return Finding(Result.NOT_CHECKED, f"EC2 tells no spot price of {instance.name} in {job.region}")
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


def _price_file(job: CheckContext) -> str | Finding:
    service = job.options.service
    newest = max(price.as_of for price in job.lookup.catalogue.prices if price.service == service)
    return _dated(job, f"the newest price is of {newest}", newest)


def _price(job: CheckContext, instance: InstanceType) -> str | Finding:
    if job.options.reservation is not None:
        if (fee_usd := job.options.block_fee_usd) is not None:
            return f"${fee_usd:,.2f} paid up front"
        usd_per_hour = block_usd_per_hour(instance, job.region, job.lookup.catalogue, job.lookup.today)
        return f"${usd_per_hour:g}/h paid up front"
    rate = dearest_rate(
        instance,
        job.region,
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
        Result.WARNING, f"{message}, {age_days} days ago", f"ask AWS for today's: {UPDATE_COMMAND}"
    )


def _is_on_ec2(job: CheckContext) -> bool:
    return not job.trains


def _has_block(job: CheckContext) -> bool:
    return job.options.purchase == "capacity-block"


def _has_nodes_on_ec2(job: CheckContext) -> bool:
    return not job.trains and job.options.num_nodes > 1


#: All of them, in the order in which a job needs them in a region. A new one is a line here.
_IN_REGION = (
    _Listed("config", _config, asks_aws=False),
    _Listed("region", _region, needed=False),
    _Listed("price", _price, _each_type, asks_aws=False),
    _Listed("machine image", _machine_image, when=_is_on_ec2),
    _Listed("container image", _container),
    _Listed("instance profile", _profile, when=_is_on_ec2),
    _Listed("role", _role, when=lambda job: job.trains),
    _Listed("queue", _queue, when=lambda job: job.options.queue is not None),
    _Listed(
        "scheduler role",
        _scheduler_role,
        when=lambda job: _is_on_ec2(job) and (job.options.account_timer or _is_started_later(job)),
    ),
    _Listed("bucket", _bucket),
    _Listed("stored code", _stored_code, _each_stored_object, needed=False),
    _Listed(
        "input",
        _input,
        lambda job: [({}, (uri,)) for uri in given_inputs(job.options).values()],
        needed=False,
    ),
    _Listed("network", training_network, when=lambda job: job.trains and bool(job.here.sagemaker_subnets)),
    _Listed("security group", security_groups, when=_is_on_ec2),
    _Listed("subnet", subnet, lambda job: _each_zone(job) or [({}, (None,))], when=_is_on_ec2),
    _Listed("between nodes", between_nodes, when=_has_nodes_on_ec2, needed=False),
    # A block's instances stand together by themselves.
    _Listed(
        "placement group",
        placement_group,
        _each_zone,
        when=lambda job: _has_nodes_on_ec2(job) and not _has_block(job),
        needed=False,
    ),
    _Listed("offered", _offered, _each_type, when=_is_on_ec2),
    _Listed("capacity block", _block, _each_type, when=_has_block),
    _Listed("training plan", _training_plan, when=lambda job: bool(job.options.training_plan), needed=False),
    # A block's or a training plan's instances were granted when it was bought.
    _Listed(
        "quota",
        _quota,
        _each_type,
        when=lambda job: not (_has_block(job) or job.options.training_plan),
        needed=False,
    ),
    _Listed(
        "spot price",
        _spot_price,
        _each_type,
        when=lambda job: _is_on_ec2(job) and job.options.purchase == "spot",
        needed=False,
    ),
)
