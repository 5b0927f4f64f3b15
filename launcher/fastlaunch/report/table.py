"""A comparison as a table for people: a section for each workload, what the columns leave out underneath."""

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.notes import FURTHER_APART, OF_COMMITS
from fastlaunch.analysis.verdicts import THROUGHPUT, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.measure.summarize import Interval
from fastlaunch.report.convergence import NOTHING, by_reference, convergence_columns
from fastlaunch.report.grids import tables
from fastlaunch.report.names import name_of, which

WIDTH = 120
UNKNOWN = "n/a"
#: A reason that the section's own line gives already.
_TOLD_BY_THE_SECTION = "throughput, not training progress"
#: Columns of words.
_WORDS = ("instance", "recipe", "data", "which", "verdict", "convergence")
#: Columns that say which row it is.
_TELL_APART = ("instance", "recipe", "GPUs", "batch", "tokens each", "data", "which")
_PRECISIONS_OF_THEIR_OWN = ("fp32", "tf32", "fp16")
#: Where a command begins that ends a note.
_COMMAND = re.compile(r"(?<=[;,]) run fastlaunch ")

Cell = Callable[[Row], str | None]


def as_table(
    comparison: Comparison, *, only: Sequence[str] = (), brief: bool = False, width: int = WIDTH
) -> str:
    """The comparison as text of up to `width` columns, without the sentence that answers it.

    only: headings of what to show of each row besides what tells the rows apart; all without any. brief:
    leave out the times before the steps, the kernels, and all notes but of prices, of what bars a row and of
    speeds that differ by commit. Raises UnknownName for a heading that no workload has.
    """
    sections = [
        [row for row in comparison.rows if row.workload == workload]
        for workload in dict.fromkeys(row.workload for row in comparison.rows)
    ]
    known = dict.fromkeys(name for rows in sections for name in _columns(rows))
    for name in only:
        if name not in known:
            raise UnknownName("column", name, known)
    return "\n\n".join(_section(rows, only, brief, width) for rows in sections)


def _section(rows: Sequence[Row], only: Sequence[str], brief: bool, width: int) -> str:
    """One workload: rows that train alike, then those that do not, then everything that needs words."""
    shared = _shared(rows)
    parts = [_heading(rows, shared)]
    columns = {name: cell for name, cell in _columns(rows, only).items() if name not in shared}
    columns = {name: cell for name, cell in columns.items() if any(cell(row) is not None for row in rows)}
    if only:
        columns = {name: cell for name, cell in columns.items() if name in (*_TELL_APART, *only)}
    trains = [row for row in rows if row.comparable_as == TRAINING]
    others = [row for row in rows if row.comparable_as == THROUGHPUT]
    if trains:
        parts += _grids(trains, columns, width)
    if others:
        parts.append(f"{_TOLD_BY_THE_SECTION} (another {_other(rows)} than the baseline's):")
        parts += _grids(others, columns, width)
    parts += _held_out(rows, shared, width)
    told, left_out = _notes(rows, brief)
    if not brief:
        parts += [_before(rows, width), _ran(rows, width)]
    parts.append(_filled(told, width))
    if left_out:
        parts.append(f"({left_out} note{_s(str(left_out))} left out by --brief)")
    return "\n\n".join(part for part in parts if part)


def _other(rows: Sequence[Row]) -> str:
    """In what a row differs from its baseline that is compared by throughput only."""
    lengths = len({row.sequence_length for row in rows}) > 1
    return "global batch or sequence length" if lengths else "global batch"


def _shared(rows: Sequence[Row]) -> dict[str, str]:
    """Columns that say the same of every row, by name: they go into the heading."""
    told: dict[str, Cell] = {
        "instance": lambda row: row.place,
        "batch": lambda row: str(row.batch_size_per_gpu),
        "GPUs": _gpus,
        "tokens each": _sequence_length,
        "data": _data,
        "runs": _runs,
    }
    values = {name: {cell(row) for row in rows} for name, cell in told.items()}
    return {name: str(next(iter(found))) for name, found in values.items() if len(found) == 1}


