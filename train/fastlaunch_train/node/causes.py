"""Why a run failed, in one line: the exception of the rank that failed first."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fastlaunch_train.records.records import is_echo

_MAX_CHARS = 400
_TRACEBACK = "Traceback (most recent call last):"
#: Where torchrun begins to report that a rank failed: what the ranks said stands before.
_TORCHRUN = re.compile(r"failed \(exitcode: -?\d+\)|Sending process \d+ closing signal")
#: The signal that killed a rank, as torchrun tells it at its end. By SIGTERM it ends the other ranks itself.
_SIGNAL = re.compile(r"traceback *: (Signal (?!15\b).*)")
_ERROR = re.compile(r"(?:[\w.]+: )?error: .*")


def cause_of(output: Path, log: Path, attempt: int) -> str:
    """What ended the run, in a line; the last that it printed where nothing else is known, else "".

    output: with tracebacks (`traceback-rank-*-attempt-<n>.txt`) and records. log: what the run printed.
    """
    lines = _last_lines(log)
    told = [*_of_tracebacks(output, attempt), *_of_records(output, attempt), *_signals(lines)]
    own = [line for line in told if line and not is_echo(line)]
    return next(iter([*own, *filter(None, told)]), _of_log(lines))[:_MAX_CHARS]


def exception_line(lines: Sequence[str]) -> str:
    """The line of a traceback that names the exception; else the last one with words in it, else "".

    Of several tracebacks it is the last one's, which the others led to. A message may go on below its line.
    """
    fatal = next((line for line in lines if line.startswith("Fatal Python error:")), "")
    if fatal:
        # The fault handler tells where every thread stood, and after that which modules there were.
        return fatal.strip()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else ()
    named = next((line.strip() for line in after if line.strip() and not line[0].isspace()), "")
    return named or next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")


def _of_tracebacks(output: Path, attempt: int) -> list[str]:
    """The exception of each rank's traceback, of the first to fail first."""
    paths = _oldest_first(output, f"traceback-rank-*-attempt-{attempt}.txt")
    return [exception_line(_last_lines(path)) for path in paths]


def _of_records(output: Path, attempt: int) -> list[str]:
    found = []
    for path in _oldest_first(output, f"rank-*-attempt-{attempt}.jsonl"):
        try:
            end = json.loads(next(iter(reversed(_last_lines(path))), ""))
        except ValueError:
            continue
        if end.get("kind") == "end" and end.get("status") != "completed":
            found.append(str(end.get("message") or end["status"]))
    return found


def _signals(lines: Sequence[str]) -> list[str]:
    return [match[1] for line in lines if (match := _SIGNAL.search(line))]


def _of_log(lines: Sequence[str]) -> str:
    """What the ranks, or run_train.sh before them, said last: an error, an exception, or any words."""
    end = next((number for number, line in enumerate(lines) if _TORCHRUN.search(line)), len(lines))
    said = lines[:end]
    error = next((line for line in reversed(said) if _ERROR.match(line)), "")
    return error.strip() or exception_line(said)


def _oldest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def _last_lines(path: Path) -> list[str]:
    """The lines at the end of a file that may be long, but empty ones; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()]
