"""Plain tables: their columns, and which columns give way on a narrow terminal."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar

from fastlaunch.core.terminal import printable

Row = TypeVar("Row")

#: Importance of a column that is never dropped: it tells rows apart, or the table exists for it.
KEPT = 100
#: Importance of a column that stays even if it is the same in all rows: nothing else tells its value.
FIXED = 101
#: Importance of a column that is dropped before any other wraps.
SPARE = 0
#: The width of tables without a terminal.
WIDTH = 120
#: Characters between two columns.
GAP = 2
#: Columns wrap down to this width before a column is dropped or a long word is broken.
_LEAST, _LEAST_PIECE = 24, 8
#: A broken word is as hard to read as so many more lines; the rows that are weighed.
_BROKEN_WORD, _MOST_WEIGHED = 3, 200
#: A number with an optional unit; ~ marks an inferred one.
_NUMBER = re.compile(r"[-~]?[0-9][0-9.,]*(e[+-]?[0-9]+)?( ?[a-zA-Z%]{1,3})?")
#: Characters after which a word that is too long for its column is broken.
_JOINTS = re.compile(r"(?<=[=,/:_-])(?!$)")


def as_text(value: object) -> str:
    """Return the value as text for a cell; empty for None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return printable(", ".join(map(str, value)))
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading, and how to get and show its value for each row."""

    name: str  # the heading
    value: Callable[[Row], Any]  # None if the row has none
    _: KW_ONLY
    format: Callable[[Any], str | None] = as_text  # takes values other than None
    importance: int = KEPT  # the least important column leaves first
    align: Literal["left", "right"] | None = None  # None: numbers to the right, words to the left

    def text(self, row: Row) -> str:
        """Return the row's cell, empty where there is nothing to show."""
        value = self.value(row)
        return "" if value is None else self.format(value) or ""


def keyed(
    headings: Mapping[str, str], importance: Mapping[str, int] | None = None
) -> list[Column[Mapping[str, Any]]]:
    """Return columns of rows that are mappings. headings, importance: by key."""
    levels = importance or {}
    return [Column(name, itemgetter(key), importance=levels.get(key, KEPT)) for key, name in headings.items()]


@dataclass
class _Cells:
    """A column with the texts of its cells and the width that it gets."""

    name: str
    texts: list[str]
    importance: int
    is_right: bool

    def __post_init__(self) -> None:
        self.natural = self.width = max(map(len, (self.name, *self.texts)))

    @property
    def is_same(self) -> bool:
        """Whether several rows have one and the same cell, which may be left out."""
        return self.importance < FIXED and len(self.texts) > 1 and len(set(self.texts)) == 1

    def cost(self, width: int) -> int:
        """Return how much harder to read the table is at this width: further lines, and broken words."""
        long = [text for text in self.texts[:_MOST_WEIGHED] if len(text) > width]
        broken = sum(len(word) > width for text in long for word in text.split())
        return sum(len(_wrapped(text, width, hanging=True)) - 1 for text in long) + _BROKEN_WORD * broken

    def floor(self, least: int) -> int:
        """Return the smallest width before a column is dropped: words wrap, numbers do not."""
        if self.is_right:
            return self.natural
        pieces = (piece for text in (self.name, *self.texts) for piece in _pieces(text, least))
        return min(self.natural, max(least, *map(len, pieces)))


