"""The measured tables of README and docs/results.md are what the shipped records give, and nothing else."""

from pathlib import Path

import pytest

from benchmarks.tables import README, RESULTS, ROOT, commands_of, with_tables

MEASUREMENTS = Path("train", "measurements")


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.name)
def test_a_pages_tables_are_what_the_records_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text), "make tables, and look at what has changed"


def test_every_folder_of_measurements_is_in_a_table() -> None:
    tables = commands_of(RESULTS.read_text(encoding="utf-8"))
    imported = {word for commands in tables for command in commands for word in command}
    folders = {str(path.relative_to(ROOT)) for path in (ROOT / MEASUREMENTS).iterdir() if path.is_dir()}
    assert folders and folders <= imported


@pytest.mark.slow
@pytest.mark.parametrize("end", ["<!-- /headline -->", "<!-- /measured -->"])
def test_a_figure_changed_by_hand_is_written_over(end: str) -> None:
    (page,) = (page for page in (README, RESULTS) if end in page.read_text(encoding="utf-8"))
    start, _, _ = page.read_text(encoding="utf-8").partition(end)
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
