"""A comparison as a table for people: a section for each workload, what the columns leave out underneath."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.convergence import REFERENCE, Difference, HeldOut
from fastlaunch.analysis.notes import Note, NoteKind
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.analysis.validity import percent
from fastlaunch.analysis.verdicts import THROUGHPUT, TRAINING
from fastlaunch.core.errors import UnknownName
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import Interval
from fastlaunch.report.text import UNKNOWN, dollars, limits, name_of, which, with_range
from fastlaunch_train.records.records import STEP_PARTS

WIDTH = 120
#: A cell that does not apply to its row.
NOTHING = "-"
#: Characters between two columns.
_GAP = 2
#: The heading of rows that do not train like the baseline. It replaces their notes of that kind.
_THROUGHPUT = "throughput, not training progress"
#: Columns of words, aligned to the left.
_WORDS = ("instance", "recipe", "whose", "data", "which", "verdict", "convergence")
#: Columns that identify a row.
_IDENTIFYING = ("instance", "recipe", "whose", "GPUs", "batch", "tokens each", "data", "which")
_PRECISIONS_WITH_OWN_PEAK = ("fp32", "tf32", "fp16")
#: A note may end with a command, which begins here.
_COMMAND = re.compile(r"(?<=[;,]) run fastlaunch ")

Cell = Callable[[Row], str | None]


def as_table(
    comparison: Comparison, *, only: Sequence[str] = (), brief: bool = False, width: int = WIDTH
) -> str:
    """Return the comparison as text of up to `width` characters a line, without the answer.

    only: show just the columns with these headings, and those that identify a row. brief: leave out the times
    before the steps, the kernels, and the notes that `notes_of` leaves out. Raises UnknownName for a heading
    that no workload has.
    """
    sections = comparison.by_workload.values()
    known = dict.fromkeys(name for rows in sections for name in _columns(rows))
    for name in only:
        if name not in known:
            raise UnknownName("column", name, known)
    return "\n\n".join(_section(rows, only, brief, width) for rows in sections)


def _section(rows: Sequence[Row], only: Sequence[str], brief: bool, width: int) -> str:
    """Return one workload: rows that train like the baseline, other rows, held-out losses, notes."""
    shared = _shared(rows)
    parts = [_heading(rows, shared, width)]
    columns = _known(_columns(rows, only), rows, shared)
    if only:
        columns = {name: cell for name, cell in columns.items() if name in (*_IDENTIFYING, *only)}
    trains = [row for row in rows if row.verdict.comparable_as == TRAINING]
    others = [row for row in rows if row.verdict.comparable_as == THROUGHPUT]
    if trains:
        parts += _grids(trains, columns, width)
    if others:
        parts.append(f"{_THROUGHPUT} (another {_other(rows)} than the baseline's):")
        parts += _grids(others, columns, width)
    parts += _held_out(rows, shared, width)
    notes, num_hidden = notes_of(rows, brief)
    if not brief:
        parts += [_before(rows, width), _step_parts(rows, width), _kernels(rows, width)]
    parts.append(bulleted(notes, width))
    if num_hidden:
        parts.append(f"({counted(num_hidden, 'note')} left out by --brief)")
    return "\n\n".join(part for part in parts if part)


def _known(columns: Mapping[str, Cell], rows: Sequence[Row], shared: Mapping[str, str]) -> dict[str, Cell]:
    """Return the columns that are not in the heading, and of which some row has a value."""
    return {
        name: cell
        for name, cell in columns.items()
        if name not in shared and any(cell(row) is not None for row in rows)
    }


def _other(rows: Sequence[Row]) -> str:
    """Return what rows that are compared by throughput only may have other than the baseline."""
    lengths = len({row.setup.sequence_length for row in rows}) > 1
    return "global batch or sequence length" if lengths else "global batch"


def _shared(rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns that are the same in every row, by name: they go into the heading."""
    cells: dict[str, Cell] = {
        "instance": lambda row: row.place,
        "batch": _batch,
        "GPUs": _gpus,
        "tokens each": _sequence_length,
        "data": _data,
        "runs": lambda row: str(row.num_runs),
    }
    values = {name: {cell(row) for row in rows} for name, cell in cells.items()}
    return {name: str(next(iter(texts))) for name, texts in values.items() if len(texts) == 1}


