"""`fastlaunch status`, `logs` and `cancel`: runs that are under way, from any terminal."""

import codecs
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from io import IncrementalNewlineDecoder
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.cli.context import app_context, open_reconciled
from fastlaunch.cli.options import examples, next_command, profile_option, table_or_json_option, yes_option
from fastlaunch.cli.render import print_models, print_run_rows, run_row
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED, UserError
from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import RunState
from fastlaunch.core.terminal import as_warning, raw_output, report_line
from fastlaunch.core.units import counted
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.ledger.rows import Attempt
    from fastlaunch.lifecycle.follow import View

#: A node uploads every 30 s.
FETCH_INTERVAL_S = 5.0
#: A local run writes its log at once. Its launcher notes the end, or a reconcile does if that is gone.
_LOOK_INTERVAL_S, _TICK_S = 1.0, 0.2
#: How long ended runs on AWS are shown: long enough for a night.
_LATELY = timedelta(days=1)
_CHUNK_BYTES = 2**16


@click.command(
    epilog=examples(
        ("what is under way, and what ended today", "fastlaunch status"),
        ("bring home what is not here of runs that ended", "fastlaunch status state=completed"),
        ("for a script", "fastlaunch status k3f9 --output json"),
    )
)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@table_or_json_option
@profile_option
def status(runs: tuple[str, ...], output: str) -> int:
    """Show where runs stand, after checking that it is still true, and bring home their records and logs.

    RUN is a run's id, the beginning or end of it, or `field=glob`. Without RUN: the runs under way, those on
    AWS that ended within a day, and the last submission. A detached run on EC2 goes on from its last
    checkpoint, within its --max-hours, if EC2 took its spot machine, one of several machines was lost or a
    GPU is faulty.
    The exit code is 1 if a machine is over its time, or AWS does not show it, and 3 if AWS refuses the files
    of RUN.
    """
    from fastlaunch.lifecycle.budgets import uses_of
    from fastlaunch.lifecycle.follow import Follower, current_runs, fetch_ended, fetch_unfollowed, not_here

    with open_reconciled() as (context, ledger):
        go_on(context, ledger)
        chosen = ledger.select(runs) if runs else current_runs(ledger, since=context.now() - _LATELY)
        with activity("fetching what runs have uploaded"):
            refused = fetch_unfollowed(context, ledger, chosen)
            if runs:
                refused |= fetch_ended(context, ledger, chosen)
                chosen = [ledger.get(run.id) for run in chosen]
        for problem in not_here(refused):
            report_line(as_warning(problem))
        view = Follower(world=context, ledger=ledger, choose=lambda: chosen).read()
    alarmed = sorted({str(live.attempts[-1].region) for live in view.runs if live.alarm})
    codes = [error.exit_code for error in refused.values()] if runs else []
    code = EXIT_JOB_FAILED if alarmed else max(codes, default=EXIT_DONE)
    budgets = uses_of(context)
    if output == "json":
        home = context.settings.home
        shown = {
            "runs": [live.to_dict(home=home, now=view.now) for live in view.runs],
            "budgets": [use.to_json() for use in budgets],
        }
        click.echo(json.dumps(shown, indent=2))
        return code
    if view.runs:
        # A run that was asked for is shown in any case.
        needed = [live for live in view.runs if runs or not live.run.is_unstarted]
        rows = [run_row(live.run, note=live.in_words()) for live in needed]
        num_unneeded = 0 if runs else sum(live.run.is_unneeded for live in view.runs)
        num_unstarted = len(view.runs) - len(needed) - num_unneeded
        print_run_rows(rows, num_unneeded=num_unneeded, num_unstarted=num_unstarted)
        of = "" if runs else " under way or of the last submission"
        states = states_text([live.run for live in needed])
        click.echo(f"{counted(len(rows), 'run')}{of}{': ' if rows else ''}{states}.")
        print_models([live.run for live in needed])
    else:
        click.echo("No runs yet.")
    for use in budgets:
        click.echo(f"budgets.{use.name}: {use}.")
    look = "".join(f" --region {region}" for region in alarmed)
    next_command(f"fastlaunch reap{look}" if alarmed else _after_status(chosen))
    return code


def go_on(context: "World", ledger: "Ledger") -> bool:
    """Resume runs that EC2 interrupted and nobody follows; return whether any still waits for a machine.

    Raises KeyboardInterrupt if the user stopped it.
    """
    from fastlaunch.lifecycle.launcher import open_launcher

    if not ledger.goes_on():
        return False
    with open_launcher(context, context.cloud_backends) as launcher:
        is_waiting = launcher.go_on()
        if launcher.stop.by:
            raise KeyboardInterrupt
    return is_waiting


def states_text(runs: "Sequence[Run]") -> str:
    """`1 running, 2 completed`."""
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{counts[state]} {state}" for state in RunState if counts[state])


