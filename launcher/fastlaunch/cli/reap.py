"""`fastlaunch reap`: end what is over its time, found by tags and names, and update the ledger."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from fastlaunch.catalog.prices import paid_usd_per_hour
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    examples,
    next_command,
    print_json,
    profile_option,
    table_or_json_option,
    terminal_width,
    yes_option,
)
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import (
    EXIT_CLOUD_REFUSED,
    EXIT_DONE,
    CloudRefused,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.core.ownership import RUN_ID
from fastlaunch.core.tables import SPARE, Column, table
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import counted
from fastlaunch.lifecycle.deadline_schedule import schedule_token
from fastlaunch.lifecycle.reap import (
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
)
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.ledger.ledger import Ledger

T = TypeVar("T")
Row = Mapping[str, Any]


class _Words(NamedTuple):
    noun: str
    to_do: str
    done: str


_WORDS: Mapping[Kind, _Words] = {
    "instance": _Words("instance", "to terminate", "terminated"),
    "job": _Words("training job", "to stop", "stopped"),
    "schedule": _Words("schedule", "to delete", "deleted"),
}


@click.command(
    short_help="End instances, jobs and schedules that nobody stops, found by their tags.",
    epilog=examples(
        ("what is left, in every region; changes nothing", "fastlaunch reap --all-regions --dry-run"),
        ("end what is over its time", "fastlaunch reap"),
        ("end everything of yours now", "fastlaunch reap --mine --now --all-regions"),
    ),
)
@click.option("--region", "regions", multiple=True, metavar="REGION", help="Look here; may be repeated.")
@click.option("--all-regions", is_flag=True, help="Look in every region that the account may use.")
@click.option("--run", "run_id", metavar="ID", help="Only this run's; they end within their time too.")
@click.option("--mine", is_flag=True, help="Only what has your name as its owner.")
@click.option("--now", "at_once", is_flag=True, help="With --mine: end what is within its time too.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@table_or_json_option("the report is")
@yes_option
@profile_option
def reap(
    regions: tuple[str, ...],
    all_regions: bool,
    run_id: str | None,
    mine: bool,
    at_once: bool,
    dry_run: bool,
    output: str,
    yes: bool,
) -> int:
    """End instances, training jobs and schedules that nobody stops any more, found by their tags and names.

    An instance goes if it is 10 minutes over its time limit, whoever started it; a training job if SageMaker
    did not end it in time; both 10 minutes after their attempt in this ledger has ended; a schedule if its
    machine is gone. Everything else is listed and left, also a machine that lacks one of fastlaunch's tags
    or has it in another form. Without --region it looks in the regions of the config file and of the ledger.

    --run ID and --mine --now end your own within their time, without a ledger.
    """
    context = app_context()
    with activity("asking AWS who you are"):
        with suppress(Throttled, Unreachable):
            # Report an expired login once and not for every list.
            context.aws.identity()
        scope = _scope(context, run_id=run_id, mine=mine, at_once=at_once)
    with _ledger(context) as ledger:
        with activity("looking up regions"):
            in_regions = _regions(context, regions, all_regions, ledger)
        with activity("looking for what lives", total=3 * len(in_regions)) as shown:
            inventory = take_inventory(context.aws, in_regions, begin=shown.begin)
        refused = list(inventory.refused)
        machines = [
            end_now(machine) if scope.at_once else machine
            for machine in _judge_machines(context, inventory, ledger)
            if scope.has(machine)
        ]
        refused += _end(context, ledger, machines, dry_run=dry_run, yes=yes)
        # After the machines, since a machine that stays keeps its schedule.
        schedules = _judge_schedules(scope, inventory, machines, refused, context.now())
        if not dry_run:
            with activity("deleting schedules"):
                refused += end(context.aws, [schedule for schedule in schedules if schedule.must_go])
        with activity("asking AWS what runs are doing"):
            ended_runs = (None if dry_run else _ask(ledger, lambda ledger: _reconcile(context, ledger))) or []
    prices = _price_list(context) if machines else None
    refusals = {(refusal.kind, refusal.id): refusal.error for refusal in refused}
    rows: dict[Kind, list[Row]] = {kind: [] for kind in _WORDS}
    for orphan in (*machines, *schedules):
        refusal = refusals.get((orphan.kind, orphan.id))
        usd_per_hour = _usd_per_hour(context, orphan, prices)
        rows[orphan.kind].append(_row(orphan, refusal, dry_run=dry_run, usd_per_hour=usd_per_hour))
    report = _Report(
        regions=in_regions, scope=scope, rows=rows, refused=refused, ended_runs=ended_runs, dry_run=dry_run
    )
    (report.print_json if output == "json" else report.print)()
    return EXIT_CLOUD_REFUSED if refused else EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class _Scope:
    """The machines that `fastlaunch reap` may end."""

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


def _scope(context: World, *, run_id: str | None, mine: bool, at_once: bool) -> _Scope:
    if at_once and not (run_id or mine):
        raise UserError("--now would end everybody's machines", "add --run ID or --mine")
    if run_id is not None and not re.fullmatch(RUN_ID, run_id):
        raise UserError(
            f"--run: {run_id!r} is not the id of a run",
            "give it whole, such as 20261121-090312-k3f9; `fastlaunch reap --dry-run` lists them",
        )
    owner = owner_of(context.aws.identity()) if mine else None
    return _Scope(run_id=run_id, owner=owner, at_once=at_once or run_id is not None)


def _judge_machines(context: World, inventory: Inventory, ledger: "Ledger | None") -> list[Orphan]:
    now, instances, jobs = context.now(), inventory.instances, inventory.jobs
    known = _ask(ledger, lambda ledger: known_attempts(ledger, context.cloud_backends, instances, jobs)) or {}
    return [
        *(judge_instance(instance, known.get(instance.id), now=now) for instance in instances),
        *(judge_job(job, known.get(job.name), now=now) for job in jobs),
    ]


def _judge_schedules(
    scope: _Scope,
    inventory: Inventory,
    machines: Sequence[Orphan],
    refused: Sequence[Refusal],
    now: datetime,
) -> list[Orphan]:
    """Judge the scope's schedules by the instances that stay alive in their regions."""
    refused_ids = {refusal.id for refusal in refused}
    gone = {machine.id for machine in machines if machine.must_go and machine.id not in refused_ids}
    unlisted = {refusal.region for refusal in refused if refusal.kind == "instance" and refusal.id is None}
    attempt_of = {instance.id: (instance.region, instance.token) for instance in inventory.instances}
    live = {attempt for id, attempt in attempt_of.items() if id not in gone}
    ended = Counter(attempt for id, attempt in attempt_of.items() if id in gone)
    in_scope = {attempt_of[machine.id] for machine in machines if machine.id in attempt_of}
    attempts = [(schedule.region, schedule_token(schedule.name)) for schedule in inventory.schedules]
    return [
        judge_schedule(
            schedule,
            live_tokens=[token for region, token in live if token and region == schedule.region],
            is_known=schedule.region not in unlisted,
            # Each machine has its own schedule. If machines are fewer, AWS does not show one yet.
            is_ended=ended[attempt] >= attempts.count(attempt),
            now=now,
        )
        for schedule, attempt in zip(inventory.schedules, attempts, strict=True)
        # A schedule has no owner, so use its machine's.
        if (attempt in in_scope if scope.owner else scope.run_id in (None, _run_of(attempt[1])))
    ]


