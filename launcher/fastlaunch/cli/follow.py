"""`fastlaunch status`, `logs` and `cancel`: runs that are under way, from any terminal."""

import codecs
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from io import IncrementalNewlineDecoder
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastlaunch.api.context import AppContext, open_launcher
from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.cli.context import open_reconciled
from fastlaunch.cli.options import examples, next_command, profile_option, table_or_json_option, yes_option
from fastlaunch.cli.render import print_run_rows, run_row
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED, UserError
from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import RunState
from fastlaunch.core.terminal import raw_output
from fastlaunch.lifecycle.advice import PROGRESS
from fastlaunch.lifecycle.display import RecordTail, describe

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.ledger.rows import Attempt

#: A node uploads every 30 s.
FETCH_INTERVAL_S = 5.0
_WATCH_INTERVAL_S = 60.0
#: What ended on AWS is shown for so long: overnight nobody looks.
_LATELY = timedelta(days=1)
#: For more machines that nobody follows, `status` would take long to fetch.
_MAX_FETCHED = 16

_CHUNK_BYTES = 2**16


@click.command(
    short_help="Show where runs stand, after checking that it is still true.",
    epilog=examples(
        ("what is under way, and what ended today", "fastlaunch status"),
        ("until all have ended", "fastlaunch status --watch"),
        ("for a script", "fastlaunch status k3f9 --output json"),
    ),
)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--watch", is_flag=True, help="Look every minute, until no run is under way.")
@table_or_json_option("the rows are")
@profile_option
def status(runs: tuple[str, ...], watch: bool, output: str) -> int:
    """Show where runs stand, after checking that it is still true.

    RUN is a run's id, the beginning or end of it, or `field=glob`. Without RUN: the runs under way, those on
    AWS that ended within a day, and the last submission. A detached run on EC2 goes on from its last
    checkpoint, within its --max-hours, if EC2 took its spot machine or a GPU of it is faulty.
    The exit code is 1 if a machine is over its time, or AWS does not show it.
    """
    while True:
        with open_reconciled() as (context, ledger):
            is_waiting = _go_on(context, ledger)
            code, is_under_way = _show_status(context, ledger, runs, output, watch=watch)
        if not watch or not (is_waiting or is_under_way):
            return code
        context.sleep(_WATCH_INTERVAL_S)


def _go_on(context: AppContext, ledger: "Ledger") -> bool:
    """Go on with what EC2 interrupted and nobody follows; return whether any still waits for that."""
    if not ledger.goes_on():
        return False
    with open_launcher(context, context.cloud_backends) as launcher:
        is_waiting = launcher.go_on()
        if launcher.stop.by:
            raise KeyboardInterrupt
    return is_waiting


def _show_status(
    context: AppContext, ledger: "Ledger", runs: tuple[str, ...], output: str, *, watch: bool
) -> tuple[int, bool]:
    """Print where the runs stand; return the exit code, and whether one of them is under way."""
    shown = ledger.select(runs) if runs else current_runs(ledger, since=context.now() - _LATELY)
    with activity("fetching what runs have uploaded"):
        refused = fetch_unfollowed(context, ledger, shown)
    for token, error in refused.items():
        click.echo(f"warning: what {token} uploaded cannot be brought here: {error.message}", err=True)
    alarmed = _alarmed_regions(context, ledger, shown)
    code = EXIT_JOB_FAILED if alarmed else EXIT_DONE
    is_under_way = any(not run.state.is_final for run in shown)
    if output == "json":
        from fastlaunch.lifecycle.describe import status_to_dict

        home, now = context.settings.home, context.now()
        document = {
            "runs": [status_to_dict(run, ledger.attempts_of(run.id), home=home, now=now) for run in shown]
        }
        # Of many documents, each has a line of its own.
        click.echo(json.dumps(document, indent=None if watch else 2))
        return code, is_under_way
    if rows := [run_row(run, note=_note(context, ledger, run)) for run in shown]:
        print_run_rows(rows)
    counts = Counter(run.state for run in shown)
    summary = ", ".join(f"{counts[state]} {state}" for state in RunState if counts[state])
    click.echo(f"{len(shown)} run{'' if len(shown) == 1 else 's'}: {summary}." if shown else "No runs yet.")
    look = "".join(f" --region {region}" for region in alarmed)
    next_command(f"fastlaunch reap{look}" if alarmed else _after_status(shown))
    return code, is_under_way


@click.command(
    short_help="Show what a run printed; -f follows it.",
    epilog=examples(
        ("of the last run, as it comes", "fastlaunch logs -f"),
        ("of one run", "fastlaunch logs k3f9"),
    ),
)
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow the run until it ends.")
@click.option("--raw", is_flag=True, help="Print it byte by byte, with its colours and control characters.")
@profile_option
def logs(run: str | None, follow: bool, raw: bool) -> None:
    """Show what a run printed; -f follows it.

    RUN is a run's id, or the beginning or end of it. Without RUN: the last run that was started.
    """
    with open_reconciled() as (context, ledger):
        chosen = ledger.get(run) if run else _last_started(ledger)
        show = _show_cloud_log if chosen.backend in CLOUD_BACKENDS else _show_local_log
        show(context, ledger, chosen, follow=follow, raw=raw)
        completed = ledger.get(chosen.id).state is RunState.COMPLETED
        next_command("fastlaunch compare" if completed else "fastlaunch status")


