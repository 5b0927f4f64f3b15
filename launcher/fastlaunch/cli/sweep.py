"""`fastlaunch sweep`: recipes and batch sizes on several instance types, within one budget."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from fastlaunch.api.context import AppContext, open_launcher
from fastlaunch.api.options import check_backend, check_local, settings_with, take_fields
from fastlaunch.api.submission import backend_name
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    BATCH_SIZE,
    COUNT,
    NAMES,
    POSITIVE_COUNT,
    USD,
    Quantity,
    next_command,
    profile_option,
    table_or_json_option,
    yes_option,
)
from fastlaunch.cli.render import exit_code_of
from fastlaunch.cli.submit_options import (
    HEADINGS,
    GroupedCommand,
    cloud_options,
    training_options,
)
from fastlaunch.cli.sweep_plan import Planned, plan_here, plan_on_aws, plan_text
from fastlaunch.core.errors import EXIT_DONE, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.core.units import counted, split_names
from fastlaunch.jobs.options import CloudOptions, SubmitOptions

if TYPE_CHECKING:
    from fastlaunch.ledger.rows import Sweep as StoredSweep
    from fastlaunch.runs.launcher import Launcher
    from fastlaunch.runs.stop_request import StopRequest
    from fastlaunch.runs.sweep import Saved, Sweep

#: Options of `submit` that a sweep decides itself, or that are of one instance type.
_NOT_HERE = (
    *("until_resolved", "experiment", "add_to", "detach"),
    *("reservation", "block_fee_usd", "training_plan"),
)


class _SweepCommand(GroupedCommand):
    """Has the options of `submit`, less those that are not for a sweep; its own come first."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **HEADINGS,
        "Spend": ("resume", "parallel", *HEADINGS["Spend"]),
    }

    def __init__(self, name: str | None, *, params: list[click.Parameter], **more: Any) -> None:
        kept: dict[str | None, click.Parameter] = {}
        for param in params:
            if param.name not in _NOT_HERE:
                kept.setdefault(param.name, param)
        super().__init__(name, params=list(kept.values()), **more)


def _parse_batch_sizes(text: str) -> tuple[int | str, ...]:
    sizes = [BATCH_SIZE.convert(part, None, None) for part in split_names(text)]
    if not sizes or "auto-each" in sizes:
        raise UserError(f"{text!r} is no list of batch sizes", "give numbers and auto, such as auto,64")
    return tuple(dict.fromkeys(sizes))


