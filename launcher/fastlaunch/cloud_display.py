"""Shows an attempt on AWS: what its machines are doing, then one of its runs after another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import Sight
from fastlaunch.measure.outcome import outcome_of, read_records
from fastlaunch.runs.display import Display, Progress, RecordTail

#: Of the node's own log, so much of the end is looked at for its last line.
_MAX_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """A run to show, under its label. num_steps: None where only its record will tell."""

    id: str
    label: str
    num_steps: int | None


@dataclass(kw_only=True)
class AttemptDisplay:
    """What `display` shows of an attempt while it lasts.

    place: the machine's type and where it is asked for. machine: by the name that AWS gave it.
    """

    display: Display
    home: Path
    token: str
    runs: Sequence[ShownRun]
    place: str
    machine: str
    _current: int = 0
    _tail: RecordTail | None = field(default=None)
    _tail_of: Path | None = field(default=None)
    _records: tuple[Path, ...] = ()

    @property
    def current(self) -> ShownRun:
        """The run that is shown."""
        return self.runs[self._current]

    def start(self) -> None:
        """Show the first run."""
        self._show_start()

    def update(self, sight: Sight, synced: s3_sync.Synced) -> None:
        """Show what is known now: AWS's word, and what was synced."""
        self._records = tuple(path for path in synced.files if path.name.startswith("rank-"))
        for number in range(self._current + 1, len(self.runs)):
            if self._record(self.runs[number]):
                self.finish(self._ended_as(self.current))
                self._current, self._tail, self._tail_of = number, None, None
                self._show_start()
        run = self.current
        newest = self._record(run)
        # A job that SageMaker starts again goes on in another file.
        if newest is not None and newest != self._tail_of:
            self._tail, self._tail_of = RecordTail(s3_sync.run_folder(self.home, run.id)), newest
        progress = self._tail.read() if self._tail else None
        stage = self._stage(sight, synced)
        self.display.show(progress or Progress(step=0, num_steps=run.num_steps or 0, phase=stage))

    def finish(self, outcome: str) -> None:
        """Show that the run that is shown has ended, and how."""
        self.display.finish(outcome)

    def _ended_as(self, run: ShownRun) -> str:
        """How a run ended, by its records: what the node says of it comes later."""
        records, _ = read_records([path for path in self._of(run) if path.is_file()])
        last = max((record.header["attempt"] for record in records), default=0)
        newest = [record for record in records if record.header["attempt"] == last]
        return str(outcome_of(newest).state) if newest else "ended without a record"

    def _show_start(self) -> None:
        run = self.current
        self.display.start(run.label, run.num_steps)

    def _of(self, run: ShownRun) -> list[Path]:
        """The record files of the run that lie under the attempt's own output."""
        folder = s3_sync.run_folder(self.home, run.id)
        return [path for path in self._records if path.parent == folder]

    def _record(self, run: ShownRun) -> Path | None:
        """The newest record of the run's first rank, None while it is not here."""
        own = [path for path in self._of(run) if path.name.startswith("rank-00000-") and path.is_file()]
        # By length first: attempt 10 comes after attempt 9.
        return max(own, key=lambda path: (len(path.name), path.name), default=None)

    def _stage(self, sight: Sight, synced: s3_sync.Synced) -> str:
        if not sight.is_seen or (sight.is_live and not sight.is_up):
            return f"{self.place}: {sight.told or 'pending'}"
        if not sight.is_live:
            return f"{self.machine}: {sight.told or 'shutting down'}"
        if synced.boot is None:
            return f"{self.machine}: booting"
        said = _last_line(s3_sync.node_log_path(self.home, self.token))
        return f"{self.machine}: {said or 'booted'}"


def _last_line(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), None)