def table(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    width: int | None = None,
    *,
    rule: bool = False,
    missing: str = "",
    titles: Mapping[int, str] | None = None,
) -> str:
    """Return a plain table with lines of at most `width` characters; None for no limit.

    Columns without any value are not shown. If the table is too wide, first the SPARE columns are dropped,
    then words wrap, then the least important columns are dropped, the last among equals first, then those
    that are the same in all rows, then words break. A line under the table names dropped columns.

    rule: underline the headings. missing: the cell of a row without a value. titles: lines above the rows
    with these numbers.
    """
    from tabulate import tabulate

    shown = []
    for column in columns:
        texts = [column.text(row) for row in rows]
        if any(texts) or not rows:
            is_number = any(texts) and all(_NUMBER.fullmatch(text) for text in texts if text)
            is_right = column.align == "right" or (column.align is None and is_number)
            cells = [text or missing for text in texts]
            shown.append(_Cells(column.name, cells, column.importance, is_right))
    names = [cells.name for cells in shown]
    if width is not None:
        _fit(shown, width)
    if not shown:
        return ""
    left = [name for name in names if name not in [cells.name for cells in shown]]
    lines = [[cells.name for cells in shown]]
    lines += [["-" * cells.width for cells in shown]] if rule else []
    num_headings = len(lines)
    lines += [list(line) for line in zip(*(cells.texts for cells in shown), strict=True)]
    wrapped = [
        [
            "\n".join(_wrapped(text, cells.width, hanging=number == 0))
            for number, (text, cells) in enumerate(zip(line, shown, strict=True))
        ]
        for line in lines
    ]
    # The headings go in as a row: tabulate would make each column two characters wider than its heading.
    alignment = ["right" if cells.is_right else "left" for cells in shown]
    text = tabulate(wrapped, tablefmt="plain", disable_numparse=True, colalign=alignment)
    drawn = iter(line.rstrip() for line in text.splitlines())
    done: list[str] = []
    for number, cells_of_row in enumerate(wrapped, start=-num_headings):
        if titles and (title := titles.get(number)):
            done += [title] if width is None else textwrap.wrap(title, width, break_on_hyphens=False)
        done += [next(drawn) for _ in range(max(cell.count("\n") for cell in cells_of_row) + 1)]
    if left:
        done += _wrapped(f"(left out for want of room: {', '.join(left)})", width or 0)
    return "\n".join(done)


def _fit(columns: list[_Cells], width: int) -> None:
    """Set each column's width, and remove the columns without room."""

    def excess() -> int:
        """Return how many characters the columns are too wide."""
        return sum(cells.width for cells in columns) + GAP * (len(columns) - 1) - width

    def fit(size: Callable[[_Cells], int]) -> bool:
        for cells in columns:
            cells.width = size(cells)
        return excess() <= 0

    def wrapped(cells: _Cells) -> int:
        return cells.floor(_LEAST)

    while not fit(lambda cells: cells.natural):
        lowest = min(cells.importance for cells in columns)
        if lowest > SPARE and (fit(wrapped) or lowest >= KEPT):
            break
        columns.remove([cells for cells in columns if cells.importance == lowest][-1])
    else:
        return
    # What is the same in all rows tells none apart: leave it out before breaking words.
    while not fit(wrapped) and (same := [cells for cells in columns if cells.is_same]):
        columns.remove(same[-1])
    # If even parts of words are too wide, break anywhere.
    any(map(fit, (wrapped, lambda cells: cells.floor(_LEAST_PIECE), lambda cells: 1)))
    floors = [cells.width for cells in columns]
    fit(lambda cells: cells.natural)
    while excess() > 0:
        wide = [cells for cells, floor in zip(columns, floors, strict=True) if cells.width > floor]
        if not wide:
            break
        # The widest among those that lose least.
        loses = [(cells.cost(cells.width - 1) - cells.cost(cells.width), -cells.width) for cells in wide]
        wide[loses.index(min(loses))].width -= 1


def _pieces(text: str, width: int) -> Iterator[str]:
    """Yield the unbreakable pieces: words, and the parts of words that are longer than `width`."""
    for word in text.split():
        yield from (word,) if len(word) <= width else _JOINTS.split(word)


def _wrapped(text: str, width: int, *, hanging: bool = False) -> list[str]:
    """Return the text in lines, broken at blanks, then after `=`, `/` and the like, else anywhere.

    hanging: indent all lines but the first, so that they do not look like another row.
    """
    if len(text) <= width or not width:
        return [text]
    indent = "  " if hanging and width > 2 * _LEAST_PIECE else ""
    lines: list[str] = []
    for word in text.split():
        separator = " "
        for piece in (word,) if len(word) + len(indent) <= width else _JOINTS.split(word):
            if lines and len(lines[-1]) + len(separator) + len(piece) <= width:
                lines[-1] += separator + piece
            else:
                lines += textwrap.wrap(piece, width, initial_indent=indent if lines else "")
            separator = ""
    return lines
