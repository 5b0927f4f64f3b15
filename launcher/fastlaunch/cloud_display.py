"""Shows an attempt on AWS: what its node is doing, then one of its runs after another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch import s3_sync
from fastlaunch.aws import Instance
from fastlaunch.follow import Display, Progress, RecordTail
from fastlaunch.outcome import outcome_of, read_records

#: Of the node's own log, so much of the end is looked at for its last line.
_MAX_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """A run to show, under its label."""

    id: str
    label: str
    num_steps: int


@dataclass(kw_only=True)
class AttemptDisplay:
    """What `display` shows of an attempt while it lasts. place: the machine and where it is asked for."""

    display: Display
    home: Path
    token: str
    runs: Sequence[ShownRun]
    place: str
    _current: int = 0
    _tail: RecordTail | None = field(default=None)

    @property
    def current(self) -> ShownRun:
        """The run that is shown."""
        return self.runs[self._current]

    def start(self) -> None:
        """Show the first run."""
        self._show_start()

    def update(self, instance: Instance | None) -> None:
        """Show what is known now: EC2's word, and what was synced."""
        for number in range(self._current + 1, len(self.runs)):
            if self._has_begun(self.runs[number]):
                self.finish(self._ended_as(self.current))
                self._current, self._tail = number, None
                self._show_start()
        run = self.current
        if self._tail is None and self._record(run).exists():
            self._tail = RecordTail(s3_sync.run_folder(self.home, run.id))
        progress = self._tail.read() if self._tail else None
        self.display.show(progress or Progress(step=0, num_steps=run.num_steps, phase=self._stage(instance)))

    def finish(self, outcome: str) -> None:
        """Show that the run that is shown has ended, and how."""
        self.display.finish(outcome)

    def _ended_as(self, run: ShownRun) -> str:
        """How a run ended, by its records: what the node says of it comes later."""
        folder = s3_sync.run_folder(self.home, run.id)
        records, _ = read_records(sorted(folder.glob(f"rank-*-attempt-{self._number}.jsonl")))
        return str(outcome_of(records).state) if records else "ended without a record"

    @property
    def _number(self) -> str:
        return self.token.rpartition("-a")[2]

    def _show_start(self) -> None:
        run = self.current
        self.display.start(run.label, run.num_steps)

    def _record(self, run: ShownRun) -> Path:
        name = f"rank-00000-attempt-{self._number}.jsonl"
        return s3_sync.run_folder(self.home, run.id) / name

    def _has_begun(self, run: ShownRun) -> bool:
        return self._record(run).exists()

    def _stage(self, instance: Instance | None) -> str:
        if instance is None or instance.state == "pending":
            return f"{self.place}: pending"
        if instance.state != "running":
            return f"{instance.id}: {instance.state}"
        if s3_sync.kept(self.home, self.token).boot is None:
            return f"{instance.id} in {instance.zone}: booting"
        said = _last_line(s3_sync.node_log_path(self.home, self.token))
        return f"{instance.id} in {instance.zone}: {said or 'booted'}"


def _last_line(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), None)
