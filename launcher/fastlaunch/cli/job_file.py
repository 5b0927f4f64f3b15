"""`submit job.yaml`: options from a file, named without the dashes. Those that are typed count before them.

docs/job.schema.json describes such files to editors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from fastlaunch.cli.options import NAMES
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.core.units import join_list
from fastlaunch.core.yaml_file import YamlFile
from fastlaunch.jobs.options import CloudOptions
from fastlaunch.jobs.scripts import split_command

#: Of one call, and not of the job.
_OF_A_CALL = ("yes", "dry_run", "show", "output", "profile", "help", "job_schema")
COMMAND = "command"


def job_options(params: Sequence[click.Parameter]) -> dict[str, click.Option]:
    """Return the options that a job file may have, by their names in it."""
    own = [param for param in params if isinstance(param, click.Option) and param.name not in _OF_A_CALL]
    return {param.opts[0].lstrip("-"): param for param in own}


def read_job(
    path: Path, ctx: click.Context, *, typed: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Return a job file's values by parameter, and its command. Raises BadFile, with the line.

    typed: the words of the command line. One that says where to train takes the place of all that the file
    says of that; what is for AWS alone then does not count here.
    """
    file, options = YamlFile(path), job_options(ctx.command.params)
    of_a_call = [name.replace("_", "-") for name in _OF_A_CALL]
    if here := [key for key in file.mapping() if key in of_a_call]:
        raise file.fault(f"`{here[0]}` is of one call, not of the job", here[0], hint=f"type it: --{here[0]}")
    file.refuse_unknown(known=[*options, COMMAND])
    values, command = {}, None
    for key, value in file.mapping().items():
        if value is None:
            continue
        if key == COMMAND:
            with _at(file, key):
                command = split_command(value) if isinstance(value, str) else _texts(file, value, key)
            continue
        option = options[key]
        if option.is_flag:
            # Some flags, such as --no-account-timer, turn a thing off.
            if file.value(bool, key):
                values[str(option.name)] = option.default is not True
            continue
        with _at(file, key):
            values[str(option.name)] = option.type_cast_value(ctx, _given(file, option, key, value))
    if any(word.partition("=")[0] in ("--local", "--backend", "--instance") for word in typed):
        left_out = {"local", "backend", "instances"}
        if "--local" in typed:
            left_out |= {field.name for kind in (CloudOptions, RegionSettings) for field in fields(kind)}
            left_out |= {"max_cost_usd", "regions"}
        values = {name: value for name, value in values.items() if name not in left_out}
    return values, command


@contextmanager
def _at(file: YamlFile, key: str) -> Iterator[None]:
    """Name file and line of what is wrong with this option."""
    try:
        yield
    except click.UsageError as error:
        raise file.fault(f"{key}: {error.message}", key) from None
    except BadFile:
        raise
    except UserError as error:
        raise file.fault(error.message.removeprefix("--"), key, hint=error.hint) from None


def _given(file: YamlFile, option: click.Option, key: str, value: Any) -> Any:
    """Return the value as it would be typed: a text, or several where the option may be repeated."""
    if isinstance(value, Mapping) and option.multiple:
        join = join_list if option.name == "lists" else ",".join
        texts = {name: _texts(file, each, key, name) for name, each in file.mapping(key).items()}
        return tuple(
            f"{name}={join(several) if isinstance(value[name], list) else several[0]}"
            for name, several in texts.items()
        )
    if option.multiple:
        return _texts(file, value, key)
    return ",".join(_texts(file, value, key)) if option.type is NAMES else file.text(key)


def _texts(file: YamlFile, value: Any, *at: str) -> tuple[str, ...]:
    """Return the texts of the list at this path, or the one text that stands there."""
    if isinstance(value, list):
        return tuple(file.text(*at, number) for number in range(len(value)))
    return (file.text(*at),)
