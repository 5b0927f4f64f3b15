"""Published figures: what the shipped CSVs hold, and what a bad CSV is told."""

import csv
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.errors import BadFile
from fastlaunch.measure.published import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, read_published, shipped_figures
from fastlaunch.measure.summarize import RunSummary

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
    return {(row.instance, row.recipe): row for row in read_published(path)}


def test_every_shipped_file_loads() -> None:
    rows = {path.name: len(read_published(path)) for path in shipped_figures()}
    assert rows == {
        "compile-modes.csv": 5,
        "distilbert-ladder.csv": 8,
        "fp8-experiment.csv": 5,
        "ort-module.csv": 3,
        "pointwise-fusion.csv": 2,
    }


@pytest.mark.parametrize(
    ("instance", "usd_per_hour", "images_per_usd", "usd_per_million"),
    [
        ("p4d.24xlarge", 32.7726, 137_176, 7.29),
        ("p5.48xlarge", 98.32, 94_206, 10.62),
        ("p4d.24xlarge", 21.957642, 204_740, 4.88),
        ("p5.48xlarge", 55.04, 168_283, 5.94),
    ],
)
def test_the_article_reads_as_published_at_both_prices(
    instance: str, usd_per_hour: float, images_per_usd: int, usd_per_million: float
) -> None:
    row = _shipped("fp8-experiment.csv")[instance, "bf16"]
    assert row.step_time_s is not None and row.samples_per_step == 64 * 8
    images_per_hour = row.samples_per_step / row.step_time_s.value * 3600
    assert round(images_per_hour / usd_per_hour) == images_per_usd
    assert round(usd_per_hour / images_per_hour * 1e6, 2) == usd_per_million


def test_derived_rows_of_the_article_follow_from_its_percentages() -> None:
    rows = _shipped("fp8-experiment.csv")
    derived = {key: row.step_time_s.value for key, row in rows.items() if row.derived and row.step_time_s}
    assert derived == {
        ("p4d.24xlarge", "te-article"): pytest.approx(0.41 * (1 - 0.19)),
        ("p5.48xlarge", "te-article"): pytest.approx(2 * 0.199 * (1 - 0.32)),
        ("p5.48xlarge", "te-article-fp8"): pytest.approx(2 * 0.199 * (1 - 0.32) * (1 - 0.20), abs=1e-5),
    }
    assert rows["p5.48xlarge", "te-article"].batch_size_per_gpu == 128


def test_a_published_row_has_what_was_published_and_no_more() -> None:
    row = _shipped("fp8-experiment.csv")["p4d.24xlarge", "bf16"]
    assert (row.kind, row.status, row.measured_on) == ("published", "completed", "2023-11-15")
    assert (row.sample_unit, row.flops_per_sample, row.precision) == ("images", 763_504_000_000, "bf16")
    assert row.step_time_s is not None and row.step_time_s.low is None and row.step_time_s.high is None
    assert (row.steady, row.num_steps, row.problems, row.derived) == (None, 0, (), False)


def test_totals_are_in_seconds_and_metrics_as_published() -> None:
    ladder = _shipped("distilbert-ladder.csv")
    plain, ddp = ladder[None, "plain-pytorch"], ladder[None, "ddp"]
    assert plain.total_time_s == pytest.approx(22.63 * 60) and plain.num_samples == 35_000 * 3
    assert (plain.metric, plain.metric_value, plain.step_time_s) == ("test_accuracy", 0.9143, None)
    assert (ddp.num_gpus, ddp.batch_size_per_gpu, ddp.instance) == (4, 12, None)
    assert ladder[None, "fsdp"].metric is None
    compile_modes = _shipped("compile-modes.csv")
    assert [row.total_time_s for row in compile_modes.values()] == [1016.0, 1059.0, 497.9, 497.6, 769.1]
    for name, best in (("ort-module.csv", 1.86), ("pointwise-fusion.csv", 4.5)):
        rows = _shipped(name)
        assert {row.metric for row in rows.values()} == {"relative_throughput"}
        assert rows[None, "eager"].metric_value == 1.0
        assert max(row.metric_value or 0 for row in rows.values()) == best


