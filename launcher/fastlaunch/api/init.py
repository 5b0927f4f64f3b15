"""`init`: prepare an account for jobs in a region with a stack, and write the config file."""

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastlaunch.aws.cloudformation import Stack, StackChange
from fastlaunch.aws.config_text import ConfigChange, config_change, stack_entries
from fastlaunch.aws.policies import template, template_text
from fastlaunch.aws.types import Identity, Vpc
from fastlaunch.catalog.container_images import registry
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import BadConfiguration, BadFile, CloudRefused, NotAuthorised, UserError
from fastlaunch.core.home import replace_file
from fastlaunch.core.paths import read_text
from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER, Settings, config_path, load_settings
from fastlaunch.core.units import counted, is_region, parse_usd
from fastlaunch.jobs.image_build import DEFAULT_REPOSITORY
from fastlaunch.jobs.option_rules import QUEUE
from fastlaunch.lifecycle.world import World
from fastlaunch.placement.network import (
    only_vpc,
    several_vpcs,
    subnets_by_zone,
    tables_without_gateway,
    vpc_lines,
)

T = TypeVar("T")
#: Asks a question on the terminal, with a default answer.
Prompt = Callable[[str, str | None], str]
#: The default budget.
DEFAULT_BUDGET_USD = 25.0
#: docs.aws.amazon.com/AmazonS3, "Bucket naming rules"; a dot breaks TLS.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_STACK = re.compile(r"[a-zA-Z][-a-zA-Z0-9]{0,127}")
_DENIED = re.compile(r"Denied|Unauthorized|NotAuthorized|^403$")


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The options as typed; None if `init` asks for or chooses the value."""

    region: str | None = None
    bucket: str | None = None
    vpc: str | None = None
    # Ids.
    subnets: tuple[str, ...] = ()
    budget_usd: float | None = None
    stack_name: str = "fastlaunch"
    # Name of a queue of AWS Batch to make, and how many instances its jobs may use at once.
    queue: str | None = None
    queue_instances: int | None = None
    # Whether the stack takes over the account's existing bucket and repository.
    import_existing: bool = False
    # Whether to update an existing stack to this version's template.
    update: bool = False
    yes: bool = False


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The result of `init`."""

    region: str
    stack: Stack
    config: Path


def init(context: World, options: InitOptions, *, prompt: Prompt | None = None) -> Ready:
    """Create the stack and write the config file, asking before each, unless they exist.

    prompt: None without a terminal; values without a safe default then raise UserError.
    """
    if not _STACK.fullmatch(options.stack_name):
        raise UserError(f"{options.stack_name!r} is not a valid stack name", "give letters, digits and -")
    if options.queue is not None and not QUEUE.fullmatch(options.queue):
        raise UserError(f"{options.queue!r} is not a valid queue name", "give letters, digits, - and _")
    with activity("asking AWS who you are"):
        identity = context.aws.identity()
    context.report(f"account {identity.account}, as {identity.arn}")
    if options.region is None and prompt is not None:
        region = _answer(context, prompt, "region", context.own_region(), _checked_region)
    else:
        region = _checked_region(options.region or context.own_region())
    return _Init(context, options, prompt, identity, region).run()


def names_of_region(settings: Settings, region: str) -> dict[str, Any]:
    """Return the names for template and policies from a region's part of the config file."""
    here = settings.region_settings(region)
    return {
        "prefix": here.prefix or "fastlaunch",
        "repository": here.repository or DEFAULT_REPOSITORY,
        "registry": registry(region).account,
        "kms_keys": tuple(filter(None, (here.volume_kms_key, here.output_kms_key))),
        "ami_parameter": None if here.ami_parameter == DEFAULT_AMI_PARAMETER else here.ami_parameter,
    }


def _checked_region(region: str) -> str:
    if not is_region(region):
        raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    return region


def _answer(
    context: World, prompt: Prompt, question: str, default: str | None, check: Callable[[str], T]
) -> T:
    """Ask until the answer passes the check, and return it."""
    while True:
        try:
            return check(prompt(question, default))
        except UserError as error:
            context.report(f"{error.message}: {error.hint}")


