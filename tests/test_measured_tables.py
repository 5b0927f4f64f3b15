"""The measured tables of README and docs/ are what the shipped records give, and nothing else."""

import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.tables import (
    DIGEST,
    GUIDE,
    PICTURE,
    README,
    RESULTS,
    ROOT,
    commands_of,
    digest,
    picture,
    with_tables,
)

MEASUREMENTS = Path("train", "measurements")
EXPERIMENTS = sorted((ROOT / "docs" / "experiments").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *GUIDE, *RESULTS], ids=lambda page: page.name)
def test_a_pages_tables_are_what_the_records_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text), "make tables, and look at what has changed"


@pytest.mark.slow
def test_the_picture_is_of_the_records() -> None:
    with Image.open(PICTURE) as image:
        assert image.text[DIGEST] == digest(*picture()), "make tables, and look at the picture"  # type: ignore[attr-defined]


def test_every_folder_of_measurements_is_in_a_table() -> None:
    tables = [table for page in RESULTS for table in commands_of(page.read_text(encoding="utf-8"))]
    imported = {word for commands in tables for command in commands for word in command}
    folders = {str(path.relative_to(ROOT)) for path in (ROOT / MEASUREMENTS).iterdir() if path.is_dir()}
    assert folders and folders <= imported


def test_the_overview_quotes_the_tables() -> None:
    (overview,) = (page for page in RESULTS if page.stem == "index")
    rows = re.findall(
        r"^\| \[[^]]*\]\(([\w-]+\.md)\)(.*)", overview.read_text(encoding="utf-8"), re.MULTILINE
    )
    tabled = [page for page in RESULTS if commands_of(page.read_text(encoding="utf-8"))]
    assert {page for page, _ in rows} == {page.name for page in tabled}
    for page, row in rows:
        table = (overview.parent / page).read_text(encoding="utf-8")
        _, answer, rest = table.split("**", 2)
        for quoting, quoted in ((row, rest), (answer, rest)):
            figures = re.findall(r"\d+\.\d+", quoting)
            assert figures and [figure for figure in figures if figure not in quoted] == []


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.stem)
def test_an_experiments_page_quotes_the_tables(page: Path) -> None:
    _, _, found = page.read_text(encoding="utf-8").partition("## What we found\n")
    found = found.partition("\n## ")[0]
    linked = re.findall(r"\]\((\.\./results/[\w-]+\.md)\)", found)
    tables = "".join((page.parent / target).read_text(encoding="utf-8") for target in linked)
    rows = [line for line in found.splitlines() if line.startswith("| `")]
    figures = [figure for row in rows for figure in re.findall(r"(?<=\| )[\d,.]+", row)]
    assert bool(rows) == bool(linked)
    assert [figure for figure in figures if figure not in tables] == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["<!-- /headline -->", "<!-- /measured -->"])
def test_a_figure_changed_by_hand_is_written_over(end: str) -> None:
    texts = (page.read_text(encoding="utf-8") for page in (README, *RESULTS))
    start, _, _ = next(text for text in texts if end in text).partition(end)
    section = start[start.rindex("<!-- ") :] + f"{end}\n"
    assert with_tables(section.replace(end, f"te-fp8 gives 1,000,000 images/s\n{end}")) == section


@pytest.mark.parametrize(
    "block",
    [
        "",
        "```console\n```\n",
        "```console\n$ fastlaunch submit --local\n```\n",
        "```console\n$ rm -r train/measurements\n```\n",
    ],
)
def test_no_other_command_is_run(block: str) -> None:
    with pytest.raises(ValueError):
        with_tables(f"<!-- measured:x -->\n{block}<!-- /measured -->\n")
