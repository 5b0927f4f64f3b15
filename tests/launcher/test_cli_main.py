"""The command line itself: exit codes, what --help imports, unknown commands, a reader that stops reading."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fastlaunch.cli.main import COMMANDS, LazyGroup, fastlaunch, run
from fastlaunch.core.errors import BadFile, CloudRefused, JobFailed, UserError

#: Heavy, or of no use to someone who only asks for help.
NOT_FOR_HELP = (
    "torch",
    "boto3",
    "botocore",
    "numpy",
    "scipy",
    "yaml",
    "rich",
    "tabulate",
    "jinja2",
    "sqlite3",
)
#: Commands whose module is there.
PRESENT = [name for name in COMMANDS if importlib.util.find_spec(f"fastlaunch.cli.{COMMANDS[name][0]}")]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Exceptions put into this list are raised, the last first, by the command `failing`."""
    exceptions: list[BaseException] = []

    @click.command()
    def command() -> None:
        raise exceptions.pop()

    class Module:
        failing = command

    monkeypatch.setitem(COMMANDS, "failing", ("failing", "Fails."))
    monkeypatch.setitem(sys.modules, "fastlaunch.cli.failing", Module)
    return exceptions


@pytest.mark.parametrize(
    ("error", "exit_code", "told"),
    [
        (UserError("steps is 0", "give 1 or more"), 2, "error: steps is 0\n  give 1 or more\n"),
        (UserError("steps is 0"), 2, "error: steps is 0\n"),
        (BadFile("a.csv", "empty", line=1), 2, "error: a.csv:1: empty\n"),
        (JobFailed("out of memory"), 1, "error: out of memory\n"),
        (CloudRefused("no capacity"), 3, "error: no capacity\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_told_on_stderr_with_its_exit_code(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    told: str,
) -> None:
    failing.append(error)
    assert run(["failing"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == told


@pytest.mark.parametrize(
    "error", [KeyError("run"), EOFError("cut"), RecursionError(), AssertionError("never")]
)
def test_anything_else_is_a_bug_with_its_traceback(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    failing.append(error)
    assert run(["failing"]) == 70
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert type(error).__name__ in told
    assert told.endswith("this is a bug in fastlaunch: please report it with the traceback above\n")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submti", "--local"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: unknown command 'submti'\n  did you mean submit")
    assert all(name in told for name in COMMANDS)


@pytest.mark.parametrize("name", PRESENT)
def test_the_line_of_a_command_is_its_own(name: str) -> None:
    assert isinstance(fastlaunch, LazyGroup)
    with fastlaunch.make_context("fastlaunch", [name], resilient_parsing=True) as context:
        command = fastlaunch.get_command(context, name)
    assert command is not None
    assert command.get_short_help_str(limit=200) == COMMANDS[name][1]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; code = run(['--help']);"
        " print(*sorted({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "click" in modules
    assert not set(NOT_FOR_HELP) & set(modules)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_no_bug() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fastlaunch", "recipes"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: ")


def test_unflushed_output_meets_the_closed_pipe_in_time(tmp_path: Path) -> None:
    # `print` leaves its text in the buffer, which would be flushed, and fail, after the exit code is decided.
    (tmp_path / "talking.py").write_text(
        "import sys, click\n@click.command()\ndef talking():\n    sys.stdout.write('a line\\n')\n"
    )
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import talking;"
        " from fastlaunch.cli import main as cli;"
        " sys.modules['fastlaunch.cli.talking'] = talking; cli.COMMANDS['talking'] = ('talking', '');"
        " sys.argv[1:] = ['talking']; cli.main()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(
        "import time, click\n@click.command()\ndef waiting():\n    click.echo('here')\n    time.sleep(60)\n"
    )
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import waiting;"
        " from fastlaunch.cli import main as cli;"
        " sys.modules['fastlaunch.cli.waiting'] = waiting; cli.COMMANDS['waiting'] = ('waiting', '');"
        " sys.argv[1:] = ['waiting']; cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "interrupted\n")
