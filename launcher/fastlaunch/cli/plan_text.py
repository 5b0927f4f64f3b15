"""A plan for AWS as text: what it does, costs and lacks; on request the whole request as YAML."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import yaml

from fastlaunch.cli.options import next_command
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import by_reason, counted
from fastlaunch.jobs.working_directory import shown
from fastlaunch.lifecycle.announcement import (
    INDENT,
    expected_json,
    followed_jobs,
    layout,
    topics_of,
    wrapped,
)
from fastlaunch.lifecycle.submit import DryRun
from fastlaunch.placement.lookup import setup_command

if TYPE_CHECKING:
    from fastlaunch.backends.site import Site

_USER_DATA = "UserData"
#: Placeholders that AWS cannot fill, and the options that do.
_TO_BE_GIVEN = {
    "bucket": "--bucket",
    "instance-profile": "--instance-profile",
    "role": "--role",
    "subnet-id": "--subnet",
    "security-group-id": "--security-group",
}


def print_dry_run(dry_run: DryRun, *, argv: Sequence[str], output: str, show: str | None) -> None:
    """Print what a submission for AWS would do, as text or JSON. argv: of the command, without its name.

    Raises UserError for a --show of a part that the plan lacks.
    """
    (plan,), directory = dry_run.plans, dry_run.placement.directory
    if output == "json":
        for reason in by_reason(dry_run.placement.skipped):
            click.echo(f"left out: {reason}", err=True)
        files = {"files": [file.path for file in directory.files]} if directory else {}
        expected = {"expected": expected_json(dry_run.expected)}
        click.echo(json.dumps({**asdict(plan), **expected, **files}, indent=2))
    elif show == "files":
        if directory is None:
            raise UserError(
                "--show files lists what travels with a script", "end with one: -- python train.py"
            )
        click.echo("\n".join(f"{file.num_bytes:>11,}  {shown(file.path)}" for file in directory.files))
    elif show is not None:
        click.echo(request_text(plan) if show == "request" else user_data_text(plan))
    else:
        click.echo(plan_text(dry_run))
        if not dry_run.lacks_scheduler and not to_be_given(plan):
            command, *words = (word for word in argv if word != "--dry-run")
            if dry_run.placement.ceiling.is_above(dry_run.budget_usd):
                words = ["--max-cost", str(math.ceil(dry_run.placement.ceiling.usd)), *words]
            next_command(shlex.join(["fastlaunch", command, *words]))


def plan_text(dry_run: DryRun) -> str:
    """Return what would be done at the first site, what it costs, what ends it and what is missing."""
    (plan,), placement = dry_run.plans, dry_run.placement
    topics = topics_of(
        placement,
        dry_run.expected,
        old_prices=dry_run.old_prices,
        lacks_scheduler=dry_run.lacks_scheduler,
    )
    user_data = ", and `--show user-data` its script" if _USER_DATA in plan.request else ""
    request = f"{plan.operation} in {plan.region}: `--show request` prints all of it{user_data}."
    missing = _missing(plan, placement.sites[0], lacks_scheduler=dry_run.lacks_scheduler)
    most = "at most " if followed_jobs(placement)[0].max_rounds else ""
    planned = f"Planned, not started: {most}{counted(len(dry_run.jobs), 'run')}."
    return "\n".join([*layout(topics), *missing, *layout({"request": [request]}), "", planned])


def to_be_given(plan: Plan) -> list[str]:
    """Return the names of settings or options that are needed before the plan can start."""
    return [name for name in plan.placeholders if name in _TO_BE_GIVEN]


def _missing(plan: Plan, site: "Site", *, lacks_scheduler: bool) -> list[str]:
    """Return which names are missing, how to give them, and the commands that create them."""
    rows = [f"{name:<18} {_TO_BE_GIVEN[name]}" for name in to_be_given(plan)]
    rows += [f"{'scheduler-role':<18} or --no-account-timer"] * lacks_scheduler
    if not rows:
        return layout({"missing": ["nothing: the config file and the options name all."]})
    lines = [f"{'' if number else 'missing':<{INDENT}}{row}" for number, row in enumerate(rows)]
    lines += wrapped(f"or as entries under `aws: {site.region}:` in the config file. To make them:")
    return [*lines, *wrapped(setup_command(site.region))]


def request_text(plan: Plan) -> str:
    """Return the whole request as YAML, and the list of runs that its machines fetch."""
    lines = [f"{plan.operation} in {plan.region}:", *_as_yaml(plan.request)]
    for item in plan.objects:
        if item.text is not None:
            lines += ["", "What its machines do, in the list of runs that they fetch:"]
            lines += _as_yaml(json.loads(item.text))
    run_ids = [name for name in plan.placeholders if name.startswith("run-id")]
    unknown = [f"<{name}>" for name in plan.placeholders if name not in run_ids]
    unknown.append("<run-id>" if len(run_ids) == 1 else f"<run-id> to <run-id-{len(run_ids)}>")
    return "\n".join([*lines, "", f"# Known when it is submitted: {', '.join(unknown)}"])


def user_data_text(plan: Plan) -> str:
    """Return the script that the machine runs when it boots. Raises UserError if it has none."""
    if _USER_DATA not in plan.request:
        raise UserError("a training job of SageMaker has no user data", "give --show request")
    return str(plan.request[_USER_DATA])


class _Dumper(yaml.SafeDumper):
    """Writes every object in full, indents lists, and keeps texts of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _as_yaml(value: Mapping[str, Any]) -> list[str]:
    """Return indented lines of YAML."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=True)
    return [f"  {line}".rstrip() for line in text.removesuffix("\n").split("\n")]
