"""A rank that fails leaves its full traceback; one that ends well leaves nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from entrypoint import TINY, arguments, run

from fastlaunch_train.process.failures import TracebackFile, leave_traceback, traceback_path

NAME = "traceback-rank-00000-attempt-1.txt"


def failed() -> ValueError:
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("what came\nof it") from cause
    except ValueError as error:
        return error


def test_a_failure_is_written_with_its_cause(tmp_path: Path) -> None:
    leave_traceback(tmp_path / "out", 3, failed())
    text = traceback_path(tmp_path / "out", rank=0, attempt=3).read_text()
    assert "KeyError: 'the cause'" in text and "ValueError: what came\nof it" in text
    assert "in failed" in text


def test_without_a_failure_there_is_no_file_and_a_disk_that_refuses_hides_none(tmp_path: Path) -> None:
    TracebackFile(tmp_path / NAME).close()
    assert list(tmp_path.iterdir()) == []
    file = TracebackFile(tmp_path / "no such folder" / NAME)
    file.write(failed())
    file.close()


def test_a_crash_in_native_code_says_where_python_stood(tmp_path: Path) -> None:
    body = (
        "import sys, os, signal, pathlib\n"
        "from fastlaunch_train.process.failures import TracebackFile\n"
        "file = TracebackFile(pathlib.Path(sys.argv[1]))\n"
        "def native():\n    os.kill(os.getpid(), signal.SIGABRT)\n"
        "native()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path / NAME)], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGABRT
    text = (tmp_path / NAME).read_text()
    assert "Fatal Python error: Aborted" in text and "in native" in text


@pytest.mark.slow
def test_a_training_that_fails_leaves_its_traceback(tmp_path: Path) -> None:
    code, _ = run(arguments(tmp_path, workload=f"{TINY}:nan"))
    assert code == 33
    text = (tmp_path / NAME).read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert "in train" in text