def _heading(rows: Sequence[Row], shared: Mapping[str, str]) -> str:
    words = [rows[0].workload]
    if "instance" in shared and shared["instance"] != "unknown":
        words.append(f"on {shared['instance']}")
    details = []
    if "GPUs" in shared:
        one, more = ("process", "processes") if _on_cpu(rows) else ("GPU", "GPUs")
        details.append(f"{shared['GPUs']} {one if shared['GPUs'] == '1' else more}")
    if "batch" in shared:
        details.append(f"batch {shared['batch']} each")
    if shared.get("tokens each", UNKNOWN) != UNKNOWN:
        details.append(f"{shared['tokens each']} tokens a sample")
    if "data" in shared:
        details.append(f"data {shared['data']}")
    if "runs" in shared and shared["runs"] != "0":
        details.append(f"{shared['runs']} run{_s(shared['runs'])} a row")
    return f"{' '.join(words)}: {', '.join(details)}" if details else " ".join(words)


def _on_cpu(rows: Sequence[Row]) -> bool:
    return all(
        row.instance is None and row.device_name is not None and "NVIDIA" not in row.device_name
        for row in rows
    )


def _s(number: str) -> str:
    return "" if number == "1" else "s"


def _data(row: Row) -> str:
    """`synthetic`, or `file 0123456789abcdef` where the record says which."""
    return f"{row.data} {dict(row.fingerprint).get('data', '')}".strip()


def _sequence_length(row: Row) -> str:
    return str(row.sequence_length or UNKNOWN)


def _runs(row: Row) -> str:
    """`5`, or `3 of 5` where the step time of two did not settle."""
    left_out = row.num_unsteady if row.num_runs else 0
    return f"{row.num_runs} of {row.num_runs + left_out}" if left_out else str(row.num_runs)


def _gpus(row: Row) -> str:
    per_node = row.num_gpus // row.num_nodes
    return f"{row.num_nodes} x {per_node}" if row.num_nodes > 1 else str(row.num_gpus)


def _columns(rows: Sequence[Row], only: Sequence[str] = ()) -> dict[str, Cell]:
    """Heading -> cell, in order. A column without a known cell is not shown. only: those asked for; all."""
    unit = rows[0].sample_unit
    tokens = any(row.tokens_per_s for row in rows)
    apart = any(which(row, rows) for row in rows)
    prices = [row.price for row in rows if row.price]
    # Told in the heading where it is so of every price, else in the cells.
    hypothetical = bool(prices) and all(price.hypothetical for price in prices)
    # A quantity's interval is that of the step time; it is shown where it decides, not in every column.
    by_price = any(row.ratio_to_baseline for row in rows) and (not only or "x per $" in only)
    return {
        "instance": lambda row: row.place,
        "recipe": lambda row: row.recipe,
        "GPUs": _gpus,
        "batch": lambda row: str(row.batch_size_per_gpu),
        "tokens each": _sequence_length,
        "data": _data,
        **({"which": lambda row: which(row, rows) or NOTHING} if apart else {}),
        "runs": _runs,
        "step ms": lambda row: _with_bounds(row.step_time_s, 1000),
        f"{unit}/s": lambda row: _number(row.samples_per_s),
        **({"tokens/s": lambda row: _number(row.tokens_per_s)} if tokens and unit != "tokens" else {}),
        "padding": lambda row: f"{100 * row.padding_fraction:.0f}%" if row.padding_fraction else None,
        "TFLOP/s": lambda row: _number(row.tflops_per_gpu),
        "% peak": _percent_of_peak,
        "% fp8 peak": lambda row: _number(row.percent_of_fp8_peak),
        "hyp. $/h" if hypothetical else "$/h": lambda row: _usd_per_hour(row, tell=not hypothetical),
        f"$/M {unit}": lambda row: _with_bounds(row.usd_per_million_samples, say=dollars),
        **(
            {"$/B tokens": lambda row: _with_bounds(row.usd_per_billion_tokens, say=dollars)}
            if tokens
            else {}
        ),
        "x per $": lambda row: _ratio(row.ratio_to_baseline),
        "x speed": lambda row: _ratio(row.speed_ratio_to_baseline, bounds=not by_price),
        "verdict": lambda row: row.verdict,
    }