@click.command(
    short_help="Stop a run and keep what it recorded.",
    epilog=examples(
        ("one run", "fastlaunch cancel k3f9"),
        ("all that are running", "fastlaunch cancel state=running"),
    ),
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@yes_option
@profile_option
def cancel(runs: tuple[str, ...], yes: bool) -> None:
    """Stop a run and keep what it recorded.

    RUN is a run's id, the beginning or end of it, or `field=glob`, such as state=running. What else its
    machine does stops with it: on a terminal, cancel asks first.
    """
    from fastlaunch.lifecycle.cancel import cancel as cancel_run
    from fastlaunch.lifecycle.cancel import siblings

    states = []
    with open_reconciled() as (context, ledger):
        chosen = ledger.select(runs)
        with_them = dict.fromkeys(id for run in chosen for id in siblings(ledger, run))
        if others := [id for id in with_them if id not in {run.id for run in chosen}]:
            click.echo(
                f"their machines do other runs too, which stop with them: {', '.join(others)}", err=True
            )
            # Where nobody can be asked, what costs is stopped.
            context.confirm("Stop them all?", yes=yes or context.ask is None)
        for run_id in [run.id for run in chosen]:
            # Looked up now: it may share a machine with one that was stopped a moment ago.
            run = ledger.get(run_id)
            # Nor does `status` go on with it, or with what shared its machine.
            machines = ledger.attempts_of(run_id)
            ledger.set_goes_on({run_id, *(each for held in machines for each in held.run_ids)}, None)
            if run.state.is_final:
                states.append(f"{run.id} was {run.state} already")
                continue
            click.echo(f"stopping {run.id}", err=True)
            backend = context.backends[run.backend]
            with activity(f"stopping {run.id}"):
                state = cancel_run(run, backend=backend, ledger=ledger, sleep=context.sleep)
            states.append(f"{run.id} is {state}")
    click.echo("\n".join(states) if states else "No runs fit.")
    next_command("fastlaunch status")


def current_runs(ledger: "Ledger", *, since: datetime | None = None) -> "list[Run]":
    """Return the runs under way and those of the last submission, and what ended on AWS after `since`."""
    last = ledger.last_submission()
    unfinished = ledger.select(["state=planned", "state=running"])
    ended = ledger.ended_on_aws(since) if since else []
    others = [run for run in (*ended, *unfinished) if run.submission_id != last]
    return others + (ledger.select(submission=last) if last else [])


class _LogTail:
    """Prints what was added to a log since the last time. Unless raw, a carriage return begins a line."""

    def __init__(self, path: Path, *, raw: bool) -> None:
        self._path = path
        self._raw = raw
        self._offset = 0
        self._decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), True)

    def print(self) -> None:
        with self._path.open("rb") as log:
            log.seek(self._offset)
            while chunk := log.read(_CHUNK_BYTES):
                if self._raw:
                    click.echo(chunk, file=raw_output(sys.stdout), nl=False)
                else:
                    click.echo(self._decoder.decode(chunk), nl=False)
            self._offset = log.tell()


def _show_local_log(context: AppContext, ledger: "Ledger", run: "Run", *, follow: bool, raw: bool) -> None:
    from fastlaunch.lifecycle.reconcile import reconcile

    path = run.directory / LOG if run.directory else None
    if path is None or not path.is_file():
        raise UserError(f"run {run.id} has no log: it is {run.state} ({run.backend})")
    log = _LogTail(path, raw=raw)
    while True:
        # Looked up before reading: what was printed up to the end is then read after it.
        lives = follow and ledger.get(run.id).state is RunState.RUNNING
        log.print()
        if not lives:
            break
        context.sleep(0.2)
        reconcile(ledger, context.backends, context.settings)


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


def _note(context: AppContext, ledger: "Ledger", run: "Run") -> str | None:
    with context.advice.guard(PROGRESS):
        if run.backend in CLOUD_BACKENDS:
            from fastlaunch.lifecycle.describe import cloud_note

            attempts = ledger.attempts_of(run.id)
            return cloud_note(run, attempts, home=context.settings.home, now=context.now())
        if run.state is RunState.RUNNING and run.directory is not None:
            progress = RecordTail(run.directory).read()
            return describe(progress) if progress else "starting"
    return None


def _alarmed_regions(context: AppContext, ledger: "Ledger", runs: "Sequence[Run]") -> list[str]:
    """Return where machines of these runs are over their time, or may live without being seen."""
    from fastlaunch.lifecycle.sight import alarm

    last = [ledger.attempts_of(run.id)[-1:] for run in runs if run.backend in CLOUD_BACKENDS]
    return sorted({str(each.region) for attempts in last for each in attempts if alarm(each, context.now())})


