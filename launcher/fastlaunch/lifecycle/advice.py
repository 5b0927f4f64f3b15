"""Guard advisory code, such as verdicts and displays: its errors become warnings and end no machine."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from fastlaunch.core.errors import UserError

#: File in the home folder for tracebacks of guarded errors.
ERROR_LOG = "errors.log"
#: The subject of warnings where runs are shown.
PROGRESS = "the display of progress"


@dataclass(kw_only=True)
class Advice:
    """Guards advisory code. Each kind of error is reported once, as a warning."""

    home: Path
    #: Called with a warning.
    warn: Callable[[str], None]
    _warned: set[tuple[str, type[Exception]]] = field(default_factory=set)

    def guard(self, what: str) -> "_Guard":
        """Return a context manager that turns an exception of its block into a warning.

        Interruptions pass through. what: the subject of the warning, such as `the comparison`. Let the block
        return or store its decision in its last statement, so that a block that fails half-way decides
        nothing.
        """
        return _Guard(self, what)

    def _take(self, what: str, error: Exception) -> None:
        if (what, type(error)) in self._warned:
            return
        self._warned.add((what, type(error)))
        if isinstance(error, UserError):
            why = error.message
        else:
            why = f"{type(error).__name__}: {error}".rstrip(": ") + self._logged(what, error)
        self.warn(f"{what} failed, which ends nothing: {why}")

    def _logged(self, what: str, error: Exception) -> str:
        """Append the error's traceback to the log; return where it is, in words."""
        path, lines = self.home / ERROR_LOG, "".join(traceback.format_exception(error))
        with suppress(OSError):
            with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {what}\n{lines}\n")
            return f" (a bug in fastlaunch: please report it with its traceback in {path})"
        return ""


@dataclass(frozen=True)
class _Guard:
    """A class, so that type checkers know that code after the block is reached."""

    advice: Advice
    what: str

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.advice._take(self.what, error)
        return True
