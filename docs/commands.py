"""The commands with the examples of `--help`, which mkdocs-click leaves out: what cli.md shows."""

import inspect
import textwrap

import click

from fastlaunch.cli.main import fastlaunch

commands: list[click.Command] = [fastlaunch]
for each in commands:
    if isinstance(each, click.Group):
        context = click.Context(each)
        commands += filter(None, (each.get_command(context, name) for name in each.list_commands(context)))
    _, _, examples = (each.epilog or "").partition("Examples:\n")
    if examples:
        each.help = f"{inspect.cleandoc(each.help or '')}\n\n```sh\n{textwrap.dedent(examples)}\n```"