def _run_of(token: str | None) -> str | None:
    return token and token.rpartition("-a")[0]


def _ledger(context: World) -> AbstractContextManager["Ledger | None"]:
    """Open the ledger; None if there is no readable one, since tags suffice."""
    from fastlaunch.core.home import LEDGER_NAME
    from fastlaunch.ledger.ledger import open_ledger

    if not (context.settings.home / LEDGER_NAME).exists():
        return nullcontext(None)
    try:
        return closing(open_ledger(context.settings, clock=context.now))
    except UserError as error:
        report_line(as_warning(f"going by tags alone, without the ledger: {error.message}"))
        return nullcontext(None)


def _ask(ledger: "Ledger | None", question: "Callable[[Ledger], T]") -> T | None:
    """Return the ledger's answer, or None if it fails: a broken ledger must not keep machines alive."""
    if ledger is None:
        return None
    try:
        return question(ledger)
    except UserError as error:
        report_line(as_warning(f"going by tags, where the ledger cannot be read: {error.message}"))
        return None


def _regions(context: World, given: Sequence[str], all_regions: bool, ledger: "Ledger | None") -> list[str]:
    if given and all_regions:
        raise UserError("--region and --all-regions are given", "give one of the two")
    if all_regions:
        return context.aws.regions()
    if given:
        return list(dict.fromkeys(given))
    # Include regions where all attempts have ended by the ledger, which may be wrong.
    noted = _ask(ledger, lambda ledger: ledger.attempt_regions("ec2") | ledger.attempt_regions("sagemaker"))
    return sorted({context.settings.region, *context.settings.aws, *(noted or ())})


