"""Carry out `fastlaunch reap`: list what lives in the regions, judge it, ask, and end what must go."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from fastlaunch.catalog.prices import paid_usd_per_hour
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import Throttled, Unreachable, UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.ownership import RUN_ID, parse_token
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.lifecycle.orphans import (
    Inventory,
    Kind,
    Orphan,
    Refusal,
    end,
    end_now,
    judge_instance,
    judge_job,
    judge_schedule,
    known_attempts,
    note_ends,
    owner_of,
    take_inventory,
    usual_regions,
)
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.schedules import schedule_token, starts_machines
from fastlaunch.lifecycle.world import World

T = TypeVar("T")
NOUNS: Mapping[Kind, str] = {"instance": "instance", "job": "training job", "schedule": "schedule"}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The machines that may be ended."""

    #: None for the machines of all runs.
    run_id: str | None
    #: None for the machines of all owners.
    owner: str | None
    #: Whether to end machines within their time.
    at_once: bool

    def has(self, machine: Orphan) -> bool:
        """Return whether the machine is the run's and the owner's."""
        return self.run_id in (None, machine.run_id) and self.owner in (None, machine.owner)

    def __str__(self) -> str:
        of_run = f"of run {self.run_id}" if self.run_id else "of fastlaunch"
        return f"{of_run} with the owner {self.owner}" if self.owner else of_run


@dataclass(frozen=True, kw_only=True)
class Reaped:
    """What lives in the regions, and what was ended of it."""

    regions: Sequence[str]
    scope: Scope
    #: Machines, then schedules; each the oldest first.
    orphans: Sequence[Orphan]
    refused: Sequence[Refusal]
    #: Runs that turned out to have ended, with their states and reasons.
    ended_runs: Sequence[Mapping[str, str | None]]
    #: USD per hour of one machine, by its id, where it is known.
    prices: Mapping[str, float | None]


def reap(
    context: World,
    *,
    regions: Sequence[str],
    all_regions: bool,
    run_id: str | None,
    mine: bool,
    at_once: bool,
    dry_run: bool,
    yes: bool,
) -> Reaped:
    """End what must go in the regions, after asking; see `fastlaunch reap --help` for the arguments.

    Without regions, look in those of the config file and of the ledger. Raises UserError for arguments that
    exclude each other, and if the user does not agree.
    """
    if at_once and not (run_id or mine):
        raise UserError("--now would end everybody's machines", "add --run ID or --mine")
    if run_id is not None and not re.fullmatch(RUN_ID, run_id):
        raise UserError(
            f"--run: {run_id!r} is not the id of a run",
            "give it whole, such as 20261121-090312-k3f9; `fastlaunch reap --dry-run` lists them",
        )
    with activity("asking AWS who you are"):
        with suppress(Throttled, Unreachable):
            # Report an expired login once and not for every list.
            context.aws.identity()
        owner = owner_of(context.aws.identity()) if mine else None
    scope = Scope(run_id=run_id, owner=owner, at_once=at_once or run_id is not None)
    with _ledger(context) as ledger:
        with activity("looking up regions"):
            in_regions = _regions(context, regions, all_regions, ledger)
        with activity("looking for what lives", total=4 * len(in_regions)) as shown:
            inventory = take_inventory(context.aws, in_regions, begin=shown.begin)
        refused = list(inventory.refused)
        machines = [
            end_now(machine) if scope.at_once else machine
            for machine in _judge_machines(context, inventory, ledger)
            if scope.has(machine)
        ]
        refused += _end(context, ledger, machines, dry_run=dry_run, yes=yes)
        # After the machines, since a machine that stays keeps its schedule.
        over = _ask(ledger, lambda ledger: _over(ledger, inventory)) or frozenset()
        schedules = _judge_schedules(scope, inventory, machines, refused, over, context.now())
        if not dry_run:
            with activity("deleting schedules"):
                refused += end(context.aws, [schedule for schedule in schedules if schedule.must_go])
        with activity("asking AWS what runs are doing"):
            ended_runs = (None if dry_run else _ask(ledger, lambda ledger: _reconcile(context, ledger))) or []
    return Reaped(
        regions=in_regions,
        scope=scope,
        orphans=[*machines, *schedules],
        refused=refused,
        ended_runs=ended_runs,
        prices=_prices(context, machines),
    )


def _judge_machines(context: World, inventory: Inventory, ledger: Ledger | None) -> list[Orphan]:
    now, instances, jobs = context.now(), inventory.instances, inventory.jobs
    known = _ask(ledger, lambda ledger: known_attempts(ledger, context.cloud_backends, instances, jobs)) or {}
    return [
        *(judge_instance(instance, known.get(instance.id), now=now) for instance in instances),
        *(judge_job(job, known.get(job.name), now=now) for job in jobs),
    ]


