"""No process outlives the test that started it, whatever session or parent it has by then."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leftovers import MARK, kill_leftovers, num_started

#: While a program takes the place of another, a process has no environment.
LEAVING = "setsid sleep 1000 > /dev/null 2>&1 & until grep -q sleep /proc/$!/cmdline; do :; done; echo $!"

#: torch starts its compile workers once, for whatever this process compiles later.
COMPILES_LATER = """
import os
from torch._inductor.async_compile import AsyncCompile
from leftovers import MARK, kill_leftovers

pool = AsyncCompile.process_pool()
pool.submit(os.getpid).result()
killed = kill_leftovers(os.environ[MARK])
print(len(killed), pool.submit(os.getpid).result() != os.getpid())
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_what_a_test_leaves_is_killed(tmp_path: Path) -> None:
    before = num_started()
    # As a rank of torchrun: a session of its own, and by now an orphan.
    done = subprocess.run(
        ["bash", "-c", LEAVING],
        env={**os.environ, MARK: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert num_started() > before
    assert kill_leftovers(f"{tmp_path}-of-another") == []
    assert kill_leftovers(str(tmp_path)) == [int(done.stdout)]


@pytest.mark.slow
def test_compile_workers_stay_for_the_tests_that_follow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_LATER],
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout == "0 True\n", done.stderr


def test_so_is_what_it_forked() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    kill_leftovers("nobody's")
    assert process.exitcode == -signal.SIGKILL


def test_every_test_has_a_mark_of_its_own(isolated: Path) -> None:
    assert os.environ[MARK] == str(isolated.parent)