def _end(
    context: World, ledger: "Ledger | None", machines: Sequence[Orphan], *, dry_run: bool, yes: bool
) -> list[Refusal]:
    """End the machines that must go, after asking; return what AWS refused to end."""
    going = [machine for machine in machines if machine.must_go]
    if not going or dry_run:
        return []
    if not yes:
        for machine in going:
            noun = "" if machine.kind == "instance" else f"{_WORDS[machine.kind].noun} "
            whose = f", owner {machine.owner}" if machine.owner else ""
            click.echo(f"{noun}{machine.id} of run {machine.run_id}{whose}: {machine.why}", err=True)
    what = " and ".join(
        f"{words.noun}s" for kind, words in _WORDS.items() if any(machine.kind == kind for machine in going)
    )
    context.confirm(f"End {f'{len(going)} {what}' if len(going) > 1 else 'it'}?", yes=yes)
    with activity(f"ending {what}"):
        refused = end(context.aws, going)
    refused_ids = {refusal.id for refusal in refused}
    gone = [machine for machine in going if machine.id not in refused_ids]
    _ask(ledger, lambda ledger: note_ends(ledger, gone))
    return refused


def _reconcile(context: World, ledger: "Ledger") -> list[dict[str, str | None]]:
    """Reconcile the ledger with AWS, and return the runs that turn out to have ended."""
    from fastlaunch.lifecycle.reconcile import reconcile

    selectors = ["state=planned", "state=running", "backend=ec2", "backend=sagemaker"]
    open_before = [run.id for run in ledger.select(selectors)]
    reconcile(ledger, context.backends, context.settings)
    ended = [run for run in ledger.select(open_before) if run.state.is_final] if open_before else []
    return [{"run": run.id, "state": str(run.state), "reason": run.reason} for run in ended]


def _price_list(context: World) -> "Catalogue | None":
    try:
        return context.catalogue
    except UserError as error:
        # The machines are gone by now; only their cost is unknown.
        report_line(as_warning(f"prices are not known: {error.message}"))
        return None


def _usd_per_hour(context: World, machine: Orphan, price_list: "Catalogue | None") -> float | None:
    """Return the hourly price of one machine, if it is known."""
    # What a spot job costs is known at its end, and somebody else's spot instance only to them.
    if machine.known and machine.known.usd_per_hour and not (machine.kind == "job" and machine.is_spot):
        return machine.known.usd_per_hour
    if machine.is_spot or not machine.instance_type or price_list is None:
        return None
    service = "ec2" if machine.kind == "instance" else "sagemaker"
    price = price_list.find_price(
        machine.instance_type, service=service, region=machine.region, on=context.today
    )
    return paid_usd_per_hour(price, context.settings)


def _row(orphan: Orphan, refusal: CloudRefused | None, *, dry_run: bool, usd_per_hour: float | None) -> Row:
    """Return what there is to say of an orphan, and what was done with it."""
    words = _WORDS[orphan.kind]
    done = (words.to_do if dry_run else words.done) if orphan.must_go else "left"
    outcome = {"done": "refused" if refusal else done, "why": str(refusal) if refusal else orphan.why}
    if orphan.kind == "schedule":
        created_at = orphan.began_at.isoformat()
        return {"schedule": orphan.id, "region": orphan.region, "created_at": created_at, **outcome}
    cost_usd = None if usd_per_hour is None else orphan.hours * orphan.num_machines * usd_per_hour
    return {
        orphan.kind: orphan.id,
        "run": orphan.run_id,
        "owner": orphan.owner,
        "region": orphan.region,
        "type": orphan.instance_type,
        "num_machines": orphan.num_machines,
        "zone": orphan.zone,
        "is_spot": orphan.is_spot,
        "state": orphan.state,
        "launched_at": orphan.began_at.isoformat(),
        "ends_at": orphan.ends_at.isoformat() if orphan.ends_at else None,
        "hours": round(orphan.hours, 3),
        "cost_usd": None if cost_usd is None else round(cost_usd, 2),
        **outcome,
    }


