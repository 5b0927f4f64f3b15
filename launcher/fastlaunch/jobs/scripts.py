"""Turn a command of the user's into jobs: its variants by `-L`, its name, and what keeps it from starting."""

import os
import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import split_list
from fastlaunch.jobs.job import SCRIPT_RECIPE, Job, Script, names_variant
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.option_rules import check_script
from fastlaunch.jobs.options import Options
from fastlaunch_train.records.contents import path_of

#: Every combination is planned and stored before the first one starts.
MOST_VARIANTS = 1000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*", re.ASCII)
_PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?|pypy3?")
_SHELLS = ("sh", "bash", "zsh")
#: Programs that start a Python script on several ranks by themselves.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_LAUNCHING_MODULES = (
    *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
    *("deepspeed.launcher.runner", "cProfile", "pdb"),
)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_-]*\}", re.ASCII)
#: Options of Python whose value is a word of its own.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def scripts_here(options: Options, machine: Machine) -> tuple[Script, ...]:
    """Return the variants of the command with their ranks on this machine, the baseline first.

    Raises UserError for what cannot start here, and for options that do not fit together.
    """
    scripts = scripts_of(options)
    nproc = None if options.nproc is None else num_ranks_of(options.nproc, machine)
    for script in scripts:
        program, path = script.argv[0], _script_path(script.argv)
        if shutil.which(program) is None and Path(program).is_file():
            raise UserError(f"{program} cannot be executed", f"give what runs it, as in: -- python {program}")
        if shutil.which(program) is None:
            raise UserError(f"there is no command {program} here", "give its name, or its path")
        if path is not None and not Path(path).exists():
            raise _no_script(path, Path(program).name)
    return tuple(replace(script, nproc=nproc) for script in scripts)


def scripts_of(options: Options) -> tuple[Script, ...]:
    """Return the variants of the command, the baseline first, without their ranks.

    Raises UserError for options that do not fit together.
    """
    check_script(options)
    if not options.command:
        raise UserError("no command follows --", "give one, as in: -- python train.py --lr 1e-3")
    scripts = [
        Script(command=options.command, variant=variant, hang_timeout_s=options.hang_timeout_s)
        for variant in _variants(options.lists, options.command)
    ]
    if options.baseline is not None:
        base = next(
            (script for script in scripts if names_variant(options.baseline, dict(script.variant))), None
        )
        if base is None:
            raise UnknownName("baseline", options.baseline, [script.label for script in scripts])
        scripts = [base, *(script for script in scripts if script is not base)]
    _check_commands(scripts, options.nproc)
    return tuple(scripts)


def script_spec(script: Script, *, num_nodes: int = 1, **where: Any) -> Job:
    """Return the job of a script. where: what `Job` says of machines and how they are bought."""
    num_ranks = 1 if script.nproc is None else script.nproc
    return Job(
        workload=script_name(script.argv),
        recipe=SCRIPT_RECIPE,
        script=script,
        batch_size=None,
        steps=None,
        num_gpus=num_nodes * num_ranks,
        num_nodes=num_nodes,
        **where,
    )


def on_nodes(script: Script, nproc: int | str | None, instance: InstanceType, num_nodes: int) -> Script:
    """Return the script with its ranks on a node, by --nproc as typed.

    On several nodes a Python script runs under torchrun even without it, with one rank per GPU.
    """
    is_joined = num_nodes > 1 and _PYTHON.fullmatch(Path(script.argv[0]).name) is not None
    if nproc == "gpu" or (nproc is None and is_joined):
        return replace(script, nproc=instance.num_accelerators)
    return replace(script, nproc=None if nproc is None else int(nproc))


def check_travels_along(
    scripts: Sequence[Script], paths: Collection[str], *, why_not: str, to_take: str
) -> None:
    """Raise UserError if a script is not among the files that travel.

    paths: those of the files, from the current directory. why_not, to_take: why an existing file does not
    travel, and what to type, with `{}` for its path.
    """
    for script in scripts:
        program, named = script.argv[0], _script_path(script.argv)
        is_private = Path(program).is_absolute() and Path(program).is_relative_to(Path.home())
        for path in filter(None, (program if is_private or _is_relative(program) else None, named)):
            inside = os.path.normpath(path)
            if inside in paths or any(other.startswith(f"{inside}/") for other in paths):
                continue
            if Path(path).is_absolute():
                # The image may have what is not here.
                if Path(path).exists():
                    raise UserError(f"{path} is of this machine alone", "give a name, or the path from here")
            elif not Path(path).exists():
                raise _no_script(path, Path(program).name)
            elif inside.startswith(".."):
                raise UserError(
                    f"{path} is outside of this folder, {Path.cwd()}, of which the files travel",
                    f"type: cd {Path(path).resolve().parent}",
                )
            else:
                raise UserError(f"{path} does not travel with the job: {why_not}", to_take.format(path))


def _is_relative(program: str) -> bool:
    return "/" in program and not Path(program).is_absolute()


