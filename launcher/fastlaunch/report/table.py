"""A comparison as text tables: a section for each workload, with notes underneath."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.verdicts import THROUGHPUT, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.core.tables import KEPT, WIDTH, table
from fastlaunch.core.units import counted
from fastlaunch.report.columns import Part, RowColumn, columns_of
from fastlaunch.report.notes import bulleted, notes_of
from fastlaunch.report.text import UNKNOWN, name_of

#: The heading of rows that do not train like the baseline; it replaces their notes of that kind.
_THROUGHPUT = "throughput, not training progress"
#: Columns that move into a workload's heading if they are the same in all rows.
_SHARED = ("instance", "batch", "GPUs", "tokens each", "data", "runs")
#: The parts of the table of speed and cost, and the headings of the tables under it.
_MAIN = (Part.SPEED, Part.COST)
_FURTHER = {
    Part.START: "time before the measured steps, not included above:",
    Part.STEP: "where the time of a profiled step goes:",
}


def as_table(
    comparison: Comparison, *, only: Sequence[str] = (), brief: bool = False, width: int = WIDTH
) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer.

    only: show only the columns with these headings, and columns that identify a row. brief: leave out times
    before the steps, kernels, and the notes that `notes_of` leaves out. Raises UnknownName for a heading that
    no workload has.
    """
    sections = comparison.by_workload.values()
    columns = [
        [column for column in columns_of(rows, only) if column.part and column.name] for rows in sections
    ]
    main = [column for of_rows in columns for column in of_rows if column.part in (Part.IDENTITY, *_MAIN)]
    known = dict.fromkeys(column.name for column in main)
    for name in only:
        if name not in known:
            raise UnknownName("column", name, known)
    parts = zip(sections, columns, strict=True)
    return "\n\n".join(_section(rows, of_rows, only, brief, width) for rows, of_rows in parts)


def _section(
    rows: Sequence[Row], columns: Sequence[RowColumn], only: Sequence[str], brief: bool, width: int
) -> str:
    """Return one workload: rows that train like the baseline, other rows, held-out losses, notes."""
    shared = _shared(rows)
    columns = [column for column in columns if column.name not in shared]

    def grid(of: Sequence[Row], *parts: Part, width: int | None = width) -> str:
        chosen = [column for column in columns if column.part in (Part.IDENTITY, *parts)]
        if only and parts[0] in _MAIN:
            # Keep columns that the user named.
            chosen = [
                replace(column, importance=KEPT)
                for column in chosen
                if column.part == Part.IDENTITY or column.name in only
            ]
        return table(of, chosen, width, rule=True, missing=UNKNOWN)

    def grids(of: Sequence[Row]) -> list[str]:
        """Return one table, or if it would be too wide, a table of the speed and one of the cost."""
        fits = max(map(len, grid(of, *_MAIN, width=None).splitlines())) <= width
        return [grid(of, *_MAIN)] if fits or only else [grid(of, part) for part in _MAIN]

    parts = [_heading(rows, shared, width)]
    trains = [row for row in rows if row.verdict.comparable_as == TRAINING]
    others = [row for row in rows if row.verdict.comparable_as == THROUGHPUT]
    if trains:
        parts += grids(trains)
    if others:
        lengths = len({row.setup.sequence_length for row in rows}) > 1
        what = "global batch or sequence length" if lengths else "global batch"
        parts += [f"{_THROUGHPUT} (another {what} than the baseline's):", *grids(others)]
    by_reference: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.validity.held_out is not None:
            by_reference.setdefault(row.validity.convergence.reference, []).append(row)
    for reference, evaluated in by_reference.items():
        pairs = "in the same rounds" if rows[0].setup.is_script else "at the same seeds"
        against = f", and its difference to that of {reference} {pairs} (one-sided 95% limits)"
        title = f"held-out loss at the end{against if reference else ''}:"
        parts.append(f"{textwrap.fill(title, width)}\n{grid(evaluated, Part.LOSS)}")
    notes, num_hidden = notes_of(rows, brief)
    if not brief:
        for part, title in _FURTHER.items():
            of_part = [column for column in columns if column.part == part]
            if timed := [row for row in rows if any(column.text(row) for column in of_part)]:
                parts.append(f"{title}\n{grid(timed, part)}")
        parts += _kernels(rows, width)
    parts.append(bulleted(notes, width))
    if num_hidden:
        parts.append(f"({counted(num_hidden, 'note')} left out by --brief)")
    return "\n\n".join(part for part in parts if part)


def _kernels(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the recorded kernels of one forward pass, with the rows that ran them."""
    by_kernels: dict[str, list[str]] = {}
    for row in rows:
        for kernels in row.kernels:
            by_kernels.setdefault(kernels, []).append(name_of(row, rows))
    if by_kernels:
        notes = [f"{', '.join(names)}: {kernels}" for kernels, names in by_kernels.items()]
        yield f"kernels of one forward pass:\n{bulleted(notes, width)}"


def _shared(rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells that are the same in every row, by column: they go into the heading."""
    columns = [column for column in columns_of(rows) if column.name in _SHARED]
    texts = {column.name: {column.text(row) for row in rows} for column in columns}
    return {name: next(iter(values)) for name, values in texts.items() if len(values) == 1}


def heading(rows: Sequence[Row], width: int) -> str:
    """Return what all rows of a workload share, and how many runs they have."""
    fewest, most = (of(row.num_runs for row in rows) for of in (min, max))
    return _heading(rows, {"runs": f"{fewest} to {most}", **_shared(rows)}, width)


def _heading(rows: Sequence[Row], shared: Mapping[str, str], width: int) -> str:
    setups = [row.setup for row in rows]
    on_cpu = all(
        setup.instance is None and setup.device_name is not None and "NVIDIA" not in setup.device_name
        for setup in setups
    )
    one, several = ("process", "processes") if on_cpu else ("GPU", "GPUs")
    gpus, place, runs = (shared.get(name, "") for name in ("GPUs", "instance", "runs"))
    details = [
        f"{gpus} {one if gpus == '1' else several}" if gpus else "",
        f"batch {shared['batch']} each" if shared.get("batch") else "",
        f"{shared['tokens each']} tokens a sample" if shared.get("tokens each") else "",
        # A script's data are unknown.
        f"data {shared['data']}" if "data" in shared and not setups[0].is_script else "",
        f"{runs} run{'' if runs == '1' else 's'} a row" if runs not in ("", "0") else "",
    ]
    known = ", ".join(filter(None, details))
    where = f" on {place}" if place not in ("", "unknown") else ""
    return textwrap.fill(
        f"{setups[0].workload}{where}{f': {known}' if known else ''}", width, break_on_hyphens=False
    )
