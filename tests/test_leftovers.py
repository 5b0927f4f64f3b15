"""No process outlives the test that started it, whatever session or parent it has by then."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from leftovers import MARK, kill_leftovers

#: While a program takes the place of another, a process has no environment.
LEAVING = "setsid sleep 1000 > /dev/null 2>&1 & until grep -q sleep /proc/$!/cmdline; do :; done; echo $!"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_what_a_test_leaves_or_forks_is_killed(isolated: Path) -> None:
    mark = os.environ[MARK]
    assert mark == str(isolated.parent), "every test has its own"
    # As a rank of torchrun: a session of its own, and by now an orphan.
    done = subprocess.run(["bash", "-c", LEAVING], capture_output=True, text=True, check=True)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    forked.start()
    assert kill_leftovers(f"{mark}-of-another") == []
    assert forked.exitcode == -signal.SIGKILL
    assert kill_leftovers(mark) == [int(done.stdout)]