def _variants(texts: Sequence[str], command: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """Return every combination of the values of `-L`, the last one's changing fastest."""
    lists: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        if not _NAME.fullmatch(name):
            raise UserError(f"-L {text!r} is not NAME=A,B", "give one such as -L amp=bf16,fp32")
        if name in lists:
            raise UserError(
                f"-L {name} is given twice", "give all its values at once, as in -L amp=bf16,fp32"
            )
        lists[name] = split_list(listed)
        if not all(lists[name]):
            what = "a value that is empty" if listed else "no values"
            raise UserError(f"-L {name} has {what}", f"give some, as in -L {name}=A,B")
        if not any(f"{{{name}}}" in word for word in command):
            _check_spelling(name, command, [text.partition("=")[0] for text in texts])
            raise UserError(
                f"the command has no {{{name}}}, in whose place the values of -L {name} go",
                f"write it where they go, as in: -- {shlex.join(command)} --{name} {{{name}}}",
            )
    num_variants = prod(map(len, lists.values()))
    if num_variants > MOST_VARIANTS:
        raise UserError(f"-L makes {num_variants:,} combinations", f"give {MOST_VARIANTS:,} or fewer")
    return [tuple(zip(lists, values, strict=True)) for values in product(*lists.values())]


def _check_spelling(name: str, command: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError if the command has a placeholder that nothing fills, spelled much like `name`'s."""
    from difflib import get_close_matches

    places = [place[1:-1] for word in command for place in _PLACEHOLDER.findall(word)]
    if near := get_close_matches(name, set(places).difference(names), n=1, cutoff=0.5):
        raise UserError(f"no -L fills {{{near[0]}}} in the command", f"did you mean {{{name}}}?")


def num_ranks_of(nproc: int | str, machine: Machine) -> int:
    """Return --nproc as a number: `gpu` is one per GPU. Raises UserError for more than one on a GPU."""
    if nproc == "gpu" and not machine.devices:
        raise UserError(f"--nproc gpu is one per GPU, and here is {machine.description}", "give a number")
    number = len(machine.devices) if isinstance(nproc, str) else nproc
    if machine.devices and number > len(machine.devices):
        raise UserError(
            f"{number} processes on {machine.description}",
            f"give --nproc {len(machine.devices)} or less: one process per GPU",
        )
    return number


def _check_commands(scripts: Sequence[Script], nproc: int | str | None) -> None:
    """Raise UserError if two variants are one command, or if torchrun cannot start one on several ranks."""
    seen: dict[tuple[str, ...], Script] = {}
    for script in scripts:
        other = seen.setdefault(script.argv, script)
        if other is not script:
            both = script.label if script.label == other.label else f"{other.label} and {script.label}"
            raise UserError(
                f"two variants are one command: {both}", "to run each several times, add --repeats 2"
            )
        program = Path(script.argv[0]).name
        if nproc is not None and not _PYTHON.fullmatch(program):
            starts = "starts its ranks itself" if program in _LAUNCHERS else "is no Python script"
            raise UserError(
                f"--nproc starts a Python script on several ranks, and {program} {starts}",
                "leave out --nproc",
            )


def _no_script(path: str, program: str) -> UserError:
    runs = "" if Path(path).name == program else f", which {program} is to run"
    return UserError(
        f"there is no {path} here{runs}",
        f"the command starts in the current directory, {Path.cwd()}: give the path from there",
    )


def caveats_of(scripts: Sequence[Script], instances: Sequence[InstanceType] = ()) -> tuple[str, ...]:
    """Return what to know before the commands start. instances: on which they start a single process."""
    script = scripts[0]
    is_python = _PYTHON.fullmatch(Path(script.argv[0]).name) is not None
    caveats = []
    left = [word for word in script.argv if _PLACEHOLDER.fullmatch(word)]
    # Braces are common in what a shell or awk runs.
    if left and script.variant:
        caveats.append(f"no -L names {left[0]}: the command gets it as it is")
    elif left and is_python:
        to_vary = f"-L {left[0][1:-1]}=A,B varies it"
        caveats.append(f"no -L names {left[0]}: the command gets it as it is; {to_vary}")
    most = max((instance.num_accelerators for instance in instances), default=1)
    if script.nproc is None and most > 1 and is_python:
        caveats.append(f"one process on {most} GPUs: --nproc gpu starts one for each, under torchrun")
    return tuple(caveats)


def script_name(argv: Sequence[str]) -> str:
    """Return the name of a command: its script's path in its repository or here, else its program."""
    if file := script_file(argv):
        # A file that only the image has goes by its name.
        return path_of(file) if Path(file).exists() or not Path(file).is_absolute() else Path(file).name
    return _module_of(argv) or Path(argv[0]).name


def script_file(argv: Sequence[str]) -> str | None:
    """Return the file that a command runs, as a path from here; None if it is not known."""
    program = argv[0]
    if named := _script_path(argv):
        return named
    if (module := _module_of(argv)) and module not in _LAUNCHING_MODULES:
        path = module.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__main__.py") if Path(name).is_file()), None)
    named = next((word for word in argv[1:] if word.endswith(".py")), None)
    return program if _is_relative(program) and not named else named


def _module_of(argv: Sequence[str]) -> str | None:
    """Return the module that `python -m` runs."""
    is_module = _PYTHON.fullmatch(Path(argv[0]).name) and "-m" in argv[1:-1]
    return argv[argv.index("-m", 1) + 1] if is_module else None


def _script_path(argv: Sequence[str]) -> str | None:
    """Return the script that the program runs, if we know the program."""
    program = Path(argv[0]).name
    if program in _LAUNCHERS:
        return next((word for word in argv[1:] if word.endswith(".py")), None)
    if not (program in _SHELLS or _PYTHON.fullmatch(program)):
        return None
    words = iter(argv[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word in ("-m", "-c", "-"):
            return None
        if word in _WITH_VALUE and program not in _SHELLS:
            next(words, None)
    return None
