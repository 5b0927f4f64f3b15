"""Plain tables: what leaves, wraps and stays where the terminal is narrow."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fastlaunch.core.tables import SPARE, Column, keyed, table

LONG = "fp8-fused dgrad_accumulation=fast last_block=class_token weight_cast=optimizer"
ROWS: Sequence[Mapping[str, Any]] = (
    {"recipe": "bf16", "ms": 100, "rate": 640.0, "empty": None, "why": "the baseline"},
    {"recipe": LONG, "ms": 80, "rate": None, "empty": "", "why": "surely better"},
)
HEADINGS = {"recipe": "recipe", "ms": "step ms", "rate": "images/s", "empty": "whose", "why": "why"}
NOTE = "(left out for want of room: "


def lines(width: int | None, importance: Mapping[str, int] | None = None, **options: Any) -> list[str]:
    return table(ROWS, keyed(HEADINGS, importance), width, **options).splitlines()


def test_what_fits_is_one_line_a_row_without_empty_columns() -> None:
    shown = lines(None)
    assert [line.split()[0] for line in shown] == ["recipe", "bf16", LONG.split()[0]]
    assert shown[0].split() == ["recipe", "step", "ms", "images/s", "why"]
    assert shown == lines(max(map(len, shown)))
    # Numbers end below each other.
    assert shown[1].index("100") + 3 == shown[2].index(" 80 ") + 3


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_no_line_is_too_wide_and_no_letter_is_lost(width: int) -> None:
    shown = lines(width)
    assert max(map(len, shown)) <= width
    assert not any("…" in line for line in shown)
    letters = sorted("".join(line for row in ROWS for line in (row["recipe"], row["why"])).replace(" ", ""))
    text = "".join(shown).replace(" ", "")
    assert all(text.count(letter) >= letters.count(letter) for letter in set(letters))


def test_long_names_wrap_between_words_and_the_next_lines_begin_no_row() -> None:
    first, *further = lines(80)[2:]
    assert first.split()[:2] == ["fp8-fused", "dgrad_accumulation=fast"]
    assert all(line.startswith("  ") for line in further)
    assert {word for line in further for word in line.split()} >= set(LONG.split()[2:])


def test_a_narrower_column_of_several_words_wraps_before_a_wider_word_breaks() -> None:
    rows = [{"instance": "p6-b200.48xlarge", "recipe": "fp8-fused +d+l"}]
    text = table(rows, keyed({"instance": "instance", "recipe": "recipe"}), 31)
    assert [line.split() for line in text.splitlines()[1:]] == [["p6-b200.48xlarge", "fp8-fused"], ["+d+l"]]


def test_the_least_important_column_leaves_first_and_is_named() -> None:
    least = {"why": 1, "rate": 2}
    assert not any(line.startswith(NOTE) for line in lines(60, least))
    assert lines(45, least)[-1] == f"{NOTE}why)"
    assert " ".join(lines(33, least)[-2:]) == f"{NOTE}images/s, why)"
    # A spare column leaves before anything wraps.
    assert lines(110, {"ms": SPARE})[-1] == f"{NOTE}step ms)" and len(lines(110, {"ms": SPARE})) == 4


def test_a_column_that_is_the_same_in_all_rows_leaves_before_a_word_is_broken() -> None:
    rows = [
        {"recipe": name, "batch": "64", "s": f"{n} to 9"} for n, name in enumerate(("bf16", "compile-all"))
    ]
    columns = keyed({"recipe": "recipe", "batch": "batch", "s": "s"})
    text = table(rows, columns, 20)
    assert "compile-all  1 to 9" in text and " ".join(text.split()).endswith(f"{NOTE}batch)")
    assert "batch" in table(rows, columns, 26).splitlines()[0]


def test_titles_stand_above_rows_and_a_rule_under_the_headings() -> None:
    shown = lines(60, rule=True, missing="n/a", titles={0: "first:", 1: "x " * 50})
    assert shown[1].startswith("------") and shown[2] == "first:"
    # A long title wraps.
    assert " ".join(shown[4:6]) == "x " * 49 + "x" and "n/a" in shown[6]


def test_a_table_without_rows_has_its_headings() -> None:
    assert table([], keyed({"a": "A", "b": "B"}), 80) == "A  B"
    assert table([{"a": None}], keyed({"a": "A"}), 80) == ""


def test_a_column_formats_what_it_has() -> None:
    columns = [Column[int]("n", lambda n: n or None, format="{:.1f}".format, align="right")]
    assert table([1, 0], columns, missing="-").splitlines() == ["  n", "1.0", "  -"]
