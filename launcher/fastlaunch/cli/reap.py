"""`fastlaunch reap`: terminate what is over its time, found by tags, and bring the ledger up to that."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastlaunch.cli.listing import table
from fastlaunch.cli.options import confirm, next_command, table_or_json_option, yes_option
from fastlaunch.cli.surroundings import Surroundings, surroundings
from fastlaunch.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, UserError
from fastlaunch.reap import Finding, Refusal, find, judge, known_attempts, note_ends, terminate

if TYPE_CHECKING:
    from fastlaunch.runs import Ledger

T = TypeVar("T")

_HEADERS = {
    "instance": "instance",
    "run": "run",
    "type": "type",
    "zone": "zone",
    "hours": "hours",
    "cost": "cost",
    "done": "",
    "why": "why",
}


@click.command(short_help="Terminate instances that are over their time, found by their tags.")
@click.option("--region", "regions", multiple=True, metavar="REGION", help="Look there; may be repeated.")
@click.option("--all-regions", is_flag=True, help="Look in every region that the account may use.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; change and ask nothing.")
@table_or_json_option("the instances are")
@yes_option
def reap(regions: tuple[str, ...], all_regions: bool, dry_run: bool, output: str, yes: bool) -> int:
    """Terminate instances that are over their time, found by their tags.

    An instance goes if its time limit and 10 minutes have passed since it was launched, whoever started it,
    or if its attempt in this ledger has ended. Others are listed and left. Looks in the regions of the config
    file and of the ledger, unless told where.
    """
    around = surroundings()
    with _ledger(around) as ledger:
        looked = _regions(around, regions, all_regions, ledger)
        instances, refused = find(around.aws, looked)
        known = _told_by(ledger, lambda own: known_attempts(own, instances)) or {}
        findings = [judge(one, known.get(one.id), now=around.now()) for one in instances]
        going = [finding for finding in findings if finding.must_go]
        if going and not dry_run:
            _ask(going, yes=yes)
            refused += _terminate(around, ledger, going)
        healed = (None if dry_run else _told_by(ledger, lambda own: _heal(around, own))) or []
    prices = _usd_per_hour(around, findings)
    (_tell_json if output == "json" else _tell)(
        looked, findings, refused, healed, prices=prices, dry_run=dry_run
    )
    return EXIT_CLOUD_REFUSED if refused else EXIT_DONE


def _ledger(around: Surroundings) -> AbstractContextManager["Ledger | None"]:
    """The ledger, as a context; None where there is none, or none that can be read: tags tell enough."""
    from fastlaunch.runs import LEDGER_NAME, open_ledger

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
    noted = _told_by(ledger, lambda own: own.attempt_regions("ec2")) or ()
    return sorted({around.settings.region, *around.settings.aws, *noted})


def _ask(going: Sequence[Finding], *, yes: bool) -> None:
    if not yes:
        for finding in going:
            click.echo(f"{finding.instance.id} of run {finding.run_id}: {finding.why}", err=True)
    many = f"{len(going)} instances" if len(going) > 1 else "it"
    confirm(f"Terminate {many}?", yes=yes)


def _terminate(around: Surroundings, ledger: "Ledger | None", going: Sequence[Finding]) -> list[Refusal]:
    refused = terminate(around.aws, going)
    kept = {one.instance_id for one in refused}
    gone = [finding for finding in going if finding.instance.id not in kept]
    _told_by(ledger, lambda own: note_ends(own, gone))
    return refused


def _heal(around: Surroundings, ledger: "Ledger") -> list[dict[str, str | None]]:
    """The runs that are found to have ended, by what is true now; what AWS does not tell stays as it was."""
    from fastlaunch.submission import reconcile

    open_before = [run.id for run in ledger.select(["state=planned", "state=running", "backend=ec2"])]
    reconcile(ledger, around.backends)
    ended = [run for run in ledger.select(open_before) if run.state.is_final] if open_before else []
    return [{"run": run.id, "state": str(run.state), "reason": run.reason} for run in ended]


def _usd_per_hour(around: Surroundings, findings: Sequence[Finding]) -> dict[str, float]:
    """What an hour of each instance costs, by instance id; those of which it is not known are left out."""
    prices = {
        finding.instance.id: finding.known.usd_per_hour
        for finding in findings
        if finding.known and finding.known.usd_per_hour
    }
    unpriced = [one.instance for one in findings if one.instance.id not in prices]
    # What somebody else's spot instance costs, only its own request tells.
    if listed := [one for one in unpriced if not one.is_spot]:
        from fastlaunch.prices import load_catalogue

        today = around.now().date()
        try:
            catalogue = load_catalogue(around.settings.prices)
        except UserError as error:
            # Told after the machines are gone: it is only their cost that is not known then.
            click.echo(f"warning: prices are not known: {error.message}", err=True)
            return prices
        for one in listed:
            try:
                price = catalogue.price(one.instance_type, region=one.region, on=today)
            except UserError:
                continue
            prices[one.id] = price.usd_per_hour * (1 - around.settings.discount)
    return prices


def _rows(
    findings: Sequence[Finding],
    refused: Sequence[Refusal],
    *,
    prices: Mapping[str, float],
    dry_run: bool,
) -> list[dict[str, Any]]:
    kept = {one.instance_id: str(one.error) for one in refused if one.instance_id}
    rows = []
    for finding in findings:
        one = finding.instance
        done = "terminated" if finding.must_go else "left"
        if finding.must_go and dry_run:
            done = "to terminate"
        if one.id in kept:
            done = "refused"
        rate = prices.get(one.id)
        rows.append(
            {
                "instance": one.id,
                "run": finding.run_id,
                "type": one.instance_type,
                "region": one.region,
                "zone": one.zone,
                "is_spot": one.is_spot,
                "state": one.state,
                "launched_at": one.launch_time.isoformat(),
                "ends_at": finding.ends_at.isoformat(),
                "hours": round(finding.hours, 3),
                "cost_usd": round(finding.hours * rate, 2) if rate is not None else None,
                "done": done,
                "why": kept.get(one.id, finding.why),
                "warning": finding.warning,
            }
        )
    return rows


def _tell_json(
    looked: Sequence[str],
    findings: Sequence[Finding],
    refused: Sequence[Refusal],
    healed: Sequence[Mapping[str, str | None]],
    *,
    prices: Mapping[str, float],
    dry_run: bool,
) -> None:
    closed = [{"region": one.region, "reason": str(one.error)} for one in refused if one.instance_id is None]
    told = {
        "dry_run": dry_run,
        "regions": list(looked),
        "instances": _rows(findings, refused, prices=prices, dry_run=dry_run),
        "refused_regions": closed,
        "ended_runs": list(healed),
    }
    click.echo(json.dumps(told, indent=2))


def _tell(
    looked: Sequence[str],
    findings: Sequence[Finding],
    refused: Sequence[Refusal],
    healed: Sequence[Mapping[str, str | None]],
    *,
    prices: Mapping[str, float],
    dry_run: bool,
) -> None:
    rows = _rows(findings, refused, prices=prices, dry_run=dry_run)
    if rows:
        shown = [
            {
                **row,
                "zone": row["zone"] or row["region"],
                "hours": f"{row['hours']:.1f}",
                "cost": f"${row['cost_usd']:,.2f}" if row["cost_usd"] is not None else "n/a",
                "why": f"{row['why']} ({row['warning']})" if row["warning"] else row["why"],
            }
            for row in rows
        ]
        click.echo(table(shown, _HEADERS) + "\n")
    for one in refused:
        where = f"{one.instance_id} in {one.region}" if one.instance_id else one.region
        click.echo(f"error: {where}: {one.error.message}", err=True)
        if one.error.hint:
            click.echo(f"  {one.error.hint}", err=True)
    for run in healed:
        click.echo(f"run {run['run']} is {run['state']}" + (f": {run['reason']}" if run["reason"] else ""))
    click.echo(_sentence(rows, looked, refused))
    next_command("fastlaunch status")


def _sentence(rows: Sequence[Mapping[str, Any]], looked: Sequence[str], refused: Sequence[Refusal]) -> str:
    closed = {one.region for one in refused if one.instance_id is None}
    where = [region for region in looked if region not in closed]
    places = f"{len(where)} regions" if len(where) > 3 else ", ".join(where)
    if not where:
        return "No region could be looked at: whether an instance of fastlaunch lives is not known."
    if not rows:
        return f"No instance of fastlaunch lives in {places}."
    parts = [
        f"{sum(row['done'] == done for row in rows)} {done}"
        for done in ("terminated", "to terminate", "refused", "left")
        if any(row["done"] == done for row in rows)
    ]
    going = [row for row in rows if row["done"] in ("terminated", "to terminate")]
    cost = sum(row["cost_usd"] or 0 for row in going)
    unknown = sum(row["cost_usd"] is None for row in going)
    told = f"; what went cost about ${cost:,.2f}" if cost else ""
    told += f" (of {unknown} the price is not known)" if unknown else ""
    return f"{len(rows)} instance{'s' if len(rows) > 1 else ''} in {places}: {', '.join(parts)}{told}."