def heading(rows: Sequence[Row], width: int) -> str:
    """Return what all rows of a workload share, and how many runs they have."""
    fewest, most = (of(row.num_runs for row in rows) for of in (min, max))
    return _heading(rows, {"runs": f"{fewest} to {most}", **_shared(rows)}, width)


def _heading(rows: Sequence[Row], shared: Mapping[str, str], width: int) -> str:
    words = [rows[0].setup.workload]
    if "instance" in shared and shared["instance"] != "unknown":
        words.append(f"on {shared['instance']}")
    details = []
    if "GPUs" in shared:
        singular, plural = ("process", "processes") if _on_cpu(rows) else ("GPU", "GPUs")
        details.append(f"{shared['GPUs']} {singular if shared['GPUs'] == '1' else plural}")
    if shared.get("batch", UNKNOWN) != UNKNOWN:
        details.append(f"batch {shared['batch']} each")
    if shared.get("tokens each", UNKNOWN) != UNKNOWN:
        details.append(f"{shared['tokens each']} tokens a sample")
    # What a script reads nobody knows.
    if "data" in shared and not rows[0].setup.is_script:
        details.append(f"data {shared['data']}")
    if "runs" in shared and shared["runs"] != "0":
        details.append(f"{shared['runs']} run{'' if shared['runs'] == '1' else 's'} a row")
    text = f"{' '.join(words)}: {', '.join(details)}" if details else " ".join(words)
    return textwrap.fill(text, width, break_on_hyphens=False)


def _on_cpu(rows: Sequence[Row]) -> bool:
    return all(
        setup.instance is None and setup.device_name is not None and "NVIDIA" not in setup.device_name
        for setup in (row.setup for row in rows)
    )


def _data(row: Row) -> str:
    """Return `synthetic`, or `file 0123456789abcdef` if the record says which."""
    return f"{row.setup.data} {row.setup.fingerprint.get('data', '')}".strip()


def _batch(row: Row) -> str:
    return str(row.setup.batch_size_per_gpu or UNKNOWN)


def _sequence_length(row: Row) -> str:
    return str(row.setup.sequence_length or UNKNOWN)


def _gpus(row: Row) -> str:
    per_node = row.setup.num_gpus // row.setup.num_nodes
    return f"{row.setup.num_nodes} x {per_node}" if row.setup.num_nodes > 1 else str(row.setup.num_gpus)


def whose(row: Row) -> str:
    """Return whose runs the row holds: `yours`, or `yours, ann`."""
    own = "yours" if any(run.owner is None for run in row.runs) else None
    return ", ".join(filter(None, [own, *row.shared_by]))


def _columns(rows: Sequence[Row], only: Sequence[str] = ()) -> dict[str, Cell]:
    """Return the cell function by heading, in order. A column without a known cell is not shown."""
    unit = rows[0].setup.sample_unit
    tokens = any(row.speed.tokens_per_s for row in rows)
    apart = any(which(row, rows) for row in rows)
    prices = [row.price for row in rows if row.price]
    # The heading says `prorated` if all prices are, else the cells do.
    hypothetical = bool(prices) and all(price.hypothetical for price in prices)
    # All intervals are that of the step time, so we show it where it decides only.
    by_price = any(row.verdict.ratio for row in rows) and (not only or "x per $" in only)
    return {
        "instance": lambda row: row.place,
        "recipe": lambda row: row.setup.recipe,
        **({"whose": whose} if any(row.shared_by for row in rows) else {}),
        "GPUs": _gpus,
        "batch": _batch,
        "tokens each": _sequence_length,
        "data": _data,
        **({"which": lambda row: which(row, rows) or NOTHING} if apart else {}),
        "runs": lambda row: str(row.num_runs),
        "step ms": lambda row: with_range(row.speed.step_time_s, factor=1000),
        "total s": lambda row: with_range(row.speed.total_time_s),
        f"{unit}/s": lambda row: _number(row.speed.samples_per_s),
        **({"tokens/s": lambda row: _number(row.speed.tokens_per_s)} if tokens and unit != "tokens" else {}),
        "padding": lambda row: (
            f"{100 * row.overhead.padding_fraction:.0f}%" if row.overhead.padding_fraction else None
        ),
        "TFLOP/s": lambda row: _number(row.speed.tflops_per_gpu),
        "% peak": _percent_of_peak,
        "% fp8 peak": lambda row: _number(row.speed.percent_of_fp8_peak),
        "prorated $/h" if hypothetical else "$/h": lambda row: _usd_per_hour(row, mark=not hypothetical),
        f"$/M {unit}": lambda row: with_range(row.cost.usd_per_million_samples, format_value=dollars),
        "$/B tokens": lambda row: with_range(row.cost.usd_per_billion_tokens, format_value=dollars),
        "x per $": lambda row: _ratio(row.verdict.ratio),
        "x speed": lambda row: _ratio(row.verdict.speed_ratio, bounds=not by_price),
        "verdict": lambda row: row.verdict.words,
    }


