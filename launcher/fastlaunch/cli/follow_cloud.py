"""What `status`, `logs`, `cancel` and `collect` do for runs on AWS: fetch what is new, and show it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.cli.context import Surroundings
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.run_attempts import Attempt

#: A node uploads every 30 s.
FETCH_INTERVAL_S = 5.0
#: `status` fetches for so many machines that nobody follows; for more it would take long.
_MAX_FETCHED = 16
_CHUNK_BYTES = 2**16


def fetch(around: Surroundings, attempts: Iterable["Attempt"]) -> dict[str, UserError]:
    """Bring what is new of the attempts; why that failed, by token of those for which it did."""
    refused = {}
    for attempt in attempts:
        if attempt.region is None or attempt.output is None:
            continue
        try:
            s3_sync.sync(
                around.aws,
                around.settings.home,
                region=attempt.region,
                output=attempt.output,
                token=attempt.token,
                num_nodes=attempt.num_nodes,
            )
        except UserError as error:
            refused[attempt.token] = error
    return refused


def fetch_unfollowed(around: Surroundings, ledger: "Ledger", runs: Sequence["Run"]) -> None:
    """Bring what is new of the machines that do these runs and that no launcher follows; a few of them."""
    from fastlaunch.submission import launcher_lives

    found: dict[str, Attempt] = {}
    for run in runs:
        if run.backend not in CLOUD_BACKENDS or run.state.is_final or len(found) >= _MAX_FETCHED:
            continue
        for attempt in ledger.attempts_of(run.id)[-1:]:
            if attempt.handle and not attempt.ended_at and not launcher_lives(ledger, run):
                found[attempt.token] = attempt
    for token, error in fetch(around, found.values()).items():
        click.echo(f"warning: what {token} uploaded cannot be brought here: {error.message}", err=True)


def show_log(around: Surroundings, ledger: "Ledger", run: "Run", *, follow: bool) -> None:
    """Print the run's log as far as it was uploaded; its node's until it has one. follow: until it ends.

    Raises UserError if there is neither.
    """
    from fastlaunch.submission import reconcile

    shown: dict[Path, int] = {}
    warned: set[str] = set()
    while True:
        # Looked up before fetching: what was printed up to the end is then fetched after it.
        now = ledger.get(run.id)
        has_ended = now.state.is_final
        attempts = ledger.attempts_of(run.id)
        for error in fetch(around, attempts[-1:]).values():
            if error.message not in warned:
                click.echo(f"warning: {error.message}", err=True)
            warned.add(error.message)
        path = _log(around.settings.home, run, attempts)
        if path is None and (has_ended or not follow):
            path = _diary(around, attempts)
        if path is not None:
            if path not in shown and path.name != LOG:
                until = "" if has_ended else f", until run {run.id} prints something"
                click.echo(f"the machine's own log{until}:", err=True)
            shown[path] = _print_from(path, shown.get(path, 0))
        elif not has_ended and now.reason and now.reason not in warned:
            click.echo(f"nothing is printed yet: {now.reason}", err=True)
            warned.add(now.reason)
        if has_ended or not follow:
            break
        around.sleep(FETCH_INTERVAL_S)
        reconcile(ledger, around.backends, settings=around.settings)
    if not shown:
        raise UserError(
            f"run {run.id} has no log yet: it is {ledger.get(run.id).state}", "type: fastlaunch status"
        )
    # A run of several nodes may have failed on another one.
    if others := sorted(s3_sync.run_folder(around.settings.home, run.id).glob("log-node-*.txt")):
        click.echo(f"what it printed on other nodes: {', '.join(map(str, others))}", err=True)


def _log(home: Path, run: "Run", attempts: Sequence["Attempt"]) -> Path | None:
    own = s3_sync.run_folder(home, run.id) / LOG
    if own.is_file():
        return own
    tokens = [attempt.token for attempt in reversed(attempts)]
    theirs = [path(home, token) for token in tokens for path in (s3_sync.node_log_path, s3_sync.console_path)]
    return next((path for path in theirs if path.is_file() and path.stat().st_size), None)


def _diary(around: Surroundings, attempts: Sequence["Attempt"]) -> Path | None:
    """File with what the newest attempt's containers printed, where AWS keeps that; None if it is nothing."""
    last = attempts[-1] if attempts else None
    backend = around.cloud_backends.get(last.backend) if last else None
    # What a machine of EC2's wrote to its console is its own business, unless it never boots.
    if last is None or last.handle is None or backend is None or backend.boot_limit is not None:
        return None
    try:
        path = backend.diary(last.handle)
    except UserError as error:
        click.echo(f"warning: {error.message}", err=True)
        return None
    return path if path.stat().st_size else None


def _print_from(path: Path, offset: int) -> int:
    with path.open("rb") as log:
        log.seek(offset)
        while chunk := log.read(_CHUNK_BYTES):
            click.echo(chunk, nl=False)
        return log.tell()
