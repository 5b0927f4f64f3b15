"""Earlier measurements: summaries that come with fastlaunch, and published figures.

Figures are in a CSV with a row for each experiment that others ran. Either all rows are read or none.

    workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source

and optionally `total_time_s,num_samples,metric,value,derived,seed,host,round`. `num_gpus` is over all nodes.
An unstated `instance` is `unknown`, and an unstated `measured_on` (YYYY-MM-DD) empty. `step_time_s` is empty
if a total (`total_time_s`) or another figure (`metric` and `value`) was published. `derived` is `yes` for
figures computed from published percentages. `seed`, `host` and `round` distinguish repeats of a row. A single
row has no interval.
"""

import csv
import functools
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, get_args, get_type_hints

from msgspec import Meta, ValidationError, convert

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text, shipped
from fastlaunch.measure.headers import known_workload
from fastlaunch.measure.summary import Environment, Figures, Interval, RunSummary, Setup, Timing, read_summary
from fastlaunch_train.recipes.recipes import RECIPES

REQUIRED_COLUMNS = (
    *("workload", "instance", "num_nodes", "recipe", "batch_size_per_gpu", "num_gpus"),
    *("step_time_s", "measured_on", "source"),
)
#: The `data` of a published row, since no column says how data were fed.
DATA = "published"

#: The file with the summaries of the shipped records.
SUMMARIES = "summaries.json"

_Count = Annotated[int, Meta(ge=1, le=10**15, description="a whole number of 1 or more")]
_Seed = Annotated[int, Meta(ge=0, le=10**15, description="a whole number of 0 or more")]
_Number = Annotated[float, Meta(ge=-1e300, le=1e300, description="a number")]
#: Times outside these limits are typing errors and would overflow.
_Seconds = Annotated[float, Meta(ge=1e-9, le=1e12, description="a number of seconds, more than 0")]
_Date = Annotated[date, Meta(description="a date as YYYY-MM-DD")]
_Flag = Annotated[Literal["yes"], Meta(description="`yes`, or empty")]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The cells of one row; an empty cell is None."""

    workload: str
    instance: str
    num_nodes: _Count
    recipe: str
    batch_size_per_gpu: _Count
    num_gpus: _Count
    step_time_s: _Seconds | None = None
    measured_on: _Date | None = None
    source: str
    total_time_s: _Seconds | None = None
    num_samples: _Count | None = None
    metric: str | None = None
    value: _Number | None = None
    derived: _Flag | None = None
    seed: _Seed | None = None
    host: str | None = None
    round: _Count | None = None


def shipped_figures() -> tuple[Path, ...]:
    """Return the CSV files that come with fastlaunch."""
    return tuple(sorted(Path(__file__).with_name("published_figures").glob("*.csv")))


@functools.cache
def shipped_summaries(workload: str | None = None) -> Mapping[str, RunSummary]:
    """Return the shipped summaries by run id. workload: None for all workloads.

    They are in measurements/summaries.json beside the records, which would take seconds to read;
    `python -m benchmarks.keep`, in tests, rewrites the file.
    """
    return MappingProxyType(read_summaries(shipped("measurements") / SUMMARIES, workload))


@functools.cache
def shipped_workloads() -> Mapping[str, str]:
    """Return the unit of a sample of each workload with shipped summaries."""
    setups = [
        summary["setup"]
        for summary in json.loads((shipped("measurements") / SUMMARIES).read_bytes()).values()
    ]
    return {setup["workload"]: setup.get("sample_unit", "") for setup in setups}


def shipped_runs(workload: str) -> dict[str, RunSummary]:
    """Return the workload's shipped summaries and published rows by run id."""
    figures = {id: row for id, row in _shipped_rows().items() if row.setup.workload == workload}
    return {**shipped_summaries(workload), **figures}


@functools.cache
def _shipped_rows() -> Mapping[str, RunSummary]:
    return {
        f"{path.stem}-{number}": row
        for path in shipped_figures()
        for number, row in enumerate(read_published(path), start=1)
    }


def read_summaries(path: Path, workload: str | None = None) -> dict[str, RunSummary]:
    """Return the summaries in a JSON file by run id, in order. workload: None for all.

    Raises BadFile if the file is missing or has another form.
    """
    try:
        data = json.loads(path.read_bytes())
        return {
            run_id: read_summary(summary)
            for run_id, summary in data.items()
            if workload is None or summary["setup"]["workload"] == workload
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError, UserError) as error:
        raise BadFile(path, f"cannot be read: {error}", hint="install fastlaunch again") from None


