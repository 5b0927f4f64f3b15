"""Cells as aligned tables that are no wider than the terminal."""

from collections.abc import Iterator, Sequence

#: Between two columns.
_GAP = 2


def tables(
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    left: Sequence[str],
    kept: Sequence[str],
    width: int,
) -> str:
    """`cells`, a row each, as a table; where that is wider than `width`, as several one below the other.

    Each of these has the columns of `kept`, which say which row it is, and as many of the others as fit. What
    fits in no way is left whole, for the terminal to wrap. left: headings of columns of words.
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
    """The columns of each table, by their numbers."""
    every = list(range(len(widths)))
    others = [number for number in every if number not in kept]

    def fits(columns: Sequence[int]) -> bool:
        return sum(widths[number] for number in columns) + _GAP * (len(columns) - 1) <= width

    if fits(every) or not others or not all(fits([*kept, number]) for number in others):
        yield every
        return
    part: list[int] = []
    for number in others:
        if not fits([*kept, *part, number]):
            yield sorted([*kept, *part])
            part = []
        part.append(number)
    yield sorted([*kept, *part])


def _aligned(
    headings: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], *, left: Sequence[str]
) -> str:
    from tabulate import tabulate

    # The headings go in as a row: tabulate would make each column two characters wider than its heading.
    lines = [headings, ["-" * width for width in widths], *cells]
    alignment = ["left" if name in left else "right" for name in headings]
    text = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=alignment)
    return "\n".join(line.rstrip() for line in text.splitlines())
