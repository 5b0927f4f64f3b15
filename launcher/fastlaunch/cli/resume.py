"""`fastlaunch resume`: another machine for a run that did not complete, from its last checkpoint."""

import json
import sys
from typing import TYPE_CHECKING

import click

from fastlaunch.cli.context import Surroundings, surroundings
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import confirm, next_command, table_or_json_option, yes_option
from fastlaunch.cli.render import HEADERS, answer, row, to_json
from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.runs.launcher import CloudLauncher
    from fastlaunch.runs.stop_request import StopRequest


@click.command(short_help="Go on with an interrupted run on AWS, from its last checkpoint.")
@click.argument("run")
@click.option(
    "--max-cost", type=click.FloatRange(min=0, min_open=True), help="USD; refuse if it may cost more."
)
@click.option("--detach", is_flag=True, help="Return once a machine was started.")
@table_or_json_option("the run is")
@yes_option
def resume(run: str, max_cost: float | None, detach: bool, output: str, yes: bool) -> int:
    """Go on with an interrupted run on AWS, from its last checkpoint.

    RUN is an id or a part of one. The new machine is of the type the run began on, and gets the minutes that
    earlier ones left of its limit. SageMaker itself starts a spot job again that it took back; this is for
    one that stopped or failed.
    """
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.runs.stop_request import StopRequest
    from fastlaunch.submission import reconcile

    around = surroundings()
    with open_ledger(around.settings) as ledger, StopRequest() as stop:
        reconcile(ledger, around.backends, settings=around.settings)
        chosen = ledger.get(run)
        _ask(around, ledger, chosen, max_cost=max_cost, yes=yes)
        after = _launcher(around, ledger, stop).resume(chosen, detach=detach)
    shown = {"runs": [to_json(after)]}
    rows = f"{table([row(after)], HEADERS)}\n\n{answer([after])}"
    click.echo(json.dumps(shown, indent=2) if output == "json" else rows)
    completed, is_under_way = after.state == "completed", detach and not after.state.is_final
    next_command("fastlaunch compare" if completed else f"fastlaunch logs {after.id}")
    if stop.by:
        return EXIT_INTERRUPTED
    return EXIT_DONE if completed or is_under_way else EXIT_JOB_FAILED


def _ask(around: Surroundings, ledger: "Ledger", run: "Run", *, max_cost: float | None, yes: bool) -> None:
    """Say from where the run would go on and what that may cost, and return if the user agrees."""
    from fastlaunch.placement.cost_ceiling import check_budget
    from fastlaunch.runs.resume import ceiling_of, resumable

    found = resumable(run, backends=around.cloud_backends, aws=around.aws, ledger=ledger, now=around.now())
    ceiling = ceiling_of(found)
    check_budget(ceiling, max_cost)
    click.echo(f"from {found.checkpoint}, with {found.minutes_left} minutes left; {ceiling}", err=True)
    confirm(f"go on with {run.id}?", yes=yes)


def _launcher(around: Surroundings, ledger: "Ledger", stop: "StopRequest") -> "CloudLauncher":
    from fastlaunch.runs.display import make_display
    from fastlaunch.runs.launcher import CloudLauncher

    return CloudLauncher(
        backends=around.cloud_backends,
        aws=around.aws,
        ledger=ledger,
        home=around.settings.home.absolute(),
        settings=around.settings,
        display=make_display(sys.stderr, around.monotonic_s),
        stop=stop,
        now=around.now,
    )
