"""Leaves what runs write where SageMaker copies it to S3: segments of what grows, finished checkpoints."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

from fastlaunch_train.node.segments import Segments, joined
from fastlaunch_train.node.shelf import Shelf

#: What of a run's output is wanted, besides its checkpoints.
_WANTED = re.compile(
    r"rank-\d{5}-attempt-\d+\.jsonl|traceback-rank-\d{5}-attempt-\d+\.txt|nccl-node-\d+\.txt"
)
_RECORD = re.compile(r"rank-\d{5}-attempt-(?P<n>\d{1,6})\.jsonl")
_CHECKPOINT = re.compile(r"step-\d{8,}\.pt")
LOG = "log.txt"
#: As many as training itself keeps: the newest may not have been copied yet when the machine is taken.
KEPT_CHECKPOINTS = 2


class Shipping:
    """Ships every `every_s` seconds between `start` and `stop`, and whenever `now` is called.

    folder: the host's own, such as `<token>/node-0`. This program's log is `work`/log.txt; a run's log and
    output are in `run_folder`.
    """

    def __init__(self, shelf: Shelf, folder: str, *, every_s: float, say: Callable[[str], None]) -> None:
        self._shelf = shelf
        self._folder = folder
        self._segments = Segments(shelf)
        self._every_s = every_s
        self._say = say
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._go_on, name="shipping", daemon=True)

    def run_folder(self, run_id: str) -> Path:
        """Where the run's log lies, and its output in the folder `output`."""
        return self._shelf.work / "runs" / run_id

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ship no more by itself; what is under way is ended first."""
        self._ended.set()
        self._thread.join()

    def now(self) -> bool:
        """Ship what is there; whether the disk took all of it. What it refused is tried again next time."""
        with self._lock:
            problems = [problem for problem in map(self._try, self._steps()) if problem]
        problem = problems[0] if problems else ""
        if problem and problem != self._problem:
            self._say(f"not shipped, will try again: {problem}")
        self._problem = problem
        return not problem

    def _go_on(self) -> None:
        while not self._ended.wait(self._every_s):
            self.now()

    def _steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = [self._cut(self._shelf.work / LOG, LOG)]
        for folder in sorted(self._shelf.work.glob("runs/*")):
            steps.append(self._cut(folder / LOG, f"{folder.name}/{LOG}"))
            for path in sorted((folder / "output").glob("*")):
                if _WANTED.fullmatch(path.name):
                    steps.append(self._cut(path, f"{folder.name}/{path.name}"))
            steps.append(lambda folder=folder: self._take_checkpoints(folder))  # type: ignore[misc]
        return steps

    def _cut(self, file: Path, name: str) -> Callable[[], None]:
        return lambda: self._segments.cut(file, f"{self._folder}/{name}")

    def _try(self, step: Callable[[], None]) -> str:
        try:
            step()
        except FileNotFoundError:
            pass  # not written yet, or removed by training as older than the newest two
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _take_checkpoints(self, folder: Path) -> None:
        here = checkpoints(folder / "output" / "checkpoints")
        there = checkpoints(self._shelf.root / folder.name / "checkpoints")
        # The one that training goes on from is there already, and must stay here until it is read.
        if not here or (there and here[-1].name <= there[-1].name):
            return
        self._shelf.move(here[-1], f"{folder.name}/checkpoints/{here[-1].name}")
        self._say(f"run {folder.name}: {here[-1].name}")
        for path in here[:-1]:
            path.unlink(missing_ok=True)
        remove_older(self._shelf.root, folder.name, KEPT_CHECKPOINTS)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first. SageMaker's own marks beside them are none."""
    return sorted(path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))


def remove_older(root: Path, run_id: str, num_kept: int) -> None:
    """Remove all but the run's newest checkpoints from this disk; in S3 they stay."""
    for path in checkpoints(root / run_id / "checkpoints")[:-num_kept]:
        path.unlink(missing_ok=True)


def last_attempt(root: Path, run_id: str) -> int:
    """The highest attempt number of the run's records, of whatever job and host; 0 if there are none."""
    names = (joined(path) for path in root.glob(f"*/node-*/{run_id}/rank-*"))
    return max((int(match["n"]) for name in names if name and (match := _RECORD.fullmatch(name))), default=0)
