"""`fastlaunch runs`: list, show, import, export, share and remove runs."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from fastlaunch.api import listing as api
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    POSITIVE_COUNT,
    examples,
    next_command,
    output_option,
    print_json,
    profile_option,
    table_or_json_option,
    terminal_width,
    with_filters,
    yes_option,
)
from fastlaunch.cli.render import print_rows, print_table, print_text, runs_table
from fastlaunch.cli.share import pull, push
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import Settings
from fastlaunch.core.tables import SPARE, Column
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import counted, in_ms
from fastlaunch.jobs.options import ML
from fastlaunch.ledger.ledger import IMPORT, Run, open_ledger
from fastlaunch.lifecycle.describe import all_to_dict, as_lines, for_people, measured, run_to_dict
from fastlaunch.lifecycle.reconcile import reconcile

#: The first to give way on a narrow terminal are the least important.
_COLUMNS: Sequence[Column[Mapping[str, Any]]] = (
    Column("run", itemgetter("run")),
    # A long id begins with the workload, any other with the day.
    Column("when", itemgetter("when"), importance=SPARE - 5),
    Column("backend", itemgetter("backend"), importance=SPARE - 3),
    Column("owner", itemgetter("owner"), importance=SPARE - 2),
    Column("workload", itemgetter("workload"), importance=SPARE - 1),
    Column("recipe", itemgetter("recipe")),
    Column("instance", itemgetter("instance"), importance=SPARE),
    Column("state", itemgetter("state")),
    Column("step time", itemgetter("step_time_s"), format=in_ms),
    Column("loss", itemgetter("final_loss"), format="{:.3f}".format, importance=SPARE - 4),
)


@click.group(
    invoke_without_command=True,
    epilog=examples(
        ("all runs", "fastlaunch runs"),
        ("what finished with Transformer Engine", "fastlaunch runs list 'recipe=te-*' state=completed"),
        ("everything about one of them", "fastlaunch runs show k3f9"),
    ),
)
@click.pass_context
def runs(ctx: click.Context) -> None:
    """List, show, import, export, share and remove runs; without a command, list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_runs)


runs.add_command(push)
runs.add_command(pull)


@runs.command(
    "list",
    short_help="List runs, the newest last.",
    epilog=examples(
        ("the last 20", "fastlaunch runs list --limit 20"),
        ("runs on one instance type, as JSON", "fastlaunch runs list 'instance=p5*' --output json"),
    ),
    help=with_filters("List runs, the newest last: all, or those that RUN and FILTER pick."),
)
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@click.option("--limit", type=POSITIVE_COUNT, metavar="N", help="Show only the last N.")
@output_option
@profile_option
def list_runs(selectors: tuple[str, ...] = (), limit: int | None = None, output: str = "table") -> None:
    selected = api.runs(*selectors, context=app_context())
    shown = selected[-limit:] if limit else selected
    rows = [run_to_dict(run) for run in shown]
    if output != "table":
        print_rows(rows, output=output)
        return
    if rows:
        # If all runs were made here, the column says nothing.
        is_local = all(run.backend == "local" for run in shown)
        columns = [column for column in _COLUMNS if not (is_local and column.name == "backend")]
        cells = [{**row, "run": run.id, "when": _day_of(run)} for row, run in zip(rows, shown, strict=True)]
        print_table(runs_table(cells, columns, terminal_width()))
    only = f", the last {limit} shown" if len(shown) < len(selected) else ""
    all_of = "" if selectors else " in all"
    click.echo(f"{counted(len(selected), 'run')}{all_of}{only}.")
    # Rather one that measured something than one that was cancelled.
    telling = [run for run in shown if run.summary and run.summary.is_measured] or shown
    next_command(f"fastlaunch runs show {telling[-1].id}" if telling else "fastlaunch submit --local")


def _day_of(run: Run) -> str | None:
    """Return when the run was made; of an imported one, when it was measured."""
    if run.backend == IMPORT:
        return run.summary.environment.measured_on if run.summary else None
    return run.created_at[:10]


