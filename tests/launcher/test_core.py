"""Errors and exit codes, quantities, locks, private files, plain text, and what a log tells of a failure."""

import io
import json
import os
import re
import stat
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastlaunch.core import errors, locks
from fastlaunch.core.data import read, to_data
from fastlaunch.core.errors import BadFile, CloudRefused, UnknownName, UserError
from fastlaunch.core.home import close_to_others, make_folder
from fastlaunch.core.log_file import LOG, last_words, telling_lines
from fastlaunch.core.plan import Plan
from fastlaunch.core.terminal import as_warning, plain, plain_output, raw_output, report_line
from fastlaunch.core.units import parse_bytes, parse_count, parse_duration_s

# Errors


def test_exit_codes() -> None:
    raised = [UserError("no"), BadFile("a.csv", "empty"), CloudRefused("no capacity")]
    assert [error.exit_code for error in raised] == [2, 2, 3]
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert sorted(codes) == [0, 1, 2, 3, 70, 130]


def test_an_unknown_name_comes_with_the_nearest_and_all() -> None:
    error = UnknownName("instance", "p5.48xlrage", ["p5.48xlarge", "p5.4xlarge", "gelu"])
    assert (error.message, error.name) == ("unknown instance 'p5.48xlrage'", "p5.48xlrage")
    assert error.hint == ("did you mean p5.48xlarge or p5.4xlarge? known: gelu, p5.48xlarge, p5.4xlarge")
    assert UnknownName("recipe", "zzz", ["bf16", "fp8", "bf16"]).hint == "known: bf16, fp8"
    assert UnknownName("run", "r1", []).hint == "there is no run yet"
    assert UnknownName("run", "r1", [], hint="fastlaunch submit").hint == "fastlaunch submit"


def test_a_bad_file_names_its_line() -> None:
    assert BadFile(Path("prices.yaml"), "a price of 0", line=12).message == "prices.yaml:12: a price of 0"
    assert BadFile("prices.yaml", "empty").message == "prices.yaml: empty"


