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
from fastlaunch.core.yaml_file import YamlFile
from fastlaunch.jobs.options import CloudOptions
from fastlaunch.jobs.scripts import joined, split_command

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
                command = split_command(value) if isinstance(value, str) else None
            command = command or tuple(_texts(file, file.items(key), key))
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
    if isinstance(value, Mapping):
        value = [f"{name}={_joined(file, each, key, name)}" for name, each in file.mapping(key).items()]
    if option.multiple:
        return tuple(_texts(file, value if isinstance(value, list) else [value], key))
    return _joined(file, value, key) if option.type is NAMES else _text(file, value, key)


def _joined(file: YamlFile, value: Any, *at: str) -> str:
    return joined(_texts(file, value, *at)) if isinstance(value, list) else _text(file, value, *at)


def _texts(file: YamlFile, values: Sequence[Any], *at: str) -> list[str]:
    return [_text(file, value, *at, number) for number, value in enumerate(values)]


def _text(file: YamlFile, value: Any, *at: str | int) -> str:
    # YAML takes on, off, yes and no for these, too.
    if value is None or isinstance(value, bool | dict | list):
        raise file.fault(
            f"{at[0]} has {value!r} where text or a number goes", *at, hint="put quotes around it"
        )
    return str(value)
