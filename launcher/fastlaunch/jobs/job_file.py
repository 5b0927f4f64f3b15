"""`submit job.yaml`: options from a file, named without the dashes. Typed options override them.

docs/job.schema.json describes such files to editors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.yaml_file import YamlFile
from fastlaunch.jobs.options import OPTIONS, Option, options_of, split_command

#: Options of a single call, which do not describe the job.
_OF_A_CALL = ("yes", "dry-run", "show", "output", "profile", "help", "job-schema")
COMMAND = "command"


def read_job(path: Path, *, typed: Sequence[str] = ()) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Return a job file's values by field of `Options`, and its command. Raises BadFile, with the line.

    typed: the words of the command line. If one says where to train, it replaces everything that the file
    says about that; for a local run, the file's options for AWS are then ignored.
    """
    file = YamlFile(path)
    options = {option.key: (name, option) for name, option in options_of("submit").items()}
    for key in file.mapping():
        if key in _OF_A_CALL:
            raise file.fault(f"`{key}` belongs to one call, not to the job", key, hint=f"type it: --{key}")
    file.refuse_unknown(known=[*options, COMMAND])
    values, command = {}, None
    for key, value in file.mapping().items():
        if value is None:
            continue
        try:
            if key == COMMAND:
                command = split_command(value) if isinstance(value, str) else _texts(file, value, key)
                continue
            name, option = options[key]
            if not option.is_switch:
                values[name] = _read(file, option, value)
            elif file.value(bool, key):
                # Some switches, such as no-account-timer, turn something off.
                values[name] = not option.default
        except BadFile:
            raise
        except UserError as error:
            raise file.fault(f"{key}: {error.message}", key, hint=error.hint) from None
    if any(word.partition("=")[0] in ("--local", "--backend", "--instance") for word in typed):
        left_out = {"local", "backend", "instances"}
        if "--local" in typed:
            left_out |= {name for name, option in OPTIONS.items() if "local" not in option.places}
        values = {name: value for name, value in values.items() if name not in left_out}
    return values, command


def _read(file: YamlFile, option: Option, value: Any) -> Any:
    """Return the value of an option, parsed from the scalars' text."""
    if isinstance(value, Mapping) and option.pairs:
        texts = {name: _texts(file, item, option.key, name) for name, item in value.items()}
        return option.gather(
            {name: texts[name] if isinstance(item, list) else texts[name][0] for name, item in value.items()}
        )
    if option.is_of_several:
        return option.gather(_texts(file, value, option.key))
    return option.read(file.text(option.key))


def _texts(file: YamlFile, value: Any, *at: str) -> tuple[str, ...]:
    """Return the texts at this path, which has a list or a single text."""
    if isinstance(value, list):
        return tuple(file.text(*at, number) for number in range(len(value)))
    return (file.text(*at),)


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of job files."""
    text, texts, pairs = ({"$ref": f"#/$defs/{name}"} for name in ("text", "texts", "pairs"))
    command = "Run this script of your own, as words or as one text."
    properties: dict[str, Any] = {COMMAND: {"description": command, "anyOf": [text, texts]}}
    for option in sorted(options_of("submit").values(), key=lambda option: option.key):
        kinds: list[dict[str, Any]] = [{"type": "boolean"}] if option.is_switch else [text]
        kinds += [texts] if option.is_of_several else []
        kinds += [pairs] if option.pairs else []
        kind = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        properties[option.key] = {"description": option.help, **kind}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fastlaunch submit JOB.yaml",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": {
            "text": {"type": ["string", "number", "boolean", "null"]},
            "texts": {"type": "array", "items": text},
            "pairs": {"type": "object", "additionalProperties": {"anyOf": [text, texts]}},
        },
    }