# Quantities


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        (" 200 ", 200),
        ("10 K", 10_000),
        ("1.1M", 1_100_000),
        (".5k", 500),
        ("2b", 2_000_000_000),
        ("2G", 2_000_000_000),
        ("1T", 10**12),
        ("1.5e3", 1500),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_count(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90 sec", 90), ("1.5s", 1.5), ("30m", 1800), ("48h", 172_800), ("1h 30 m", 5400), ("1d2h3m4s", 93_784)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


NOT_COUNTS = (
    *("", " ", "k", "-1", "+1", "1.5", "1.2345k", "ten", "10x", "1e", "1e-3", "nan", "0x10", "1 000", "1,5"),
    *("1,5M", "1,00", "1,000,00", "1_", "_1", "1__0", "1..5", "1.", "1e999", "9223372036854775808"),
    *("9" * 5000, "10k10k", "١٠"),
)
NOT_DURATIONS = ("", "90", "h", "-1h", "1h30", "1w", "1h-30m", "1h,30m", "1:30", "1,5h", "1e99s")


@pytest.mark.parametrize(("parse", "texts"), [(parse_count, NOT_COUNTS), (parse_duration_s, NOT_DURATIONS)])
def test_what_is_no_quantity_is_refused(parse: Callable[[str], object], texts: tuple[str, ...]) -> None:
    for text in texts:
        with pytest.raises(UserError):
            parse(text)


@given(st.integers(0, 2**63 - 1))
@example(2**53 + 1)
def test_every_whole_number_is_read_exactly(count: int) -> None:
    assert parse_count(str(count)) == parse_count(f"{count:,}") == parse_count(f"{count:_}") == count


@given(st.text(max_size=30) | st.text("0123456789.,_eEkmbgtisdhnB -", max_size=12))
def test_any_text_is_a_quantity_or_the_users_error(text: str) -> None:
    for parse in (parse_bytes, parse_count, parse_duration_s):
        try:
            value = parse(text)
        except UserError:
            continue
        assert 0 <= value < float("inf")


# Locks


def test_a_lock_that_was_waited_for_is_seen_by_others(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.lock", []

    def wait() -> None:
        with locks.held(path):
            seen.append(locks.is_held(path))

    with locks.held(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        # It waits for the file that is removed in the end.
        waiting.join(0.1)
        assert waiting.is_alive()
    waiting.join(10)
    assert seen == [True]
    assert not locks.is_held(path)


# Logs

TORCHRUN = (
    "E1121 09:43:53.750000 10848 torch/distributed/elastic/multiprocessing/api.py:1002] failed\n"
    "Traceback (most recent call last):\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "=====\n"
)
OLD_TORCHRUN = "[2023-11-02 14:17:31,123] torch.distributed.elastic.multiprocessing.api: [ERROR] failed\n"


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (f"step 1\nerror: no GPU\n  try bf16\n{TORCHRUN}", "error: no GPU"),
        (f"ValueError: x\n{OLD_TORCHRUN}", "ValueError: x"),
        ("x" * 1_000_000 + "\nValueError: the end\n\n    \n", "ValueError: the end"),
    ],
)
def test_the_last_line_of_the_jobs_own(log: str, last: str, tmp_path: Path) -> None:
    assert (last_words(tmp_path), telling_lines(tmp_path, num_lines=20)) == (None, []), "there is no log"
    (tmp_path / LOG).write_bytes(b"\xff\xfe\n" + log.encode())
    assert last_words(tmp_path) == last
    assert last in telling_lines(tmp_path, num_lines=4)
    assert len(telling_lines(tmp_path, num_lines=2)) == 2
    (tmp_path / LOG).write_text(TORCHRUN)
    assert telling_lines(tmp_path, num_lines=1) == ["====="]


# What reaches a terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("step 1\tloss 2.5\nµs ≤ 1 – 日本 👩‍🚀", "step 1\tloss 2.5\nµs ≤ 1 – 日本 👩‍🚀"),
        ("\x1b[1;32mINFO\x1b[0m ready", "INFO ready"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("\x1b[2J\x1b[Hgone", "^[[2J^[[Hgone"),
        # A rendition inside another sequence leaves none behind.
        ("\x1b\x1b[0m[2J", "^[[2J"),
        ("12%\r13%\x7f", "12%^M13%^?"),
        ("\x9b2J", "<U+009B>2J"),
        ("i-\u202e321", "i-<U+202E>321"),
    ],
)
def test_plain_text_steers_no_terminal(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(
    text=st.text(alphabet=st.sampled_from("\x1b\x9b[]0;mcJ\x07\r\x08 a\n\t\ud800\u2067") | st.characters())
)
def test_no_control_character_passes(text: str) -> None:
    for encoding in ("ascii", "utf-8"):
        written = io.BytesIO()
        output = plain_output(io.TextIOWrapper(written, encoding=encoding, newline=""))
        print(text, file=output, flush=True)
        shown = written.getvalue().decode(encoding)
        assert not {c for c in shown if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
        # What is plain already stays as it is.
        assert plain(shown) == shown


def test_the_stream_itself_can_be_had() -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    assert raw_output(plain_output(stream)) is stream is raw_output(stream)


# Files of the user's alone


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_a_home_that_is_open_to_others_is_closed(tmp_path: Path, open_umask: None) -> None:
    home = tmp_path / "home"
    home.mkdir()
    close_to_others(home)
    assert mode_of(home) == 0o700


def test_a_folder_that_is_shared_on_purpose_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    close_to_others(tmp_path)
    assert mode_of(tmp_path) == 0o1777
    # Nor is it an error that there is none.
    close_to_others(tmp_path / "none")


def test_folders_are_made_for_the_user_alone(tmp_path: Path, open_umask: None) -> None:
    for _ in range(2):
        make_folder(tmp_path / "a" / "b")
    assert (mode_of(tmp_path / "a"), mode_of(tmp_path / "a" / "b")) == (0o700, 0o700)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folder(tmp_path / "file" / "b")


def test_on_a_terminal_a_warning_is_broken_at_blanks_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    warning = as_warning("the prices of p5.48xlarge are of 2026-07-20: type fastlaunch prices update")
    command = "warning: fastlaunch submit --instance p5.48xlarge --recipe te-fp8 --max-hours 2"
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        report_line(warning, plain_output(stream))
        report_line(command, plain_output(stream))
    assert pipe.getvalue() == f"{warning}\n{command}\n"
    broken = terminal.getvalue().removesuffix(f"{command}\n").splitlines()
    assert len(broken) > 1 and max(map(len, broken)) <= 40
    assert " ".join(line.strip() for line in broken) == warning


REQUEST = {
    "UserData": "#!/bin/bash\necho \x1b[1m\u202e\n",
    "MinCount": 1,
    "Tags": [{"Key": "a", "Value": ""}],
}


def test_a_plan_is_read_to_the_letter_and_with_all_its_fields() -> None:
    """The request is sent again as it was; `vars` shows what a field has by default, too."""
    plan = Plan(backend="ec2", operation="RunInstances", request=REQUEST, max_cost_usd=9.5)
    data = to_data(plan)
    assert data.keys() == {"backend", "operation", "request", "max_cost_usd"}
    assert vars(read(Plan, json.loads(json.dumps(data)), "plan")) == vars(plan)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"request": []}, "$.request"),
        ({"max_cost_usd": "9.5"}, "$.max_cost_usd"),
        ({"objects": [{"bucket": "b", "key": "k", "sha256": "0", "text": 5}]}, "$.objects[0].text"),
        ({"objects": [{"bucket": "b", "key": "k", "sha256": "0", "text": None, "x": 1}]}, "$.objects[0].x"),
        ({"colour": "red"}, "$.colour"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(change: dict[str, Any], place: str) -> None:
    data = to_data(Plan(backend="ec2", operation="RunInstances", request=REQUEST))
    with pytest.raises(UserError, match=rf"^plan: .*`{re.escape(place)}`$"):
        read(Plan, data | change, "plan")
