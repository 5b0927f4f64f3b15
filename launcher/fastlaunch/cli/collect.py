"""`fastlaunch collect`: download what runs on AWS uploaded, and list what is here and what is missing."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.catalog.prices import paid_usd_per_hour
from fastlaunch.cli.context import open_reconciled
from fastlaunch.cli.options import examples, next_command, profile_option, table_or_json_option
from fastlaunch.cli.render import plain_table, print_table
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, CloudRefused, UserError
from fastlaunch.lifecycle.collect import checkpoints, summary_of
from fastlaunch.lifecycle.describe import collected_to_dict
from fastlaunch.lifecycle.follow import current_runs, fetch_output
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger

_HEADERS = {
    "run": "run",
    "recipe": "recipe",
    "state": "state",
    "ranks": "ranks",
    "log": "log",
    "checkpoint": "checkpoint",
    "cost": "cost",
    "missing": "missing",
}


@click.command(
    epilog=examples(
        ("all that is not here yet", "fastlaunch collect"),
        ("of one run, as JSON", "fastlaunch collect k3f9 --output json"),
    ),
)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@table_or_json_option
@profile_option
def collect(runs: tuple[str, ...], output: str) -> int:
    """Bring home the records, logs and facts of runs on AWS.

    RUN is a run's id, the beginning or end of it, or `field=glob`. Without RUN: the runs under way and the
    last submission. What is here already is not fetched again. A run under way is collected as far as it has
    come.
    """
    with open_reconciled() as (context, ledger):
        chosen = ledger.select(runs) if runs else current_runs(ledger)
        cloud = [run for run in chosen if run.backend in CLOUD_BACKENDS]
        here = [run.id for run in chosen if run.backend not in CLOUD_BACKENDS]
        attempts = {attempt.token: attempt for run in cloud for attempt in ledger.attempts_of(run.id)}
        with activity("fetching what runs have uploaded", total=len(attempts)) as shown:
            steps = shown.over(attempts.values(), lambda attempt: attempt.token)
            refused = fetch_output(context, steps)
        reports = [_report(context, ledger, run.id, refused) for run in cloud]
    if here:
        subject = f"run {here[0]} is" if len(here) == 1 else f"{len(here):,} runs are"
        click.echo(f"{subject} here already: only runs on AWS are collected", err=True)
    if output == "json":
        click.echo(json.dumps({"runs": reports}, indent=2))
    elif reports or not here:
        _print(reports, context)
    else:
        next_command("fastlaunch compare")
    return max((error.exit_code for error in refused.values()), default=EXIT_DONE)


def _report(
    context: World, ledger: "Ledger", run_id: str, refused: Mapping[str, UserError]
) -> dict[str, Any]:
    home, run = context.settings.home, ledger.get(run_id)
    if run.state.is_final:
        summary = summary_of(run, ledger.attempts_of(run.id), home)
        if summary is not None and summary != run.summary:
            ledger.set_summary(run.id, summary)
    attempts = ledger.attempts_of(run.id)
    problems = {attempt.token: refused[attempt.token] for attempt in attempts if attempt.token in refused}
    try:
        stored = None if problems else checkpoints(run, attempts, context.cloud_backends)
    except CloudRefused as error:
        stored, problems = None, {"checkpoints": error}
    paid = paid_usd_per_hour(run.price, context.settings)
    return collected_to_dict(
        run,
        attempts,
        home=home,
        now=context.now(),
        discount=0.0 if run.price is None or paid is None else round(1 - paid / run.price.usd_per_hour, 6),
        stored=stored,
        refused=problems,
    )


def _print(reports: Sequence[Mapping[str, Any]], context: World) -> None:
    if not reports:
        click.echo("No runs on AWS fit.")
        next_command("fastlaunch runs")
        return
    rows = [_row(report) for report in reports]
    print_table(plain_table(rows, _HEADERS, optional=("log", "ranks")) + "\n")
    for report in reports:
        for name, value in _facts(report):
            click.echo(f"{report['id']}  {name:<11} {value}")
    whole = sum(not report["missing"] for report in reports)
    click.echo(
        f"\n{whole} of {len(reports)} run{'s' if len(reports) > 1 else ''} complete, "
        f"in {context.settings.home / 'runs'}."
    )
    next_command("fastlaunch compare" if whole else "fastlaunch status")


def _row(report: Mapping[str, Any]) -> dict[str, Any]:
    stored, log = report["checkpoints"], report["log"] or next(iter(report["node_logs"]), None)
    return {
        "run": report["id"],
        "recipe": report["recipe"],
        "state": report["state"],
        "ranks": str(report["num_ranks"]),
        "log": "no" if log is None else "yes" if report["log"] else "node's",
        "checkpoint": f"step {stored['step']}" if stored and stored["newest"] else "none",
        "cost": "n/a" if report["cost_usd"] is None else f"${report['cost_usd']:,.2f}",
        "missing": "; ".join(report["missing"]) or None,
    }


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts for the run's machines, image and files."""
    facts = []
    for attempt in report["attempts"]:
        machine = ", ".join(attempt["instance_ids"]) or attempt["job_name"]
        if machine is None:
            continue
        billed = "" if attempt["billed_seconds"] is None else f", billed {attempt['billed_seconds']:.0f} s"
        nodes = f"{attempt['num_nodes']} x " if attempt["num_nodes"] > 1 else ""
        place = f"{nodes}{attempt['instance']} {machine} in {attempt['zone'] or attempt['region']}"
        shared = f" ({attempt['lifecycle']})" if attempt["lifecycle"] else ""
        facts.append((f"attempt {attempt['n']}", f"{place}{shared}{billed}: {attempt['cost']}"))
    if report["list_price"]:
        price = report["list_price"]
        less = f", less {report['discount']:.0%}" if report["discount"] else ""
        facts.append(("list price", f"${price['usd_per_hour']:g} per hour, {price['as_of']}{less}"))
    if report["image"]:
        facts.append(("image", report["image"]))
    if report["checkpoints"]:
        facts.append(("checkpoints", report["checkpoints"]["newest"] or report["checkpoints"]["uri"]))
    facts += [("output", path) for path in report["outputs"]]
    if report["reason"]:
        facts.append(("reason", report["reason"]))
    return facts