def read_published(path: Path) -> tuple[RunSummary, ...]:
    """Return the rows of a CSV of published figures, in order.

    Raises BadFile, with line and column, for any fault.
    """
    columns: list[str] = []
    summaries = []
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        for cells in filter(None, reader):
            line = reader.line_num
            if not columns:
                columns = [cell.strip() for cell in cells]
                _check_columns(path, line, columns)
            elif len(cells) != len(columns):
                raise BadFile(path, f"{len(cells)} cells, the header names {len(columns)}", line=line)
            else:
                row = dict(zip(columns, (cell.strip() for cell in cells), strict=True))
                summaries.append(_summary(path, line, row))
    except csv.Error as error:
        raise BadFile(path, f"not CSV: {error}", line=reader.line_num) from None
    if not summaries:
        what = "holds a header and no rows" if columns else "empty: no header"
        raise BadFile(path, what, hint=f"it begins {','.join(REQUIRED_COLUMNS)}")
    return tuple(summaries)


def _check_columns(path: Path, line: int, columns: Sequence[str]) -> None:
    """Raise BadFile for an unknown, repeated or missing column."""
    known = [of.name for of in fields(_Row)]
    for number, column in enumerate(columns):
        if column not in known:
            hint = f"known: {', '.join(known)}"
            raise BadFile(path, f"unknown column {column[:40]!r}", line=line, hint=hint)
        if column in columns[:number]:
            raise BadFile(path, f"column {column!r} twice", line=line)
    missing = [column for column in REQUIRED_COLUMNS if column not in columns]
    if missing:
        what = f"column {missing[0]} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
        raise BadFile(path, f"{what} missing", line=line)


def _summary(path: Path, line: int, cells: Mapping[str, str]) -> RunSummary:
    def bad(column: str, problem: str) -> BadFile:
        return BadFile(path, f"column {column}: {problem}", line=line)

    try:
        row = convert({column: text for column, text in cells.items() if text}, _Row, strict=False)
    except ValidationError as error:
        # The message ends with the path of a value, or with the name of a missing field.
        column = str(error).split("`")[-2].removeprefix("$.")
        if not cells[column]:
            raise bad(column, "empty") from None
        parts = get_args(get_type_hints(_Row, include_extras=True)[column])
        (_, meta) = parts if isinstance(parts[1], Meta) else get_args(parts[0])
        raise bad(column, f"{cells[column][:40]!r} is not {meta.description}") from None
    info = known_workload(row.workload)
    if row.num_gpus < row.num_nodes:
        raise bad("num_gpus", f"{row.num_gpus} over all of {row.num_nodes} nodes: it is over all nodes")
    lack = load_catalogue().lack_of_gpus(row.instance, num_gpus=row.num_gpus, num_nodes=row.num_nodes)
    if lack is not None:
        raise bad("num_gpus", lack)
    if (row.metric is None) != (row.value is None):
        raise bad("metric" if row.metric is None else "value", "empty: `metric` and `value` come together")
    if row.step_time_s is None and row.total_time_s is None and row.metric is None:
        raise bad("step_time_s", "empty, and neither `total_time_s` nor `metric` says anything")
    return RunSummary(
        setup=Setup(
            kind="published",
            workload=row.workload,
            sample_unit=info.sample_unit if info else "samples",
            flops_per_sample=info.flops_per_sample if info else None,
            recipe=row.recipe,
            precision=RECIPES[row.recipe].precision if row.recipe in RECIPES else None,
            data=DATA,
            batch_size_per_gpu=row.batch_size_per_gpu,
            num_nodes=row.num_nodes,
            num_gpus=row.num_gpus,
            instance=None if row.instance == "unknown" else row.instance,
        ),
        seed=row.seed,
        status="completed",
        timing=Timing(
            step_time_s=Interval(value=row.step_time_s) if row.step_time_s else None,
            samples_per_step=float(row.batch_size_per_gpu * row.num_gpus) if row.step_time_s else None,
        ),
        environment=Environment(
            measured_on=row.measured_on.isoformat() if row.measured_on else None,
            host_id=row.host,
            round=row.round,
        ),
        figures=Figures(
            source=row.source,
            derived=row.derived is not None,
            total_time_s=row.total_time_s,
            num_samples=row.num_samples,
            metric=row.metric,
            metric_value=row.value,
        ),
    )