def _grids(rows: Sequence[Row], columns: Mapping[str, Cell], width: int) -> list[str]:
    """Return one table; if that would be too wide, a table of the speed and one of the cost."""
    text = _grid(rows, columns, width)
    if "\n\n" not in text and max(map(len, text.splitlines())) <= width:
        return [text]
    of_cost = {name for name in columns if "$" in name or name in ("x speed", "verdict")}
    speed = {name: cell for name, cell in columns.items() if name not in of_cost}
    cost = {name: cell for name, cell in columns.items() if name in of_cost or name in _IDENTIFYING}
    return [_grid(rows, speed, width), _grid(rows, cost, width)]


def _grid(rows: Sequence[Row], columns: Mapping[str, Cell], width: int) -> str:
    cells = [[cell(row) or UNKNOWN for cell in columns.values()] for row in rows]
    return tables(list(columns), cells, left=_WORDS, kept=_IDENTIFYING, width=width)


def _identifying(rows: Sequence[Row]) -> dict[str, Cell]:
    return {name: cell for name, cell in _columns(rows).items() if name in _IDENTIFYING}


def _held_out(rows: Sequence[Row], shared: Mapping[str, str], width: int) -> Iterator[str]:
    """Yield a table of held-out losses and convergence for each reference."""
    by_reference: dict[str | None, list[Row]] = {}
    for row in rows:
        if row.validity.held_out is not None:
            by_reference.setdefault(row.validity.convergence.reference, []).append(row)
    for reference, evaluated in by_reference.items():
        pairs = "in the same rounds" if rows[0].setup.is_script else "at the same seeds"
        against = f", and its difference to that of {reference} {pairs} (one-sided 95% limits)"
        heading = f"held-out loss at the end{against if reference else ''}:"
        columns = {**_identifying(rows), **_convergence_columns(evaluated)}
        table = _grid(evaluated, _known(columns, evaluated, shared), width)
        yield f"{textwrap.fill(heading, width)}\n{table}"


def _before(rows: Sequence[Row], width: int) -> str:
    """Return the seconds before the measured steps: building, compiling, warming up."""
    times: dict[str, Cell] = {
        "build s": lambda row: _seconds(row.overhead.build_s),
        "compile s": lambda row: _seconds(row.overhead.compile_s),
        "warm-up s": lambda row: _seconds(row.overhead.warmup_s),
    }
    timed = [row for row in rows if any(cell(row) is not None for cell in times.values())]
    if not timed:
        return ""
    columns = _known({**_identifying(rows), **times}, timed, _shared(rows))
    return "time before the measured steps, not included above:\n" + _grid(timed, columns, width)


def _step_parts(rows: Sequence[Row], width: int) -> str:
    """Return where a step's time goes, of the rows with profiled runs: means over these."""
    profiled = [row for row in rows if step_parts_s(row)]
    if not profiled:
        return ""
    cells: dict[str, Cell] = {f"{part} ms": partial(_part_ms, part=part) for part in STEP_PARTS}
    columns = _known({**_identifying(rows), **cells}, profiled, _shared(rows))
    return "where the time of a profiled step goes:\n" + _grid(profiled, columns, width)


