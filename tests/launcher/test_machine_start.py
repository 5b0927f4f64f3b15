"""What a machine took to start, as its nodes said, in the summary of what ran on it."""

import json
from pathlib import Path

import pytest
from fake_summaries import PLAIN
from test_collected import attempt, say

from fastlaunch.machine_start import with_start


def test_the_pull_is_what_came_after_the_boot(tmp_path: Path) -> None:
    say(tmp_path, "status", boot_s=40.5, pull_s=100, outcome="completed", runs=[])
    found = with_start(PLAIN, [attempt()], tmp_path)
    assert (found.boot_s, found.pull_s) == (40.5, 59.5)


def test_the_newest_attempt_that_tells_counts(tmp_path: Path) -> None:
    for n, boot_s in ((1, 40), (2, 50)):
        say(tmp_path, "status", n, boot_s=boot_s, pull_s=90, outcome="completed", runs=[])
    attempts = [attempt(1), attempt(2), attempt(3)]
    assert with_start(PLAIN, attempts, tmp_path).boot_s == 50


@pytest.mark.parametrize("pull_s", [None, 10, "90", True])
def test_a_machine_that_pulled_nothing_has_no_pull(tmp_path: Path, pull_s: object) -> None:
    say(tmp_path, "status", boot_s=40, pull_s=pull_s, outcome="failed", runs=[])
    found = with_start(PLAIN, [attempt()], tmp_path)
    assert (found.boot_s, found.pull_s) == (40, None)


def test_without_a_word_nothing_is_known(tmp_path: Path) -> None:
    assert with_start(PLAIN, [attempt()], tmp_path) == PLAIN
    assert with_start(PLAIN, [], tmp_path) == PLAIN
    assert "boot_s" not in json.dumps(PLAIN.to_json())