def _grids(rows: Sequence[Row], columns: Mapping[str, Cell], width: int) -> list[str]:
    """One table, or, where that would be too wide, those of the speed and those of what it costs."""
    text = _grid(rows, columns, width)
    if "\n\n" not in text and max(map(len, text.splitlines())) <= width:
        return [text]
    of_cost = {name for name in columns if "$" in name or name in ("x speed", "verdict")}
    speed = {name: cell for name, cell in columns.items() if name not in of_cost}
    cost = {name: cell for name, cell in columns.items() if name in of_cost or name in _TELL_APART}
    return [_grid(rows, speed, width), _grid(rows, cost, width)]


def _grid(rows: Sequence[Row], columns: Mapping[str, Cell], width: int) -> str:
    cells = [[cell(row) or UNKNOWN for cell in columns.values()] for row in rows]
    return tables(list(columns), cells, left=_WORDS, kept=_TELL_APART, width=width)


def _held_out(rows: Sequence[Row], shared: Mapping[str, str], width: int) -> Iterator[str]:
    """Held-out loss at the end, a table for each reference, and what is concluded from it."""
    for heading, evaluated in by_reference(rows).items():
        columns = {
            **{
                name: cell
                for name, cell in _columns(rows).items()
                if name in _TELL_APART and name not in shared
            },
            **convergence_columns(evaluated),
        }
        shown = {n: cell for n, cell in columns.items() if any(cell(row) is not None for row in evaluated)}
        yield f"{textwrap.fill(heading, width)}\n{_grid(evaluated, shown, width)}"


def _before(rows: Sequence[Row], width: int) -> str:
    """Seconds before the steps that count: building, compiling, warming up."""
    columns: dict[str, Cell] = {
        **{name: cell for name, cell in _columns(rows).items() if name in _TELL_APART},
        "build s": lambda row: _seconds(row.build_s),
        "compile s": lambda row: _seconds(row.compile_s),
        "warm-up s": lambda row: _seconds(row.warmup_s),
    }
    timed = [row for row in rows if (row.build_s, row.compile_s, row.warmup_s) != (None, None, None)]
    if not timed:
        return ""
    shared = _shared(rows)
    shown = {
        name: cell
        for name, cell in columns.items()
        if name not in shared and any(cell(row) is not None for row in timed)
    }
    return "before the steps that count, in no figure above:\n" + _grid(timed, shown, width)


def _ran(rows: Sequence[Row], width: int) -> str:
    """What one forward pass ran, where fusion is measured; rows that ran the same are told together."""
    by_kernels: dict[str, list[str]] = {}
    for row in rows:
        for kernels in row.kernels:
            by_kernels.setdefault(kernels, []).append(name_of(row, rows))
    if not by_kernels:
        return ""
    told = [f"{', '.join(names)}: {kernels}" for kernels, names in by_kernels.items()]
    return f"what one forward pass ran:\n{_filled(told, width)}"


def _notes(rows: Sequence[Row], brief: bool) -> tuple[list[str], int]:
    """Prices with their dates, then the reasons; one that holds for every row that can have it comes once.

    brief: of the reasons those alone that bar a row from being ranked, or would, and that its runs are of
    commits of several speeds. And how many are left out.
    """
    notes = _price_notes(rows)
    # The baseline can have these too: where it has not, they are of rows that are named.
    of_runs = {text for row in rows for run in row.runs for text in run.summary.warnings}
    by_reason: dict[str, list[Row]] = {}
    for row in rows:
        for reason in row.reasons:
            if reason.startswith(_TOLD_BY_THE_SECTION):
                continue
            by_reason.setdefault(reason, []).append(row)
    compared = [row for row in rows if not row.is_baseline]
    num_left_out = 0
    for reason, concerned in by_reason.items():
        of_commits = reason.startswith(OF_COMMITS)
        of_any = reason in of_runs or of_commits
        bars = any(failure in reason for row in concerned for failure in row.guard.failures)
        if brief and not bars and not (of_commits and FURTHER_APART in reason):
            num_left_out += 1
        elif compared and all(row in concerned for row in (rows if of_any else compared)):
            notes.append(reason)
        else:
            names = dict.fromkeys(name_of(row, rows) for row in concerned)
            notes.append(f"{', '.join(names)}: {reason}")
    return notes, num_left_out