def test_unknown_recipes_and_workloads_are_data(csv_file) -> None:
    (row,) = read_published(csv_file(f"{HEADER}\nmy-net,unknown,2,mine,4,16,1e-1,,seen\n"))
    assert (row.workload, row.sample_unit, row.flops_per_sample) == ("my-net", "samples", None)
    assert (row.recipe, row.precision, row.instance, row.measured_on) == ("mine", None, None, None)
    assert row.samples_per_step == 64  # num_gpus is over all nodes


def test_quotes_bom_line_ends_blank_lines_and_column_order(csv_file) -> None:
    columns = [*reversed(REQUIRED_COLUMNS)]
    cells = [
        '"a ""long"" story,\r\nin two lines"',
        "2023-11-15",
        " 0.41 ",
        "8",
        "64",
        "bf16",
        "1",
        "p",
        "vit-huge",
    ]
    text = "\ufeff" + ",".join(columns) + "\r\n\r\n" + ",".join(cells) + "\r\n\r\n"
    (row,) = read_published(csv_file(text))
    assert row.source == 'a "long" story,\r\nin two lines'
    assert row.step_time_s is not None and row.step_time_s.value == 0.41


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
        ("workload", "  ", "empty", None),
        ("recipe", "", "empty", None),
        ("instance", "", "unknown", None),
        ("source", "", "empty", None),
        ("num_nodes", "one", "whole number", None),
        ("num_nodes", "0", "whole number", None),
        ("num_nodes", "1.5", "whole number", None),
        ("num_nodes", "-1", "whole number", None),
        ("num_nodes", "9", "over all nodes", "num_gpus"),
        ("num_gpus", "", "empty", None),
        ("num_gpus", "8x", "whole number", None),
        ("num_gpus", "9" * 400, "whole number", None),
        ("batch_size_per_gpu", "0", "whole number", None),
        ("batch_size_per_gpu", "auto", "whole number", None),
        ("step_time_s", "", "empty", None),
        ("step_time_s", "0", "more than 0", None),
        ("step_time_s", "-0.41", "more than 0", None),
        ("step_time_s", "0.41s", "not a number", None),
        ("step_time_s", "nan", "not a number", None),
        ("step_time_s", "inf", "not a number", None),
        ("step_time_s", "1e999", "not a number", None),
        ("step_time_s", "1_0", "not a number", None),
        ("step_time_s", "1e-300", "more than 0", None),
        ("measured_on", "15.11.2023", "not a date", None),
        ("measured_on", "2023-02-30", "not a date", None),
        ("measured_on", "20231115", "not a date", None),
        ("total_time_s", "0", "more than 0", None),
        ("num_samples", "-3", "whole number", None),
        ("metric", "accuracy", "come together", "value"),
        ("value", "0.9", "come together", "metric"),
        ("derived", "maybe", "neither", None),
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
        ("", 1, "empty"),
        ("\n\n", 1, "empty"),
        (b"\xef\xbb\xbf", 1, "empty"),
        (HEADER, 1, "no rows"),
        (f"{HEADER},colour\n{ROW},red\n", 1, "unknown column 'colour' .column 10"),
        (f"{HEADER},\n{ROW},\n", 1, "unknown column ''"),
        (f"{HEADER},recipe\n{ROW},bf16\n", 1, "column 'recipe' twice"),
        (HEADER.removesuffix(",source") + "\n", 1, "column 'source' is missing"),
        (f"{ROW}\n", 1, "unknown column 'vit-huge'"),
        (f"{HEADER}\n{ROW}\n{ROW},more\n", 3, "10 cells, .*'more' stands after the last, column source"),
        (f"{HEADER}\n{ROW}\nvit-huge,p5.48xlarge\n", 3, "2 cells, .*nothing in column num_nodes"),
        (f'{HEADER}\n{ROW}\n"vit-huge,p5\n', 3, "not CSV"),
        (f'{HEADER}\n{ROW}\n"vit"huge,p5\n', 3, "not CSV"),
        (f"{HEADER}\n{'x' * 200_000}\n", 2, "not CSV: field larger"),
        (f"{HEADER}\n{ROW}\n".encode() + b"vit\xff", 3, "not UTF-8"),
        (f"{HEADER}\r{ROW}\r".encode() + b"vit\xff", 3, "not UTF-8"),
        (f"{HEADER}\n{ROW}\nvit\0huge", 3, "NUL byte"),
        (f"{HEADER}\n{ROW}".encode("utf-16"), 1, "NUL byte"),
        (f'{HEADER}\n{ROW.replace("an article", TWO_LINES)}\n{ROW},\n', 4, "10 cells"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told_with_its_line(csv_file, text: str | bytes, line: int, problem: str) -> None:
    with pytest.raises(BadFile, match=problem) as caught:
        read_published(csv_file(text))
    assert caught.value.line == line


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(BadFile, match="cannot be read"):
            read_published(path)


def _read(data: bytes) -> tuple[RunSummary, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.csv")
        path.write_bytes(data)
        return read_published(path)


#: Cells that are good somewhere, so that generated files come close to being right.
CELLS = st.sampled_from(
    [
        *ROW.split(","),
        "",
        "unknown",
        "0",
        "-1",
        "1e5",
        "nan",
        "yes",
        "accuracy",
        "2023-13-01",
        '"',
        '"a,b"',
        "é",
        "\r",
    ]
)
NEAR_CSV = st.lists(st.lists(CELLS, min_size=8, max_size=10).map(",".join), max_size=3).map(
    lambda rows: "\n".join([HEADER, *rows]).encode()
)


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), NEAR_CSV))
def test_any_bytes_are_rows_or_a_bad_file(data: bytes) -> None:
    try:
        rows = _read(data)
    except BadFile as error:
        assert error.message
    else:
        assert rows and all(row.kind == "published" and not row.problems for row in rows)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(str.strip).filter(bool)
