"""What takes a while: when it is shown, where, and that nothing of it stays on a terminal."""

import io
import os
import pty
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fastlaunch.cli.main import run
from fastlaunch.core import activity as module
from fastlaunch.core.activity import Activity, activity, show


def waiting(*steps: Callable[[], object]) -> Callable[[float], bool]:
    """Wait by doing the next of the steps; it is over after the last one."""
    left: Iterator[Callable[[], object]] = iter(steps)

    def wait(seconds: float) -> bool:
        step = next(left, None)
        if step is not None:
            step()
        return step is None

    return wait


def nothing() -> None:
    return


def test_what_is_done_soon_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with activity("asking AWS for prices", total=2) as shown:
        assert list(shown.over(["a", "b"])) == ["a", "b"]
    assert capsys.readouterr() == ("", "")
    stream = io.StringIO()
    show(Activity("building"), stream, waiting())
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("recommend --workload vit-huge --samples 1M --measured-only", "weighing what could be bought"),
        ("estimate --instance p5.48xlarge --samples 1M", "adding up the training"),
        ("compare", "comparing the runs"),
        ("runs import --published", "reading records"),
    ],
)
def test_what_reads_many_records_is_shown(
    command: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["runs", "import", "--published"])
    capsys.readouterr()
    monkeypatch.setattr(module, "_PLAIN_DELAY_S", 0.0)
    run(command.split())
    assert line in capsys.readouterr().err.splitlines()


def test_off_a_terminal_there_is_a_line_where_something_is_new() -> None:
    shown, stream = Activity("fetching", total=3), io.StringIO()
    items = shown.over("abc")
    show(shown, stream, waiting(lambda: next(items), nothing, nothing, lambda: (next(items), next(items))))
    assert stream.getvalue() == "fetching, 1 of 3: a\nfetching, 3 of 3: c\n"


def test_off_a_terminal_what_is_waited_for_is_said_every_20_seconds() -> None:
    shown, stream, said_at_s, now_s = Activity("stopping run-a"), io.StringIO(), [], 0.0

    def wait(seconds: float) -> bool:
        nonlocal now_s
        if stream.getvalue().count("\n") > len(said_at_s):
            said_at_s.append(now_s)
        now_s += seconds
        return now_s > 80

    shown.wait = "waiting for EC2"
    show(shown, stream, wait)
    assert said_at_s == [10, 30, 50, 70]
    assert all(line.startswith("stopping run-a; waiting for EC2") for line in stream.getvalue().splitlines())


def test_inside_another_activity_it_is_that_ones_detail() -> None:
    with activity("adding up the training"):
        (outer,) = module._CURRENT
        with activity("counting parameters"):
            assert outer.line() == "adding up the training: counting parameters"
        assert outer.line() == "adding up the training"


def test_of_a_bar_that_a_program_draws_the_last_part_is_shown() -> None:
    shown = Activity("building")
    shown.update("layer 10%\rlayer 20%\r\n")
    assert shown.line() == "building: layer 20%"
    shown.update("\x1b]0;mine\x07")
    assert shown.line() == "building: ^[]0;mine^G"


def test_a_terminal_shows_it_in_one_line_and_is_clean_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    leader, follower = pty.openpty()
    shown = Activity("building")
    with open(follower, "w", closefd=False) as terminal:
        show(shown, terminal, waiting(nothing, lambda: shown.update("x" * 200), nothing))
    os.close(follower)
    seen = b""
    with suppress(OSError):
        while part := os.read(leader, 100_000):
            seen += part
    os.close(leader)
    assert b"building" in seen and b"x" * 60 not in seen
    # The cursor is shown again, and the line erased.
    assert seen.rstrip().endswith(b"\x1b[2K")
