"""README's measured tables are what `fastlaunch compare` prints of the records, and nothing else."""

from pathlib import Path

import pytest

from benchmarks.tables import README, ROOT, commands_of, with_tables

MEASUREMENTS = Path("train", "measurements")


def test_readme_says_what_the_records_say() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_tables(text), "make tables, and look at what has changed"


def test_every_folder_of_measurements_is_in_a_table() -> None:
    tables = commands_of(README.read_text(encoding="utf-8"))
    imported = {word for commands in tables for command in commands for word in command}
    folders = {str(path.relative_to(ROOT)) for path in (ROOT / MEASUREMENTS).iterdir() if path.is_dir()}
    assert folders and folders <= imported


def test_a_figure_changed_by_hand_is_written_over() -> None:
    text = README.read_text(encoding="utf-8")
    changed = text.replace("<!-- /measured -->", "te-fp8 gives 1,000,000 images/s\n<!-- /measured -->", 1)
    assert changed != text
    assert with_tables(changed) == text


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
