"""`python -m fastlaunch_train.script --output DIR [...] -- COMMAND...`: run a user's command and record it.

The command runs as it is, in this directory, and its output goes where ours would. Signals are passed on.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import FrameType

from fastlaunch_train.process.device import gpu_facts, visible_gpus
from fastlaunch_train.process.failures import EXIT_BAD_REQUEST, EXIT_CODES, EXIT_DISK_FULL, EXIT_HANG
from fastlaunch_train.process.torchrun import MARGIN_S
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.records.contents import VARIABLE
from fastlaunch_train.records.records import Phase
from fastlaunch_train.script.checkpoints import OUTPUT, Packer, restore, steps_done
from fastlaunch_train.script.devices import DeviceSampler
from fastlaunch_train.script.ending import Ending, complete_records, how_failed
from fastlaunch_train.script.settings import ScriptSettings, header, read_settings

#: Seconds between two looks at the script.
_LOOK_EVERY_S = 0.2
#: Exit codes of shells for a program that does not exist or may not be run.
EXIT_NOT_FOUND, EXIT_NOT_RUNNABLE = 127, 126
#: Linux's prctl(2): the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """The wrapper's own arguments."""

    output: Path
    nproc: str | None  # a number, or `gpu`
    hang_timeout_s: float | None
    makes_checkpoints: bool  # pack what the script saves, for another machine to go on from
    is_resumed: bool
    command: list[str]


def main(argv: Sequence[str]) -> int:
    """Run a script as `argv` says; return its exit code.

    The code is 128 plus the number if a signal ends the script, 130 after a signal to us, 124 if the script
    made no step for too long, 2 for a bad request, and 28 if the records cannot be written.
    """
    options = parse_options(argv)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        output = options.output.resolve()
        restored = restore(output) if options.is_resumed else None
        (output / OUTPUT).mkdir(exist_ok=True)
        environment = _environment(os.environ, options, output)
        settings = read_settings(
            environment, script=environment["FASTLAUNCH_SCRIPT"], command=options.command
        )
        assert settings is not None
        command = with_folders(options.command, environment)
        if options.nproc:
            command = under_torchrun(command, options.nproc)
    except RecipeError as error:
        _say(f"error: {error.message}\n  {error.hint}")
        return EXIT_BAD_REQUEST
    except tarfile.TarError as error:
        _say(f"error: the checkpoint cannot be unpacked: {error}")
        return EXIT_BAD_REQUEST
    except OSError as error:
        _say(f"error: {error}")
        return EXIT_DISK_FULL
    nodes = [environment.get(name, "") for name in ("PET_NODE_RANK", "PET_NNODES")]
    node, num_nodes = (
        int(text) if text.isdigit() else default for text, default in zip(nodes, (0, 1), strict=True)
    )
    # This holds until a rank reports it: a user's command may start any number of ranks.
    num_local = _num_ranks(options.nproc)
    settings = replace(settings, rank=node * num_local, world_size=num_nodes * num_local, num_nodes=num_nodes)
    return Script(options, settings, restored=restored).run(command, environment)


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the wrapper's arguments, up to `--`. Exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m fastlaunch_train.script", usage="%(prog)s --output DIR [options] -- COMMAND..."
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the records")
    parser.add_argument(
        "--nproc",
        type=_nproc,
        help="ranks that torchrun starts on this machine: a number, or gpu for one per GPU",
    )
    parser.add_argument(
        "--hang-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end a script that has begun to record steps and records none",
    )
    parser.add_argument(
        "--checkpoints", action="store_true", help="pack what the script saves as checkpoints/step-<n>.tar"
    )
    parser.add_argument("--resume", action="store_true", help="unpack the newest of these checkpoints first")
    arguments, command = _split(argv)
    options = parser.parse_args(arguments)
    if not command:
        parser.error("no command after --")
    return Options(
        output=options.output,
        nproc=options.nproc,
        hang_timeout_s=options.hang_timeout,
        makes_checkpoints=options.checkpoints,
        is_resumed=options.resume,
        command=command,
    )


