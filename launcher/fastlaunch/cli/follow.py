"""`fastlaunch status`, `logs` and `cancel`: runs that are under way, from any terminal."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from fastlaunch.backends import RunState
from fastlaunch.cli.listing import table
from fastlaunch.cli.options import next_command
from fastlaunch.cli.run_table import HEADERS, row, to_json
from fastlaunch.cli.surroundings import Surroundings, surroundings
from fastlaunch.errors import UserError
from fastlaunch.follow import RecordTail, describe
from fastlaunch.log_file import LOG

if TYPE_CHECKING:
    from fastlaunch.runs import Ledger, Run

_CHUNK_BYTES = 2**16


@click.command(short_help="Where runs stand, after checking that they really do.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How the rows are written to stdout.",
)
def status(runs: tuple[str, ...], output: str) -> None:
    """Where runs stand, after checking that they really do.

    RUN is an id, a part of one, or `field=glob`; without any, the runs under way and the last submission.
    """
    with _ledger() as (_, ledger):
        shown = ledger.select(runs) if runs else _current(ledger)
    if output == "json":
        click.echo(json.dumps({"runs": [to_json(run) for run in shown]}, indent=2))
        return
    if shown:
        click.echo(table([row(run, note=_progress(run)) for run in shown], HEADERS) + "\n")
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
    with _ledger() as (around, ledger):
        chosen = ledger.get(run) if run else _last_started(ledger)
        path = chosen.directory / LOG if chosen.directory else None
        if path is None or not path.is_file():
            raise UserError(f"run {chosen.id} has no log: it is {chosen.state} ({chosen.backend})")
        with path.open("rb") as log:
            while True:
                # Looked up before reading: what was printed up to the end is then read after it.
                lives = follow and ledger.get(chosen.id).state is RunState.RUNNING
                while chunk := log.read(_CHUNK_BYTES):
                    click.echo(chunk, nl=False)
                if not lives:
                    break
                around.sleep(0.2)
                _reconcile(around, ledger)
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
    with _ledger() as (around, ledger):
        for run in ledger.select(runs):
            if run.state.is_final:
                states.append(f"{run.id} was {run.state} already")
                continue
            click.echo(f"stopping {run.id}", err=True)
            state = cancel_run(run, backend=around.backends[run.backend], ledger=ledger, sleep=around.sleep)
            states.append(f"{run.id} is {state}")
    click.echo("\n".join(states) if states else "No runs fit.")
    next_command("fastlaunch status")


@contextmanager
def _ledger() -> "Iterator[tuple[Surroundings, Ledger]]":
    """Surroundings and open ledger, brought up to what is true."""
    from fastlaunch.runs import open_ledger

    around = surroundings()
    with open_ledger(around.settings) as ledger:
        _reconcile(around, ledger)
        yield around, ledger


def _reconcile(around: Surroundings, ledger: "Ledger") -> None:
    from fastlaunch.submission import reconcile

    reconcile(ledger, around.backends)


def _current(ledger: "Ledger") -> "list[Run]":
    last = ledger.last_submission()
    unfinished = ledger.select(["state=planned", "state=running"])
    others = [run for run in unfinished if run.submission_id != last]
    return others + (ledger.select(submission=last) if last else [])


def _last_started(ledger: "Ledger") -> "Run":
    started = [
        run for run in ledger.select(["backend=local"]) if run.directory and (run.directory / LOG).is_file()
    ]
    if not started:
        raise UserError("no run was started here yet", "type: fastlaunch submit --local")
    return started[-1]


def _progress(run: "Run") -> str | None:
    if run.state is not RunState.RUNNING or run.directory is None:
        return None
    progress = RecordTail(run.directory).read()
    return describe(progress) if progress else "starting"


def _after_status(runs: "Sequence[Run]") -> str:
    running = [run for run in runs if run.state is RunState.RUNNING]
    if running:
        return f"fastlaunch logs -f {running[0].id}"
    if any(run.state in (RunState.FAILED, RunState.LOST) for run in runs):
        return "fastlaunch logs " + next(
            run.id for run in runs if run.state in (RunState.FAILED, RunState.LOST)
        )
    return "fastlaunch compare" if runs else "fastlaunch submit --local"
