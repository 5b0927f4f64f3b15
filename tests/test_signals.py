"""The suite runs in the background too: `nohup make test`, or `make test &` in a script."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: How a process ends that sends itself the signal, started by a session in which it was ignored.
SESSION = """
import os, signal, subprocess, sys
sys.path[:0] = sys.argv[2:]
import conftest
conftest.hear_signals()
child = "import os, signal, time; os.kill(os.getpid(), int({})); time.sleep(0.1)"
ended = subprocess.run([sys.executable, "-c", child.format(sys.argv[1])], stderr=subprocess.DEVNULL)
print(ended.returncode)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_that_the_session_ignores_reach_the_processes_of_tests(number: signal.Signals) -> None:
    ignoring = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"]
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [*ignoring, sys.executable, "-c", SESSION, str(int(number)), *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{-number}\n"
