"""A plan for AWS as text: what it does, costs and lacks; on request the whole request as YAML."""

import json
import math
import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
import yaml

from fastlaunch.cli.options import next_command
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import by_reason, counted
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.working_directory import shown
from fastlaunch.lifecycle.announcement import (
    MOST,
    expected_json,
    expected_text,
    in_words,
    needs_text,
    some,
    spot_text,
    travels_text,
)
from fastlaunch.lifecycle.submit import DryRun
from fastlaunch.placement.config_checks import setup_command
from fastlaunch.placement.cost_ceiling import NOT_COUNTED, hours_text

if TYPE_CHECKING:
    from fastlaunch.backends.site import Site

_USER_DATA = "UserData"
#: Longer lines are hard to read.
_WIDEST = 100
#: Placeholders that AWS cannot fill, and the options that do.
_TO_BE_GIVEN = {
    "bucket": "--bucket",
    "instance-profile": "--instance-profile",
    "role": "--role",
    "subnet-id": "--subnet",
    "security-group-id": "--security-group",
}
#: The column of the texts, beside their names.
_INDENT = 9


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
    (plan,), jobs, placement = dry_run.plans, dry_run.jobs, dry_run.placement
    options, directory = placement.options, placement.directory
    travels = [*(travels_text(directory) if directory else []), *needs_text(options)]
    site, *others = placement.sites
    where = [f"left out: {reason}" for reason in by_reason(placement.skipped)[:MOST]]
    if others:
        where.insert(0, f"without capacity there: {some([other.name for other in others], ', then ')}")
        if len({other.instance.name for other in placement.sites}) > 1:
            where.insert(1, "the next type is tried only where there is no capacity: `sweep` trains on each")
    width = min(_WIDEST, shutil.get_terminal_size(fallback=(80, 1)).columns)
    ends = _ends(site, options, lacks_scheduler=dry_run.lacks_scheduler)
    old = [f"{dry_run.old_prices}."] if dry_run.old_prices else []
    expected = expected_text(dry_run.expected, jobs, max_minutes=options.max_minutes)
    cost = [f"{placement.ceiling}.", *old, expected, NOT_COUNTED]
    lines = [
        *_topic("plan", [in_words(_as_followed(jobs, options), site)], width),
        *_topic("where", where, width),
        *_topic("travels", travels, width),
        *_topic("cost", cost, width),
        *_topic("ends", [ends, *spot_text(jobs)], width),
        *_missing(plan, site, width, lacks_scheduler=dry_run.lacks_scheduler),
    ]
    user_data = ", and `--show user-data` its script" if _USER_DATA in plan.request else ""
    request = f"{plan.operation} in {plan.region}: `--show request` prints all of it{user_data}."
    most = "at most " if _as_followed(jobs, options)[0].max_rounds else ""
    lines += _topic("request", [request], width)
    return "\n".join([*lines, "", f"Planned, not started: {most}{counted(len(jobs), 'run')}."])


def _as_followed(jobs: Sequence[Job], options: Options) -> Sequence[Job]:
    """Return the jobs that are run: all rounds where nobody looks in between."""
    return [replace(job, max_rounds=None) for job in jobs] if options.detach else jobs


def _topic(name: str, texts: Sequence[str], width: int) -> list[str]:
    """Return the texts, wrapped and indented; the name stands before the first."""
    lines = [line for text in texts for line in _wrapped(text, width)]
    return [f"{name:<{_INDENT}}{lines[0].lstrip()}", *lines[1:]] if lines else []


def _wrapped(text: str, width: int) -> list[str]:
    """Return lines in the column of the texts."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _ends(site: "Site", options: Options, *, lacks_scheduler: bool) -> str:
    hours = hours_text(options.max_minutes)
    if site.backend == "sagemaker":
        return f"with its last run, or by SageMaker {hours} after it began to train."
    timers = [f"its own timer after {hours}"]
    if options.account_timer:
        timers.append(f"a timer in the account{' (missing, see below)' if lacks_scheduler else ''}")
    return f"with its last run. What hangs is ended by {', '.join(timers)}, and `fastlaunch reap`."


def to_be_given(plan: Plan) -> list[str]:
    """Return the names of settings or options that are needed before the plan can start."""
    return [name for name in plan.placeholders if name in _TO_BE_GIVEN]


def _missing(plan: Plan, site: "Site", width: int, *, lacks_scheduler: bool) -> list[str]:
    """Return which names are missing, how to give them, and the commands that create them."""
    rows = [f"{name:<18} {_TO_BE_GIVEN[name]}" for name in to_be_given(plan)]
    rows += [f"{'scheduler-role':<18} or --no-account-timer"] * lacks_scheduler
    if not rows:
        return _topic("missing", ["nothing: the config file and the options name all."], width)
    lines = [f"{'' if number else 'missing':<{_INDENT}}{row}" for number, row in enumerate(rows)]
    lines += _wrapped(f"or as entries under `aws: {site.region}:` in the config file. To make them:", width)
    return [*lines, *_wrapped(setup_command(site.region), width)]


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
