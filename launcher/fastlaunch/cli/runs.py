"""`fastlaunch runs`: list, show, import, export and remove runs."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fastlaunch.cli.context import reconcile_here
from fastlaunch.cli.options import (
    POSITIVE_COUNT,
    confirm,
    next_command,
    output_option,
    profile_option,
    table_or_json_option,
    yes_option,
)
from fastlaunch.cli.render import print_rows, print_text
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import Settings, load_settings
from fastlaunch.core.units import in_ms
from fastlaunch.ledger.ledger import IMPORT, Run, open_ledger
from fastlaunch.runs.describe import as_lines, for_people, measured, run_as_json, run_as_row

_HEADERS = {
    "id": "run",
    "when": "when",
    "backend": "backend",
    "workload": "workload",
    "recipe": "recipe",
    "instance": "instance",
    "state": "state",
    "step": "step time",
    "loss": "loss",
}
_FILTERS_HELP = """
    RUN is a run's id, or the beginning or last part of it; FILTER is field=glob, such as 'recipe=te-*', on
    workload, recipe, instance, state, submission, backend or commit (of the training code).
"""


def _with_filters(text: str) -> str:
    return text.rstrip() + "\n" + _FILTERS_HELP


@click.group(invoke_without_command=True, short_help="List, show, import, export and remove runs.")
@click.pass_context
def runs(ctx: click.Context) -> None:
    """List, show, import, export and remove runs; without a command, list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_runs)


@runs.command(
    "list",
    short_help="List runs, the newest last.",
    help=_with_filters("""List runs, the newest last: all, or those that RUN and FILTER pick."""),
)
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@click.option("--limit", type=POSITIVE_COUNT, metavar="N", help="Show only the last N.")
@output_option
@profile_option
def list_runs(selectors: tuple[str, ...] = (), limit: int | None = None, output: str = "table") -> None:
    with open_ledger(load_settings()) as ledger:
        reconcile_here(ledger)
        selected = ledger.fetch_comparable(selectors, all_runs=True)
    shown = selected[-limit:] if limit else selected
    rows = [run_as_row(run) for run in shown]
    if output != "table":
        print_rows(rows, output=output)
        return
    if rows:
        cells = [_cells(run) for run in shown]
        headers = {key: text for key, text in _HEADERS.items() if _tells(key, cells)}
        print_rows(
            cells,
            output=output,
            headers=headers,
            # The id begins with the workload where it is long, and else with the day.
            shrinkable=("recipe", "instance", "workload"),
            droppable=("when", "loss", "backend"),
        )
    click.echo(f"{_num_runs(selected)}{f', the last {limit} shown' if len(shown) < len(selected) else ''}.")
    next_command(f"fastlaunch runs show {shown[-1].id}" if shown else "fastlaunch submit --local")


@runs.command("show", short_help="Show everything that is known of a run.")
@click.argument("name", metavar="RUN")
@table_or_json_option("the run is")
@profile_option
def show(name: str, output: str) -> None:
    """Show everything that is known of a run: what was asked for, what was done and when, what it measured,
    what it was billed at, and where its files are.

    RUN is the run's id, or the beginning or last part of it.
    """
    with open_ledger(load_settings()) as ledger:
        reconcile_here(ledger)
        run = ledger.get(name)
        data = run_as_json(ledger, run)
    if output == "json":
        click.echo(json.dumps(data, indent=2))
        return
    for line in as_lines({**for_people(run, data), "files": _files(run)}):
        # A command is left whole, to be copied.
        (click.echo if " --" in line else print_text)(line)
    print_text(f"Run {run.id} is {run.state}" + (f": {of}" if (of := measured(run)) else "") + ".")
    next_command(f"fastlaunch compare {run.id}" if run.summary else f"fastlaunch logs {run.id}")


@runs.command("rm", short_help="Remove runs and their files.")
@click.argument("selectors", nargs=-1, required=True, metavar="[RUN|FILTER]...")
@yes_option
@profile_option
def remove(selectors: tuple[str, ...], yes: bool) -> None:
    """Remove runs from the ledger, and their folders if fastlaunch made them. Files that were imported stay.

    A run that has not ended is refused.
    """
    settings = load_settings()
    with open_ledger(settings) as ledger:
        reconcile_here(ledger)
        chosen = ledger.fetch_comparable(selectors, all_runs=True)
        if not chosen:
            raise UserError(
                f"no run fits {shlex.join(selectors)}", "`fastlaunch runs list` shows what there is"
            )
        folders = [folder for run in chosen if (folder := _own_folder(run, settings))]
        for run in chosen if not yes else ():
            click.echo(f"{run.id}  {run.workload}  {run.recipe}  {run.state}", err=True)
        confirm(f"Remove {_num_runs(chosen)}{_with_folders(folders)}?", yes=yes)
        ledger.remove([run.id for run in chosen])
    for folder in folders:
        _remove_folder(folder)
    click.echo(f"Removed {_num_runs(chosen)}.")
    next_command("fastlaunch runs list")