SECONDS = st.none() | st.floats(1e-9, 1e12)


@st.composite
def _rows(draw: st.DrawFn) -> dict[str, object]:
    num_nodes = draw(st.integers(1, 64))
    row: dict[str, object] = {
        "workload": draw(WORDS),
        "instance": draw(st.sampled_from(["p5.48xlarge", "unknown"])),
        "num_nodes": num_nodes,
        "recipe": draw(WORDS),
        "batch_size_per_gpu": draw(st.integers(1, 10**6)),
        "num_gpus": num_nodes * draw(st.integers(1, 16)),
        "step_time_s": draw(SECONDS),
        "measured_on": draw(st.none() | st.dates()),
        "source": draw(WORDS),
        "total_time_s": draw(SECONDS),
        "num_samples": draw(st.none() | st.integers(1, 10**12)),
        "metric": draw(st.none() | WORDS),
        "derived": draw(st.sampled_from(["", "yes"])),
    }
    row["value"] = draw(st.floats(-1e9, 1e9)) if row["metric"] else None
    if row["step_time_s"] is None and row["total_time_s"] is None and row["metric"] is None:
        row["step_time_s"] = 0.1
    return row


@given(st.lists(_rows(), min_size=1, max_size=4))
def test_valid_rows_come_back_as_written(rows: list[dict[str, object]]) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, fieldnames=REQUIRED_COLUMNS + OPTIONAL_COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    read = [
        {
            "workload": row.workload,
            "instance": row.instance or "unknown",
            "num_nodes": row.num_nodes,
            "recipe": row.recipe,
            "batch_size_per_gpu": row.batch_size_per_gpu,
            "num_gpus": row.num_gpus,
            "step_time_s": row.step_time_s.value if row.step_time_s else None,
            "measured_on": row.measured_on,
            "source": row.source,
            "total_time_s": row.total_time_s,
            "num_samples": row.num_samples,
            "metric": row.metric,
            "value": row.metric_value,
            "derived": "yes" if row.derived else "",
        }
        for row in _read(buffer.getvalue().encode())
    ]
    assert read == [row | {"measured_on": row["measured_on"] and str(row["measured_on"])} for row in rows]
