"""`fastlaunch watch` on a terminal and without one, over real processes and a mock of AWS."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from cloud_commands import cloud
from cloud_runs import start_run
from fake_train.launcher import fastlaunch
from fake_train.processes import LAUNCHER, is_training, launcher, runs, wait_until

from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

if TYPE_CHECKING:
    from cloud_runs import CloudRun
    from moto_server import MotoServer


def test_without_runs_it_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("watch") == 0
    shown = capsys.readouterr()
    assert shown.out == "No run is under way.\n"
    assert shown.err == "next: fastlaunch submit --local\n"
    assert fastlaunch("watch", "no-such-run") == 2
    assert fastlaunch("watch", "--sweep", "no-such-sweep") == 2
    assert fastlaunch("watch", "--interval", "0.1") == 2


def started(server: "MotoServer", *recipes: str) -> "CloudRun":
    with open_ledger(load_settings()) as ledger:
        return start_run(ledger, server, recipes=recipes or ("bf16",))


def scripted(*steps: Callable[[], object]) -> Callable[[float], None]:
    """Sleep by doing the next of the steps."""
    waiting = list(steps)
    return lambda _: waiting.pop(0)() and None


def test_a_run_on_aws_from_its_boot_to_its_end(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    sleep = scripted(
        lambda: run.say("boot.json"),
        lambda: (
            run.record(run.run_ids[0], steps=20, status=None),
            run.upload("node-0/gpu-use.txt.000000000000", b"0%\n93%\n97"),
        ),
        lambda: (run.record(run.run_ids[0], steps=20), run.end()),
    )
    assert cloud("watch", "--output", "json", sleep=sleep) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["state"] for row in rows] == ["running"] * 3 + ["completed"]
    assert [row["doing"] for row in rows[:2]] == [
        "waiting for the machine to boot",
        "pulling the image and starting",
    ]
    boot, _, steps, end = rows
    # Ten minutes at $60 an hour; at most 60 minutes and 10 more at $55.04.
    assert boot["cost_usd"] == pytest.approx(10.0, abs=1)
    assert (boot["projected_usd"], boot["max_cost_usd"]) == (None, pytest.approx(64.2133333))
    assert boot["time_left_s"] == pytest.approx(50 * 60, abs=60)
    assert (steps["step"], steps["num_steps"], steps["gpu_use"]) == (20, 20, 0.93)
    assert steps["projected_usd"] == pytest.approx(steps["cost_usd"])
    assert end["cost_is_final"] and end["doing"] is None and end["cost_usd"] == pytest.approx(10.0, abs=1)


def test_a_run_that_failed_is_its_exit_code(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    failed = [{"run_id": run.run_ids[0], "state": "failed", "exit_code": 1}]
    assert cloud("watch", sleep=scripted(lambda: run.end(outcome="failed", runs=failed))) == 1
    shown = capsys.readouterr()
    assert "1 run: 1 failed." in shown.out.splitlines()[-1]
    assert shown.err.endswith(f"next: fastlaunch logs {run.run_ids[0]}\n")


@pytest.mark.slow
def test_a_terminal_shows_it_at_any_width_and_ctrl_c_leaves_the_run_alone() -> None:
    with launcher("submit", "--local", "--steps", "100000", FAKE_STEP_S="0.01"):
        wait_until(is_training)
        leader, follower = pty.openpty()
        resize(follower, 80)
        watching = subprocess.Popen(
            [sys.executable, str(LAUNCHER), "watch"],
            env={
                **{name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TERM": "xterm",
            },
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        shown = bytearray()
        read_until(leader, shown, rb"\d+/100,000")
        narrow = len(shown)
        resize(follower, 200)
        # What has no room at 80 columns.
        wide = rb"step time +samples/s"
        read_until(leader, shown, wide)
        assert not re.search(wide, shown[:narrow])
        watching.send_signal(signal.SIGINT)
        read_until(leader, shown, rb"next: fastlaunch cancel")
        assert watching.wait(60) == 130
        os.close(leader)
        os.close(follower)
        assert b"1 run goes on" in shown and b"Traceback" not in shown
        assert [run.state for run in runs()] == [RunState.RUNNING]
        assert fastlaunch("cancel", runs()[0].id) == 0


def resize(terminal: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))


def read_until(terminal: int, shown: bytearray, pattern: bytes) -> None:
    """Read what the terminal shows until it fits the pattern, or has ended."""
    while not re.search(pattern, shown):
        part = os.read(terminal, 100_000)
        assert part, shown
        shown += part
