"""What was measured before: summaries that come with fastlaunch, and published figures.

These are in a CSV, a row for each experiment that others ran, all rows or none.

    workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source

and optionally `total_time_s,num_samples,metric,value,derived,seed,host,round`. `num_gpus` is over all nodes.
`instance` is `unknown` where it was not said, and `measured_on` (YYYY-MM-DD) empty. `step_time_s` is empty
for what was published as a total (`total_time_s`) or as a figure of its own (`metric` and `value`). `derived`
is `yes` for what was worked out from published percentages. `seed`, `host` and `round` tell repeats of one
row apart. A row has no interval of its own.
"""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text, shipped
from fastlaunch.core.units import parse_date
from fastlaunch.measure.summary import Environment, Figures, Interval, RunSummary, Setup, Timing, read_summary
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.workloads.registry import WorkloadError, workload_info

REQUIRED_COLUMNS = (
    *("workload", "instance", "num_nodes", "recipe", "batch_size_per_gpu", "num_gpus"),
    *("step_time_s", "measured_on", "source"),
)
OPTIONAL_COLUMNS = (
    *("total_time_s", "num_samples", "metric", "value", "derived"),
    *("seed", "host", "round"),
)
#: What `RunSummary.data` holds for a published row: how the data were fed is not a column.
DATA = "published"

#: The file beside the shipped records that sums them up.
SUMMARIES = "summaries.json"