@dataclass(frozen=True)
class _Init:
    """A call of `init` once the region is known."""

    context: World
    options: InitOptions
    prompt: Prompt | None
    identity: Identity
    region: str

    def run(self) -> Ready:
        budget_usd = self._budget_usd()
        with _explained(self.identity, self.region):
            with activity(f"looking at stack {self.options.stack_name}") as shown:
                aws = self.context.aws
                stack = aws.settled_stack(self.region, self.options.stack_name, shown.update)
            if stack is None or stack.is_empty:
                stack, subnets = self._create()
            else:
                subnets = self._check_stack(stack)
                stack = self._compare(stack, subnets)
        entries = {**stack_entries(stack.outputs.get("ConfigFile", ""), self.region), "subnets": subnets}
        return Ready(region=self.region, stack=stack, config=self._write_config(entries, budget_usd))

    # A new stack

    def _create(self) -> tuple[Stack, Mapping[str, str]]:
        """Return the new stack, and the subnets by zone."""
        aws, region, name = self.context.aws, self.region, self.options.stack_name
        vpc = self._vpc(aws.vpcs(region))
        tables = aws.route_tables(region, vpc)
        subnets = subnets_by_zone(aws.subnets_of(region, vpc), tables, vpc=vpc, given=self.options.subnets)
        served = aws.s3_gateway_tables(region, vpc)
        route_tables = tables_without_gateway(subnets.values(), tables, served)
        bucket = self._bucket()
        if present := self.context.settings.region_settings(region).bucket:
            self.context.report(f"the config file names a bucket for {region} already: {present}")
        import_existing = self._import_existing(bucket)
        self.context.check_can_ask(yes=self.options.yes)
        with ExitStack() as unless_agreed:
            parameters = {"BucketName": bucket, "Vpc": vpc, "RouteTables": ",".join(route_tables)}
            parameters |= self._queue_parameters()
            change_set, changes = self._propose(
                unless_agreed, list(subnets), parameters, is_new=True, import_existing=import_existing
            )
            self.context.report(f"stack {name} in {region}, with bucket {bucket}, in {vpc}:")
            self._confirm(changes, f"Make stack {name}?")
            unless_agreed.pop_all()
        stack = self._execute(change_set)
        return stack, {zone: subnet.id for zone, subnet in subnets.items()}

    def _vpc(self, vpcs: Sequence[Vpc]) -> str:
        chosen = only_vpc(vpcs, region=self.region, given=self.options.vpc)
        if self.prompt and len(vpcs) > 1 and self.options.vpc is None:
            self.context.report(f"VPCs of {self.region}:\n{vpc_lines(vpcs)}")
            answer = self.prompt("VPC in which machines run", chosen.id if chosen else None)
            chosen = only_vpc(vpcs, region=self.region, given=answer)
        if chosen is None:
            raise several_vpcs(vpcs, self.region)
        return chosen.id

    def _bucket(self) -> str:
        if self.options.bucket is not None:
            return _checked_bucket(self.options.bucket)
        default = f"fastlaunch-{self.identity.account}-{self.region}"
        if self.prompt is None:
            return default
        return _answer(self.context, self.prompt, "bucket to make", default, _checked_bucket)

    def _import_existing(self, bucket: str) -> bool:
        """Return whether the stack takes over existing resources with its names. Raises UserError if not."""
        aws, region = self.context.aws, self.region
        is_own = aws.is_bucket_of(region, bucket, self.identity.account)
        if is_own is False:
            raise UserError(
                f"another account has the bucket {bucket}, or you may not look at it",
                "give another name, --bucket NAME, or ask for the right s3:ListBucket on it",
            )
        repository = self.context.settings.region_settings(region).repository or DEFAULT_REPOSITORY
        existing = [f"bucket {bucket}"] if is_own else []
        existing += [f"repository {repository}"] if aws.repository_exists(region, repository) else []
        if not existing or self.options.import_existing:
            return bool(existing)
        there = f"this account has {' and '.join(existing)} already, of no stack {self.options.stack_name}"
        ask = self.context.ask
        if not self.options.yes and ask is not None and ask(f"{there}. Let the stack take over?"):
            return True
        another = ", or name another: --bucket NAME" if is_own and len(existing) == 1 else ""
        raise UserError(there, f"let the stack take over: --import-existing{another}")

    # An existing stack

    def _check_stack(self, stack: Stack) -> Mapping[str, str]:
        """Return the subnets by zone. Raises UserError if the stack is unusable or not as typed."""
        region, name = self.region, stack.name
        if not stack.is_usable:
            raise _unusable(stack)
        entries = stack_entries(stack.outputs.get("ConfigFile", ""), region)
        vpc = stack.parameters.get("Vpc", "")
        for option, given, present in (
            ("--bucket", self.options.bucket, entries.get("bucket")),
            ("--vpc", self.options.vpc, vpc),
        ):
            if given is not None and given != present:
                raise UserError(
                    f"stack {name} in {region} has {present}, not {given}",
                    f"leave out {option}, or make another stack: --stack-name NAME",
                )
        configured = self.context.settings.region_settings(region).subnets
        if configured and not self.options.subnets:
            return configured
        aws = self.context.aws
        subnets = subnets_by_zone(
            aws.subnets_of(region, vpc), aws.route_tables(region, vpc), vpc=vpc, given=self.options.subnets
        )
        return {zone: subnet.id for zone, subnet in subnets.items()}

    def _compare(self, stack: Stack, subnets: Mapping[str, str]) -> Stack:
        """Compare the stack with the template, update it if the user agrees, and return it."""
        entries = stack_entries(stack.outputs["ConfigFile"], self.region)
        zones = list(entries.get("placement_groups") or ())
        if self.options.update:
            zones = sorted({*zones, *subnets})
        there = f"stack {stack.name} is there"
        with ExitStack() as unless_agreed:
            try:
                parameters = dict.fromkeys(stack.parameters) | self._queue_parameters()
                change_set, changes = self._propose(unless_agreed, zones, parameters, is_new=False)
            except (NotAuthorised, BadConfiguration) as error:
                if self.options.update:
                    raise
                # A user who may not deploy the stack may still use it.
                self.context.report(f"{there}; not compared with the template: {error.message}")
                return stack
            if not changes:
                self.context.report(f"stack {stack.name} is up to date")
                return stack
            if not self.options.update:
                again = shlex.join(["fastlaunch", *self.context.argv, "--update"])
                differing = f"this template would change {counted(len(changes), 'resource')} of it"
                self.context.report(f"{there}; {differing}: {again}")
                return stack
            self.context.report(f"changes in stack {stack.name} in {self.region}:")
            self._confirm(changes, f"Change stack {stack.name}?")
            unless_agreed.pop_all()
        return self._execute(change_set)

    # Both

    def _queue_parameters(self) -> dict[str, str]:
        """Return the template's parameters for the queue, where it is given."""
        given = {"QueueName": self.options.queue, "QueueInstances": self.options.queue_instances}
        return {name: str(value) for name, value in given.items() if value is not None}

    def _propose(
        self,
        unless_agreed: ExitStack,
        zones: Sequence[str],
        parameters: Mapping[str, str | None],
        *,
        is_new: bool,
        import_existing: bool = False,
    ) -> tuple[str, Sequence[StackChange]]:
        """Return a change set of what the template would change, to be discarded on exit, and its changes."""
        aws, region, name = self.context.aws, self.region, self.options.stack_name
        names = names_of_region(self.context.settings, region)
        with activity(f"comparing stack {name} with the template"):
            change_set = aws.create_change_set(
                region,
                name,
                is_new=is_new,
                template=template_text(template(zones=zones, **names)),
                parameters=parameters,
                import_existing=import_existing,
            )
            unless_agreed.callback(self._discard, change_set)
            return change_set, aws.changes(region, change_set)

    def _discard(self, change_set: str) -> None:
        """Delete a declined change set, and its stack if empty. Ignore refusals."""
        with suppress(CloudRefused):
            self.context.aws.discard(self.region, change_set, self.options.stack_name)

    def _confirm(self, changes: Sequence[StackChange], question: str) -> None:
        self.context.report("\n".join(change_lines(changes)))
        self.context.confirm(question, yes=self.options.yes)

    def _execute(self, change_set: str) -> Stack:
        name, region = self.options.stack_name, self.region
        try:
            with activity(f"stack {name}") as shown:
                stack = self.context.aws.execute_change_set(region, name, change_set, shown.update)
        except BadConfiguration as error:
            if error.code is not None:
                raise
            raise _failed(error, name, region) from None
        self.context.report(f"stack {name} is {stack.status}")
        return stack

    def _write_config(self, entries: Mapping[str, Any], budget_usd: float) -> Path:
        """Add missing lines to the config file, after asking; return its path."""
        path = config_path()
        text = read_text(path) if path.exists() else None
        change = config_change(text, region=self.region, entries=entries, max_cost_usd=budget_usd)
        if not change.lines:
            self.context.report(f"{path} needs no change")
            return path
        self.context.report(_shown(change, path, is_new=text is None))
        if change.text is None and change.is_complete:
            return path
        if change.text is None:
            raise UserError(
                f"the stack is ready, and {path} is not: {change.obstacle}",
                "write the lines above into it, then run `fastlaunch init` again",
            )
        if not self.options.yes:
            self.context.check_can_ask(yes=False)
            assert self.context.ask is not None
            if not self.context.ask(f"Write {path}?"):
                raise UserError(
                    f"{path} was not written",
                    "to go on, write the lines above into it, or run the same again",
                )
        try:
            # Keep a link in place.
            replace_file(path.resolve(), change.text.encode())
        except OSError as error:
            hint = "write the lines above into it, or set FASTLAUNCH_CONFIG to another file"
            raise BadFile(path, f"cannot be written: {error.strerror}", hint=hint) from None
        load_settings()
        return path

    def _budget_usd(self) -> float:
        if self.options.budget_usd is not None:
            return self.options.budget_usd
        if self.context.settings.max_cost is not None or not self.prompt:
            return self.context.settings.max_cost or DEFAULT_BUDGET_USD
        question = "the most USD that a submission may cost"
        return _answer(self.context, self.prompt, question, f"{DEFAULT_BUDGET_USD:g}", _checked_budget_usd)


