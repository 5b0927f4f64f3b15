"""A script's command line: its name, and how torchrun runs it. No torch."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from fastlaunch_train.recipes.recipe import RecipeError

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_FOLDER = re.compile(r"(^|=)\$(FASTLAUNCH_[A-Z0-9_]+)(?=/|$)")


def script_name(command: Sequence[str]) -> str:
    """Return what a command is called: its python file or module, else its program."""
    if _is_python(command[0]):
        for at, word in enumerate(command[1:], start=1):
            if word == "-m" and at + 1 < len(command):
                return command[at + 1]
            if not word.startswith("-"):
                return PurePath(word).name
    return PurePath(command[0]).name


def with_folders(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return `command` with a folder for `$FASTLAUNCH_OUTPUT` or the like at the start of a word or value.

    A script that takes its folders as options then needs no shell. A name that is not set stays as it is.
    """
    return [
        _FOLDER.sub(lambda match: match[1] + environment.get(match[2], match[0][len(match[1]) :]), word)
        for word in command
    ]


def under_torchrun(command: Sequence[str], nproc: str) -> list[str]:
    """Return `command` with `nproc` ranks on this machine, by torchrun: a number, or `gpu` for one a GPU.

    Raises RecipeError for a command that is no python script: torchrun starts nothing else so.
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
    # Numbered nodes say by torchrun's own variables where they meet; a machine alone takes any free port.
    return [*launcher, f"--nproc-per-node={nproc}", *target]


def _is_python(program: str) -> bool:
    return _PYTHON.fullmatch(PurePath(program).name) is not None