def _type_text(row: Row) -> str:
    count = f"{row['num_machines']} x " if row["num_machines"] > 1 else ""
    return f"{count}{row['type'] or 'n/a'}"


_MACHINE_COLUMNS: Sequence[Column[Row]] = (
    Column("run", itemgetter("run")),
    Column("owner", lambda row: row["owner"] or "n/a", importance=SPARE + 2),
    Column("type", _type_text, importance=SPARE + 4),
    Column("zone", lambda row: row["zone"] or row["region"], importance=SPARE + 3),
    Column("hours", itemgetter("hours"), format="{:.1f}".format, importance=SPARE + 1),
    Column("cost", lambda row: "n/a" if row["cost_usd"] is None else f"${row['cost_usd']:,.2f}"),
)


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What `fastlaunch reap` found and did."""

    #: Where it looked, and which machines it may end.
    regions: Sequence[str]
    scope: _Scope
    #: By kind, each the oldest first.
    rows: Mapping[Kind, Sequence[Row]]
    refused: Sequence[Refusal]
    #: Runs that turned out to have ended.
    ended_runs: Sequence[Mapping[str, str | None]]
    dry_run: bool

    def print_json(self) -> None:
        unlisted = [
            {"region": refusal.region, "what": f"{_WORDS[refusal.kind].noun}s", "reason": str(refusal.error)}
            for refusal in self.refused
            if refusal.id is None
        ]
        print_json(
            {
                "dry_run": self.dry_run,
                "regions": list(self.regions),
                **{f"{kind}s": rows for kind, rows in self.rows.items()},
                "refused_regions": unlisted,
                "ended_runs": list(self.ended_runs),
            }
        )

    def print(self) -> None:
        """Print a table and a sentence for each kind that was found."""
        for kind, rows in self.rows.items():
            of_schedule: list[Column[Row]] = [Column("region", itemgetter("region"))]
            columns: list[Column[Row]] = [
                Column(_WORDS[kind].noun, itemgetter(kind)),
                *(of_schedule if kind == "schedule" else _MACHINE_COLUMNS),
                Column("", itemgetter("done")),
                Column("why", itemgetter("why")),
            ]
            if rows:
                click.echo(table(rows, columns, terminal_width()) + "\n")
        for refusal in self.refused:
            subject = refusal.id or f"{_WORDS[refusal.kind].noun}s"
            click.echo(f"error: {subject} in {refusal.region}: {refusal.error.message}", err=True)
        # Print each hint once.
        for hint in dict.fromkeys(refusal.error.hint for refusal in self.refused if refusal.error.hint):
            click.echo(f"  {hint}", err=True)
        for run in self.ended_runs:
            reason = f": {run['reason']}" if run["reason"] else ""
            click.echo(f"run {run['run']} is {run['state']}{reason}")
        # Mention kinds other than instances only if some exist, or may exist.
        refused_kinds = {refusal.kind for refusal in self.refused}
        for kind, rows in self.rows.items():
            if rows or kind == "instance" or kind in refused_kinds:
                click.echo(self._sentence(kind))
        next_command("fastlaunch status")

    def _sentence(self, kind: Kind) -> str:
        """Return how many of a kind there are and what was done with them, with their cost."""
        words, rows = _WORDS[kind], self.rows[kind]
        unlisted = {refusal.region for refusal in self.refused if (refusal.kind, refusal.id) == (kind, None)}
        regions = [region for region in self.regions if region not in unlisted]
        where = f"{len(regions)} regions" if len(regions) > 3 else ", ".join(regions)
        if not regions:
            unknown = f"whether {words.noun}s {self.scope} live is not known"
            return f"No region could be looked at: {unknown}."
        if not rows:
            return f"No {words.noun} {self.scope} lives in {where}."
        counts = Counter(row["done"] for row in rows)
        ended = (words.done, words.to_do)
        parts = [f"{counts[done]} {done}" for done in (*ended, "refused", "left") if counts[done]]
        sentence = f"{counted(len(rows), words.noun)} in {where}: {', '.join(parts)}"
        costs = [row["cost_usd"] for row in rows if row["done"] in ended and kind != "schedule"]
        if known := sum(cost or 0 for cost in costs):
            sentence += f"; cost so far about ${known:,.2f}"
        if num_unknown := costs.count(None):
            sentence += f" (the price of {num_unknown} is not known)"
        return f"{sentence}."