def _checked_bucket(name: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise UserError(
            f"{name!r} is not a valid bucket name", "give 3 to 63 of a to z, 0 to 9 and -, such as acme-runs"
        )
    return name


def _checked_budget_usd(text: str) -> float:
    budget_usd = parse_usd(text)
    if budget_usd <= 0:
        raise UserError(f"{text!r} is not above 0", "give an amount of USD such as 25")
    return budget_usd


def change_lines(changes: Sequence[StackChange]) -> list[str]:
    """Return a line for each action and kind of resource."""
    names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for change in changes:
        action = "Replace" if change.is_replaced else change.action
        names[action, change.kind].append(change.name)
    width = max(len(kind) for _, kind in names)
    return [f"  {action:<7}  {kind:<{width}}  {', '.join(names[action, kind])}" for action, kind in names]


@contextmanager
def _explained(identity: Identity, region: str) -> Iterator[None]:
    """Add to a refusal who lacks the right, and how to continue without it."""
    try:
        yield
    except NotAuthorised as error:
        if error.code is None or not _DENIED.search(error.code):
            raise
        who = "" if identity.arn in error.message else f" (you are {identity.arn})"
        explained = NotAuthorised(
            f"{error.message}{who}", f"ask for that right, or {_by_administrator(region)}"
        )
        explained.code = error.code
        raise explained from None


def _by_administrator(region: str) -> str:
    return (
        "let an administrator deploy the template, and then run `fastlaunch init` again, which finds the "
        f"stack: fastlaunch iam print --cloudformation --region {region} > fastlaunch.yaml"
    )


def _delete_command(name: str, region: str) -> str:
    return f"aws cloudformation delete-stack --region {region} --stack-name {name}"


def _failed(error: BadConfiguration, name: str, region: str) -> BadConfiguration:
    """Return the error for a stack that CloudFormation failed to deploy."""
    hints = []
    if "not authorized" in error.message:
        hints.append(f"ask for that right, or {_by_administrator(region)}")
    if "already exists" in error.message:
        hints.append("name another bucket (--bucket NAME), or let the stack take it over (--import-existing)")
    if "ROLLBACK" in error.message and "UPDATE" not in error.message:
        hints.append(f"before you run it again, delete what is left: {_delete_command(name, region)}")
    return BadConfiguration(
        error.message, "\n  ".join(hints) or "correct what it names, then run the same again"
    )


def _unusable(stack: Stack) -> UserError:
    """Return the error for a stack that only its owner can repair."""
    state = f"stack {stack.name} in {stack.region} is {stack.status}"
    state += f": {stack.reason}" if stack.reason else ""
    if stack.status.startswith("UPDATE"):
        more = f"continue-update-rollback --region {stack.region} --stack-name {stack.name}"
        return UserError(state, f"bring it back first: aws cloudformation {more}")
    return UserError(
        state,
        f"delete it, then run the same again: {_delete_command(stack.name, stack.region)}\n  a bucket or "
        "repository that it made is kept: --import-existing then takes it over",
    )


def _shown(change: ConfigChange, path: Path, *, is_new: bool) -> str:
    """Return the lines for the config file, under a heading that says what happens to them."""
    if change.text is not None:
        head = f"{path}, a new file:" if is_new else f"to be added to {path}, which otherwise stays as it is:"
    else:
        head = f"{path} stays as it is: {change.obstacle}:"
    return "\n".join([head, "", *(f"  {line}".rstrip() for line in change.lines.splitlines()), ""])