def _judge_schedules(
    scope: Scope,
    inventory: Inventory,
    machines: Sequence[Orphan],
    refused: Sequence[Refusal],
    over: Collection[str],
    now: datetime,
) -> list[Orphan]:
    """Judge the scope's schedules by the instances that stay alive in their regions.

    over: tokens of attempts that have ended by the ledger.
    """
    refused_ids = {refusal.id for refusal in refused}
    gone = {machine.id for machine in machines if machine.must_go and machine.id not in refused_ids}
    unlisted = {refusal.region for refusal in refused if refusal.kind == "instance" and refusal.id is None}
    attempt_of = {instance.id: (instance.region, instance.token) for instance in inventory.instances}
    live = {attempt for id, attempt in attempt_of.items() if id not in gone}
    ended = Counter(attempt for id, attempt in attempt_of.items() if id in gone)
    in_scope = {attempt_of[machine.id] for machine in machines if machine.id in attempt_of}
    attempts = [(schedule.region, schedule_token(schedule.name)) for schedule in inventory.schedules]
    timers = Counter(
        attempt
        for attempt, schedule in zip(attempts, inventory.schedules, strict=True)
        if not starts_machines(schedule.name)
    )
    return [
        judge_schedule(
            schedule,
            live_tokens=[token for region, token in live if token and region == schedule.region],
            is_over=scope.run_id is not None or attempt[1] in over,
            is_known=schedule.region not in unlisted,
            # Each machine has its own timer. If machines are fewer, AWS does not show one yet.
            is_ended=ended[attempt] >= timers[attempt],
            now=now,
        )
        for schedule, attempt in zip(inventory.schedules, attempts, strict=True)
        # A schedule has no owner, so use its machine's.
        if (attempt in in_scope if scope.owner else scope.run_id in (None, _run_of(attempt[1])))
    ]


def _over(ledger: Ledger, inventory: Inventory) -> frozenset[str]:
    """Return the tokens of the schedules whose attempts have ended."""
    tokens = filter(None, (schedule_token(schedule.name) for schedule in inventory.schedules))
    attempts = ledger.attempts_by_token(list(tokens)).items()
    return frozenset(token for token, attempt in attempts if attempt.ended_at is not None)


def _run_of(token: str | None) -> str | None:
    return token and parse_token(token)[0]


def _ledger(context: World) -> AbstractContextManager[Ledger | None]:
    """Open the ledger; None if there is no readable one, since tags suffice."""
    if not (context.settings.home / LEDGER_NAME).exists():
        return nullcontext(None)
    try:
        return closing(open_ledger(context.settings, clock=context.now))
    except UserError as error:
        context.report(as_warning(f"going by tags alone, without the ledger: {error.message}"))
        return nullcontext(None)


def _ask(ledger: Ledger | None, question: Callable[[Ledger], T]) -> T | None:
    """Return the ledger's answer, or None if it fails: a broken ledger must not keep machines alive."""
    if ledger is None:
        return None
    try:
        return question(ledger)
    except UserError as error:
        report_line(as_warning(f"going by tags, where the ledger cannot be read: {error.message}"))
        return None


def _regions(context: World, given: Sequence[str], all_regions: bool, ledger: Ledger | None) -> list[str]:
    if given and all_regions:
        raise UserError("--region and --all-regions are given", "give one of the two")
    if all_regions:
        return context.aws.regions()
    if given:
        return list(dict.fromkeys(given))
    # A ledger may be wrong about what has ended.
    known = _ask(ledger, lambda ledger: usual_regions(context.settings, ledger))
    return known or usual_regions(context.settings, None)


def _end(
    context: World, ledger: Ledger | None, machines: Sequence[Orphan], *, dry_run: bool, yes: bool
) -> list[Refusal]:
    """End the machines that must go, after asking; return what AWS refused to end."""
    going = [machine for machine in machines if machine.must_go]
    if not going or dry_run:
        return []
    if not yes:
        for machine in going:
            noun = "" if machine.kind == "instance" else f"{NOUNS[machine.kind]} "
            whose = f", owner {machine.owner}" if machine.owner else ""
            context.report(f"{noun}{machine.id} of run {machine.run_id}{whose}: {machine.why}")
    kinds = {machine.kind for machine in going}
    what = " and ".join(f"{noun}s" for kind, noun in NOUNS.items() if kind in kinds)
    context.confirm(f"End {f'{len(going)} {what}' if len(going) > 1 else 'it'}?", yes=yes)
    with activity(f"ending {what}"):
        refused = end(context.aws, going)
    refused_ids = {refusal.id for refusal in refused}
    gone = [machine for machine in going if machine.id not in refused_ids]
    _ask(ledger, lambda ledger: note_ends(ledger, gone))
    return refused


def _reconcile(context: World, ledger: Ledger) -> list[dict[str, str | None]]:
    """Reconcile the ledger with AWS, and return the runs that turn out to have ended."""
    selectors = ["state=planned", "state=running", "backend=ec2", "backend=sagemaker"]
    open_before = [run.id for run in ledger.select(selectors)]
    reconcile(ledger, context.backends, context.settings)
    ended = [run for run in ledger.select(open_before) if run.state.is_final] if open_before else []
    return [{"run": run.id, "state": str(run.state), "reason": run.reason} for run in ended]


def _prices(context: World, machines: Sequence[Orphan]) -> dict[str, float | None]:
    """Return the hourly price of each machine by its id; None where it is not known."""
    prices: dict[str, float | None] = {}
    catalogue = None
    try:
        catalogue = context.catalogue if machines else None
    except UserError as error:
        # The machines are gone by now; only their cost is unknown.
        context.report(as_warning(f"prices are not known: {error.message}"))
    for machine in machines:
        prices[machine.id] = None
        # What a spot job costs is known at its end, and somebody else's spot instance only to them.
        if machine.known and machine.known.usd_per_hour and not (machine.kind == "job" and machine.is_spot):
            prices[machine.id] = machine.known.usd_per_hour
        elif catalogue and machine.instance_type and not machine.is_spot:
            service = "ec2" if machine.kind == "instance" else "sagemaker"
            price = catalogue.find_price(
                machine.instance_type, service=service, region=machine.region, on=context.today
            )
            prices[machine.id] = paid_usd_per_hour(price, context.settings)
    return prices