@click.command(
    epilog=examples(
        ("of the last run, as it comes", "fastlaunch logs -f"), ("of one run", "fastlaunch logs k3f9")
    )
)
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow the run until it ends.")
@click.option("--raw", is_flag=True, help="Print it byte by byte, with its colours and control characters.")
@profile_option
def logs(run: str | None, follow: bool, raw: bool) -> None:
    """Show what a run printed; -f follows it.

    RUN is a run's id, or the beginning or end of it. Without RUN: the last run that was started.
    """
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.lifecycle.follow import Follower, fetch_output

    context = app_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        chosen = ledger.get(run) if run else _last_started(ledger)
        is_cloud = chosen.backend in CLOUD_BACKENDS
        views = Follower(
            world=context,
            ledger=ledger,
            choose=lambda: [ledger.get(chosen.id)],
            fetch=lambda ledger, _: fetch_output(context, ledger.attempts_of(chosen.id)[-1:]),
        ).views(
            interval_s=FETCH_INTERVAL_S if is_cloud else _LOOK_INTERVAL_S,
            tick_s=FETCH_INTERVAL_S if is_cloud else _TICK_S,
        )
        log = _Log(context=context, follow=follow, raw=raw)
        with activity("asking AWS what runs are doing"):
            view = next(views)
        log.show(view)
        for view in views if follow else ():
            log.show(view)
    log.end(view.runs[0].run)
    completed = view.runs[0].run.state is RunState.COMPLETED
    next_command("fastlaunch compare" if completed else "fastlaunch status")


@click.command(
    epilog=examples(
        ("one run", "fastlaunch cancel k3f9"), ("all that are running", "fastlaunch cancel state=running")
    )
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
            # If nobody can be asked, stop what costs money.
            context.confirm("Stop them all?", yes=yes or context.ask is None)
        for run_id in [run.id for run in chosen]:
            # Read again, since stopping an earlier run may have stopped this one on the same machine.
            run = ledger.get(run_id)
            # `status` must not resume it, nor the runs that shared its machine.
            attempts = ledger.attempts_of(run_id)
            shared_ids = {shared_id for attempt in attempts for shared_id in attempt.run_ids}
            ledger.set_goes_on({run_id, *shared_ids}, None)
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


class _LogTail:
    """Prints what a log gained since the last call. Unless raw, a carriage return begins a new line."""

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


@dataclass(kw_only=True)
class _Log:
    """Prints a run's log as far as it is here; before the run has one, the log of its node or machine."""

    context: World
    follow: bool
    raw: bool
    _tails: dict[Path, _LogTail] = field(default_factory=dict)
    _printed: set[str] = field(default_factory=set)

    def show(self, view: "View") -> None:
        (live,) = view.runs
        run = live.run
        for problem in view.problems:
            self._print_once(as_warning(problem))
        path = _log_of(self.context.settings.home, run, live.attempts)
        if path is None and (run.state.is_final or not self.follow):
            path = _console_log(self.context, live.attempts)
        if path is not None:
            if path.name != LOG:
                until = "" if run.state.is_final else f", until run {run.id} prints something"
                self._print_once(f"the machine's own log{until}:")
            self._tails.setdefault(path, _LogTail(path, raw=self.raw)).print()
        elif not run.state.is_final and run.reason:
            self._print_once(f"nothing is printed yet: {run.reason}")

    def end(self, run: "Run") -> None:
        """Print where else the run has logs. Raises UserError if it has none."""
        if not self._tails:
            raise UserError(f"run {run.id} has no log: it is {run.state}", "type: fastlaunch status")
        # A run of several nodes may have failed on another one.
        if run.directory and (others := sorted(run.directory.glob("log-node-*.txt"))):
            self._print_once(f"what it printed on other nodes: {', '.join(map(str, others))}")

    def _print_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            report_line(line)


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


def _after_status(runs: "Sequence[Run]") -> str:
    running = [run for run in runs if run.state is RunState.RUNNING]
    if running:
        return f"fastlaunch logs -f {running[0].id}"
    failed = [run for run in runs if run.state in (RunState.FAILED, RunState.LOST)]
    if failed:
        return f"fastlaunch logs {failed[0].id}"
    if any(run.summary and run.summary.is_measured for run in runs):
        return "fastlaunch compare"
    return f"fastlaunch runs show {runs[0].id}" if runs else "fastlaunch submit --local"


def _log_of(home: Path, run: "Run", attempts: Sequence["Attempt"]) -> Path | None:
    run_log = run.directory / LOG if run.directory else None
    if run_log is not None and run_log.is_file():
        return run_log
    tokens = [attempt.token for attempt in reversed(attempts)]
    attempt_logs = [
        path(home, token) for token in tokens for path in (s3_sync.node_log_path, s3_sync.console_path)
    ]
    return next((path for path in attempt_logs if path.is_file() and path.stat().st_size), None)


def _console_log(context: World, attempts: Sequence["Attempt"]) -> Path | None:
    """Return a file with the output of the newest attempt's containers; None if AWS has none."""
    last = attempts[-1] if attempts else None
    backend = context.cloud_backends.get(last.backend) if last else None
    # EC2's console helps only if the machine never boots.
    if last is None or last.handle is None or backend is None or backend.boot_limit is not None:
        return None
    try:
        path = backend.console_log(last.handle)
    except UserError as error:
        report_line(as_warning(error.message))
        return None
    return path if path.stat().st_size else None
