"""`fastlaunch reap`: end what is over its time, found by tags and names, and bring the ledger up to that."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import click

from fastlaunch.cli.context import AppContext, app_context
from fastlaunch.cli.options import confirm, table_or_json_option, yes_option
from fastlaunch.cli.render import KIND_WORDS, ReapReport, print_reap, print_reap_json
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, UserError
from fastlaunch.runs.reap import (
    Inventory,
    Orphan,
    Refusal,
    end,
    judge_instance,
    judge_job,
    judge_pool,
    judge_schedule,
    known_attempts,
    note_ends,
    take_inventory,
    tokens_of,
)

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger

T = TypeVar("T")


@click.command(short_help="End instances, jobs and schedules that nobody stops, found by their tags.")
@click.option("--region", "regions", multiple=True, metavar="REGION", help="Look here; may be repeated.")
@click.option("--all-regions", is_flag=True, help="Look in every region that the account may use.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@table_or_json_option("the report is")
@yes_option
def reap(regions: tuple[str, ...], all_regions: bool, dry_run: bool, output: str, yes: bool) -> int:
    """End instances, training jobs and schedules that nobody stops any more, found by their tags and names.

    An instance goes if it is 10 minutes over its time limit, whoever started it; a training job if SageMaker
    did not end it in time; both if their attempt in this ledger has ended; a warm pool of an earlier version
    if its job did not complete; a schedule if its machine is gone. Everything else is listed and left.
    Without --region it looks in the regions of the config file and of the ledger.
    """
    context = app_context()
    with _ledger(context) as ledger:
        in_regions = _regions(context, regions, all_regions, ledger)
        inventory = take_inventory(context.aws, in_regions)
        refused = list(inventory.refused)
        machines = _judge_machines(inventory, ledger, context.now())
        refused += _end(context, ledger, machines, dry_run=dry_run, yes=yes)
        # After the machines: the schedules of those that stay stay too.
        schedules = _judge_schedules(inventory, machines, refused, context.now())
        if not dry_run:
            refused += end(context.aws, [schedule for schedule in schedules if schedule.must_go])
        ended_runs = (None if dry_run else _ask(ledger, lambda own: _reconcile(context, own))) or []
    report = ReapReport(
        regions=in_regions,
        orphans=[*machines, *schedules],
        refused=refused,
        ended_runs=ended_runs,
        prices=_usd_per_hour(context, machines),
        dry_run=dry_run,
    )
    (print_reap_json if output == "json" else print_reap)(report)
    return EXIT_CLOUD_REFUSED if refused else EXIT_DONE


def _judge_machines(inventory: Inventory, ledger: "Ledger | None", now: datetime) -> list[Orphan]:
    known = _ask(ledger, lambda own: known_attempts(own, inventory.instances, inventory.jobs)) or {}
    return [
        *(judge_instance(instance, known.get(instance.id), now=now) for instance in inventory.instances),
        *(judge_job(job, known.get(job.name), now=now) for job in inventory.jobs),
        *(judge_pool(job, now=now) for job in inventory.pools),
    ]


def _judge_schedules(
    inventory: Inventory, machines: Sequence[Orphan], refused: Sequence[Refusal], now: datetime
) -> list[Orphan]:
    """Judge the schedules by the instances in their regions that live on."""
    refused_ids = {refusal.id for refusal in refused}
    gone = {machine.id for machine in machines if machine.must_go and machine.id not in refused_ids}
    unlisted = {refusal.region for refusal in refused if refusal.kind == "instance" and refusal.id is None}
    live = [instance for instance in inventory.instances if instance.id not in gone]
    return [
        judge_schedule(
            schedule,
            live_tokens=[
                token for each in live if each.region == schedule.region for token in tokens_of(each)
            ],
            is_known=schedule.region not in unlisted,
            now=now,
        )
        for schedule in inventory.schedules
    ]


def _ledger(context: AppContext) -> AbstractContextManager["Ledger | None"]:
    """Open the ledger; None if there is none that can be read: tags tell enough."""
    from fastlaunch.ledger.ledger import LEDGER_NAME, open_ledger

    if not (context.settings.home / LEDGER_NAME).exists():
        return nullcontext(None)
    try:
        return closing(open_ledger(context.settings))
    except UserError as error:
        click.echo(f"warning: going by tags alone, without the ledger: {error.message}", err=True)
        return nullcontext(None)


def _ask(ledger: "Ledger | None", question: "Callable[[Ledger], T]") -> T | None:
    """Return what the ledger answers, or None: what is wrong with it must not keep machines alive."""
    if ledger is None:
        return None
    try:
        return question(ledger)
    except UserError as error:
        click.echo(f"warning: going by tags, where the ledger cannot be read: {error.message}", err=True)
        return None


def _regions(
    context: AppContext, given: Sequence[str], all_regions: bool, ledger: "Ledger | None"
) -> list[str]:
    if given and all_regions:
        raise UserError("--region and --all-regions are given", "give one of the two")
    if all_regions:
        return context.aws.regions()
    if given:
        return list(dict.fromkeys(given))
    # Also where all has ended by the ledger: it may be wrong.
    noted = _ask(ledger, lambda own: own.attempt_regions("ec2") | own.attempt_regions("sagemaker"))
    return sorted({context.settings.region, *context.settings.aws, *(noted or ())})


def _end(
    context: AppContext, ledger: "Ledger | None", machines: Sequence[Orphan], *, dry_run: bool, yes: bool
) -> list[Refusal]:
    """End the machines that must go, after asking; return what AWS refused to end."""
    going = [machine for machine in machines if machine.must_go]
    if not going or dry_run:
        return []
    if not yes:
        for machine in going:
            word = "" if machine.kind == "instance" else f"{KIND_WORDS[machine.kind][0]} "
            click.echo(f"{word}{machine.id} of run {machine.run_id}: {machine.why}", err=True)
    what = " and ".join(
        f"{word}s" for kind, (word, _) in KIND_WORDS.items() if any(g.kind == kind for g in going)
    )
    confirm(f"End {f'{len(going)} {what}' if len(going) > 1 else 'it'}?", yes=yes)
    refused = end(context.aws, going)
    refused_ids = {refusal.id for refusal in refused}
    gone = [machine for machine in going if machine.id not in refused_ids]
    _ask(ledger, lambda own: note_ends(own, gone))
    return refused


def _reconcile(context: AppContext, ledger: "Ledger") -> list[dict[str, str | None]]:
    """Bring the ledger up to what is true now, and return the runs that turn out to have ended."""
    from fastlaunch.runs.reconcile import reconcile

    selectors = ["state=planned", "state=running", "backend=ec2", "backend=sagemaker"]
    open_before = [run.id for run in ledger.select(selectors)]
    reconcile(ledger, context.backends)
    ended = [run for run in ledger.select(open_before) if run.state.is_final] if open_before else []
    return [{"run": run.id, "state": str(run.state), "reason": run.reason} for run in ended]


def _usd_per_hour(context: AppContext, machines: Sequence[Orphan]) -> dict[str, float]:
    """Return what an hour of each machine costs, by its id; what is not known is absent."""
    prices = {
        machine.id: machine.known.usd_per_hour
        for machine in machines
        if machine.known and machine.known.usd_per_hour and not (machine.kind == "job" and machine.is_spot)
    }
    # What a spot job costs is known at its end; what somebody else's spot instance costs, only to them.
    listed = [
        (machine, machine.instance_type)
        for machine in machines
        if machine.id not in prices and not machine.is_spot and machine.instance_type
    ]
    if listed:
        from fastlaunch.catalog.load import load_catalogue

        today = context.now().date()
        try:
            catalogue = load_catalogue(context.settings.prices)
        except UserError as error:
            # The machines are gone by now: only their cost is not known.
            click.echo(f"warning: prices are not known: {error.message}", err=True)
            return prices
        for machine, name in listed:
            service = "ec2" if machine.kind == "instance" else "sagemaker"
            try:
                price = catalogue.price(name, region=machine.region, service=service, on=today)
            except UserError:
                continue
            prices[machine.id] = price.usd_per_hour * (1 - context.settings.discount)
    return prices
