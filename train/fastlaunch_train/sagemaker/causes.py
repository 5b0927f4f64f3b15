"""Why a run failed, in one line: the exception of the rank that failed first."""

import json
import re
from pathlib import Path

_MAX_CHARS = 400
#: What ranks say whose peer is gone. They fail because another one did.
_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|DistBackendError|DistNetworkError|"
    r"TCPStore|remote process|process group|rendezvous|by a peer",
    re.IGNORECASE,
)


def cause_of(output: Path, log: Path, attempt: int) -> str:
    """What ended the run, in a line; the last that it printed where nothing else is known, else "".

    output: with tracebacks (`traceback-rank-*-attempt-<n>.txt`) and records. log: what the run printed.
    """
    told = [*_of_tracebacks(output, attempt), *_of_records(output, attempt), _of_log(log)]
    own = [line for line in told if line and not is_echo(line)]
    return next(iter([*own, *filter(None, told)]), "")[:_MAX_CHARS]


def is_echo(cause: str) -> bool:
    """Whether a rank that says so failed because one elsewhere did."""
    return _ECHO.search(cause) is not None


def _of_tracebacks(output: Path, attempt: int) -> list[str]:
    """The last line of each rank's traceback, of the first to fail first."""
    return [_last_line(path) for path in _oldest_first(output, f"traceback-rank-*-attempt-{attempt}.txt")]


def _of_records(output: Path, attempt: int) -> list[str]:
    found = []
    for path in _oldest_first(output, f"rank-*-attempt-{attempt}.jsonl"):
        try:
            end = json.loads(_last_line(path))
        except ValueError:
            continue
        if end.get("kind") == "end" and end.get("status") != "completed":
            found.append(str(end.get("message") or end["status"]))
    return found


def _of_log(log: Path) -> str:
    """The signal that killed a rank, as torchrun tells it at its end; else the last line with words in it."""
    lines = _last_lines(log)
    signals = (match[1] for line in lines if (match := re.search(r"traceback *: (Signal .*)", line)))
    return next(signals, next((line for line in lines if re.search(r"\w", line)), ""))


def _oldest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def _last_line(path: Path) -> str:
    return next(iter(_last_lines(path)), "")


def _last_lines(path: Path) -> list[str]:
    """Lines that are not empty of a file that may be long, the last one first; none if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip() for line in reversed(lines) if line.strip()]
