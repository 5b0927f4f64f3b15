"""`fastlaunch status`, `logs` and `cancel`: runs that are under way, from any terminal."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.backends import RunState
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.cli.context import Surroundings, surroundings
from fastlaunch.cli.follow_cloud import fetch_unfollowed, show_log
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import next_command, table_or_json_option
from fastlaunch.cli.render import HEADERS, row, to_json
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG
from fastlaunch.runs.display import RecordTail, describe

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run

_CHUNK_BYTES = 2**16


@click.command(short_help="Where runs stand, after checking that they really do.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@table_or_json_option("the rows are")
def status(runs: tuple[str, ...], output: str) -> None:
    """Where runs stand, after checking that they really do.

    RUN is an id, a part of one, or `field=glob`; without any, the runs under way and the last submission.
    """
    with open_reconciled() as (around, ledger):
        shown = ledger.select(runs) if runs else current_runs(ledger)
        fetch_unfollowed(around, ledger, shown)
        if output == "json":
            click.echo(json.dumps({"runs": [_as_json(around, ledger, run) for run in shown]}, indent=2))
            return
        rows = [row(run, note=_note(around, ledger, run)) for run in shown]
    if rows:
        click.echo(table(rows, HEADERS) + "\n")
    counts = Counter(run.state for run in shown)
    told = ", ".join(f"{counts[state]} {state}" for state in RunState if counts[state])
    click.echo(f"{len(shown)} run{'' if len(shown) == 1 else 's'}: {told}." if shown else "No runs yet.")
    next_command(_after_status(shown))


@click.command(short_help="What a run printed; -f follows it.")
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
def logs(run: str | None, follow: bool) -> None:
    """What a run printed; -f follows it.

    RUN is an id or a part of one; without it, the last run that was started.
    """
    with open_reconciled() as (around, ledger):
        chosen = ledger.get(run) if run else _last_started(ledger)
        show = show_log if chosen.backend in CLOUD_BACKENDS else _show_local_log
        show(around, ledger, chosen, follow=follow)
        completed = ledger.get(chosen.id).state is RunState.COMPLETED
        next_command("fastlaunch compare" if completed else "fastlaunch status")


@click.command(short_help="Stop a run and keep what it recorded.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def cancel(runs: tuple[str, ...]) -> None:
    """Stop a run and keep what it recorded.

    RUN is an id, a part of one, or `field=glob` such as state=running.
    """
    from fastlaunch.submission import cancel as cancel_run

    states = []
    with open_reconciled() as (around, ledger):
        for run_id in [run.id for run in ledger.select(runs)]:
            # Looked up now: it may share a machine with one that was stopped a moment ago.
            run = ledger.get(run_id)
            if run.state.is_final:
                states.append(f"{run.id} was {run.state} already")
                continue
            click.echo(f"stopping {run.id}", err=True)
            state = cancel_run(
                run,
                backend=around.backends[run.backend],
                ledger=ledger,
                sleep=around.sleep,
                settings=around.settings,
            )
            states.append(f"{run.id} is {state}")
    click.echo("\n".join(states) if states else "No runs fit.")
    next_command("fastlaunch status")


@contextmanager
def open_reconciled() -> "Iterator[tuple[Surroundings, Ledger]]":
    """Surroundings and open ledger, brought up to what is true."""
    from fastlaunch.ledger.ledger import open_ledger

    around = surroundings()
    with open_ledger(around.settings) as ledger:
        _reconcile(around, ledger)
        yield around, ledger


def _reconcile(around: Surroundings, ledger: "Ledger") -> None:
    from fastlaunch.submission import reconcile

    reconcile(ledger, around.backends, settings=around.settings)


def current_runs(ledger: "Ledger") -> "list[Run]":
    """The runs under way, and those of the last submission."""
    last = ledger.last_submission()
    unfinished = ledger.select(["state=planned", "state=running"])
    others = [run for run in unfinished if run.submission_id != last]
    return others + (ledger.select(submission=last) if last else [])


def _show_local_log(around: Surroundings, ledger: "Ledger", run: "Run", *, follow: bool) -> None:
    path = run.directory / LOG if run.directory else None
    if path is None or not path.is_file():
        raise UserError(f"run {run.id} has no log: it is {run.state} ({run.backend})")
    with path.open("rb") as log:
        while True:
            # Looked up before reading: what was printed up to the end is then read after it.
            lives = follow and ledger.get(run.id).state is RunState.RUNNING
            while chunk := log.read(_CHUNK_BYTES):
                click.echo(chunk, nl=False)
            if not lives:
                break
            around.sleep(0.2)
            _reconcile(around, ledger)


def _last_started(ledger: "Ledger") -> "Run":
    started = [
        run
        for run in ledger.select([f"backend={name}" for name in ("local", *CLOUD_BACKENDS)])
        if (run.directory and (run.directory / LOG).is_file())
        or (run.backend in CLOUD_BACKENDS and ledger.attempts_of(run.id))
    ]
    if not started:
        raise UserError("no run was started here yet", "type: fastlaunch submit --local")
    return started[-1]


def _note(around: Surroundings, ledger: "Ledger", run: "Run") -> str | None:
    if run.backend in CLOUD_BACKENDS:
        from fastlaunch.cloud_view import cloud_note

        return cloud_note(run, ledger.attempts_of(run.id), home=around.settings.home, now=around.now())
    if run.state is not RunState.RUNNING or run.directory is None:
        return None
    progress = RecordTail(run.directory).read()
    return describe(progress) if progress else "starting"


def _as_json(around: Surroundings, ledger: "Ledger", run: "Run") -> dict[str, Any]:
    if run.backend not in CLOUD_BACKENDS:
        return to_json(run)
    from fastlaunch.cloud_view import cloud_as_json

    attempts = ledger.attempts_of(run.id)
    return {**to_json(run), **cloud_as_json(run, attempts, home=around.settings.home, now=around.now())}


def _after_status(runs: "Sequence[Run]") -> str:
    running = [run for run in runs if run.state is RunState.RUNNING]
    if running:
        return f"fastlaunch logs -f {running[0].id}"
    failed = [run for run in runs if run.state in (RunState.FAILED, RunState.LOST)]
    if failed:
        return f"fastlaunch logs {failed[0].id}"
    if any(run.summary and run.summary.step_time_s for run in runs):
        return "fastlaunch compare"
    return f"fastlaunch runs show {runs[0].id}" if runs else "fastlaunch submit --local"
