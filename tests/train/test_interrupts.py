"""Signals, heard between steps or, if need be, despite them. Each case runs in a process of its own."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, sys, time
from fastlaunch_train.process.interrupts import Interrupts
interrupts = Interrupts(grace_s=0.3)
interrupts.install()
interrupts.on_stuck = lambda message: print("stuck:", message, flush=True)
print("ready", flush=True)
{body}
"""


def start(body: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_sees_the_request(number: signal.Signals) -> None:
    process = start(
        "while not interrupts.requested: time.sleep(0.01)\ninterrupts.done()\nprint(interrupts.message)"
    )
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output == f"stopped by {number.name}\n"


def test_a_process_stuck_in_c_is_ended_after_the_grace() -> None:
    # A mutex locked twice waits for ever, and no signal wakes it: as a collective without its peers.
    process = start(
        "mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)\n"
        "libc.pthread_mutex_lock(mutex)\nlibc.pthread_mutex_lock(mutex)"
    )
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.startswith("stuck: stopped by SIGTERM; no step ended")


def test_nothing_is_forced_once_the_loop_is_done() -> None:
    process = start(
        "while not interrupts.requested: time.sleep(0.01)\ninterrupts.done()\ntime.sleep(0.6)\nprint('ended')"
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "ended\n")


def test_a_checkpoint_that_outlasts_the_grace_is_not_stuck() -> None:
    process = start("with interrupts.saving(): time.sleep(1.2)\ninterrupts.done()\nprint('ended')")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "ended\n")


def test_the_grace_goes_on_after_a_checkpoint() -> None:
    process = start("with interrupts.saving(): time.sleep(0.6)\ntime.sleep(60)")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.startswith("stuck: ")


def test_a_process_that_is_stuck_before_it_has_a_record_is_ended_too() -> None:
    process = start("interrupts.on_stuck = None\ntime.sleep(30)")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
