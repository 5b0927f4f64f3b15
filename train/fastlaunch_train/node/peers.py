"""Keeps several nodes on EC2 in step: they do the same runs together, and hear of each other through S3.

- Rank 0's address is the object rank0. Before a run, and after the last one, every node leaves an object
  ready/<number of the run>/<its address> and waits until there are as many as nodes, so that no node is in
  another run than its peers, or turns off while one still trains.
- A run that fails on one node is failed for all: the object abort-<number> ends its containers, and all go on
  with the next one. The object abort ends the attempt.
- A machine that vanished says nothing. Each node listens to the next one, in a ring, from when all have left
  ready/0/<their address>; one that has not within twelve minutes and more will not come.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from fastlaunch_train.node.aws_cli import AwsCli
from fastlaunch_train.node.commands import Clock, Stop, attempts, every
from fastlaunch_train.node.protocol import (
    ABORT,
    BLOCK,
    PEER,
    RANK_0,
    SPOT,
    STOP,
    WATCHDOG,
    ready_name,
    run_abort_name,
)

#: Of the first run's rendezvous less one; each run has its own.
PORT = 29500
#: The discard port: open or closed, the kernel of a machine that is there answers.
_ANY_PORT = 9
_HERE, _SKIP = "here", "skip"


class AbortWatch:
    """Sees what the launcher, or another node, asks for by objects below `output`."""

    def __init__(self, cli: AwsCli, output: str, stop: Stop, say: Callable[[str], None]) -> None:
        self._cli = cli
        self._output = output
        self._stop = stop
        self._say = say
        #: Numbers of the runs that have failed on some node.
        self.failed_runs: set[int] = set()
        #: There is nothing left to save together: a peer can no longer train.
        self.is_hasty = False
        #: This node has asked all others to stop: what stands there may be its own word.
        self.is_own = False

    def look(self) -> bool:
        """Note what is asked for; return whether that could be seen."""
        names = self._cli.names(f"{self._output}/{ABORT}")
        if names is None:
            return False
        for name in names:
            number = name[len(ABORT) + 1 :]
            if number.isdigit():
                self.failed_runs.add(int(number))
        if ABORT not in names or self.is_own:
            return True
        why = self._cli.read(f"{self._output}/{ABORT}")
        if why is None:
            return False
        if not self.is_own:
            self._say(f"told: {why.strip()}")
            self.is_hasty = self.is_hasty or why.startswith("failed")
            self._stop.ask(reason_of(why))
        return True


def reason_of(abort: str) -> str:
    """Return why a node stops that finds this in the object abort, which a node or the launcher has left."""
    return PEER if abort.split()[:1] in ([SPOT], [WATCHDOG], [BLOCK], ["failed"]) else STOP


class Peers:
    """The other nodes. address: this one's. state: a folder for what is about to be sent."""

    def __init__(
        self,
        watch: AbortWatch,
        cli: AwsCli,
        output: str,
        *,
        rank: int,
        address: str,
        num_nodes: int,
        state: Path,
        stop: Stop,
        clock: Clock,
        say: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self.watch = watch
        self._cli = cli
        self._output = output
        self._rank = rank
        self._address = address
        self._num_nodes = num_nodes
        self._state = state
        self._stop = stop
        self._clock = clock
        self._say = say
        self._fail = fail
        self._lock = threading.Lock()
        self.master = ""
        #: All nodes have done their last run.
        self.is_done = False

    def begin(self) -> None:
        """Say where this node is, if it is rank 0, and begin to listen to another one."""
        if self._rank == 0:
            where = json.dumps({"address": self._address, "port": PORT}) + "\n"
            attempts(5, 5, lambda: self._put(RANK_0, where), clock=self._clock)
        threading.Thread(target=self._listen, name="peer", daemon=True).start()

    def find_master(self) -> bool:
        """Look where rank 0 is; return whether that is known."""
        try:
            self.master = str(json.loads(self._cli.read(f"{self._output}/{RANK_0}") or "")["address"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def alarm(self, why: str) -> None:
        """Ask all others to stop, before this node does; nothing if anybody has asked for it."""
        with self._lock:
            if self._stop.reason or self.watch.is_own:
                return
            self.watch.is_own = True
        text = f"{why} ({socket.gethostname()})\n"
        if not self._put(ABORT, text, limit_s=10):
            again = threading.Thread(
                target=attempts,
                args=(9, 9, lambda: self._put(ABORT, text)),
                kwargs={"clock": self._clock},
                daemon=True,
            )
            again.start()

    def meet(self, step: str, *, is_skipped: bool = False) -> bool | None:
        """Wait until all nodes have come to `step`; None if they do not, or this one is to stop.

        Returns whether the run is to be skipped, which rank 0 decides for all.
        """
        word = (_SKIP if is_skipped else _HERE) + "\n"
        is_there = attempts(5, 5, lambda: self._put(ready_name(step, self._address), word), clock=self._clock)
        cut = self._stop.event
        if is_there and attempts(600, 2, lambda: self._are_all_at(step), clock=self._clock, cut=cut):
            if self._rank == 0 or step == "end":
                return is_skipped
            uri = f"{self._output}/{ready_name(step, self.master)}"
            for _ in range(5):
                said = self._cli.read(uri)
                if said is not None:
                    return said.strip() == _SKIP
                self._clock.sleep(5)
        if not self._stop.event.is_set():
            self._fail("peers")
        return None

    def tell_failed(self, number: int) -> None:
        """Tell all others that run `number` has failed here."""
        attempts(5, 2, lambda: self._put(run_abort_name(number), _HERE + "\n"), clock=self._clock)

    def _are_all_at(self, step: str) -> bool:
        return len(self._cli.names(f"{self._output}/{ready_name(step)}") or ()) == self._num_nodes

    def _put(self, name: str, text: str, limit_s: float = 20) -> bool:
        path = self._state / name.replace("/", "-")
        path.write_text(text)
        return self._cli.copy(path, f"{self._output}/{name}", limit_s=limit_s)

    # Listening

    def _listen(self) -> None:
        while not self._put(ready_name("0", self._address), _HERE + "\n"):
            if self._clock.wait(self._stop.event, 5):
                return
        found: list[str] = []

        def ring() -> bool:
            names = self._cli.names(f"{self._output}/{ready_name('0')}") or []
            found[:] = names
            return len(names) == self._num_nodes

        if not attempts(36, 20, ring, clock=self._clock, cut=self._stop.event):
            if not self._stop.event.is_set():
                self._fail("peers")
            return
        peer = next_in_ring(found, self._address)
        num_silent: list[int] = []

        def listen() -> bool:
            if self._stop.reason:
                return True
            if answers(peer):
                num_silent[:] = [0]
            elif num_silent:
                num_silent[0] += 1
            return num_silent == [3]

        every(2, listen, name="peer", clock=self._clock, say=self._say).join()
        if self._stop.reason or self.is_done:
            return
        self.watch.is_hasty = True
        self._say(f"{peer} does not answer")
        self.alarm(f"failed {peer} does not answer")
        self._stop.ask(PEER)


def next_in_ring(addresses: list[str], own: str) -> str:
    """Return the address after `own`; the first one after the last."""
    ordered = sorted(addresses)
    return ordered[(ordered.index(own) + 1) % len(ordered)]


def answers(address: str, port: int = _ANY_PORT) -> bool:
    """Return whether a machine is there: its kernel answers, with an open port or a closed one."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
