"""Lines on the config file's SNS topic: an attempt starts, replaces another, ends, or is over its time.

Each is sent once. An attempt starts once, and one launcher decides what became of its runs; a machine may
have told its end itself. Of an attempt over its time, the ledger's reason says that the topic was told.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.core.terminal import plain
from fastlaunch.ledger.attempt_cost import total_cost
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.advice import Advice
from fastlaunch.lifecycle.finish import STOPPED_BY, AttemptResult
from fastlaunch.lifecycle.sight import over_since

#: The ledger's `reason` of an attempt that was announced to be over its time begins so.
OVER_TIME = "over its time since "
#: Of a message: reasons may hold what AWS or a node says.
_MAX_LENGTH = 500


@dataclass(kw_only=True)
class Announcer:
    """Sends the lines. What prevents that is reported once, and hinders nothing."""

    ledger: Ledger
    settings: Settings
    #: Called with a warning.
    warn: Callable[[str], None]
    _has_failed: bool = False

    @cached_property
    def _advice(self) -> Advice:
        return Advice(home=self.settings.home, warn=self.warn)

    def started(self, backend: CloudBackend, attempt: Attempt) -> None:
        """Say that an attempt has its machines, and which earlier one it replaces."""
        with self._telling(attempt) as topic:
            several = f"{attempt.num_nodes} x " if attempt.num_nodes > 1 else ""
            line = f"attempt {attempt.n} started on {several}{attempt.instance}"
            earlier = [each for each in self.ledger.attempts_of(attempt.run_ids[0]) if each.n < attempt.n]
            if replaced := next((each for each in reversed(earlier) if each.handle), None):
                why = f" ({replaced.reason})" if replaced.reason else ""
                line += f", and replaces attempt {replaced.n}{why}"
            self._send(backend, topic, attempt, line)

    def ended(self, backend: CloudBackend, attempt: Attempt, result: AttemptResult) -> None:
        """Say how an attempt ended and what its runs cost so far, unless that is known already."""
        with self._telling(attempt) as topic:
            if result.is_news:
                why = f" ({result.reason})" if result.reason else ""
                line = f"attempt {attempt.n} ended: {result.state}{why}; {self._cost(backend, attempt)}"
                self._send(backend, topic, attempt, line)

    def over_time(self, backend: CloudBackend, attempt: Attempt) -> None:
        """Say that an open attempt is over its time, if it is."""
        with self._telling(attempt) as topic:
            since = over_since(attempt, backend.now())
            # Whoever asked it to stop knows, and that it was asked must stay known.
            if topic is None or since is None or (attempt.reason or "").startswith((OVER_TIME, STOPPED_BY)):
                return
            noted = f"{OVER_TIME}{since:%Y-%m-%d %H:%M} UTC"
            if not self.ledger.explain_attempt(attempt.id, noted, instead_of=[attempt.reason]):
                return
            self._send(
                backend, topic, attempt, f"attempt {attempt.n} is {noted}; {self._cost(backend, attempt)}"
            )

    def _cost(self, backend: CloudBackend, attempt: Attempt) -> str:
        return total_cost(self.ledger.attempts_of(attempt.run_ids[0]), backend.now()).text

    @contextmanager
    def _telling(self, attempt: Attempt) -> Iterator[str | None]:
        """Yield the topic of the attempt's region, if there is one; report what prevents telling it."""
        topic = self.settings.aws.get(attempt.region or "", RegionSettings()).sns_topic
        with self._advice.guard(f"a line on {topic}"):
            try:
                yield topic
            except UserError as error:
                self._has_failed = True
                self.warn(f"{topic} is not told of {attempt.token}: {error.message}")

    def _send(self, backend: CloudBackend, topic: str | None, attempt: Attempt, line: str) -> None:
        # What has failed once would only keep the launcher waiting.
        if topic is None or self._has_failed:
            return
        first, *others = attempt.run_ids
        runs = f"run {first}" + (f" and {len(others)} more" if others else "")
        backend.aws.publish(topic, " ".join(plain(f"fastlaunch: {runs}: {line}").split())[:_MAX_LENGTH])