def step_parts_s(row: Row) -> dict[str, float]:
    """Return the seconds of a step by its parts, as means over the row's profiled runs; empty without any."""
    profiles = [run.summary.profile.parts_s for run in row.runs if run.summary.profile]
    means = {part: mean_of([parts.get(part) for parts in profiles]) for part in STEP_PARTS}
    return {part: seconds for part, seconds in means.items() if seconds is not None}


def _part_ms(row: Row, part: str) -> str | None:
    seconds = step_parts_s(row).get(part)
    return None if seconds is None else f"{1000 * seconds:.3g}"


def _kernels(rows: Sequence[Row], width: int) -> str:
    """Return the kernels of one forward pass, if that was looked at, with the rows that ran them."""
    by_kernels: dict[str, list[str]] = {}
    for row in rows:
        for kernels in row.kernels:
            by_kernels.setdefault(kernels, []).append(name_of(row, rows))
    if not by_kernels:
        return ""
    notes = [f"{', '.join(names)}: {kernels}" for kernels, names in by_kernels.items()]
    return f"kernels of one forward pass:\n{bulleted(notes, width)}"


def notes_of(rows: Sequence[Row], brief: bool) -> tuple[list[str], int]:
    """Return the prices with their dates, then the reasons with their rows; and how many were left out.

    A reason of every row names none. brief: leave out all reasons but those that bar a row, or would without
    --allow-unverified, and that commits differ in speed.
    """
    notes = price_notes(rows)
    by_reason: dict[Note, list[Row]] = {}
    for row in rows:
        for reason in row.verdict.reasons:
            if reason.kind != NoteKind.BATCH:
                by_reason.setdefault(reason, []).append(row)
    compared = [row for row in rows if not row.is_baseline]
    num_left_out = 0
    for reason, concerned in by_reason.items():
        if brief and reason.kind not in (NoteKind.BAR, NoteKind.COMMITS_APART):
            num_left_out += 1
        # What the baseline may have too names no rows only if it does.
        elif compared and all(row in concerned for row in (rows if reason.is_of_runs else compared)):
            notes.append(reason)
        else:
            names = dict.fromkeys(name_of(row, rows) for row in concerned)
            notes.append(f"{', '.join(names)}: {reason}")
    return notes, num_left_out


