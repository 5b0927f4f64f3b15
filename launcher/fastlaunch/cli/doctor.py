"""`fastlaunch doctor`: check what a job on AWS needs, before it costs anything."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.aws.errors import is_without_keys
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, next_command, print_json, profile_option, table_or_json_option
from fastlaunch.cli.render import plain_table
from fastlaunch.cli.submit_options import declared_options
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_CLOUD_REFUSED, EXIT_DONE, CloudRefused
from fastlaunch.core.paths import shipped
from fastlaunch.core.units import counted, first_names, split_names, utc_day
from fastlaunch.jobs.option_rules import backend_of, check_on_aws
from fastlaunch.jobs.options import ML, Options
from fastlaunch.lifecycle.world import World
from fastlaunch.placement.check import Result

if TYPE_CHECKING:
    from fastlaunch.placement.check import Check, CheckContext

_HEADERS = {
    "result": "result",
    "check": "check",
    "instance": "instance",
    "place": "region or zone",
    "message": "detail",
}
#: The most names in the answer.
_MOST_NAMED = 6


@click.command(
    epilog=examples(
        ("all that a job on this type needs", "fastlaunch doctor --instance p5.48xlarge"),
        (
            "several types and regions",
            "fastlaunch doctor --instance p5.48xlarge,p5en.48xlarge --region us-east-1,us-west-2",
        ),
        ("two nodes on SageMaker", "fastlaunch doctor --instance ml.p5.48xlarge --num-nodes 2"),
        ("what an account needs, as text", "fastlaunch doctor --setup"),
    )
)
@declared_options(
    "doctor",
    instances="Check what a job on this type needs, quota and price too.",
    backend="Check ec2 or sagemaker.  [default: as --instance says]",
    regions="Check these regions.  [default: yours, or us-east-1]",
)
@click.option("--setup", is_flag=True, help="Print what an account needs, with the commands; ask nothing.")
@table_or_json_option
@profile_option
def doctor(setup: bool, output: str, **given: Any) -> int:
    """Check what a job on AWS needs: login, quota, image, network, bucket, price.

    It asks AWS, writes one small object to the bucket, and starts nothing. The exit code is 0 if nothing
    failed, 3 if AWS would refuse the job, and 2 if the config file or the command has to change.
    """
    from fastlaunch.core.settings import config_path
    from fastlaunch.placement.check import Check, Result
    from fastlaunch.placement.checks import checks

    if setup:
        click.echo(shipped("docs/setup.md").read_text(encoding="utf-8"), nl=False)
        return EXIT_DONE
    context = app_context()
    options = Options(**given)
    backend_of(options.instances, options.backend)
    options = options if options.regions else replace(options, regions=split_names(context.own_region()))
    check_on_aws(options)
    job = _check_context(context, options)
    path = config_path()
    absence = "" if path.exists() else ", which does not exist yet"
    config_file = Check(name="config file", result=Result.OK, message=f"{path}{absence}")
    with activity("asking what a job would meet"):
        results = [config_file, *_budget_checks(context), *checks(job)]
    (_print_json if output == "json" else _print)(results)
    next_command(_next(context, results, job))
    return _exit_code(results)


def _budget_checks(context: World) -> "list[Check]":
    """Return how much of each budget of the config file is taken."""
    from fastlaunch.lifecycle.budgets import uses_of
    from fastlaunch.placement.check import Check, Result

    try:
        uses = uses_of(context, asks_aws=True)
    except CloudRefused:
        # The checks of the login say why.
        uses = uses_of(context)
    return [
        Check(
            name=f"budgets.{use.name}",
            result=Result.OK if use.left_usd else Result.WARNING,
            message=str(use),
            hint=None if use.left_usd else f"nothing starts before {use.until:%Y-%m-%d %H:%M} UTC",
        )
        for use in uses
    ]


def _check_context(context: World, options: Options) -> "CheckContext":
    from fastlaunch.aws.client import cached
    from fastlaunch.catalog.container_images import training_base
    from fastlaunch.jobs.build import instances_of
    from fastlaunch.jobs.code_bundle import cached_bundle, wanted_pins, wheel_folder
    from fastlaunch.placement.check import CheckContext
    from fastlaunch.placement.lookup import Lookup

    now, pins = context.now(), wanted_pins()
    return CheckContext(
        lookup=Lookup(
            settings=context.settings,
            catalogue=context.catalogue,
            now=now,
            base=training_base(None, today=utc_day(now)),
            aws=cached(context.aws),
        ),
        options=options,
        instances=instances_of(options, context.catalogue) if options.instances else (),
        # Without the wheels, no job submitted from here can have stored the bundle.
        bundles=tuple(filter(None, [cached_bundle(wheel_folder(context.settings), pins)])),
    )


def _exit_code(results: Sequence["Check"]) -> int:
    """Return 3 if AWS refused anything, else 2 if anything is wrong here, else 0."""
    codes = {check.error.exit_code for check in results if check.error is not None}
    return EXIT_CLOUD_REFUSED if EXIT_CLOUD_REFUSED in codes else max(codes, default=EXIT_DONE)


def _named(check: "Check") -> str:
    """Return `quota (p5.48xlarge in us-east-1)`; the name alone for checks of all sites."""
    place = " in ".join(filter(None, (check.instance, check.zone or check.region)))
    return f"{check.name} ({place})" if place else check.name


def _print(results: Sequence["Check"]) -> None:
    # What needs action stands in full above the table, failures first.
    pressing = [
        check
        for check in results
        if check.result in (Result.FAILED, Result.WARNING)
        or (check.result == Result.NOT_CHECKED and check.hint)
    ]
    lines = []
    for check in sorted(pressing, key=lambda check: check.result != Result.FAILED):
        lines.append(f"{check.result}: {_named(check)}: {check.message}")
        lines += [f"  {check.hint}"] if check.hint else []
    rows = [
        {
            "result": str(check.result),
            "check": check.name,
            "instance": check.instance,
            "place": check.zone or check.region,
            "message": "see above" if check in pressing else check.message,
        }
        for check in results
    ]
    click.echo("\n\n".join(filter(None, [_answer(results), "\n".join(lines), plain_table(rows, _HEADERS)])))


def _answer(results: Sequence["Check"]) -> str:
    """Return `2 of 12 checks failed: login, config; 1 warning, 8 not checked.`"""
    counts = Counter(check.result for check in results)
    failed = dict.fromkeys(check.name for check in results if check.result == Result.FAILED)
    of_all = f"of {counted(len(results), 'check')}"
    if failed:
        answer = f"{counts[Result.FAILED]} {of_all} failed: {first_names([*failed], _MOST_NAMED)}"
    elif counts[Result.OK] == len(results):
        answer = f"Nothing is missing: {len(results)} {of_all} ok"
    else:
        answer = f"No check failed: {counts[Result.OK]} {of_all} ok"
    others = (
        f"{counts[result]} {result}" for result in (Result.WARNING, Result.NOT_CHECKED) if counts[result]
    )
    return f"{'; '.join(filter(None, [answer, ', '.join(others)]))}."


def _print_json(results: Sequence["Check"]) -> None:
    shown = [
        {
            "name": check.name,
            "result": str(check.result),
            **{key: getattr(check, key) for key in ("region", "zone", "instance", "message", "hint")},
            "error": type(check.error).__name__ if check.error else None,
        }
        for check in results
    ]
    print_json({"ok": _exit_code(results) == EXIT_DONE, "checks": shown})


def _next(context: World, results: Sequence["Check"], job: "CheckContext") -> str:
    # A profile whose program or session failed is not mended by new keys: its hint says what to do.
    if any(check.error is not None and is_without_keys(check.error) for check in results):
        return "aws configure"
    if any(check.error is not None for check in results):
        return shlex.join(["fastlaunch", *context.argv])
    if not job.instances:
        prefix = ML if job.options.service == "sagemaker" else ""
        return f"fastlaunch doctor --instance {prefix}p5.48xlarge"
    # Every option of the check is one of `submit` as well.
    given = context.argv[context.argv.index("doctor") + 1 :]
    saving = ["--checkpoint-every", "50"] if job.options.purchase == "spot" else []
    return shlex.join(["fastlaunch", "submit", *given, "--recipe", "bf16", *saving, "--dry-run"])