def _filled(notes: Sequence[str], width: int) -> str:
    """The notes as a list; a command at the end of one is left whole on a line of its own, to be copied."""
    lines = []
    for note in notes:
        text, *command = _COMMAND.split(note, maxsplit=1)
        said = f"{text} run" if command else text
        # An option must not be broken at its hyphens.
        lines.append(
            textwrap.fill(said, width, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        )
        lines += [f"    fastlaunch {words}" for words in command]
    return "\n".join(lines)


def _price_notes(rows: Sequence[Row]) -> list[str]:
    notes: dict[str, None] = {}
    for row in rows:
        price = row.price
        if price is None:
            continue
        charged = price.charged_as and f"charged as {price.charged_as}"
        what = price.hypothetical or charged or row.instance or "each row"
        hypothetical = "hypothetical price, nobody sells this: " if price.hypothetical else ""
        dated = f"as of {price.as_of} ({price.source})" if price.as_of else "as given"
        inferred = ", inferred" if price.inferred else ""
        notes[f"{hypothetical}{what}: ${price.usd_per_hour:g}/h {dated}{inferred}"] = None
    return list(notes)


def _percent_of_peak(row: Row) -> str | None:
    """Of the recipe's own precision where it is wider than bf16, else of bf16; FP8 has a column besides."""
    if row.precision in _PRECISIONS_OF_THEIR_OWN:
        own = _number(row.percent_of_peak)
        return own and f"{own} ({row.precision})"
    return _number(row.percent_of_bf16_peak)


def _usd_per_hour(row: Row, *, tell: bool) -> str | None:
    """tell: say of a hypothetical price that it is one."""
    if row.price is None:
        return None
    hypothetical = "hyp. " if tell and row.price.hypothetical else ""
    inferred = "~" if row.price.inferred else ""
    nodes = f"{row.num_nodes} x " if row.num_nodes > 1 else ""
    return f"{hypothetical}{inferred}{nodes}{row.price.usd_per_hour:.2f}"


def _with_bounds(
    quantity: Interval | None, factor: float = 1.0, *, say: Callable[[float], str] | None = None
) -> str | None:
    """`12.3 ±0.8%`: half the interval, in percent of the value."""
    if quantity is None or not 0 < quantity.value * factor < math.inf:
        return None
    text = (say or number)(quantity.value * factor)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} ±{50 * (quantity.high - quantity.low) / quantity.value:.1f}%"


def _ratio(quantity: Interval | None, *, bounds: bool = True) -> str | None:
    if quantity is None:
        return None
    text = f"{quantity.value:.3f}" if quantity.value < 99.5 else f"{quantity.value:.0f}"
    if not bounds or quantity.low is None or quantity.high is None or quantity.low == quantity.high:
        return text
    return f"{text} ±{50 * (quantity.high - quantity.low) / quantity.value:.1f}%"


def _number(quantity: Interval | None, factor: float = 1.0) -> str | None:
    return _with_bounds(quantity and Interval(value=quantity.value), factor)


def dollars(value: float) -> str:
    """`1,062`, `10.62`, `7.29`, `0.0123`."""
    return f"{value:,.2f}" if 0.9995 <= value < 999.5 else number(value)


def number(value: float) -> str:
    """Three digits or more, thousands grouped: `1,249`, `156`, `41.6`, `7.29`, `0.0123`."""
    if value >= 99.95:
        return f"{value:,.0f}" if value < 1e12 else f"{value:.3g}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:.3g}"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
