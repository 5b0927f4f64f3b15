"""How a command ends that started runs: rows and an answer on stdout, the next command on stderr."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from fastlaunch.backends import RunState
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import next_command
from fastlaunch.cli.render import HEADERS, answer, row, to_json
from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED
from fastlaunch.core.log_file import LOG, telling_lines
from fastlaunch.jobs.spec import JobSpec, names_apart

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run

_NUM_LOG_LINES = 20
_FAILED = (RunState.FAILED, RunState.LOST)


def tell_runs(runs: "Sequence[Run]", *, output: str) -> None:
    """Rows and answer on stdout; the end of a failed run's log and the next command on stderr."""
    if output == "json":
        click.echo(
            json.dumps({"submission": runs[0].submission_id, "runs": [to_json(r) for r in runs]}, indent=2)
        )
    else:
        rows = [{**row(run), "recipe": name} for run, name in zip(runs, _names(runs), strict=True)]
        click.echo(f"{table(rows, HEADERS)}\n\n{answer(runs)}")
    failed = next((run for run in runs if run.state in _FAILED and run.directory), None)
    if failed is not None and failed.directory is not None:
        lines = telling_lines(failed.directory, num_lines=_NUM_LOG_LINES)
        click.echo("\n".join([f"the end of {failed.directory / LOG}:", *lines]), err=True)
    next_command(_next(runs, failed))


def _names(runs: "Sequence[Run]") -> list[str]:
    """The runs' recipes, with what sets runs apart that share one."""
    specs = [JobSpec.from_json(run.spec) for run in runs if run.spec]
    return names_apart(specs) if len(specs) == len(runs) else [run.recipe for run in runs]


def _next(runs: "Sequence[Run]", failed: "Run | None") -> str:
    for run in runs:
        if not run.state.is_final:
            return f"fastlaunch logs -f {run.id}"
    if any(run.summary and run.summary.step_time_s for run in runs):
        return "fastlaunch compare"
    shown = failed or runs[0]
    has_log = shown.directory is not None and (shown.directory / LOG).is_file()
    return f"fastlaunch logs {shown.id}" if has_log else f"fastlaunch runs show {shown.id}"


def exit_code_of(runs: "Sequence[Run]", *, stopped: bool) -> int:
    """Done if every run completed, or goes on by itself; interrupted if the user stopped it."""
    if stopped:
        return EXIT_INTERRUPTED
    good = all(run.state is RunState.COMPLETED or not run.state.is_final for run in runs)
    return EXIT_DONE if good else EXIT_JOB_FAILED
