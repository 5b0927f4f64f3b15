"""`fastlaunch reap`: end what is over its time, found by tags and names, and bring the ledger up to that."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import click

from fastlaunch.cli.context import Surroundings, surroundings
from fastlaunch.cli.options import confirm, table_or_json_option, yes_option
from fastlaunch.cli.reap_report import WORDS, Report, tell, tell_json
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, UserError
from fastlaunch.runs.reap import (
    Finding,
    Found,
    Refusal,
    end,
    find,
    judge_instance,
    judge_job,
    judge_pool,
    judge_schedule,
    known_attempts,
    note_ends,
    tokens_of,
)

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger

T = TypeVar("T")


@click.command(short_help="End instances, jobs and schedules that nobody stops, found by their tags.")
@click.option("--region", "regions", multiple=True, metavar="REGION", help="Look there; may be repeated.")
@click.option("--all-regions", is_flag=True, help="Look in every region that the account may use.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change and ask nothing.")
@table_or_json_option("what was found is")
@yes_option
def reap(regions: tuple[str, ...], all_regions: bool, dry_run: bool, output: str, yes: bool) -> int:
    """End instances, training jobs and schedules that nobody stops any more, found by their tags and names.

    An instance goes if its time limit and 10 minutes have passed since it was launched, whoever started it;
    a training job if SageMaker did not end it in its time; both if their attempt in this ledger has ended;
    machines kept after a job (--keep-alive) if it did not complete; a schedule if its machine is gone. Others
    are listed and left. Looks in the regions of the config file and of the ledger, unless told where.
    """
    around = surroundings()
    with _ledger(around) as ledger:
        looked = _regions(around, regions, all_regions, ledger)
        found = find(around.aws, looked)
        refused = list(found.refused)
        findings = _machines(found, ledger, around.now())
        refused += _end(around, ledger, findings, dry_run=dry_run, yes=yes)
        # After the machines: the schedules of those that stay stay too.
        timers = _schedules(found, findings, refused, around.now())
        if not dry_run:
            refused += end(around.aws, [one for one in timers if one.must_go])
        healed = (None if dry_run else _told_by(ledger, lambda own: _heal(around, own))) or []
    report = Report(
        regions=looked,
        findings=[*findings, *timers],
        refused=refused,
        healed=healed,
        prices=_usd_per_hour(around, findings),
        dry_run=dry_run,
    )
    (tell_json if output == "json" else tell)(report)
    return EXIT_CLOUD_REFUSED if refused else EXIT_DONE


def _machines(found: Found, ledger: "Ledger | None", now: datetime) -> list[Finding]:
    """The instances, training jobs and warm pools, judged by their tags and by what the ledger tells."""
    known = _told_by(ledger, lambda own: known_attempts(own, found.instances, found.jobs)) or {}
    return [
        *(judge_instance(one, known.get(one.id), now=now) for one in found.instances),
        *(judge_job(one, known.get(one.name), now=now) for one in found.jobs),
        *(judge_pool(one, now=now) for one in found.pools),
    ]


def _schedules(
    found: Found, findings: Sequence[Finding], refused: Sequence[Refusal], now: datetime
) -> list[Finding]:
    """The schedules, judged by the instances of their regions that live on."""
    kept = {one.id for one in refused}
    gone = {one.id for one in findings if one.must_go and one.id not in kept}
    unseen = {one.region for one in refused if one.kind == "instance" and one.id is None}
    judged = []
    for schedule in found.schedules:
        live = [one for one in found.instances if one.region == schedule.region and one.id not in gone]
        tokens = [token for one in live for token in tokens_of(one)]
        is_known = schedule.region not in unseen
        judged.append(judge_schedule(schedule, live_tokens=tokens, is_known=is_known, now=now))
    return judged


def _ledger(around: Surroundings) -> AbstractContextManager["Ledger | None"]:
    """The ledger, as a context; None where there is none, or none that can be read: tags tell enough."""
    from fastlaunch.ledger.ledger import LEDGER_NAME, open_ledger

    if not (around.settings.home / LEDGER_NAME).exists():
        return nullcontext(None)
    try:
        return closing(open_ledger(around.settings))
    except UserError as error:
        click.echo(f"warning: going by tags alone, without the ledger: {error.message}", err=True)
        return nullcontext(None)


def _told_by(ledger: "Ledger | None", ask: "Callable[[Ledger], T]") -> T | None:
    """What the ledger tells, or None: what is wrong with it must not keep machines alive."""
    if ledger is None:
        return None
    try:
        return ask(ledger)
    except UserError as error:
        click.echo(f"warning: going by tags, where the ledger does not tell: {error.message}", err=True)
        return None


def _regions(
    around: Surroundings, given: Sequence[str], all_regions: bool, ledger: "Ledger | None"
) -> list[str]:
    if given and all_regions:
        raise UserError("--region and --all-regions are given", "give one of the two")
    if all_regions:
        return around.aws.regions()
    if given:
        return list(dict.fromkeys(given))
    # Also where what the ledger holds to have ended ran: it may be wrong.
    noted = _told_by(ledger, lambda own: own.attempt_regions("ec2") | own.attempt_regions("sagemaker"))
    return sorted({around.settings.region, *around.settings.aws, *(noted or ())})


def _end(
    around: Surroundings, ledger: "Ledger | None", findings: Sequence[Finding], *, dry_run: bool, yes: bool
) -> list[Refusal]:
    """End the machines that must go, after asking; what AWS refused to end."""
    going = [finding for finding in findings if finding.must_go]
    if not going or dry_run:
        return []
    if not yes:
        for finding in going:
            word = "" if finding.kind == "instance" else f"{WORDS[finding.kind][0]} "
            click.echo(f"{word}{finding.id} of run {finding.run_id}: {finding.why}", err=True)
    what = " and ".join(f"{word}s" for kind, (word, _) in WORDS.items() if any(g.kind == kind for g in going))
    confirm(f"End {f'{len(going)} {what}' if len(going) > 1 else 'it'}?", yes=yes)
    refused = end(around.aws, going)
    kept = {one.id for one in refused}
    gone = [finding for finding in going if finding.id not in kept]
    _told_by(ledger, lambda own: note_ends(own, gone))
    return refused


def _heal(around: Surroundings, ledger: "Ledger") -> list[dict[str, str | None]]:
    """The runs that are found to have ended, by what is true now; what AWS does not tell stays as it was."""
    from fastlaunch.submission import reconcile

    wanted = ["state=planned", "state=running", "backend=ec2", "backend=sagemaker"]
    open_before = [run.id for run in ledger.select(wanted)]
    reconcile(ledger, around.backends)
    ended = [run for run in ledger.select(open_before) if run.state.is_final] if open_before else []
    return [{"run": run.id, "state": str(run.state), "reason": run.reason} for run in ended]


def _usd_per_hour(around: Surroundings, findings: Sequence[Finding]) -> dict[str, float]:
    """What an hour of one machine costs, by id of the finding; where it is not known it is left out."""
    prices = {
        finding.id: finding.known.usd_per_hour
        for finding in findings
        if finding.known and finding.known.usd_per_hour and not (finding.kind == "job" and finding.is_spot)
    }
    # What a spot job costs, its end tells; what somebody else's spot instance does, its own request.
    listed = [
        (one, one.instance_type)
        for one in findings
        if one.id not in prices and not one.is_spot and one.instance_type
    ]
    if listed:
        from fastlaunch.catalog.prices import load_catalogue

        today = around.now().date()
        try:
            catalogue = load_catalogue(around.settings.prices)
        except UserError as error:
            # Told after the machines are gone: it is only their cost that is not known then.
            click.echo(f"warning: prices are not known: {error.message}", err=True)
            return prices
        for one, name in listed:
            service = "ec2" if one.kind == "instance" else "sagemaker"
            try:
                price = catalogue.price(name, region=one.region, service=service, on=today)
            except UserError:
                continue
            prices[one.id] = price.usd_per_hour * (1 - around.settings.discount)
    return prices
