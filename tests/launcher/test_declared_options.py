"""What is made from the declaration of the options: keywords, schema of job files, table of the reference.

To write them anew after a change of the options: python tests/launcher/test_declared_options.py
"""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import click
import pytest

from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.job_file import job_schema
from fastlaunch.jobs.options import HEADINGS, OPTIONS, PLACES, Option, Options, options_of

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- options: made by tests/launcher/test_declared_options.py -->\n"
END = "<!-- end of options -->\n"
KEYWORDS = '''"""The options of `submit` and `sweep` as Python keywords, for editors and type checkers.

Made from `jobs.options.Options` by tests/launcher/test_declared_options.py: not edited by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

#: A name, names with commas between them, or a sequence of names.
Names = str | Sequence[str]
#: KEY=VALUE texts, or values by key.
Pairs = str | Sequence[str] | Mapping[str, Any]
'''


def keywords() -> str:
    """The module of the TypedDicts."""
    kinds = {field.name: field.type for field in fields(Options)}

    def line(name: str) -> str:
        option = OPTIONS.get(name)
        kind = (
            getattr(kinds[name], "__name__", kinds[name]) if kinds[name] in (int, str, bool) else kinds[name]
        )
        if option is None or option.is_of_several:
            kind = "Pairs | None" if option and option.pairs else "Names | None"
            kind = "int | str | Sequence[int | str] | None" if name == "batch_sizes" else kind
        return f"    {name}: {kind}\n"

    submit, sweep = options_of("submit"), options_of("sweep")
    return KEYWORDS + "".join(
        f'\n\nclass {title}:\n    """{text}"""\n\n{"".join(map(line, names))}'
        for title, text, names in (
            (
                "Shared(TypedDict, total=False)",
                "The options that `submit` and `sweep` share.",
                ["command", *(name for name in submit if name in sweep)],
            ),
            (
                "SubmitArguments(Shared, total=False)",
                "The options of `submit`.",
                [name for name in submit if name not in sweep],
            ),
            (
                "SweepArguments(Shared, total=False)",
                "The options of `sweep`.",
                [name for name in sweep if name not in submit],
            ),
        )
    )


def where(option: Option) -> str:
    """`EC2`, or nothing where it means something everywhere."""
    names = dict(zip(PLACES, ("here", "containers here", "EC2", "SageMaker"), strict=True))
    places = "" if option.places == PLACES else ", ".join(names[place] for place in option.places)
    kind = {True: "a script", False: "a workload", None: ""}[option.for_script]
    return ": ".join(filter(None, (kind, places)))


def table() -> str:
    """The options as a table of Markdown."""
    rows = [
        f"| `{option.flag}` | `{name}` | {', '.join(option.commands)} | {where(option)} |\n"
        for name, option in OPTIONS.items()
    ]
    return "| option | in Python | of | for |\n|---|---|---|---|\n" + "".join(rows)


def reference() -> str:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


#: What is written, by its path.
MADE: Mapping[str, Callable[[], str]] = {
    "launcher/fastlaunch/api/keywords.py": keywords,
    "docs/job.schema.json": lambda: json.dumps(job_schema(), indent=2) + "\n",
    "docs/reference.md": reference,
}


@pytest.mark.parametrize("path", MADE)
def test_what_is_made_from_the_options_is_as_they_are(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == MADE[path]()


@pytest.mark.parametrize("command", ["submit", "sweep", "doctor", "resume"])
def test_a_command_has_its_options(command: str) -> None:
    with click.Context(group) as context:
        params = {param.name: param for param in group.get_command(context, command).params}  # type: ignore[union-attr]
    for name, option in options_of(command).items():
        param = params[name]
        assert (param.opts, param.nargs, param.multiple) == ([option.flag], 1, option.repeated)  # type: ignore[attr-defined]
        assert option.repeated or param.default is option.default
    assert not params.keys() - options_of(command).keys() & OPTIONS.keys()


def test_every_option_is_read() -> None:
    room = ROOT / "launcher" / "fastlaunch"
    # `settings_with` puts the options of a region in the place of the config file's.
    read = {field.name for field in fields(RegionSettings)}
    for path in {*room.rglob("*.py")} - {room / "jobs" / "options.py", room / "api" / "keywords.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="options") | ast.Attribute(attr="options"), attr=name):
                    read.add(name)
                case ast.Call(args=args):
                    # Such as `given_pairs(options, "tags")`.
                    parts = [part for argument in args for part in ast.walk(argument)]
                    read |= {part.value for part in parts if isinstance(part, ast.Constant)}
    assert {*OPTIONS} - read == set()


def test_a_declaration_says_one_thing() -> None:
    for name, option in OPTIONS.items():
        assert option.heading in HEADINGS and set(option.places) <= set(PLACES) and option.help.strip()
        assert option.pairs <= option.repeated
        # Where it is not for all of AWS, what to type instead is known.
        assert option.elsewhere or {"ec2", "sagemaker"} <= set(option.places), name
    for command in ("submit", "sweep"):
        flags = [option.flag for option in options_of(command).values()]
        assert len(flags) == len(set(flags))


if __name__ == "__main__":
    for path, text in MADE.items():
        (ROOT / path).write_text(text(), encoding="utf-8")
