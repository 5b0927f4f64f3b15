"""torchrun that lets its ranks end: the relay by itself, then the real thing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from entrypoint import NO_GPU, ROOT, TINY, arguments, record

from fastlaunch_train.process.torchrun import SignalRelay, attach, exit_code_of

#: A relay with one child that says when it is there and what signal it got.
PROGRAM = """
import os, signal, subprocess, sys, time
from fastlaunch_train.process.torchrun import SignalRelay

class Ranks:
    def __init__(self, process): self.process = process
    def pids(self): return {{0: self.process.pid}}

# os.write: a signal may come while a `print` of "ready" is still flushing, and a second one is refused then.
CHILD = '''
import os, signal, sys, time
def heard(number, frame):
    os.write(1, b"heard " + signal.Signals(number).name.encode() + b"\\\\n")
    {child}
signal.signal(signal.SIGTERM, heard)
signal.signal(signal.SIGINT, heard)
os.write(1, b"ready\\\\n")
while True:  # A signal that comes just before a long sleep begins would be handled after it.
    time.sleep(0.01)
'''

def child():
    return subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)

relay = SignalRelay({limit_s})
relay.listen()
{body}
"""


def start(body: str, *, child: str = "sys.exit(3)", limit_s: float = 30) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body, child=child, limit_s=limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


#: In torchrun's order: until `started`, which may come later than the child's first word, a signal waits.
RUN = """
relay.starting()
process = child()
relay.started(Ranks(process))
while process.poll() is None:
    time.sleep(0.01)
sys.exit(process.returncode)
"""


def test_signals_reach_the_ranks_as_they_are() -> None:
    process = start(RUN, child="heard.count = getattr(heard, 'count', 0) + 1; heard.count < 2 or sys.exit(4)")
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "heard SIGTERM")
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (4, "heard SIGINT\n")
    assert "SIGTERM: the ranks have 30 s" in err


def test_a_rank_that_does_not_end_is_killed() -> None:
    process = start(RUN, child="pass", limit_s=0.3)
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, out) == (256 - signal.SIGKILL, "heard SIGTERM\n")
    assert "has not ended: killed" in err


def test_before_there_are_ranks_a_signal_ends_it() -> None:
    process = start("print('here', flush=True)\ntime.sleep(60)")
    wait_for(process, "here")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 128 + signal.SIGTERM


def test_while_ranks_are_started_a_signal_waits_for_them() -> None:
    process = start(RUN.replace("process = child()", "process = child()\nsys.stdin.read()"))
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    out, _ = process.communicate("", timeout=30)
    assert (process.returncode, out) == (3, "heard SIGTERM\n")


def test_ranks_are_not_started_again_after_they_were_asked_to_end() -> None:
    process = start(RUN.replace("sys.exit(process.returncode)", "relay.starting()\nprint('again')"))
    wait_for(process, "ready")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[:2] == (128 + signal.SIGTERM, "heard SIGTERM\n")


def test_a_torch_without_the_hooks_is_told_from_one_with_them() -> None:
    def hooks(**methods: object) -> SimpleNamespace:
        return SimpleNamespace(PContext=type("PContext", (), methods))

    relay = SignalRelay(1)
    assert attach(relay, hooks(start=dict, close=dict, pids=dict))
    for api in (SimpleNamespace(), hooks(pids=dict, close=dict), hooks(start=dict, pids=dict)):
        assert not attach(relay, api)


def torchrun(*argv: str, before: str = "", **env: str) -> subprocess.Popen[str]:
    """The module as a process."""
    program = f"{before}\nimport sys\nfrom fastlaunch_train.process.torchrun import main\nmain(sys.argv[1:])"
    module = ["-c", program] if before else ["-m", "fastlaunch_train.process.torchrun"]
    path = os.pathsep.join([str(ROOT / "train"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *module, "--standalone", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **NO_GPU, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
    )


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_checkpoint_longer_than_torchruns_patience_is_finished(tmp_path: Path) -> None:
    argv = arguments(
        tmp_path, *("--steps", "100000", "--checkpoint-every", "100000"), workload=f"{TINY}:slow_checkpoint"
    )
    process = torchrun(
        *("--nproc-per-node=2", "-m", "fastlaunch_train", *argv),
        CHECKPOINT_S="34",
        FASTLAUNCH_STOP_GRACE_S="60",
    )
    first = tmp_path / "rank-00000-attempt-1.jsonl"
    while not first.exists() or first.read_text().count('"kind":"block"') < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "SIGTERM: the ranks have 65 s to end" in output
    ends = [record(tmp_path, rank=rank).end for rank in range(2)]
    assert [end.status for end in ends if end] == ["interrupted", "interrupted"]
    (num_steps,) = {end.num_steps for end in ends if end}
    # It begins while the steps stand still, and is waited for at the end.
    saved = [phase.seconds for phase in record(tmp_path).phases if phase.name == "checkpoint"]
    assert max(saved) >= 34
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{num_steps:08d}.pt"


@pytest.mark.parametrize(
    ("codes", "first", "code"),
    [
        ([78, -15], [78], 78),
        ([1, 78], [1], 78),
        ([78, 79, -15], [], 79),
        ([130, -15, 130], [], 130),
        ([130, -9], [130], 130),
        ([130, -9], [-9], None),  # torchrun has asked the other to stop
        ([130, 1], [], None),
        ([1], [1], None),
        ([-15], [], None),
    ],
)
def test_ranks_have_exit_codes_that_say_more(codes: list[int], first: list[int], code: int | None) -> None:
    assert exit_code_of(codes, first) == code


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 1), ("exit 78", 78)])
def test_exit_codes_are_torchruns_but_for_two(script: str, code: int) -> None:
    process = torchrun("--nproc-per-node=1", "--no-python", "sh", "-c", script)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output


@pytest.mark.slow
def test_without_the_hooks_torchrun_still_runs_and_a_warning_says_how_it_stops() -> None:
    process = torchrun(
        *("--nproc-per-node=1", "--no-python", "sh", "-c", "echo $TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        before="from torch.distributed.elastic.multiprocessing import api\ndel api.PContext.pids",
        FASTLAUNCH_STOP_GRACE_S="90",
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "has no PContext.start" in output
    assert "\n95\n" in output


@pytest.mark.slow
def test_an_environment_that_means_nothing_is_refused() -> None:
    process = torchrun("--nproc-per-node=1", "--no-python", "true", FASTLAUNCH_STOP_GRACE_S="long")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "FASTLAUNCH_STOP_GRACE_S is 'long'" in output