@runs.command(
    "show",
    short_help="Show everything that is known of a run.",
    epilog=examples(
        ("by the end of its id", "fastlaunch runs show k3f9"),
        ("as JSON", "fastlaunch runs show k3f9 --output json"),
    ),
)
@click.argument("name", metavar="RUN")
@table_or_json_option
@profile_option
def show(name: str, output: str) -> None:
    """Show everything that is known of a run: its job, what was done and when, what it measured, what it was
    billed at, and where its files are.

    RUN is the run's id, or the beginning or last part of it.
    """
    context = app_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        reconcile(ledger, context.backends, context.settings)
        run = ledger.get(name)
        data = all_to_dict(ledger, run, home=context.settings.home, now=context.now())
    if output == "json":
        print_json(data)
        return
    for line in as_lines({**for_people(run, data), "files": _files(run)}):
        # Keep a command on one line, so that it can be copied.
        (click.echo if " --" in line else print_text)(line)
    print_text(f"Run {run.id} is {run.state}" + (f": {of}" if (of := measured(run)) else "") + ".")
    next_command(f"fastlaunch compare {run.id}" if of else f"fastlaunch logs {run.id}")


@runs.command(
    "rm",
    short_help="Remove runs and their files.",
    epilog=examples(
        ("one run", "fastlaunch runs rm k3f9"),
        ("all that failed, without a question", "fastlaunch runs rm state=failed --yes"),
    ),
)
@click.argument("selectors", nargs=-1, required=True, metavar="[RUN|FILTER]...")
@yes_option
@profile_option
def remove(selectors: tuple[str, ...], yes: bool) -> None:
    """Remove runs from the ledger, and their folders if fastlaunch made them. Imported files stay.

    A run that has not ended is not removed.
    """
    context = app_context()
    settings = context.settings
    with open_ledger(settings, clock=context.now) as ledger:
        reconcile(ledger, context.backends, context.settings)
        chosen = ledger.fetch_comparable(selectors, all_runs=True)
        if not chosen:
            raise api.no_run_fits(selectors)
        folders = [folder for run in chosen if (folder := _own_folder(run, settings))]
        for run in chosen if not yes else ():
            click.echo(f"{run.id}  {run.workload}  {run.recipe}  {run.state}", err=True)
        and_files = f" and {counted(len(folders), 'folder')} with records" if folders else ""
        context.confirm(f"Remove {counted(len(chosen), 'run')}{and_files}?", yes=yes)
        ledger.remove([run.id for run in chosen])
    for folder in folders:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            report_line(as_warning(f"{folder} stays, it cannot be removed: {error.strerror}"))
    click.echo(f"Removed {counted(len(chosen), 'run')}.")
    next_command("fastlaunch runs list")


