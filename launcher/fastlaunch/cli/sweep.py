"""`fastlaunch sweep`: recipes and batch sizes on several instance types, within one budget."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.api import sweep as api
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    examples,
    next_command,
    print_json,
    table_or_json_option,
    terminal_width,
    yes_option,
)
from fastlaunch.cli.render import plain_table
from fastlaunch.cli.submit_options import GroupedCommand, declared_options, training_profile_option
from fastlaunch.core.errors import EXIT_DONE
from fastlaunch.core.units import counted
from fastlaunch.lifecycle.announcement import expected_json
from fastlaunch.lifecycle.sweep_plan import SweepPlan, plan_lines

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.lifecycle.sweep import Saved
    from fastlaunch.lifecycle.world import World

#: Longer lines are hard to read.
_WIDEST = 100


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        (
            "two recipes on two instance types, for at most $300 together",
            "fastlaunch sweep --instance p4d.24xlarge,p5.48xlarge --recipe bf16,te-fp8 --max-cost 300",
        ),
        (
            "only as far as needed to find what buys the most",
            "fastlaunch sweep --instance p4d.24xlarge,p5.48xlarge --recipe bf16,te-fp8 --until-best",
        ),
        (
            "variants of a script of your own",
            "fastlaunch sweep --instance p4d.24xlarge,p5.48xlarge -L amp=fp32,bf16 "
            "-- python train.py --amp {amp}",
        ),
        (
            "recipes and batch sizes on this machine",
            "fastlaunch sweep --local --recipe fp32,bf16 --batch-size 8,16",
        ),
        ("go on with the last sweep", "fastlaunch sweep --resume"),
    ),
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    help="Go on with this sweep, or the last: start what has not started, and complete what has.",
)
@click.option("--dry-run", is_flag=True, help="Print matrix and ceiling; start, write and ask nothing.")
@yes_option
@declared_options(
    "sweep",
    local="Sweep this machine.",
    instances="Train on each of these instance types, one after another, or several at a time by --parallel.",
    backend="Train on ec2 or sagemaker.  [default: by the names of the types]",
    repeats="Run each cell this often.  [default: until its verdict is settled]",
    max_cost_usd="Start an instance type only if its ceiling fits into what the others left of this.  "
    "[default: `max_cost` of the config file]",
)
@table_or_json_option
@training_profile_option
def sweep(resume: str | None, dry_run: bool, output: str, yes: bool, **options: Any) -> int:
    """Measure recipes, or variants of a script, on several instance types, within one budget.

    Each instance type runs its recipes and batch sizes on one machine, in interleaved rounds, until their
    verdicts are settled. With --until-best a cell runs only as long as it may be the best of all types.
    --max-cost limits all types together: a type whose ceiling does not fit into what is left is not started.
    To go on with a sweep that was stopped or killed, type --resume.
    """
    context, current = app_context(), click.get_current_context()
    if resume is not None:
        # Leave defaults out, since the user did not give them.
        typed = click.core.ParameterSource.COMMANDLINE
        options = {
            name: value
            for name, value in options.items()
            if current.get_parameter_source(name) is typed or (name == "command" and value is not None)
        }
    result = api.sweep(
        resume=resume,
        dry_run=dry_run,
        yes=yes,
        announce=lambda plan: click.echo(_plan_text(plan), err=True),
        context=context,
        **options,
    )
    if isinstance(result, SweepPlan):
        _print_plan(result, output=output)
        return EXIT_DONE
    _print_result(context, result, output=output)
    return result.exit_code


def _print_plan(plan: SweepPlan, *, output: str) -> None:
    if output == "json":
        cells = [
            {**vars(cell), "runs": 0 if cell.skipped else part.num_rounds}
            for part in plan.types.values()
            for cell in part.cells
        ]
        expected = {name: expected_json(part.expected) for name, part in plan.types.items() if part.ceiling}
        data: dict[str, Any] = {
            "cells": cells,
            "ceilings_usd": {name: ceiling.usd for name, ceiling in plan.ceilings.items()},
            "expected": expected,
            "max_cost_usd": plan.max_cost_usd,
        }
        if plan.directory:
            data["files"] = [file.path for file in plan.directory.files]
        print_json(data)
        return
    click.echo(f"{_plan_text(plan)}\n\nPlanned, not started: at most {counted(plan.num_runs, 'run')}.")


def _plan_text(plan: SweepPlan) -> str:
    """Return the matrix, what it leaves out and why, and the most that each type and the sweep may cost."""
    is_script = any(part.options and part.options.command for part in plan.types.values())
    rows = []
    for name, part in plan.types.items():
        is_limit = plan.is_until_best or (part.options is not None and part.options.until_resolved)
        runs = f"at most {part.num_rounds}" if is_limit else str(part.num_rounds)
        rows += [
            {
                "instance": name,
                "variant": cell.label if is_script else None,
                "recipe": None if is_script else cell.label,
                "batch": None if is_script else cell.batch_size or "default",
                "runs": "none" if cell.skipped else runs,
            }
            for cell in part.cells
        ]
    width = min(_WIDEST, terminal_width() or _WIDEST)
    wrapped = [
        textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for line in plan_lines(plan)
    ]
    # A column without values is left out.
    headers = {name: name for name in ("instance", "variant", "recipe", "batch", "runs")}
    return "\n".join([plain_table(rows, headers), "", *wrapped])


def _print_result(context: "World", swept: api.Swept, *, output: str) -> None:
    """Print how the parts ended, their measurements, the savings and the next command."""
    from fastlaunch.cli.compare import print_comparison, print_warnings
    from fastlaunch.lifecycle.sweep import states

    for name, runs in swept.by_part.items():
        counts = ", ".join(f"{number} {state}" for state, number in states(runs).items())
        click.echo(f"{name}: {counts}", err=True)
    for name, error in swept.left_out.items():
        if name not in swept.by_part:
            click.echo(f"{name}: {error.message}", err=True)
    data = {
        **{"id": swept.id, "parts": {name: states(of) for name, of in swept.by_part.items()}},
        "left_out": {name: error.message for name, error in swept.left_out.items()},
        "saved": swept.saved and vars(swept.saved),
        "best": [[_best_to_json(row) for row in rows] for rows in swept.best],
    }
    is_shown = False
    if swept.comparison is not None:
        print_warnings(swept.comparison.warnings)
        with context.advice.guard("the comparison"):
            lines = [*map(_best_text, swept.best), *([_saved_text(swept.saved)] if swept.saved else [])]
            print_comparison(swept.comparison, output, below=lines, sweep=data)
            is_shown = True
    if output == "json" and not is_shown:
        print_json({"sweep": data})
    baseline = f" --baseline {swept.best[0][0].run_ids[0]}" if swept.best else ""
    next_command(
        f"fastlaunch sweep --resume {swept.id}"
        if swept.is_stopped or any(error.exit_code for error in swept.left_out.values())
        else f"fastlaunch compare sweep={swept.id} --all{baseline}"
    )


def _best_text(rows: "Sequence[Row]") -> str:
    """`Best: te-fp8 on p5.48xlarge, $0.1234 per million samples. May be as good: bf16 on p5.48xlarge, ...`"""
    texts = []
    for row in rows:
        cost = row.cost.usd_per_million_samples
        usd = f", ${cost.value:.4g} per million samples" if cost else ""
        texts.append(f"{row.setup.recipe} on {row.place}{usd}")
    batch = f" at global batch {rows[0].setup.global_batch}" if rows[0].setup.global_batch else ""
    others = f" May be as good: {'; '.join(texts[1:])}." if texts[1:] else ""
    return f"Best{batch}: {texts[0]}.{others}"


def _best_to_json(row: "Row") -> dict[str, Any]:
    cost = row.cost.usd_per_million_samples
    return {
        **{"instance": row.setup.instance, "recipe": row.setup.recipe},
        **{"batch_size_per_gpu": row.setup.batch_size_per_gpu, "num_runs": row.num_runs},
        "usd_per_million_samples": cost.value if cost else None,
    }


def _saved_text(early: "Saved") -> str:
    """`Stopping early saved 8 runs of the full matrix: about 21 min of machines, $4.10.`"""
    if not early.num_runs:
        return "Stopping early saved nothing: no run of the matrix was left out as settled."
    text = f"Stopping early saved {counted(early.num_runs, 'run')} of the full matrix"
    if early.machine_s is not None:
        minutes = early.machine_s / 60
        time = f"{early.machine_s:.0f} s" if minutes < 1 else f"{minutes:,.0f} min"
        text += f": about {time} of machine time"
        text += f", ${early.usd:,.2f}" if early.usd is not None else ""
    return f"{text}."