class Script:
    """Runs a script, watches it, and ends it if need be."""

    def __init__(
        self,
        options: Options,
        settings: ScriptSettings,
        clock: Callable[[], float] = time.monotonic,
        restored: Phase | None = None,
    ) -> None:
        self._options = options
        self._settings = settings
        self._clock = clock
        self._restored = restored
        # Every node goes on from the first node's checkpoint.
        is_first = options.makes_checkpoints and settings.rank == 0
        self._packer = Packer(settings.records, _say) if is_first else None
        self._signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the command to its end, complete its records, and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        started = self._clock()
        try:
            # The script gets its own group, so that nothing it starts outlives it. No thread runs yet.
            self._process = subprocess.Popen(
                command,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509
            )
        except OSError as error:
            _say(f"error: {command[0]}: {error.strerror}")
            code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_RUNNABLE
            ending = Ending(status="failed", message=f"{command[0]}: {error.strerror}", wall_s=0.0)
            return code if self._complete(ending) else EXIT_DISK_FULL
        if self._signal is not None:  # the signal came before there was a process
            self._process.send_signal(self._signal)
        sampler = DeviceSampler(lambda: self._clock() - started)
        is_hang = self._wait(self._process)
        wall_s = self._clock() - started
        self._end_group(self._process.pid)
        devices = sampler.stop()
        code, message = self._outcome(self._process.returncode, is_hang=is_hang)
        if self._packer and code:
            self._packer.pack()
        status = {0: "completed", EXIT_CODES["interrupted"]: "interrupted"}.get(code, "failed")
        ending = Ending(status=status, message=message, wall_s=wall_s, is_hang=is_hang, devices=devices)
        return code if self._complete(ending) or code else EXIT_DISK_FULL

    def _outcome(self, returncode: int, *, is_hang: bool) -> tuple[int, str | None]:
        """Return our exit code and the record's message."""
        if is_hang:
            return EXIT_HANG, f"no step for {self._options.hang_timeout_s:g} s"
        if self._signal is not None:
            return EXIT_CODES["interrupted"], f"stopped by {signal.Signals(self._signal).name}"
        code = 128 - returncode if returncode < 0 else returncode
        return code, how_failed(returncode) if returncode else None

    def _wait(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until the script has ended; return whether it was ended for making no step."""
        kill_at: float | None = None
        grace_s = self._settings.launch.stop_grace_s + 2 * MARGIN_S
        is_hang, progress, progress_at = False, 0, self._clock()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
                return is_hang
            if self._packer:
                self._packer.look()
            now = self._clock()
            if self._options.hang_timeout_s is not None and not is_hang and self._signal is None:
                size = self._recorded_bytes()
                if size is None or size != progress:
                    progress, progress_at = size or 0, now
                elif now - progress_at > self._options.hang_timeout_s:
                    is_hang = True
                    _say(f"error: no step for {self._options.hang_timeout_s:g} s (--hang-timeout): ending it")
                    process.terminate()
            if kill_at is None and (is_hang or self._signal is not None):
                kill_at = now + grace_s
            if kill_at is not None and now > kill_at:
                _say("the script has not ended: killed")
                _signal_group(signal.SIGKILL, process.pid)

    def _recorded_bytes(self) -> int | None:
        """Return the bytes that the ranks have recorded; None before the first has begun."""
        paths = self._options.output.glob(f"rank-*-attempt-{self._settings.attempt}.jsonl")
        sizes = [path.stat().st_size for path in paths]
        return sum(sizes) if sizes else None

    def _end_group(self, group: int) -> None:
        """End the processes that the script has left behind; after a signal they get time to save."""
        limit_s = self._settings.launch.stop_grace_s if self._signal is not None else MARGIN_S
        until = self._clock() + limit_s
        if not _signal_group(signal.SIGTERM, group):
            return
        _say("the script left processes behind; ending them")
        while _signal_group(0, group) and self._clock() < until:
            time.sleep(_LOOK_EVERY_S)
        _signal_group(signal.SIGKILL, group)

    def _complete(self, ending: Ending) -> bool:
        """Complete the records; return False, and say so, if the disk refuses."""
        settings = self._settings
        attempt = settings.attempt or 1
        script_header = header(settings, None, attempt=attempt)
        script_header["machine"] |= gpu_facts(*visible_gpus())
        num_local = settings.world_size // settings.num_nodes
        if VARIABLE not in os.environ:
            script_header["files"] = None  # this process's imports are not the script's
        try:
            complete_records(
                self._options.output,
                attempt=attempt,
                node=settings.rank // num_local,
                ranks=range(settings.rank, settings.rank + num_local),
                header=script_header,
                ending=ending,
                restored=self._restored,
            )
        except OSError as error:
            _say(f"error: the record could not be completed: {error}")
            return False
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, number)


def _environment(environment: Mapping[str, str], options: Options, output: Path) -> dict[str, str]:
    """Return the script's environment."""
    return {
        **environment,
        "FASTLAUNCH_RECORDS": str(output),
        "FASTLAUNCH_OUTPUT": str(output / OUTPUT),
        "FASTLAUNCH_STEPS_DONE": str(steps_done(output)),
        "FASTLAUNCH_SCRIPT": environment.get("FASTLAUNCH_SCRIPT") or script_name(options.command),
        "FASTLAUNCH_COMMAND": json.dumps(options.command),
        # Set it here, so that all ranks agree.
        "FASTLAUNCH_ATTEMPT": environment.get("FASTLAUNCH_ATTEMPT") or "1",
    }


def _signal_group(number: int, group: int) -> bool:
    """Send a signal to a group of processes; return whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _die_with_parent() -> None:
    """Have the system, if it can, kill this child when the wrapper is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before the first `--`, and those after it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _num_ranks(nproc: str | None) -> int:
    """Return how many ranks torchrun starts here; 1 without it."""
    if nproc == "gpu":
        return int(gpu_facts(*visible_gpus()).get("num_devices", 1))
    return int(nproc or 1)


def _nproc(text: str) -> str:
    if text != "gpu" and not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of at least 1 nor gpu")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _say(text: str) -> None:
    # A signal can interrupt a print, which may not be entered twice.
    os.write(2, f"fastlaunch: {text}\n".encode(errors="replace"))


_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_FOLDER = re.compile(r"(^|=)\$(FASTLAUNCH_[A-Z0-9_]+)(?=/|$)")


def script_name(command: Sequence[str]) -> str:
    """Return the name of a command: its Python file or module, else its program."""
    if _is_python(command[0]):
        for at, word in enumerate(command[1:], start=1):
            if word == "-m" and at + 1 < len(command):
                return command[at + 1]
            if not word.startswith("-"):
                return PurePath(word).name
    return PurePath(command[0]).name


def with_folders(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return `command` with variables such as `$FASTLAUNCH_OUTPUT` expanded at the start of a word or value.

    A script that takes its folders as options then needs no shell. Unset variables stay as they are.
    """
    return [
        _FOLDER.sub(lambda match: match[1] + environment.get(match[2], match[0][len(match[1]) :]), word)
        for word in command
    ]


def under_torchrun(command: Sequence[str], nproc: str) -> list[str]:
    """Return `command` under torchrun with `nproc` ranks on this machine: a number, or `gpu` for one per GPU.

    Raises RecipeError for a command that is not a Python script: torchrun would not start it as it is.
    """
    python, *words = command
    if not _is_python(python):
        raise RecipeError(
            f"--nproc starts python scripts, and {python!r} is none",
            "give `python FILE ...`, or leave --nproc out and start the ranks in your own command",
        )
    options = 0
    while options < len(words) and words[options] in ("-u", "-O", "-B"):
        options += 1
    target = words[options:]
    if not target or (target[0].startswith("-") and target[0] != "-m") or target == ["-m"]:
        raise RecipeError(
            f"--nproc needs a file or `-m MODULE` after {' '.join(command[: 1 + options])}",
            "give `python FILE ...`",
        )
    launcher = [python, *words[:options], "-m", "fastlaunch_train.process.torchrun"]
    # Numbered nodes meet where torchrun's variables say; a single machine takes any free port.
    return [*launcher, f"--nproc-per-node={nproc}", *target]


def _is_python(program: str) -> bool:
    return _PYTHON.fullmatch(PurePath(program).name) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
