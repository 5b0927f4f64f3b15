"""Uploads while runs go on: what files have grown by, as segments, every few seconds.

Every run has the folders `out/<run id>`, which is its output, and `log/<run id>`, both below the machine's
work folder. A segment is named after the byte at which it starts, and never changes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fastlaunch_train.node.commands import Clock
from fastlaunch_train.node.outputs import NotRegular, is_regular, opened
from fastlaunch_train.node.protocol import (
    GPU_USE,
    LOG,
    MAX_NAMES_LEFT_OUT,
    MAX_OUTPUT_BYTES,
    MAX_OUTPUT_DEPTH,
    MAX_OUTPUT_FILE_BYTES,
    MAX_OUTPUT_FILES,
    MAX_SEGMENT_BYTES,
    MODEL,
    OUTPUT,
    OUTPUT_FOLDERS,
    RECORD,
    checkpoint_key,
    is_output_file,
    output_folder,
    segment_name,
)

#: The most rounds of uploads at the end, as files may grow meanwhile.
_MAX_LAST_ROUNDS = 20
#: Seconds between two attempts to send what is left.
_LAST_PAUSE_S = 5.0
#: The most segments of output for the user in one call of the store.
_MAX_WAITING = 500
#: About the bytes of such a call: they wait in memory, and a call takes a second or two to begin.
_GROUP_BYTES = 4 * MAX_SEGMENT_BYTES
#: The most files to name that are not sent.
_MOST_NAMED = 5


class Store(ABC):
    """Where segments go. staging: a folder on the same file system, for incomplete files."""

    def __init__(self, root: Path, staging: Path) -> None:
        self.root = root
        self._staging = staging
        for folder in (root, staging):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Write a file as a whole. Raises OSError if the disk refuses it; then nothing has changed."""
        part = self._staging / f"part-{threading.get_ident()}"
        try:
            part.write_bytes(data)
            self._place(part, name)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    @abstractmethod
    def flush(self) -> bool:
        """Send what was put there; return whether all of it arrived."""

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so much can be put there before it is sent."""
        return True

    @abstractmethod
    def end_of(self, name: str) -> int:
        """Return the byte after the last stored segment of a file; 0 if there is none."""

    def _place(self, file: Path, name: str) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


class Segments:
    """Cuts the new bytes of growing files into segments.

    If an earlier container has left segments of a file, new ones start at their end.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Where a file's first byte is among the segments, and how many of its bytes are cut.
        self._starts: dict[str, int] = {}
        self._cut: dict[str, int] = {}

    def cut(self, file: Path, name: str, *, below: Path, is_open: bool = False) -> bool:
        """Put the new bytes of `file` as a segment of `name`; return whether there may be more of them.

        below: a folder above it that training cannot replace. is_open: it is a record whose end may still be
        rewritten. Raises NotRegular, and OSError where the store refuses it or the file cannot be read.
        """
        at = self._cut.get(name, 0)
        with opened(file, below=below) as source:
            source.seek(at)
            data = source.read(MAX_SEGMENT_BYTES)
        if is_open:
            data = before_end(data)
        if not data:
            return False
        if name not in self._starts:
            self._starts[name] = self._store.end_of(name)
        self._store.put(segment_name(name, self._starts[name] + at), data)
        self._cut[name] = at + len(data)
        return True


