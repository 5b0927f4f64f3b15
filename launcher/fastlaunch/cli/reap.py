"""`fastlaunch reap`: end what is over its time, found by tags and names, and update the ledger."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import click

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
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, CloudRefused
from fastlaunch.core.tables import SPARE, Column, table
from fastlaunch.core.units import counted
from fastlaunch.lifecycle import reap as reaping
from fastlaunch.lifecycle.orphans import Kind, Orphan
from fastlaunch.lifecycle.reap import NOUNS, Reaped

Row = Mapping[str, Any]
#: What is done with a kind, before and after.
_TO_DO: Mapping[Kind, str] = {"instance": "to terminate", "job": "to stop", "schedule": "to delete"}
_DONE: Mapping[Kind, str] = {"instance": "terminated", "job": "stopped", "schedule": "deleted"}


@click.command(
    epilog=examples(
        ("what is left, in every region; changes nothing", "fastlaunch reap --all-regions --dry-run"),
        ("end what is over its time", "fastlaunch reap"),
        ("end everything of yours now", "fastlaunch reap --mine --now --all-regions"),
    )
)
@click.option(
    "--region", "regions", multiple=True, metavar="REGION", help="Look in this region; may be repeated."
)
@click.option("--all-regions", is_flag=True, help="Look in every region that the account may use.")
@click.option("--run", "run_id", metavar="ID", help="End only this run's machines, within their time too.")
@click.option("--mine", is_flag=True, help="End only what has your name as its owner.")
@click.option("--now", "at_once", is_flag=True, help="With --mine: end machines within their time too.")
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@table_or_json_option
@yes_option
@profile_option
def reap(output: str, dry_run: bool, **options: Any) -> int:
    """End instances, training jobs and schedules that nobody stops any more, found by their tags and names.

    It ends an instance that is 10 minutes over its time limit, whoever started it; a training job that
    SageMaker did not end in time; both 10 minutes after their attempt in this ledger has ended; and a
    schedule whose machine is gone. It lists everything else and leaves it, also a machine that lacks one of
    fastlaunch's tags or has it in another form. Without --region it looks in the regions of the config file
    and of the ledger.

    --run ID and --mine --now end machines within their time too, and need no ledger.
    """
    done = reaping.reap(app_context(), dry_run=dry_run, **options)
    refusals = {(refusal.kind, refusal.id): refusal.error for refusal in done.refused}
    rows: dict[Kind, list[Row]] = {kind: [] for kind in NOUNS}
    for orphan in done.orphans:
        refusal = refusals.get((orphan.kind, orphan.id))
        usd_per_hour = done.prices.get(orphan.id)
        rows[orphan.kind].append(_row(orphan, refusal, dry_run=dry_run, usd_per_hour=usd_per_hour))
    if output == "json":
        unlisted = [
            {"region": refusal.region, "what": f"{NOUNS[refusal.kind]}s", "reason": str(refusal.error)}
            for refusal in done.refused
            if refusal.id is None
        ]
        print_json(
            {
                "dry_run": dry_run,
                "regions": list(done.regions),
                **{f"{kind}s": rows_of_kind for kind, rows_of_kind in rows.items()},
                "refused_regions": unlisted,
                "ended_runs": list(done.ended_runs),
            }
        )
    else:
        _print(done, rows)
    return EXIT_CLOUD_REFUSED if done.refused else EXIT_DONE


def _row(orphan: Orphan, refusal: CloudRefused | None, *, dry_run: bool, usd_per_hour: float | None) -> Row:
    """Return what there is to say of an orphan, and what was done with it."""
    done = (_TO_DO if dry_run else _DONE)[orphan.kind] if orphan.must_go else "left"
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


def _print(done: Reaped, rows: Mapping[Kind, Sequence[Row]]) -> None:
    """Print a table and a sentence for each kind that is there."""
    for kind, rows_of_kind in rows.items():
        of_schedule: list[Column[Row]] = [Column("region", itemgetter("region"))]
        columns: list[Column[Row]] = [
            Column(NOUNS[kind], itemgetter(kind)),
            *(of_schedule if kind == "schedule" else _MACHINE_COLUMNS),
            Column("outcome", itemgetter("done")),
            Column("why", itemgetter("why")),
        ]
        if rows_of_kind:
            click.echo(table(rows_of_kind, columns, terminal_width()) + "\n")
    for refusal in done.refused:
        subject = refusal.id or f"{NOUNS[refusal.kind]}s"
        click.echo(f"error: {subject} in {refusal.region}: {refusal.error.message}", err=True)
    # Print each hint once.
    for hint in dict.fromkeys(refusal.error.hint for refusal in done.refused if refusal.error.hint):
        click.echo(f"  {hint}", err=True)
    for run in done.ended_runs:
        reason = f": {run['reason']}" if run["reason"] else ""
        click.echo(f"run {run['run']} is {run['state']}{reason}")
    # Mention kinds other than instances only if some exist, or may exist.
    refused_kinds = {refusal.kind for refusal in done.refused}
    for kind, rows_of_kind in rows.items():
        if rows_of_kind or kind == "instance" or kind in refused_kinds:
            click.echo(_sentence(done, kind, rows_of_kind))
    next_command("fastlaunch status")


def _sentence(done: Reaped, kind: Kind, rows: Sequence[Row]) -> str:
    """Return how many of a kind there are and what was done with them, with their cost."""
    noun = NOUNS[kind]
    unlisted = {refusal.region for refusal in done.refused if (refusal.kind, refusal.id) == (kind, None)}
    regions = [region for region in done.regions if region not in unlisted]
    where = f"{len(regions)} regions" if len(regions) > 3 else ", ".join(regions)
    if not regions:
        return f"No region could be looked at: whether {noun}s {done.scope} live is not known."
    if not rows:
        return f"No {noun} {done.scope} lives in {where}."
    counts = Counter(row["done"] for row in rows)
    ended = (_DONE[kind], _TO_DO[kind])
    parts = [f"{counts[word]} {word}" for word in (*ended, "refused", "left") if counts[word]]
    sentence = f"{counted(len(rows), noun)} in {where}: {', '.join(parts)}"
    costs = [row["cost_usd"] for row in rows if row["done"] in ended and kind != "schedule"]
    if known := sum(cost or 0 for cost in costs):
        sentence += f"; cost so far about ${known:,.2f}"
    if num_unknown := costs.count(None):
        sentence += f" (the price of {num_unknown} is not known)"
    return f"{sentence}."
