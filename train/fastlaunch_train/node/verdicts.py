"""Why a run failed, in one line, and how it ended on a host, by the words of all hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastlaunch_train.node.outputs import is_regular, opened
from fastlaunch_train.node.protocol import COMPLETED, FAILED, INTERRUPTED, is_echo

_MAX_CHARS = 400
_TRACEBACK = "Traceback (most recent call last):"
#: Where torchrun begins to report that a rank failed; the ranks' messages stand before it.
_TORCHRUN = re.compile(r"failed \(exitcode: -?\d+\)|Sending process \d+ closing signal")
#: The signal that killed a rank, as torchrun reports it; with SIGTERM torchrun itself ends the other ranks.
_SIGNAL = re.compile(r"traceback *: (Signal (?!15\b).*)")
_ERROR = re.compile(r"(?:[\w.]+: )?error: .*")


def cause_of(output: Path, log: Path, attempt: int) -> str:
    """Return in a line what ended the run; its last printed line if nothing else is known; else "".

    output: the folder of tracebacks (`traceback-rank-*-attempt-<n>.txt`) and records. log: the run's log.
    """
    lines = _last_lines(log)
    failed, stopped = _of_records(output, attempt)
    # When a rank has failed, torchrun asks the others to stop.
    tracebacks = _oldest_first(output, f"traceback-rank-*-attempt-{attempt}.txt")
    raised = [exception_line(_last_lines(path)) for path in tracebacks]
    killed = [match[1] for line in lines if (match := _SIGNAL.search(line))]
    causes = [*raised, *failed, *killed, *stopped]
    causes = [cause for cause in causes if cause] or [_of_log(lines)]
    return next((cause for cause in causes if not is_echo(cause)), causes[0])[:_MAX_CHARS]


def is_lasting(output: Path, attempt: int) -> bool:
    """Return whether a rank ended by what would end it again: no memory, or a loss that is no number."""
    return any(status in ("out_of_memory", "nan_loss") for status, _ in _ends(output, attempt))


def noted_step(output: Path) -> int:
    """Return the step that a script has saved last, by the notes of all its ranks here; 0 if unknown."""
    steps = []
    for path in output.glob("checkpoint-rank-*.json"):
        try:
            with opened(path, below=output) as file:
                steps.append(int(json.loads(file.read(_MAX_CHARS))["step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return 0
    return min(steps, default=0)


def exception_line(lines: Sequence[str]) -> str:
    """Return the line of a traceback that names the exception; else the last line with a word in it, else "".

    The last of several tracebacks counts, as the others led to it. A message may go on below its line.
    """
    fatal = next((line for line in lines if line.startswith("Fatal Python error:")), "")
    if fatal:
        # Below this line the fault handler prints the threads' stacks and the loaded modules.
        return fatal.strip()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else ()
    named = next((line.strip() for line in after if line.strip() and not line[0].isspace()), "")
    return named or next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")


def _of_records(output: Path, attempt: int) -> tuple[list[str], list[str]]:
    """Return the messages of the ranks that failed, and of those that were asked to stop."""
    failed: list[str] = []
    stopped: list[str] = []
    for status, message in _ends(output, attempt):
        if status != "completed":
            (stopped if status == INTERRUPTED else failed).append(message or status)
    return failed, stopped


def _ends(output: Path, attempt: int) -> Iterator[tuple[str, str]]:
    """Yield status and message of each rank that has said how it ended."""
    for path in _oldest_first(output, f"rank-*-attempt-{attempt}.jsonl"):
        with suppress(ValueError, AttributeError):
            end = json.loads(next(iter(reversed(_last_lines(path))), ""))
            if end.get("kind") == "end":
                yield str(end.get("status")), str(end.get("message") or "")


def _of_log(lines: Sequence[str]) -> str:
    """Return the last error, exception or words that the ranks, or run_train.sh before them, printed."""
    end = next((number for number, line in enumerate(lines) if _TORCHRUN.search(line)), len(lines))
    before = lines[:end]
    error = next((line for line in reversed(before) if _ERROR.match(line)), "")
    return error.strip() or exception_line(before)


def _oldest_first(folder: Path, pattern: str) -> list[Path]:
    regular = [path for path in folder.glob(pattern) if is_regular(path)]
    return sorted(regular, key=lambda path: path.lstat().st_mtime_ns)


def _last_lines(path: Path) -> list[str]:
    """Return the last non-empty lines of a file that may be long; none if it is missing."""
    try:
        with opened(path, below=path.parent) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**16))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()]


@dataclass(frozen=True)
class Word:
    """A host's word on a run that has ended there.

    code: exit code of its training. cause: why it failed; "" if that is not known. is_stopped: the host was
    asked to stop. is_made_to: it ended its training because another host's had failed. ends: it does no
    more runs.
    """

    code: int
    cause: str = ""
    is_stopped: bool = False
    is_made_to: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Verdict:
    """How a run ended. state: completed, interrupted or failed. blamed: rank of the host at fault, if any.

    is_final: a later container of the same job must not do the run again.
    """

    state: str
    blamed: int | None = None
    is_final: bool = True


def verdict(rank: int, words: Mapping[int, Word], *, is_one_lost: bool) -> Verdict:
    """Return how the run ended on host `rank`. words: by rank, of all hosts that are not lost.

    A host that ended because another did is interrupted; the other host says why.
    """
    local_word = words[rank]
    is_stopped = any(word.is_stopped for word in words.values())
    is_final = not (is_stopped or is_one_lost)
    if local_word.code == 0:
        return Verdict(COMPLETED, is_final=is_final)
    if is_stopped:
        return Verdict(INTERRUPTED, is_final=is_final)
    guilty = [at for at, word in sorted(words.items()) if word.code and not word.is_made_to]
    plain = [at for at in guilty if words[at].cause and not is_echo(words[at].cause)]
    is_follower = local_word.is_made_to or is_one_lost or (is_echo(local_word.cause) and bool(plain))
    if is_follower:
        blamed = next((at for at in (*plain, *guilty) if at != rank), None)
        return Verdict(INTERRUPTED, blamed=blamed, is_final=is_final)
    return Verdict(FAILED, blamed=rank, is_final=is_final)