_COUNT = re.compile(r"[0-9]{1,15}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
#: Times outside these are slips; what is computed from them would overflow.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e12


def shipped_figures() -> tuple[Path, ...]:
    """Return the CSV files that come with fastlaunch."""
    return tuple(sorted(Path(__file__).with_name("published_figures").glob("*.csv")))


def shipped_summaries() -> dict[str, RunSummary]:
    """Return the summaries that come with fastlaunch, by run id.

    They lie in measurements/summaries.json beside the records, since reading those takes seconds;
    `fastlaunch demo --summarise train/measurements` writes it anew.
    """
    return read_summaries(shipped("measurements") / SUMMARIES)


def shipped_runs(workload: str) -> dict[str, RunSummary]:
    """Return what comes with fastlaunch of the workload by run id: measured summaries, and published rows."""
    figures = {
        f"{path.stem}-{number}": row
        for path in shipped_figures()
        for number, row in enumerate(read_published(path), start=1)
    }
    return {
        run_id: run
        for run_id, run in {**shipped_summaries(), **figures}.items()
        if run.setup.workload == workload
    }


def read_summaries(path: Path) -> dict[str, RunSummary]:
    """Return the summaries in a JSON file by run id, in order.

    Raises BadFile if there is none, or it is something else.
    """
    try:
        data = json.loads(path.read_bytes())
        return {run_id: read_summary(summary) for run_id, summary in data.items()}
    except (OSError, ValueError, AttributeError, UserError) as error:
        raise BadFile(path, f"cannot be read: {error}", hint="install fastlaunch again") from None


def read_published(path: Path) -> tuple[RunSummary, ...]:
    """Return the rows of a CSV of published figures, in order.

    Raises BadFile, with line and column, if anything in it is wrong; then none of it is returned.
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
                summaries.append(_summary(_Row(path, line, row)))
    except csv.Error as error:
        raise BadFile(path, f"not CSV: {error}", line=reader.line_num) from None
    if not summaries:
        what = "holds a header and no rows" if columns else "empty: no header"
        raise BadFile(path, what, hint=f"it begins {','.join(REQUIRED_COLUMNS)}")
    return tuple(summaries)


def _check_columns(path: Path, line: int, columns: Sequence[str]) -> None:
    """Raise BadFile for an unknown, repeated or missing column."""
    known = REQUIRED_COLUMNS + OPTIONAL_COLUMNS
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


def _summary(row: "_Row") -> RunSummary:
    workload, recipe = row.required("workload"), row.required("recipe")
    sample_unit, flops_per_sample = _of_workload(workload)
    num_nodes, num_gpus = row.count("num_nodes"), row.count("num_gpus")
    if num_gpus < num_nodes:
        raise row.bad("num_gpus", f"{num_gpus} over all of {num_nodes} nodes: it is over all nodes")
    lack = load_catalogue().lack_of_gpus(row.text("instance"), num_gpus=num_gpus, num_nodes=num_nodes)
    if lack is not None:
        raise row.bad("num_gpus", lack)
    batch_size_per_gpu = row.count("batch_size_per_gpu")
    step_time_s, total_time_s = row.seconds("step_time_s"), row.seconds("total_time_s")
    metric, value = row.text("metric"), row.number("value")
    if (metric is None) != (value is None):
        raise row.bad("metric" if metric is None else "value", "empty: `metric` and `value` come together")
    if step_time_s is None and total_time_s is None and metric is None:
        raise row.bad("step_time_s", "empty, and neither `total_time_s` nor `metric` says anything")
    instance = row.required("instance")
    return RunSummary(
        setup=Setup(
            kind="published",
            workload=workload,
            sample_unit=sample_unit,
            flops_per_sample=flops_per_sample,
            recipe=recipe,
            precision=RECIPES[recipe].precision if recipe in RECIPES else None,
            data=DATA,
            batch_size_per_gpu=batch_size_per_gpu,
            num_nodes=num_nodes,
            num_gpus=num_gpus,
            instance=None if instance == "unknown" else instance,
        ),
        seed=row.count("seed", least=0) if row.text("seed") else None,
        status="completed",
        timing=Timing(
            step_time_s=None if step_time_s is None else Interval(value=step_time_s),
            samples_per_step=None if step_time_s is None else float(batch_size_per_gpu * num_gpus),
        ),
        environment=Environment(
            measured_on=row.date("measured_on"),
            host_id=row.text("host"),
            round=row.count("round") if row.text("round") else None,
        ),
        figures=Figures(
            source=row.required("source"),
            derived=row.flag("derived"),
            total_time_s=total_time_s,
            num_samples=row.count("num_samples") if row.text("num_samples") else None,
            metric=metric,
            metric_value=value,
        ),
    )


def _of_workload(name: str) -> tuple[str, int | None]:
    """Return sample unit and training FLOPs per sample of a workload that may be unknown here."""
    try:
        info = workload_info(name)
    except WorkloadError:
        return "samples", None
    return info.sample_unit, info.flops_per_sample


@dataclass(frozen=True)
class _Row:
    """One row: cells by column, read as what the column holds. Every refusal names line and column."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def bad(self, column: str, problem: str) -> BadFile:
        return BadFile(self.path, f"column {column}: {problem}", line=self.line)

    def text(self, column: str) -> str | None:
        return self.cells.get(column) or None

    def required(self, column: str) -> str:
        value = self.text(column)
        if value is None:
            raise self.bad(column, "empty" if column != "instance" else "empty; unknown is written `unknown`")
        return value

    def count(self, column: str, *, least: int = 1) -> int:
        text = self.required(column)
        if not _COUNT.fullmatch(text) or int(text) < least:
            raise self.bad(column, f"{text[:40]!r} is not a whole number of {least} or more")
        return int(text)

    def number(self, column: str) -> float | None:
        text = self.text(column)
        if text is None:
            return None
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self.bad(column, f"{text[:40]!r} is not a number")
        return value

    def seconds(self, column: str) -> float | None:
        value = self.number(column)
        if value is not None and not _SHORTEST_S <= value <= _LONGEST_S:
            raise self.bad(column, f"{self.cells[column][:40]} is not a time: give seconds, more than 0")
        return value

    def date(self, column: str) -> str | None:
        text = self.text(column)
        if text is None:
            return None
        try:
            return parse_date(text).isoformat()
        except UserError:
            raise self.bad(column, f"{text[:40]!r} is not a date as YYYY-MM-DD") from None

    def flag(self, column: str) -> bool:
        text = self.text(column)
        if text not in (None, "yes"):
            raise self.bad(column, f"{text[:40]!r} is neither `yes` nor empty")
        return text == "yes"
