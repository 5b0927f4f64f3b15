"""Signals, heard between steps or, if need be, despite them. Each case runs in a process of its own."""

import signal
import subprocess
import sys
import time

PROGRAM = """
import ctypes, sys, time
from fastlaunch_train.process.interrupts import Interrupts
interrupts = Interrupts(grace_s=0.2)
interrupts.install()
interrupts.on_stuck = lambda message: print("stuck:", message, flush=True)
print("ready", flush=True)
{body}
"""


#: A mutex locked twice waits for ever, and no signal wakes it: as a collective without its peers.
STUCK_IN_C = """
mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
LOOP = "while not interrupts.requested: time.sleep(0.01)\ninterrupts.done()\n"


#: (body, signal, exit code, output)
CASES = [
    (f"{LOOP}print(interrupts.message)", signal.SIGTERM, 0, "stopped by SIGTERM\n"),
    (f"{LOOP}print(interrupts.message)", signal.SIGINT, 0, "stopped by SIGINT\n"),
    (STUCK_IN_C, signal.SIGTERM, 130, "stuck: stopped by SIGTERM; no step ended within 0.2 s\n"),
    ("interrupts.on_stuck = None\ntime.sleep(30)", signal.SIGTERM, 130, ""),
    (f"{LOOP}time.sleep(0.4)\nprint('ended')", signal.SIGTERM, 0, "ended\n"),
    # A checkpoint may outlast the grace, which goes on after it.
    (
        "with interrupts.saving(): time.sleep(0.6)\ninterrupts.done()\nprint('ended')",
        signal.SIGTERM,
        0,
        "ended\n",
    ),
    (
        "with interrupts.saving(): time.sleep(0.3)\ntime.sleep(60)",
        signal.SIGTERM,
        130,
        "stuck: stopped by SIGTERM; no step ended within 0.2 s\n",
    ),
]


def test_a_signal_is_heard_by_the_loop_or_ends_what_is_stuck() -> None:
    # All at the same time: each of them mostly waits.
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, text=True)
        for body, *_ in CASES
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)  # until it is stuck, if it will be
    for process, (_, number, *_) in zip(started, CASES, strict=True):
        process.send_signal(number)
    for process, (body, _, code, output) in zip(started, CASES, strict=True):
        assert (process.communicate(timeout=30)[0], process.returncode) == (output, code), body
