"""A process 1, as a container's program is: to it a signal without a handler is lost."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

#: In place of Python, as it starts up: it does nothing about signals.
DEAF_PYTHON = "#!/bin/bash\n[ $1 = -c ] || { echo up; exec sleep 60; }\n"


def own_processes() -> list[str]:
    """What to put before a command that is to be process 1. Skips the test where that cannot be."""
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process 1 can be made: unshare is missing, or not allowed here")
    return command


def wait_until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


def send_to_first(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the process 1 that `process`, of `own_processes`, has started."""
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), number)
