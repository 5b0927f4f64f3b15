"""A request written for people is YAML that reads back as the same request."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.cli.plan_text import as_yaml

TEXT = st.text("aZ09 -_.:/<>=#|\"'{}[]&*!%@`,\\é\n\t~", max_size=12)
SCALAR = TEXT | st.integers(0, 999) | st.booleans() | st.none()
KEY = st.text("abcXYZ", min_size=1, max_size=4).filter(lambda key: key.lower() not in ("y", "n"))


def mappings(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    inside = (
        SCALAR
        if depth == 0
        else SCALAR | mappings(depth - 1) | st.lists(SCALAR | mappings(depth - 1), max_size=3)
    )
    return st.dictionaries(KEY, inside, max_size=3)


@given(value=mappings(2).filter(bool))
def test_what_is_written_reads_back(value: dict[str, Any]) -> None:
    assert yaml.safe_load("\n".join(as_yaml(value))) == value


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({"A": "ami-0123"}, ["A: ami-0123"]),
        ({"A": "s3://b/<run-id>/x"}, ["A: s3://b/<run-id>/x"]),
        ({"A": "120"}, ['A: "120"']),
        ({"A": 120}, ["A: 120"]),
        ({"A": "yes"}, ['A: "yes"']),
        ({"A": "1e3"}, ['A: "1e3"']),
        ({"A": "x: y"}, ['A: "x: y"']),
        ({"A": True, "B": None}, ["A: true", "B: null"]),
        ({"A": {}, "B": []}, ["A: {}", "B: []"]),
        ({"A": [{"B": 1, "C": ["x"]}, 2]}, ["A:", "  - B: 1", "    C:", "      - x", "  - 2"]),
        ({"A": "one\n two\n"}, ["A: |", "  one", "   two"]),
        ({"A": "one\n\ntwo"}, ["A: |-", "  one", "  ", "  two"]),
        ({"A": " one\ntwo"}, ['A: " one\\ntwo"']),
    ],
)
def test_texts_are_quoted_only_where_they_must_be(value: dict[str, Any], lines: list[str]) -> None:
    assert as_yaml(value) == lines