@runs.command("import", short_help="Import record files, CSV files and exports.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--published", is_flag=True, help="Import the published figures that come with fastlaunch.")
def import_runs(paths: tuple[Path, ...], published: bool) -> None:
    """Import record files (.jsonl, .jsonl.gz, .jsonl.xz), CSV files of published figures, archives of these
    (.tar.gz, .tar.xz), as `runs export` writes them, or folders of all these with their subfolders.

    The record files of all ranks of a run, in one folder, become one run. A run that is there already is not
    doubled. Files stay where they are: the ledger keeps a run's summary and the path.
    """
    from fastlaunch.measure.published import shipped_figures
    from fastlaunch.runs.importer import find_runs

    if not paths and not published:
        raise UserError("nothing to import", "give a file or a folder, or --published")
    importable = find_runs([*paths, *(shipped_figures() if published else ())])
    for problem in importable.skipped:
        click.echo(f"warning: skipped {problem.message}", err=True)
    command = shlex.join(["fastlaunch", "runs", "import", *map(str, paths), *["--published"] * published])
    with open_ledger(load_settings()) as ledger, ledger.transaction():
        known = ledger.existing(list(importable.runs))
        ids = ledger.add_imported(
            [(run.summary, run.source.absolute()) for run in importable.runs.values()],
            submission_id=ledger.add_submission(os.fsencode(command).decode(errors="replace")),
            run_ids=list(importable.runs),
        )
        for run in importable.runs.values():
            if run.price is not None and run.run_id not in known:
                ledger.set_price(run.run_id, run.price)
    new = len(ids) - len(known)
    here = f", {len(known)} {'was' if len(known) == 1 else 'were'} here already" if known else ""
    click.echo(f"Imported {new} run{'' if new == 1 else 's'}{here}.")
    next_command("fastlaunch compare")


@runs.command(
    "export",
    short_help="Write runs to files that `runs import` reads.",
    help=_with_filters("""Write the record files of runs, compressed, with all else that is known of them,
    to a .tar.gz file, or to a folder for each run under PATH. `fastlaunch runs import` reads both."""),
)
@click.argument("selectors", nargs=-1, required=True, metavar="[RUN|FILTER]...")
@click.option(
    "--to",
    "destination",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="Write to a .tar.gz file that is not there yet, or to a folder.",
)
def export(selectors: tuple[str, ...], destination: Path) -> None:
    from fastlaunch.runs.export import export_runs

    with open_ledger(load_settings()) as ledger:
        chosen = ledger.select(selectors)
        if not chosen:
            raise UserError(
                f"no run fits {shlex.join(selectors)}", "`fastlaunch runs list` shows what there is"
            )
        for missing in export_runs(ledger, chosen, destination):
            click.echo(f"warning: {missing}", err=True)
    click.echo(f"Exported {_num_runs(chosen)} to {destination}.")
    next_command(f"fastlaunch runs import {shlex.quote(str(destination))}")


def _cells(run: Run) -> dict[str, str | float | None]:
    row = run_as_row(run)
    when: str | None = run.created_at[:10]
    if run.backend == IMPORT:
        when = run.summary.environment.measured_on if run.summary else None
    return {
        **row,
        "when": when,
        "step": None if row["step_time_s"] is None else in_ms(row["step_time_s"]),
        "loss": None if row["final_loss"] is None else f"{row['final_loss']:.3f}",
    }


def _tells(key: str, cells: Sequence[Mapping[str, object]]) -> bool:
    """Whether a column tells runs apart: these two often say the same of all, and the table is narrow."""
    if key not in ("backend", "instance"):
        return True
    values = {row[key] for row in cells}
    return values not in ({None}, {"local"})


def _with_folders(folders: Sequence[Path]) -> str:
    if not folders:
        return ""
    return (
        " and 1 folder with its records" if len(folders) == 1 else f" and {len(folders)} folders with records"
    )


def _num_runs(selected: Sequence[Run]) -> str:
    return f"{len(selected)} run{'' if len(selected) == 1 else 's'}"


def _files(run: Run) -> list[str]:
    place = run.directory
    if place is None:
        return []
    if not place.exists():
        return [f"{place} (gone)"]
    return [str(path) for path in sorted(place.iterdir())] if place.is_dir() else [str(place)]


def _own_folder(run: Run, settings: Settings) -> Path | None:
    """Return the run's folder if fastlaunch made it for this run alone."""
    if run.backend == IMPORT or run.directory is None or not run.directory.is_dir():
        return None
    folder, home = run.directory.resolve(), (settings.home / "runs").resolve()
    return folder if folder.parent == home and folder.name == run.id else None


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        click.echo(f"warning: {folder} stays, it cannot be removed: {error.strerror}", err=True)
