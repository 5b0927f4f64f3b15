"""`fastlaunch status`, `logs` and `cancel`, also after the launcher was killed."""

import os
import signal

import pytest
from fake_train.launcher import fastlaunch
from fake_train.processes import is_training, launcher, runs, wait_until

from fastlaunch.core.plan import RunState

#: Real processes, waited for.
pytestmark = pytest.mark.slow

LONG = ("submit", "--local", "--steps", "100000", "--repeats", "2")


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """stdout and stderr of a command that succeeds."""
    capsys.readouterr()
    assert fastlaunch(*argv) == 0
    out, err = capsys.readouterr()
    return out, err


def kill_launcher_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.01")
    with launcher(*LONG) as process:
        wait_until(is_training)
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_killed_launcher_leaves_training_running_and_no_ghost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_launcher_while_training(monkeypatch)
    out, err = output(capsys, "status")
    first, second = runs()
    assert out.splitlines()[-1] == "2 runs under way or of the last submission: 1 running, 1 lost."
    assert "step " in out and "/100000" in out
    assert err == f"next: fastlaunch logs -f {first.id}\n"
    assert (second.state, second.reason) == (RunState.LOST, "its launcher ended before it started")

    _, err = output(capsys, "submit", "--local", "--steps", "5")
    assert f"warning: run {first.id} is under way here: both will be slower than alone" in err
    out, _ = output(capsys, "status")
    # The last submission, and what an earlier one left running.
    assert out.splitlines()[-1] == "2 runs under way or of the last submission: 1 running, 1 completed."

    out, _ = output(capsys, "cancel", first.id)
    assert out == f"{first.id} is interrupted\n"
    ended = runs()[0]
    assert (ended.state, ended.reason) == (RunState.INTERRUPTED, "stopped by fastlaunch cancel")
    assert ended.summary is not None and ended.summary.num_steps > 0


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGTERM, RunState.INTERRUPTED), (signal.SIGKILL, RunState.LOST)]
)
def test_run_that_ended_without_its_launcher_is_collected_by_the_next_command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    state: RunState,
) -> None:
    kill_launcher_while_training(monkeypatch)
    directory = runs()[0].directory
    assert directory is not None
    os.kill(int((directory / "lock").read_text()), number)
    wait_until(lambda: fastlaunch("status") == 0 and runs()[0].state is not RunState.RUNNING)
    run = runs()[0]
    assert run.state is state
    assert run.summary is not None and run.summary.num_steps > 0
    assert fastlaunch("submit", "--local", "--steps", "5") == 0
    assert [run.state for run in runs()] == [state, RunState.LOST, RunState.COMPLETED]


def test_logs_show_what_the_last_run_printed(capsys: pytest.CaptureFixture[str]) -> None:
    fastlaunch("submit", "--local", "--steps", "5", "--recipe", "fp32,bf16")
    out, err = output(capsys, "logs")
    steps = [f"step {number} of 5" for number in range(1, 6)]
    assert [line.partition("  ")[0] for line in out.splitlines()] == [
        "training vit-tiny with bf16",
        *steps,
        "ended: completed",
    ]
    assert err == "next: fastlaunch compare\n"
    out, _ = output(capsys, "logs", runs()[0].id.rpartition("-")[2])
    assert out.startswith("training vit-tiny with fp32\n")
    assert fastlaunch("logs", "no-such-run") == 2


def test_logs_follow_until_the_run_ends() -> None:
    with launcher("submit", "--local", "--steps", "100", FAKE_STEP_S="0.01") as process:
        wait_until(is_training)
        with launcher("logs", "-f") as follower:
            out, err = follower.communicate(timeout=60)
        lines = out.splitlines()
        assert (lines[0], lines[-1]) == ("training vit-tiny with bf16", "ended: completed"), err
        assert len(lines) == 102, "each step once"
        process.communicate(timeout=60)
    assert (process.returncode, follower.returncode) == (0, 0)


def test_run_cancelled_from_another_terminal_ends_and_the_next_one_starts() -> None:
    # The second run is cancelled while it is planned, the first one while it runs.
    with launcher(*LONG[:-1], "3", FAKE_STEP_S="0.01") as process:
        wait_until(is_training)
        first, second, third = (run.id for run in runs())
        assert fastlaunch("cancel", second) == 0
        assert runs()[1].state is RunState.CANCELLED
        assert fastlaunch("cancel", first) == 0
        wait_until(lambda: runs()[2].state is RunState.RUNNING)
        assert fastlaunch("cancel", third) == 0
        process.communicate(timeout=60)
    assert process.returncode == 1
    states = [(run.state, run.reason) for run in runs()]
    assert states == [
        (RunState.INTERRUPTED, "stopped by fastlaunch cancel"),
        (RunState.CANCELLED, "cancelled before it started"),
        (RunState.INTERRUPTED, "stopped by fastlaunch cancel"),
    ]
