"""`fastlaunch resume`: another machine for a run that did not complete, from its last checkpoint."""

import json
import sys
from typing import TYPE_CHECKING

import click

from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import confirm, next_command, table_or_json_option, yes_option
from fastlaunch.cli.render import RUN_HEADERS, run_json, run_row, runs_sentence, table
from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.runs.launcher import Launcher


@click.command(short_help="Resume an interrupted run on AWS from its last checkpoint.")
@click.argument("run")
@click.option(
    "--max-cost",
    type=click.FloatRange(min=0, min_open=True),
    metavar="USD",
    help="Refuse if it may cost more.",
)
@click.option("--detach", is_flag=True, help="Return once a machine has started.")
@table_or_json_option("the run is")
@yes_option
def resume(run: str, max_cost: float | None, detach: bool, output: str, yes: bool) -> int:
    """Resume an interrupted run on AWS from its last checkpoint.

    RUN is a run's id or a part of it. The new machine is of the type that the run began on, and gets the
    minutes that earlier machines left of its limit. A spot job that SageMaker took back starts again by
    itself; resume one that stopped or failed.
    """
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.runs.display import make_display
    from fastlaunch.runs.launcher import Launcher
    from fastlaunch.runs.reconcile import reconcile
    from fastlaunch.runs.stop_request import StopRequest

    context = app_context()
    with open_ledger(context.settings) as ledger, StopRequest() as stop:
        reconcile(ledger, context.backends)
        chosen = ledger.get(run)
        launcher = Launcher(
            backends=context.cloud_backends,
            ledger=ledger,
            settings=context.settings,
            display=make_display(sys.stderr, context.monotonic_s),
            stop=stop,
        )
        _ask(launcher, chosen, max_cost=max_cost, yes=yes)
        resumed = launcher.resume(chosen, detach=detach)
    if output == "json":
        click.echo(json.dumps({"runs": [run_json(resumed)]}, indent=2))
    else:
        click.echo(f"{table([run_row(resumed)], RUN_HEADERS)}\n\n{runs_sentence([resumed])}")
    completed, is_under_way = resumed.state == "completed", detach and not resumed.state.is_final
    next_command("fastlaunch compare" if completed else f"fastlaunch logs {resumed.id}")
    if stop.by:
        return EXIT_INTERRUPTED
    return EXIT_DONE if completed or is_under_way else EXIT_JOB_FAILED


def _ask(launcher: "Launcher", run: "Run", *, max_cost: float | None, yes: bool) -> None:
    """Say where the run would go on and what that may cost, and return if the user agrees."""
    from fastlaunch.placement.cost_ceiling import check_budget, cost_ceiling
    from fastlaunch.runs.resume import resumable

    plan = resumable(run, backends=launcher.cloud_backends, ledger=launcher.ledger)
    ceiling = cost_ceiling(plan.placements, num_nodes=plan.num_nodes, max_minutes=plan.minutes_left)
    check_budget(ceiling, max_cost)
    click.echo(f"from {plan.checkpoint}, with {plan.minutes_left} minutes left; {ceiling}", err=True)
    confirm(f"go on with {run.id}?", yes=yes)
