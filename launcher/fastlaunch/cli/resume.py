"""`fastlaunch resume`: a run that did not complete goes on from its last checkpoint."""

from typing import TYPE_CHECKING

import click

from fastlaunch.api.results import Runs, Submitted
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, profile_option, table_or_json_option, yes_option
from fastlaunch.cli.render import answer_of, print_runs
from fastlaunch.cli.submit_options import declared_options
from fastlaunch.core.errors import UserError
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.launcher import Launcher


@click.command(
    short_help="Resume an interrupted run from its last checkpoint.",
    epilog=examples(
        ("go on where it stopped", "fastlaunch resume k3f9"),
        ("on AWS, for at most $40, without following it", "fastlaunch resume k3f9 --max-cost 40 --detach"),
    ),
)
@click.argument("run")
@declared_options(
    "resume",
    max_cost_usd="Refuse if it may cost more.  [default: `max_cost` of the config file]",
    detach="Return once a machine has started.",
)
@table_or_json_option("the run is")
@yes_option
@profile_option
def resume(
    run: str, max_cost_usd: float | None, detach: bool, account_timer: bool, output: str, yes: bool
) -> int:
    """Resume an interrupted run from its last checkpoint.

    RUN is a run's id, or the beginning or end of it. A run of this machine goes on here. On AWS the new
    machine is of the type that the run began on, and gets the minutes that earlier machines left of its
    limit. A spot job that SageMaker took back starts again by itself; resume one that stopped or failed.
    """
    from fastlaunch.lifecycle.launcher import open_launcher
    from fastlaunch.lifecycle.reconcile import reconcile

    context = app_context()
    with open_launcher(context, {**context.backends, **context.cloud_backends}) as launcher:
        reconcile(launcher.ledger, context.backends, context.settings)
        chosen = launcher.ledger.get(run)
        if chosen.backend == "local":
            for option, is_given in (("--max-cost", max_cost_usd is not None), ("--detach", detach)):
                if is_given:
                    raise UserError(f"{option} is for AWS, and this goes on here", f"leave {option} out")
        else:
            _ask(context, launcher, chosen, max_cost_usd=max_cost_usd, yes=yes)
        resumed = launcher.resume(chosen, detach=detach, account_timer=account_timer)
    print_runs([resumed], output=output, answer=answer_of(context, [resumed]))
    return Submitted(runs=Runs([resumed]), is_stopped=bool(launcher.stop.by)).exit_code


def _ask(context: World, launcher: "Launcher", run: "Run", *, max_cost_usd: float | None, yes: bool) -> None:
    """Say where the run would resume and what that may cost. Return if the user agrees."""
    from fastlaunch.lifecycle.resume import resumable
    from fastlaunch.placement.cost_ceiling import NOT_COUNTED, check_budget, cost_ceiling

    plan = resumable(run, backends=launcher.cloud_backends, ledger=launcher.ledger)
    ceiling = cost_ceiling(plan.placements, num_nodes=plan.num_nodes, max_minutes=plan.minutes_left)
    check_budget(ceiling, context.settings.budget_usd(max_cost_usd))
    click.echo(
        f"from {plan.origin}, with {plan.minutes_left} minutes left; {ceiling}\n{NOT_COUNTED}", err=True
    )
    context.confirm(f"go on with {run.id}?", yes=yes)