def bulleted(notes: Sequence[str], width: int) -> str:
    """Return the notes as a list. A command at the end of one has a line of its own, to be copied."""
    lines = []
    for note in notes:
        text, *command = _COMMAND.split(note, maxsplit=1)
        words = f"{text} run" if command else text
        # An option must not be broken at its hyphens.
        lines.append(
            textwrap.fill(words, width, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        )
        lines += [f"    fastlaunch {words}" for words in command]
    return "\n".join(lines)


def price_notes(rows: Sequence[Row]) -> list[str]:
    """Return what rows are charged, as of when, and by whom it was published."""
    notes: dict[str, None] = {}
    for row in rows:
        price = row.price
        if price is None:
            continue
        charged = f"charged as {price.instance}" if price.basis == "named" else None
        what = price.hypothetical or charged or row.setup.instance or "each row"
        hypothetical = "prorated price, not sold separately: " if price.hypothetical else ""
        dated = f"as of {price.as_of} ({price.source})" if price.basis != "given" else "as given"
        inferred = ", inferred" if price.inferred else ""
        notes[f"{hypothetical}{what}: ${price.usd_per_hour:g}/h {dated}{inferred}"] = None
    return list(notes)


def _percent_of_peak(row: Row) -> str | None:
    """Return the percentage of the bf16 peak; of fp32, tf32 and fp16, that of their own peak."""
    if row.setup.precision in _PRECISIONS_WITH_OWN_PEAK:
        own = _number(row.speed.percent_of_peak)
        return own and f"{own} ({row.setup.precision})"
    return _number(row.speed.percent_of_bf16_peak)


def _usd_per_hour(row: Row, *, mark: bool) -> str | None:
    """Return the price of an hour of all nodes. mark: mark a prorated price."""
    if row.price is None:
        return None
    hypothetical = "prorated " if mark and row.price.hypothetical else ""
    inferred = "~" if row.price.inferred else ""
    nodes = f"{row.setup.num_nodes} x " if row.setup.num_nodes > 1 else ""
    return f"{hypothetical}{inferred}{nodes}{row.price.usd_per_hour:.2f}"


def _ratio(quantity: Interval | None, *, bounds: bool = True) -> str | None:
    if quantity is None:
        return None

    def text(value: float) -> str:
        return f"{value:.3f}" if value < 99.5 else f"{value:.0f}"

    # The baseline's ratio to itself is exactly 1.
    has_limits = bounds and quantity.low != quantity.high
    return text(quantity.value) + (limits(quantity, 1.0, text) if has_limits else "")


def _number(quantity: Interval | None) -> str | None:
    return with_range(quantity and Interval(value=quantity.value))


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def grid(rows: Sequence[Mapping[str, str | None]], *, width: int) -> str:
    """Return cells by heading as a table, or several, without columns in which no row has a value.

    The column `row` names the row.
    """
    headings = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [[row[name] or UNKNOWN for name in headings] for row in rows]
    return tables(headings, cells, left=("row",), kept=("row",), width=width)


def tables(
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    left: Sequence[str],
    kept: Sequence[str],
    width: int,
) -> str:
    """Return `cells`, a list for each row, as a table; if that is wider than `width`, as several tables.

    Each of these has the columns `kept` and as many others as fit. If `kept` and one other do not fit, it is
    one table all the same, which the terminal wraps. left: headings of columns aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    parts = list(_parts(widths, [number for number, name in enumerate(headings) if name in kept], width))
    return "\n\n".join(
        _aligned(
            [headings[number] for number in part],
            [[row[number] for number in part] for row in cells],
            [widths[number] for number in part],
            left=left,
        )
        for part in parts
    )


def _parts(widths: Sequence[int], kept: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of each table, by their numbers."""
    every = list(range(len(widths)))
    others = [column for column in every if column not in kept]

    def fits(columns: Sequence[int]) -> bool:
        return sum(widths[column] for column in columns) + _GAP * (len(columns) - 1) <= width

    if fits(every) or not others or not all(fits([*kept, column]) for column in others):
        yield every
        return
    part: list[int] = []
    for column in others:
        if not fits([*kept, *part, column]):
            yield sorted([*kept, *part])
            part = []
        part.append(column)
    yield sorted([*kept, *part])


def _aligned(
    headings: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], *, left: Sequence[str]
) -> str:
    lines = [headings, ["-" * width for width in widths], *cells]
    alignment = ["<" if name in left else ">" for name in headings]
    return "\n".join(
        (" " * _GAP)
        .join(f"{text:{to}{by}}" for text, to, by in zip(line, alignment, widths, strict=True))
        .rstrip()
        for line in lines
    )


def _convergence_columns(rows: Sequence[Row]) -> dict[str, Cell]:
    """Return the cell function by heading of rows that were evaluated.

    `test` is the metric on test data of the last weights, `test, best` of those best on validation data.
    """
    metric = next((of.metric for row in rows if (of := row.validity.held_out) and of.metric), None)
    figures: dict[str, Callable[[HeldOut], float | None]] = {}
    if metric is not None:
        figures = {
            metric: lambda of: of.metric_value,
            "test": lambda of: of.test_metric_value,
            "test, best": lambda of: of.best_test_metric_value,
        }
    return {
        "pairs": lambda row: _unless_reference(row, str(row.validity.convergence.num_pairs)),
        "loss": partial(_figure, value=lambda of: of.loss),
        "difference": lambda row: _unless_reference(row, _difference(row.validity.convergence.end)),
        **{name: partial(_figure, value=value) for name, value in figures.items()},
        "convergence": lambda row: row.validity.convergence.verdict,
    }


def _unless_reference(row: Row, text: str | None) -> str | None:
    return NOTHING if row.validity.convergence.verdict == REFERENCE else text


def _figure(row: Row, value: Callable[[HeldOut], float | None]) -> str | None:
    figure = row.validity.held_out and value(row.validity.held_out)
    return None if figure is None else f"{figure:.4g}"


def _difference(of: Difference | None) -> str | None:
    """Return `+0.4% (-0.1 to +0.9)`, of the reference's loss."""
    if of is None or (mean := percent(of, of.mean)) is None:
        return None
    low, high = (str(percent(of, limit)).rstrip("%") for limit in (of.low, of.high))
    return mean if of.low is None else f"{mean} ({low} to {high})"
