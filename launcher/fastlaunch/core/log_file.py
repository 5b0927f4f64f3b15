"""What a job printed, and the part of it that shows why it failed."""

import re
from pathlib import Path

#: Name of the file in the run directory that takes stdout and stderr of every rank.
LOG = "log.txt"
#: The start of torchrun's long report of a failed rank, which follows the rank's own error. torch up to 2.2
#: uses the second form.
_TORCHRUN = re.compile(
    r"^[EW]\d{4} \d\d:\d\d:\d\d\.\d+ .*torch/distributed/elastic/"
    r"|^\[\d{4}-\d\d-\d\d [\d:,]+\] torch\.distributed\.elastic\."
)
#: Bytes to read from the end of a log, which may be large.
_MAX_BYTES = 2**18


def tail(path: Path) -> list[str]:
    """Return the lines at the end of a log, which may be large; empty if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _MAX_BYTES))
            return log.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def telling_lines(directory: Path, *, num_lines: int) -> list[str]:
    """Return the last lines that the job itself printed; empty if there is no log."""
    lines = tail(directory / LOG)
    end = next((number for number, line in enumerate(lines) if _TORCHRUN.match(line)), len(lines))
    return (lines[:end] or lines)[-num_lines:]


def last_words(directory: Path) -> str | None:
    """Return the last line without indentation, such as the error under a traceback; None without one."""
    lines = telling_lines(directory, num_lines=200)
    return next((line for line in reversed(lines) if line.strip() and not line[0].isspace()), None)