class Uploads:
    """Uploads every `every_s` seconds between `start` and `stop`, and whenever `now` is called.

    folder: the node's, in the store, such as `node-0`. log: the agent's log. checkpoints: uploads complete
    checkpoints; None if that is done elsewhere. gpu_use: returns how busy the GPUs are.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        work: Path,
        log: Path,
        every_s: float,
        say: Callable[[str], None],
        clock: Clock,
        checkpoints: Callable[[], None] | None = None,
        gpu_use: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._work = work
        self._log = log
        self._segments = Segments(store)
        self._every_s = every_s
        self._say = say
        self._clock = clock
        self._checkpoints = checkpoints
        self._gpu_use = gpu_use
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._problem = ""
        #: Names of files that are not regular and stay on the machine.
        self.left_out: list[str] = []
        #: Scripts' runs under way; once a script has ended, its wrapper completes the records.
        self._open: set[str] = set()
        self._thread = threading.Thread(target=self._go_on, name="uploads", daemon=True)

    def start(self) -> None:
        """Begin to upload."""
        self._thread.start()

    def stop(self, wait_s: float) -> None:
        """Stop the regular uploads; wait at most `wait_s` seconds for one under way."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    def now(self) -> bool:
        """Upload what is there; return whether all of it arrived. The rest is tried again next time."""
        return self._round()[0]

    def last(self, limit_s: float = 60.0) -> bool:
        """Upload until nothing is left, or data grows faster than it is sent; return whether all arrived.

        limit_s: seconds after which this returns, whatever an upload still waits for.
        """
        has_arrived, over = threading.Event(), threading.Event()

        def send() -> None:
            while not (self._all_rounds() or over.is_set()):
                self._clock.wait(_LAST_PAUSE_S, over)
            if not over.is_set():
                has_arrived.set()

        threading.Thread(target=send, name="last upload", daemon=True).start()
        self._clock.wait(limit_s, has_arrived)
        over.set()
        return has_arrived.is_set()

    def _all_rounds(self) -> bool:
        for _ in range(_MAX_LAST_ROUNDS):
            has_arrived, num_cut = self._round()
            if not has_arrived:
                return False
            if not num_cut:
                break
        return True

    def leave_out(self, name: str) -> None:
        """Note that a file is not regular: it stays here, and the last word names it."""
        # A name may be invalid UTF-8, which the last word has to be.
        name = name.encode(errors="backslashreplace").decode()
        if name not in self.left_out and len(self.left_out) < MAX_NAMES_LEFT_OUT:
            self.left_out.append(name)
            self._say(f"not sent: {name!r} is no regular file, or lies behind a link")

    def leave_out_file(self, path: Path) -> None:
        """Note the same for a path in the output of a run."""
        self.leave_out(path.relative_to(self._work / "out").as_posix())

    def script_starts(self, run_id: str) -> None:
        """Hold back the ends of the run's records until `script_ended`."""
        self._open.add(run_id)

    def script_ended(self, run_id: str) -> None:
        """Upload the ends of the run's records, which its wrapper has completed."""
        self._open.discard(run_id)
        self.now()

    def output_folders(self, run_id: str, attempt: int) -> bool:
        """Upload what a run that has ended left for the user; return whether all arrived.

        Its files are taken to be final. A file that is not regular, or too large, stays here.
        """
        num_waiting = num_bytes = 0
        with self._lock:
            for path, name, size in self._left_for_user(run_id, attempt):
                try:
                    while self._segments.cut(path, f"{self._folder}/{run_id}/{name}", below=self._work):
                        num_waiting, num_bytes = num_waiting + 1, num_bytes + min(size, MAX_SEGMENT_BYTES)
                        # A call takes as long for one small file as for many, so files are sent in groups.
                        if num_bytes >= _GROUP_BYTES or num_waiting >= _MAX_WAITING:
                            if not self._clock.attempts(3, 5, self._store.flush):
                                return self._report("the store does not take it")
                            num_waiting = num_bytes = 0
                except NotRegular:
                    self.leave_out(f"{run_id}/{name}")
                except OSError as error:
                    self._say(f"run {run_id}: {name!r} not sent: {error.strerror}")
            return not num_waiting or bool(self._clock.attempts(3, 5, self._store.flush))

    def _left_for_user(self, run_id: str, attempt: int) -> Iterator[tuple[Path, str, int]]:
        """Yield the files to send, with name and size; log those that are too many or too large."""
        num_left, left, num_kept = MAX_OUTPUT_FILES, MAX_OUTPUT_BYTES, 0
        for path, name in self._in_output_folders(run_id, attempt):
            if not is_regular(path) and not _is_folder(path):
                self.leave_out(f"{run_id}/{name}")
                continue
            size = path.lstat().st_size
            is_too_much = (
                size > min(left, MAX_OUTPUT_FILE_BYTES) or not num_left or not self._store.has_room(size)
            )
            if is_too_much or not is_output_file(name):
                num_kept += 1
                if num_kept <= _MOST_NAMED:
                    self._say(f"run {run_id}: {name!r} ({size:,} bytes) not sent: too much, or badly named")
                continue
            num_left, left = num_left - 1, left - size
            yield path, name, size
        if num_kept > _MOST_NAMED:
            self._say(f"run {run_id}: {num_kept:,} files not sent in all")

    def _in_output_folders(self, run_id: str, attempt: int) -> Iterator[tuple[Path, str]]:
        for name in OUTPUT_FOLDERS:
            source, folder = self._work / "out" / run_id / name, output_folder(name, attempt)
            if source.is_symlink():
                yield source, folder
                continue
            paths = list(_tree(source, MAX_OUTPUT_DEPTH))
            num_bytes = sum(path.lstat().st_size for path in paths)
            if name == MODEL and num_bytes > MAX_OUTPUT_BYTES:
                # A part of it is of no use.
                self._say(f"run {run_id}: its model ({num_bytes:,} bytes) not sent: too much")
                continue
            if name == MODEL and not self._store.has_room(num_bytes):
                self._say(f"run {run_id}: its model ({num_bytes:,} bytes) not sent: the disk has no room")
                continue
            for path in paths:
                yield path, f"{folder}/{path.relative_to(source).as_posix()}"

    def _go_on(self) -> None:
        while not self._clock.wait(self._every_s, self._over):
            self._note_gpu_use()
            self.now()

    def _note_gpu_use(self) -> None:
        use = self._gpu_use()
        if use is not None:
            with suppress(OSError), (self._work / GPU_USE).open("a") as file:
                file.write(f"{use:.0%}\n")

    def _round(self) -> tuple[bool, int]:
        """Return whether all that was there arrived, and how many segments were cut."""
        with self._lock:
            # Segments are in memory alone: add none until those of the last round have arrived.
            if not self._store.flush():
                return self._report("the store does not take it"), 0
            problem, num_cut = "", 0
            for file, name in self._files():
                below = self._work if self._work in file.parents else file.parent
                is_open = file.parent.name in self._open and RECORD.fullmatch(file.name) is not None
                try:
                    num_cut += self._segments.cut(
                        file, f"{self._folder}/{name}", below=below, is_open=is_open
                    )
                except FileNotFoundError:
                    pass  # not written yet
                except NotRegular:
                    self.leave_out(name)
                except OSError as error:
                    problem = problem or error.strerror or str(error)
            try:
                if self._checkpoints is not None:
                    self._checkpoints()
            except OSError as error:
                problem = problem or error.strerror or str(error)
            if not self._store.flush():
                problem = problem or "the store does not take it"
            return self._report(problem), num_cut

    def _files(self) -> Iterator[tuple[Path, str]]:
        yield self._log, LOG
        yield self._work / GPU_USE, GPU_USE
        for folder in sorted(self._work.glob("log/*")):
            yield folder / LOG, f"{folder.name}/{LOG}"
        for path in sorted(self._work.glob("out/*/*")):
            if OUTPUT.fullmatch(path.name):
                yield path, f"{path.parent.name}/{path.name}"

    def _report(self, problem: str) -> bool:
        """Log the problem if it is new; return whether there is none."""
        if problem and problem != self._problem:
            self._say(f"not sent, will try again: {problem}")
        self._problem = problem
        return not problem


def _tree(folder: Path, depth: int) -> Iterator[Path]:
    """Yield everything below the folder but folders, and the folders that are deeper than `depth`."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if depth and _is_folder(path):
            yield from _tree(path, depth - 1)
        else:
            yield path


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def before_end(data: bytes) -> bytes:
    """Return the whole lines of a record's bytes, less an `end` that is the last of them."""
    whole = data[: data.rfind(b"\n") + 1]
    last = whole.rfind(b"\n", 0, -1) + 1
    return whole[:last] if b'"kind":"end"' in whole[last:] else whole


def checkpoints(
    folder: Path, leave_out: Callable[[Path], None] = lambda _: None
) -> dict[tuple[int, int], list[Path]]:
    """Return this machine's files of each checkpoint in a folder, oldest first, rank 0's file first.

    They are complete; other machines may have further ones. leave_out: called with what is named like such a
    file, or their folder, but is no regular file or folder.
    """
    if folder.is_symlink():
        leave_out(folder)
        return {}
    files: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(folder.glob("step-*")):
        key = checkpoint_key(path.name)
        if key and is_regular(path):
            files.setdefault(key, []).append(path)
        elif key:
            leave_out(path)
    return dict(sorted(files.items()))