@click.command(cls=_SweepCommand, short_help="Measure recipes on several instance types, within one budget.")
@click.option("--local", is_flag=True, help="Sweep this machine.")
@click.option(
    "--instance",
    "instances",
    type=NAMES,
    metavar="TYPE[,TYPE]",
    help="Train on each of these instance types, one after another, or several at a time by --parallel.",
)
@click.option(
    "--region",
    "regions",
    type=NAMES,
    metavar="REGION[,REGION]",
    help="Buy it in this region, else in the next.  [default: yours, or us-east-1]",
)
@click.option(
    "--backend", metavar="NAME", help="Train on ec2 or sagemaker.  [default: by the names of the types]"
)
@click.option(
    "--batch-size",
    type=Quantity("batch sizes", _parse_batch_sizes),
    default=(),
    metavar="N|auto[,N]",
    help="Train with each of these, in samples per GPU; auto is the most that fit all recipes on the type "
    "with the least GPU memory, searched for first.",
)
@click.option(
    "--repeats",
    type=COUNT,
    metavar="N",
    help="Run each cell this often.  [default: until its verdict is settled]",
)
@click.option(
    "--max-cost",
    "max_cost_usd",
    type=USD,
    metavar="USD",
    help="Start an instance type only if its ceiling fits into what the others left of this.",
)
@click.option(
    "--parallel",
    type=POSITIVE_COUNT,
    metavar="K",
    help="Train on up to K instance types at once, as far as their ceilings fit.  [default: 1]",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    help="Go on with this sweep, or the last: start what has not started, and complete what has.",
)
@training_options
@cloud_options
@click.option("--dry-run", is_flag=True, help="Print matrix and ceiling; start, write and ask nothing.")
@table_or_json_option("the comparison is")
@yes_option
@profile_option
def sweep(resume: str | None, output: str, yes: bool, **given: Any) -> int:
    """Measure recipes, or variants of a script, on several instance types, within one budget.

    Each instance type runs its recipes and batch sizes on one machine, in interleaved rounds, until their
    verdicts are settled. --max-cost is for all types together; one whose ceiling does not fit into what is
    left is not started. A sweep that was stopped or killed goes on with --resume.

    \b
      fastlaunch sweep --instance p4d.24xlarge,p5.48xlarge --recipe bf16,te-fp8 --max-cost 300
      fastlaunch sweep --instance p4d.24xlarge,p5.48xlarge -L amp=fp32,bf16 -- python train.py --amp {amp}
      fastlaunch sweep --local --recipe fp32,bf16 --batch-size 8,16
      fastlaunch sweep --resume
    """
    context = app_context()
    if resume is None:
        return _sweep(context, None, output=output, yes=yes, **given)
    current = click.get_current_context()
    typed = [
        name for name in given if current.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if typed or given["command"] is not None:
        raise UserError("--resume goes on with a sweep as it was typed", "leave out the other options")
    from fastlaunch.ledger.ledger import open_ledger

    with open_ledger(context.settings, clock=context.now) as ledger:
        stored = ledger.sweep(resume or None)
    if Path.cwd() != stored.directory:
        raise UserError(f"{stored.id} was started in {stored.directory}", f"type: cd {stored.directory}")
    again = current.command.make_context("sweep", list(stored.argv[1:])).params
    again |= {"output": output, "yes": yes}
    again.pop("resume")
    return _sweep(replace(context, argv=stored.argv), stored, **again)


def _sweep(
    context: AppContext,
    stored: "StoredSweep | None",
    *,
    local: bool,
    backend: str | None,
    instances: tuple[str, ...] | None,
    regions: tuple[str, ...] | None,
    max_cost_usd: float | None,
    parallel: int | None,
    repeats: int | None,
    dry_run: bool,
    output: str,
    yes: bool,
    **fields: Any,
) -> int:
    """Carry out the sweep that the options name, or go on with it if it is stored; return the exit code."""
    given_regions = regions
    regions = regions or split_names(context.settings.region)
    name = backend_name(context, local=local, container=False, named=backend, instances=instances)
    cloud_fields, region_fields = take_fields(fields, CloudOptions), take_fields(fields, RegionSettings)
    fields["batch_sizes"] = fields.pop("batch_size")
    fields["recipes"] = tuple(recipe for text in fields["recipes"] for recipe in split_names(text))
    cloud = CloudOptions(instances=instances or (), regions=regions, backend=name, **cloud_fields)
    # Without --repeats by the planned rule.
    fields |= {"until_resolved": repeats is None, "repeats": 1 if repeats is None else repeats}
    options = SubmitOptions(region=regions[0], **fields)
    if name == "local":
        if instances is not None:
            raise UserError("--local sweeps this machine", "leave out --instance, or --local")
        own = {"max_cost_usd": max_cost_usd, "parallel": parallel, "regions": given_regions}
        check_local({**cloud_fields, **region_fields, **own}, used=())
        planned = plan_here(context, options)
    else:
        if cloud.purchase == "capacity-block":
            raise UserError("a capacity block is of one instance type", "type: fastlaunch submit")
        check_backend(region_fields, cloud)
        context = replace(context, settings=settings_with(context.settings, region_fields, regions))
        planned = plan_on_aws(context, options, cloud, max_cost_usd)
    if dry_run:
        _print_plan(planned, max_cost_usd, output=output)
        return EXIT_DONE
    return _carry_out(
        context, planned, stored, max_cost_usd=max_cost_usd, parallel=parallel or 1, output=output, yes=yes
    )


def _print_plan(planned: Planned, max_cost_usd: float | None, *, output: str) -> None:
    if output == "json":
        cells = [
            {**vars(cell), "runs": 0 if cell.skipped else swept.num_rounds}
            for swept in planned.types.values()
            for cell in swept.cells
        ]
        ceilings = {name: ceiling.usd for name, ceiling in planned.ceilings.items()}
        files = {"files": [file.path for file in planned.directory.files]} if planned.directory else {}
        data = {"cells": cells, "ceilings_usd": ceilings, "max_cost_usd": max_cost_usd, **files}
        click.echo(json.dumps(data, indent=2))
        return
    num_runs = sum(swept.num_runs for swept in planned.types.values())
    click.echo(
        f"{plan_text(planned, max_cost_usd)}\n\nPlanned, not started: at most {counted(num_runs, 'run')}."
    )


def _carry_out(
    context: AppContext,
    planned: Planned,
    stored: "StoredSweep | None",
    *,
    max_cost_usd: float | None,
    parallel: int,
    output: str,
    yes: bool,
) -> int:
    from fastlaunch.core import locks
    from fastlaunch.core.home import make_folder
    from fastlaunch.runs.launcher import check_home
    from fastlaunch.runs.sweep import Sweep

    if planned.ceilings:
        context.check_can_ask(yes=yes)
    check_home(context.settings.home)
    backends = context.cloud_backends if planned.ceilings else {"local": context.backends["local"]}
    with open_launcher(context, backends) as launcher:
        ledger = launcher.ledger
        started = ledger.parts_of(stored.id) if stored else {}
        click.echo(plan_text(planned, max_cost_usd), err=True)
        for line in planned.warnings:
            click.echo(f"warning: {line}", err=True)
        if stored:
            click.echo(f"going on with {stored.id}; started: {', '.join(started) or 'nothing'}", err=True)
        parts, refused = planned.make(started)
        for name, error in refused.items():
            click.echo(f"left out: {name}: {error.message}", err=True)
        if planned.ceilings:
            context.confirm("Go on?" if stored else "Start it?", yes=yes)
        sweep_id = stored.id if stored else ledger.add_sweep(context.argv, Path.cwd())
        click.echo(f"{sweep_id}: to go on with it if it is stopped: fastlaunch sweep --resume", err=True)
        lock = ledger.launcher_lock(sweep_id)
        if locks.is_held(lock):
            raise UserError(f"another fastlaunch carries out {sweep_id}", "look: fastlaunch status")
        make_folder(lock.parent)
        carried_out = Sweep(
            id=sweep_id,
            launcher=launcher,
            command=shlex.join(["fastlaunch", *context.argv]),
            parts=parts,
            max_cost_usd=max_cost_usd,
            num_parallel=parallel,
            open_beside=partial(_open_beside, context, launcher.stop) if parallel > 1 else None,
            left_out=refused,
        )
        with locks.held(lock):
            carried_out.carry_out()
        return _report(context, carried_out, launcher, output=output)


@contextmanager
def _open_beside(context: AppContext, stop: "StopRequest", name: str) -> "Iterator[Launcher]":
    """Yield a launcher with a ledger of its own, whose lines begin with the name of its part."""
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.runs.display import PlainLines, report_line
    from fastlaunch.runs.launcher import Launcher

    own = replace(context, connect=lambda: context.aws, sleep=stop.sleeping(context.sleep))
    with open_ledger(context.settings, clock=context.now) as ledger:
        yield Launcher(
            backends=own.cloud_backends,
            ledger=ledger,
            settings=context.settings,
            display=PlainLines(clock=context.monotonic_s, prefix=f"{name}: "),
            stop=stop,
            report=lambda line: report_line(f"{name}: {line}"),
        )


def _report(context: AppContext, carried_out: "Sweep", launcher: "Launcher", *, output: str) -> int:
    """Print what became of the parts, what they measured and what was saved; return the exit code."""
    from fastlaunch.api.comparison import compare_at_own_prices
    from fastlaunch.cli.compare import print_comparison
    from fastlaunch.runs.sweep import duration_s, saved, states, sweep_runs

    by_part = sweep_runs(launcher.ledger, carried_out.id)
    for name, runs in by_part.items():
        counts = ", ".join(f"{number} {state}" for state, number in states(runs).items())
        click.echo(f"{name}: {counts}", err=True)
    for name, error in carried_out.left_out.items():
        if name not in by_part:
            click.echo(f"{name}: {error.message}", err=True)
    runs = [run for of in by_part.values() for run in of]
    early = saved(launcher.ledger, runs)
    data = {
        **{"id": carried_out.id, "parts": {name: states(of) for name, of in by_part.items()}},
        "left_out": {name: error.message for name, error in carried_out.left_out.items()},
        "saved": vars(early),
    }
    if any(run.summary and duration_s(run.summary) is not None for run in runs):
        print_comparison(compare_at_own_prices(context.settings, runs), output=output, sweep=data)
        if output == "table":
            click.echo(f"\n{_saved_text(early)}")
    elif output == "json":
        click.echo(json.dumps({"sweep": data}, indent=2))
    is_stopped = bool(launcher.stop.by)
    next_command(
        f"fastlaunch sweep --resume {carried_out.id}"
        if is_stopped or any(error.exit_code for error in carried_out.left_out.values())
        else f"fastlaunch compare sweep={carried_out.id} --all"
    )
    if is_stopped:
        return exit_code_of(runs, stopped=True)
    codes = (error.exit_code for error in carried_out.left_out.values())
    return next(filter(None, codes), exit_code_of(runs, stopped=False))


def _saved_text(early: "Saved") -> str:
    """`Stopping early saved 8 runs of the full matrix: about 21 min of machines, $4.10.`"""
    if not early.num_runs:
        return "Stopping early saved nothing: no run of the matrix was left out as settled."
    text = f"Stopping early saved {counted(early.num_runs, 'run')} of the full matrix"
    if early.machine_s is not None:
        minutes = early.machine_s / 60
        text += (
            f": about {f'{early.machine_s:.0f} s' if minutes < 1 else f'{minutes:,.0f} min'} of machine time"
        )
        text += f", ${early.usd:,.2f}" if early.usd is not None else ""
    return f"{text}."
