"""Published figures as data: a CSV of experiments that others ran, a row each, all rows or none.

    workload,instance,num_nodes,recipe,batch_size_per_gpu,num_gpus,step_time_s,measured_on,source

and optionally `total_time_s,num_samples,metric,value,derived`. `num_gpus` is over all nodes. `instance` is
`unknown` where it was not said, and `measured_on` (YYYY-MM-DD) empty. `step_time_s` is empty for what was
published as a total (`total_time_s`) or as a figure of its own (`metric` and `value`). `derived` is `yes`
for what was worked out from published percentages. A row has no interval: nobody can repeat it here.
"""

import csv
import datetime
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.core.errors import BadFile
from fastlaunch.measure.summary import Environment, Figures, Interval, RunSummary, Setup, Timing
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.workloads.registry import WorkloadError, workload_info

REQUIRED_COLUMNS = (
    *("workload", "instance", "num_nodes", "recipe", "batch_size_per_gpu", "num_gpus"),
    *("step_time_s", "measured_on", "source"),
)
OPTIONAL_COLUMNS = ("total_time_s", "num_samples", "metric", "value", "derived")
#: What `RunSummary.data` holds for a published row: how the data were fed is not a column.
DATA = "published"

_COUNT = re.compile(r"[0-9]{1,15}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
#: Times outside these are slips, and would overflow what is computed from them.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e12


def shipped_figures() -> tuple[Path, ...]:
    """Return the CSV files that come with fastlaunch."""
    return tuple(sorted(Path(__file__).with_name("published_figures").glob("*.csv")))


def read_published(path: Path) -> tuple[RunSummary, ...]:
    """Return the rows of a CSV of published figures, in order.

    Raises BadFile, with line and column, if anything in it is wrong; then none of it is returned.
    """
    rows = _rows(path, _text(path))
    line, cells = next(rows, (1, []))
    if not cells:
        raise BadFile(path, "empty: no header", line=1, hint=f"it begins {','.join(REQUIRED_COLUMNS)}")
    columns = _columns(path, line, cells)
    summaries = []
    for line, cells in rows:
        if len(cells) != len(columns):
            raise BadFile(
                path,
                f"{len(cells)} cells, the header names {len(columns)}: {_place(columns, cells)}",
                line=line,
            )
        summaries.append(_summary(_Row(path, line, dict(zip(columns, cells, strict=True)))))
    if not summaries:
        raise BadFile(path, "holds a header and no rows", line=line)
    return tuple(summaries)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or error}") from None
    nul = data.find(b"\0")
    if nul >= 0:
        raise BadFile(path, "holds a NUL byte: not a CSV file", line=_line_of(data, nul))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile(path, "not UTF-8", line=_line_of(data, error.start)) from None


def _line_of(data: bytes, position: int) -> int:
    return len((data[:position] + b".").splitlines())


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line it begins on, its cells without surrounding blanks) of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise BadFile(path, f"not CSV: {error}", line=line) from None
        if cells is None:
            return
        if cells:
            yield line, [cell.strip() for cell in cells]


def _columns(path: Path, line: int, columns: Sequence[str]) -> Sequence[str]:
    """Return the header's columns. Raises BadFile for an unknown, repeated or missing one."""
    known = REQUIRED_COLUMNS + OPTIONAL_COLUMNS
    for number, column in enumerate(columns, start=1):
        if column not in known:
            raise BadFile(
                path,
                f"unknown column {column!r} (column {number})",
                line=line,
                hint=f"known: {', '.join(known)}",
            )
        if column in columns[: number - 1]:
            raise BadFile(path, f"column {column!r} twice", line=line)
    for column in REQUIRED_COLUMNS:
        if column not in columns:
            raise BadFile(path, f"column {column!r} is missing", line=line)
    return columns


def _place(columns: Sequence[str], cells: Sequence[str]) -> str:
    if len(cells) < len(columns):
        return f"nothing in column {columns[len(cells)]}"
    return f"{cells[len(columns)][:40]!r} stands after the last, column {columns[-1]}"


def _summary(row: "_Row") -> RunSummary:
    workload, recipe = row.required("workload"), row.required("recipe")
    sample_unit, flops_per_sample = _of_workload(workload)
    num_nodes, num_gpus = row.count("num_nodes"), row.count("num_gpus")
    if num_gpus < num_nodes:
        raise row.bad("num_gpus", f"{num_gpus} over all of {num_nodes} nodes: it is over all nodes")
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
        status="completed",
        timing=Timing(
            step_time_s=None if step_time_s is None else Interval(value=step_time_s),
            samples_per_step=None if step_time_s is None else float(batch_size_per_gpu * num_gpus),
        ),
        environment=Environment(measured_on=row.date("measured_on")),
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

    def count(self, column: str) -> int:
        text = self.required(column)
        if not _COUNT.fullmatch(text) or int(text) == 0:
            raise self.bad(column, f"{text[:40]!r} is not a whole number of 1 or more")
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
            if not _DATE.fullmatch(text):
                raise ValueError
            return datetime.date.fromisoformat(text).isoformat()
        except ValueError:
            raise self.bad(column, f"{text[:40]!r} is not a date as YYYY-MM-DD") from None

    def flag(self, column: str) -> bool:
        text = self.text(column)
        if text not in (None, "yes"):
            raise self.bad(column, f"{text[:40]!r} is neither `yes` nor empty")
        return text == "yes"