@runs.command(
    "import",
    short_help="Import record files, CSV files and exports.",
    epilog=examples(
        ("what a colleague exported", "fastlaunch runs import runs.tar.gz"),
        ("the published figures that come with fastlaunch", "fastlaunch runs import --published"),
    ),
)
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--published", is_flag=True, help="Import the published figures that come with fastlaunch.")
def import_runs(paths: tuple[Path, ...], published: bool) -> None:
    """Import record files (.jsonl, .jsonl.gz, .jsonl.xz), CSV files of published figures, archives of these
    (.tar.gz, .tar.xz) as `runs export` writes them, or folders of all these.

    The record files of all ranks of a run, in one folder, become one run. No run is imported twice. Files
    stay where they are: the ledger keeps a run's summary and the path.
    """
    from fastlaunch.lifecycle.importer import find_runs
    from fastlaunch.measure.published import shipped_figures

    if not paths and not published:
        raise UserError("nothing to import", "give a file or a folder, or --published")
    with activity("reading records"):
        importable = find_runs([*paths, *(shipped_figures() if published else ())])
    for problem in importable.skipped:
        report_line(as_warning(f"skipped {problem.message}"))
    for path, number in importable.copies.items():
        lines = f"{number} line{' says' if number == 1 else 's say'} the same as one before"
        repeat = "a repeat has another seed, host or round"
        report_line(as_warning(f"{path}: {lines}, and they are one run: {repeat}"))
    context = app_context()
    names = {run.summary.setup.instance for run in importable.runs.values()}
    known_types = context.catalogue.instances
    for name in sorted(name for name in names if name and name.removeprefix(ML) not in known_types):
        near = get_close_matches(name, known_types, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        report_line(as_warning(f"unknown instance {name!r}: its runs have no price{meant}"))
    command = shlex.join(["fastlaunch", "runs", "import", *map(str, paths), *["--published"] * published])
    with open_ledger(context.settings) as ledger, ledger.transaction():
        ids = list(importable.runs)
        known = ledger.existing(ids)
        ledger.add_imported(
            [(run.summary, run.source.absolute()) for run in importable.runs.values()],
            submission_id=ledger.add_submission(os.fsencode(command).decode(errors="replace")),
            run_ids=ids,
        )
        for run_id, run in zip(ids, importable.runs.values(), strict=True):
            if (price := run.run_file.price) is not None and run_id not in known:
                ledger.set_price(run_id, price)
    new = len(ids) - len(known)
    here = f", {len(known)} {'was' if len(known) == 1 else 'were'} here already" if known else ""
    click.echo(f"Imported {counted(new, 'run')}{here}.")
    next_command("fastlaunch compare")


@runs.command(
    "export",
    short_help="Write runs to files that `runs import` reads, or to an experiment tracker.",
    epilog=examples(
        ("to send them to a colleague", "fastlaunch runs export 'workload=vit-huge' --to runs.tar.gz"),
        (
            "to an MLflow server",
            "fastlaunch runs export k3f9 --to http://mlflow.example:5000 --format mlflow",
        ),
        ("for TensorBoard", "fastlaunch runs export k3f9 --to tensorboard/ --format tensorboard"),
    ),
    help=with_filters("""Write the record files of runs, compressed, with all else that is known of them, to a
    .tar.gz file, or to a folder for each run under PATH. `fastlaunch runs import` reads both.

    With --format, write for MLflow, Weights & Biases (offline files) or TensorBoard instead: parameters,
    tags, figures of the whole run, and loss, step time, samples/s and data wait of every step. This replaces
    a run that is there already."""),
)
@click.argument("selectors", nargs=-1, required=True, metavar="[RUN|FILTER]...")
@click.option(
    "--to",
    "destination",
    required=True,
    metavar="PATH",
    help="Write to this new .tar.gz file or this folder; MLflow also takes a server's URI.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["records", "mlflow", "wandb", "tensorboard"]),
    default="records",
    show_default=True,
    help="Write for this program.",
)
def export(selectors: tuple[str, ...], destination: str, file_format: str) -> None:
    from fastlaunch.lifecycle.export import export_runs, tracked_runs
    from fastlaunch.report.trackers import write_runs

    context = app_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        chosen = ledger.select(selectors)
        if not chosen:
            raise api.no_run_fits(selectors)
        if file_format == "records":
            path = Path(destination)
            warnings = export_runs(ledger, chosen, path, home=context.settings.home, now=context.now())
            following: str | None = f"fastlaunch runs import {shlex.quote(destination)}"
        else:
            warnings = [
                f"run {run.id}: it is {run.state} and recorded nothing" for run in chosen if not run.summary
            ]
            chosen = [run for run in chosen if run.summary]
            write_runs(tracked_runs(chosen, context), file_format, destination)
            following = _view_command(file_format, destination)
    for warning in warnings:
        report_line(as_warning(warning))
    click.echo(f"Exported {counted(len(chosen), 'run')} to {destination}.")
    if following:
        next_command(following)


def _view_command(tracker: str, destination: str) -> str | None:
    """Return the command that shows exported runs; None for a server."""
    from fastlaunch.report.trackers import mlflow_uri

    if "://" in destination:
        return None
    if tracker == "mlflow":
        return f"mlflow ui --backend-store-uri {shlex.quote(mlflow_uri(destination))}"
    quoted = shlex.quote(destination)
    if tracker == "wandb":
        return f"wandb sync {quoted}/wandb/offline-run-*"
    return f"tensorboard --logdir {quoted}"


def _files(run: Run) -> list[str]:
    place = run.directory
    if place is None:
        return []
    if not place.exists():
        return [f"{place} (gone)"]
    return [str(path) for path in sorted(place.iterdir())] if place.is_dir() else [str(place)]


def _own_folder(run: Run, settings: Settings) -> Path | None:
    """Return the run's folder if fastlaunch made it for only this run."""
    if run.backend == IMPORT or run.directory is None or not run.directory.is_dir():
        return None
    folder, home = run.directory.resolve(), (settings.home / "runs").resolve()
    return folder if folder.parent == home and folder.name == run.id else None