def _after_status(runs: "Sequence[Run]") -> str:
    running = [run for run in runs if run.state is RunState.RUNNING]
    if running:
        return f"fastlaunch logs -f {running[0].id}"
    failed = [run for run in runs if run.state in (RunState.FAILED, RunState.LOST)]
    if failed:
        return f"fastlaunch logs {failed[0].id}"
    if any(run.summary and run.summary.timing.step_time_s for run in runs):
        return "fastlaunch compare"
    return f"fastlaunch runs show {runs[0].id}" if runs else "fastlaunch submit --local"


def fetch_output(context: AppContext, attempts: Iterable["Attempt"]) -> dict[str, UserError]:
    """Bring home what is new of the attempts; return the errors by token."""
    refused = {}
    for attempt in attempts:
        if attempt.region is None or attempt.output is None:
            continue
        try:
            synced = s3_sync.sync(
                context.aws,
                context.settings.home,
                region=attempt.region,
                output=attempt.output,
                token=attempt.token,
                run_ids=attempt.run_ids,
                num_nodes=attempt.num_nodes,
            )
            if synced.left_out:
                refused[attempt.token] = synced.left_out
        except UserError as error:
            refused[attempt.token] = error
    return refused


def fetch_unfollowed(context: AppContext, ledger: "Ledger", runs: Sequence["Run"]) -> dict[str, UserError]:
    """Bring home what is new of these runs from machines that no launcher follows, a few of them.

    Returns the errors by token.
    """
    attempts: dict[str, Attempt] = {}
    for run in runs:
        if run.backend not in CLOUD_BACKENDS or run.state.is_final or len(attempts) >= _MAX_FETCHED:
            continue
        for attempt in ledger.attempts_of(run.id)[-1:]:
            if attempt.handle and not attempt.ended_at and not ledger.launcher_lives(run):
                attempts[attempt.token] = attempt
    return fetch_output(context, attempts.values())


def _show_cloud_log(context: AppContext, ledger: "Ledger", run: "Run", *, follow: bool, raw: bool) -> None:
    """Print the run's log as far as it was uploaded; its node's until it has one. follow: until it ends.

    Raises UserError if there is neither.
    """
    from fastlaunch.lifecycle.reconcile import reconcile

    shown: dict[Path, _LogTail] = {}
    warned: set[str] = set()
    while True:
        # Looked up before fetching: what was printed up to the end is then fetched after it.
        now = ledger.get(run.id)
        has_ended = now.state.is_final
        attempts = ledger.attempts_of(run.id)
        for error in fetch_output(context, attempts[-1:]).values():
            if error.message not in warned:
                click.echo(f"warning: {error.message}", err=True)
            warned.add(error.message)
        path = _cloud_log(context.settings.home, run, attempts)
        if path is None and (has_ended or not follow):
            path = _console_log(context, attempts)
        if path is not None:
            if path not in shown and path.name != LOG:
                until = "" if has_ended else f", until run {run.id} prints something"
                click.echo(f"the machine's own log{until}:", err=True)
            shown.setdefault(path, _LogTail(path, raw=raw)).print()
        elif not has_ended and now.reason and now.reason not in warned:
            click.echo(f"nothing is printed yet: {now.reason}", err=True)
            warned.add(now.reason)
        if has_ended or not follow:
            break
        context.sleep(FETCH_INTERVAL_S)
        reconcile(ledger, context.backends, context.settings)
    if not shown:
        raise UserError(
            f"run {run.id} has no log yet: it is {ledger.get(run.id).state}", "type: fastlaunch status"
        )
    # A run of several nodes may have failed on another one.
    if others := sorted(s3_sync.run_folder(context.settings.home, run.id).glob("log-node-*.txt")):
        click.echo(f"what it printed on other nodes: {', '.join(map(str, others))}", err=True)


def _cloud_log(home: Path, run: "Run", attempts: Sequence["Attempt"]) -> Path | None:
    own = s3_sync.run_folder(home, run.id) / LOG
    if own.is_file():
        return own
    tokens = [attempt.token for attempt in reversed(attempts)]
    theirs = [path(home, token) for token in tokens for path in (s3_sync.node_log_path, s3_sync.console_path)]
    return next((path for path in theirs if path.is_file() and path.stat().st_size), None)


def _console_log(context: AppContext, attempts: Sequence["Attempt"]) -> Path | None:
    """Return a file with what the newest attempt's containers printed, if AWS keeps that; None if nothing."""
    last = attempts[-1] if attempts else None
    backend = context.cloud_backends.get(last.backend) if last else None
    # EC2's console is worth a look only if the machine never boots.
    if last is None or last.handle is None or backend is None or backend.boot_limit is not None:
        return None
    try:
        path = backend.console_log(last.handle)
    except UserError as error:
        click.echo(f"warning: {error.message}", err=True)
        return None
    return path if path.stat().st_size else None
