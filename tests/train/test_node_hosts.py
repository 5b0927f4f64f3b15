"""The hosts of a training job: what each hears of the others, and what it makes of it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from fastlaunch_train.node.hosts import SILENCE_S, Hosts
from fastlaunch_train.node.protocol import is_echo
from fastlaunch_train.node.sagemaker import PEER_GRACE_S
from fastlaunch_train.node.verdicts import Verdict, Word, verdict

NEVER = 30.0


class Job:
    """Hosts of one job, all at 127.0.0.1."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port: int = server.getsockname()[1]
        self.made: list[Hosts] = []

    def host(self, rank: int, count: int, *, token: str = "a-job", **changes: float) -> Hosts:
        host = Hosts(["127.0.0.1"] * count, rank, token=token, port=self.port, **changes)  # type: ignore[arg-type]
        self.made.append(host)
        return host

    def join(self, count: int) -> list[Hosts]:
        hosts = [self.host(rank, count) for rank in range(count)]
        with ThreadPoolExecutor(count) as pool:
            joined = pool.map(lambda host: host.join(lambda: False), reversed(hosts))
        assert list(joined) == [True] * count
        return hosts


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    for host in job.made:
        with suppress(OSError):
            host.close(is_done=True)


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + NEVER
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_hears_what_any_says_of_a_run(job: Job) -> None:
    hosts = job.join(3)
    for rank, host in enumerate(hosts):
        host.say(7, {"code": rank})
        host.say(8, {"code": 9})
    for host in hosts:
        wait_until(lambda host=host: len(host.words(7)) == 3)
        assert host.words(7) == {rank: {"code": rank} for rank in range(3)}
        assert host.lost is None


@pytest.mark.parametrize("rank", [0, 2])
def test_all_hear_that_one_is_gone(job: Job, rank: int) -> None:
    hosts = job.join(3)
    hosts[rank].close(is_done=False)
    for host in (host for at, host in enumerate(hosts) if at != rank):
        wait_until(lambda host=host: host.lost)
        assert host.lost == "127.0.0.1 is gone"


def test_a_host_that_has_said_all_may_go(job: Job) -> None:
    first, second = job.join(2)
    second.say(0, {"code": 0})
    second.close(is_done=True)
    wait_until(lambda: first.words(0))
    time.sleep(0.2)
    assert first.lost is None


def test_a_host_that_says_nothing_any_more_is_gone(job: Job) -> None:
    """As where its machine is, without a word on the network."""
    first = job.host(0, 2, silence_s=0.2)
    thread = threading.Thread(target=lambda: first.join(lambda: False))
    thread.start()
    with _connection(job.port) as silent:
        silent.sendall(b'{"token": "a-job", "host": 1}\n')
        thread.join(NEVER)
        wait_until(lambda: first.lost)
    assert SILENCE_S + PEER_GRACE_S < 20


def _connection(port: int) -> socket.socket:
    end = time.monotonic() + NEVER
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_stranger_is_not_taken_for_a_host_nor_waited_for_without_end(job: Job) -> None:
    first = job.host(0, 2, join_limit_s=0.2)
    joined: list[bool] = []
    thread = threading.Thread(target=lambda: joined.append(first.join(lambda: False)))
    thread.start()
    for greeting in (
        b"GET / HTTP/1.0\n",
        b'{"token": "another", "host": 1}\n',
        b'{"token": "a-job", "host": 5}\n',
    ):
        with _connection(job.port) as stranger:
            stranger.sendall(greeting)
            assert stranger.recv(1) == b""
    thread.join(NEVER)
    assert joined == [False]
    assert first.lost == "127.0.0.1 did not come in 0.2 s"


def test_waiting_ends_with_a_stop_and_one_host_waits_for_nobody(job: Job) -> None:
    assert not job.host(1, 2).join(lambda: True)
    alone = job.host(0, 1)
    assert alone.join(lambda: False)
    alone.say(0, {"code": 0})
    assert alone.words(0) == {0: {"code": 0}}


OK, BAD = Word(code=0), Word(code=1, cause="ValueError: x")
ECHO = Word(code=1, cause="RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:1")
MADE = Word(code=137, is_made_to=True)
STOPPED = Word(code=130, is_stopped=True, ends=True)


@pytest.mark.parametrize(
    ("words", "rank", "expected"),
    [
        ([OK], 0, Verdict(state="completed")),
        ([BAD], 0, Verdict(state="failed", blamed=0)),
        ([STOPPED], 0, Verdict(state="interrupted", is_final=False)),
        ([OK, BAD], 0, Verdict(state="completed")),
        ([BAD, BAD], 1, Verdict(state="failed", blamed=1)),
        # In the wake of another's end, whichever was heard of first.
        ([ECHO, BAD], 0, Verdict(state="interrupted", blamed=1)),
        ([ECHO, BAD], 1, Verdict(state="failed", blamed=1)),
        ([MADE, BAD], 0, Verdict(state="interrupted", blamed=1)),
        ([MADE, ECHO], 0, Verdict(state="interrupted", blamed=1)),
        # Nobody says more than that the other is gone.
        ([ECHO, ECHO], 0, Verdict(state="failed", blamed=0)),
        # One that was asked to stop: the others' trainings end with it, and the run is to go on.
        ([STOPPED, Word(code=130)], 1, Verdict(state="interrupted", is_final=False)),
        ([STOPPED, OK], 1, Verdict(state="completed", is_final=False)),
        ([STOPPED, ECHO], 1, Verdict(state="interrupted", is_final=False)),
    ],
)
def test_what_became_of_a_run(words: list[Word], rank: int, expected: Verdict) -> None:
    assert verdict(rank, dict(enumerate(words)), is_one_lost=False) == expected


@pytest.mark.parametrize("own", [BAD, ECHO, MADE])
def test_where_a_host_is_lost_nobody_else_is_blamed(own: Word) -> None:
    assert verdict(0, {0: own}, is_one_lost=True) == Verdict(state="interrupted", is_final=False)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690", True),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        ("Signal 9 (SIGKILL) received by PID 4711", False),
    ],
)
def test_what_ranks_say_whose_peer_is_gone(cause: str, expected: bool) -> None:
    assert is_echo(cause) is expected
