"""Published figures: what the shipped CSVs hold, and what a bad CSV is told."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.data import to_data
from fastlaunch.core.errors import BadFile
from fastlaunch.measure.published import REQUIRED_COLUMNS, read_published, shipped_figures
from fastlaunch.measure.summary import Interval, RunSummary, read_summary

HEADER = ",".join(REQUIRED_COLUMNS)
ROW = "vit-huge,p4d.24xlarge,1,bf16,64,8,0.41,2023-11-15,an article"
TWO_LINES = '"an\narticle"'


@pytest.fixture
def csv_file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "figures.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def _shipped(name: str) -> dict[tuple[str | None, str], RunSummary]:
    path = next(path for path in shipped_figures() if path.name == name)
    return {(row.setup.instance, row.setup.recipe): row for row in read_published(path)}


def test_every_shipped_file_loads() -> None:
    rows = {path.name: len(read_published(path)) for path in shipped_figures()}
    assert rows == {
        "compile-modes.csv": 5,
        "distilbert-ladder.csv": 8,
        "fp8-experiment.csv": 5,
        "ort-module.csv": 3,
        "pointwise-fusion.csv": 2,
    }


def test_derived_rows_of_the_article_follow_from_its_percentages() -> None:
    rows = _shipped("fp8-experiment.csv")
    derived = {
        key: row.timing.step_time_s.value
        for key, row in rows.items()
        if row.figures.derived and row.timing.step_time_s
    }
    assert derived == {
        ("p4d.24xlarge", "te-article"): pytest.approx(0.41 * (1 - 0.19)),
        ("p5.48xlarge", "te-article"): pytest.approx(2 * 0.199 * (1 - 0.32)),
        ("p5.48xlarge", "te-article-fp8"): pytest.approx(2 * 0.199 * (1 - 0.32) * (1 - 0.20), abs=1e-5),
    }
    assert rows["p5.48xlarge", "te-article"].setup.batch_size_per_gpu == 128


def test_a_published_row_has_what_was_published_and_no_more() -> None:
    row = _shipped("fp8-experiment.csv")["p4d.24xlarge", "bf16"]
    assert (row.setup.kind, row.status, row.environment.measured_on) == (
        "published",
        "completed",
        "2023-11-15",
    )
    assert (row.setup.sample_unit, row.setup.precision) == ("images", "bf16")
    assert row.setup.flops_per_sample == 763_504_000_000
    assert (row.timing.step_time_s, row.timing.samples_per_step) == (Interval(value=0.41), 512)
    assert (row.num_steps, row.problems, row.figures.derived) == (0, (), False)


def test_quotes_bom_line_ends_blank_lines_and_column_order(csv_file) -> None:
    cells = ROW.replace("an article", '"a ""long"" story,\r\nin two lines"').replace(",0.41,", ", 0.41 ,")
    order = [*REQUIRED_COLUMNS[1:], REQUIRED_COLUMNS[0]]
    text = f"\ufeff{','.join(order)}\r\n\r\n{cells.removeprefix('vit-huge,')},vit-huge\r\n\r\n"
    (row,) = read_published(csv_file(text))
    assert row.figures.source == 'a "long" story,\r\nin two lines'
    assert row.timing.step_time_s == Interval(value=0.41)


def test_repeats_say_their_seed_host_and_round(csv_file) -> None:
    text = f"{HEADER},seed,host,round\n{ROW},0,node-7,2\n{ROW},,,\n"
    first, unsaid = read_published(csv_file(text))
    assert (first.seed, first.environment.host_id, first.environment.round) == (0, "node-7", 2)
    assert (unsaid.seed, unsaid.environment.host_id, unsaid.environment.round) == (None, None, None)
    assert first.environment.session is None
    assert read_summary(to_data(first)).environment.round == 2


def _with_one_changed(column: str, value: str) -> str:
    """A good row on line 2, and on line 3 the same with `column` changed."""
    good = dict(zip(REQUIRED_COLUMNS, ROW.split(","), strict=True))
    good.setdefault(column, "")
    rows = (good, good, good | {column: value})
    return "\n".join(",".join(row if number == 0 else row.values()) for number, row in enumerate(rows))


@pytest.mark.parametrize(
    ("column", "value", "problem", "named"),
    [
        ("workload", "", "empty", None),
        ("num_nodes", "0", "whole number", None),
        ("num_nodes", "9", "over all nodes", "num_gpus"),
        ("num_gpus", "9" * 400, "whole number", None),
        ("num_gpus", "16", "which has 8 GPUs", None),
        ("instance", "ml.p5.4xlarge", "which has 1 GPU", "num_gpus"),
        ("step_time_s", "", "empty", None),
        ("step_time_s", "0", "more than 0", None),
        ("step_time_s", "0.41s", "not a number", None),
        ("step_time_s", "nan", "not a number", None),
        ("measured_on", "2023-02-30", "not a date", None),
        ("metric", "accuracy", "come together", "value"),
        ("derived", "maybe", "not `yes`", None),
        ("seed", "-1", "whole number", None),
        ("round", "0", "whole number", None),
    ],
)
def test_a_bad_cell_is_told_with_its_line_and_column(
    csv_file, column: str, value: str, problem: str, named: str | None
) -> None:
    with pytest.raises(BadFile, match=problem) as caught:
        read_published(csv_file(_with_one_changed(column, value)))
    assert caught.value.line == 3
    assert f":3: column {named or column}: " in caught.value.message


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", None, "empty"),
        (HEADER, None, "no rows"),
        (f"{HEADER},colour\n{ROW},red\n", 1, "unknown column 'colour'"),
        (f"{HEADER},recipe\n{ROW},bf16\n", 1, "column 'recipe' twice"),
        (HEADER.removesuffix(",source") + "\n", 1, "column source is missing"),
        (
            "workload,recipe\n",
            1,
            "instance, num_nodes, batch_size_per_gpu, num_gpus, step_time_s, measured_on, source",
        ),
        (f"{HEADER}\n{ROW}\n{ROW},more\n", 3, "10 cells"),
        (f'{HEADER}\n{ROW}\n"vit-huge,p5\n', 3, "not CSV"),
        (f"{HEADER}\n{ROW}\n".encode() + b"vit\xff", None, "not UTF-8"),
    ],
)
def test_a_bad_file_is_told_with_its_line(
    csv_file, text: str | bytes, line: int | None, problem: str
) -> None:
    with pytest.raises(BadFile, match=problem) as caught:
        read_published(csv_file(text))
    assert caught.value.line == line


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(BadFile, match="cannot be read"):
            read_published(path)


#: Cells that are good somewhere, so that generated files come close to being right.
CELLS = st.sampled_from(
    [*ROW.split(","), "", "unknown", "0", "1e5", "nan", "yes", "2023-13-01", '"', '"a,b"', "é", "\r"]
)
NEAR_CSV = st.lists(st.lists(CELLS, min_size=8, max_size=10).map(",".join), max_size=3).map(
    lambda rows: "\n".join([HEADER, *rows]).encode()
)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), NEAR_CSV))
def test_any_bytes_are_rows_or_a_bad_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        file.write(data)
        file.flush()
        _check(Path(file.name))


def _check(path: Path) -> None:
    try:
        rows = read_published(path)
    except BadFile as error:
        assert error.message
    else:
        assert rows and all(row.setup.kind == "published" and not row.problems for row in rows)
