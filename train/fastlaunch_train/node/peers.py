"""Keeps several EC2 nodes in step: they do the same runs together and communicate through S3.

- Rank 0's address is the object rank0. Before a run, and after the last one, every node leaves an object
  ready/<number of the run>/<its address> and waits until every node has, so that no node is in
  another run than its peers, or turns off while one still trains.
- A run that fails on one node is failed for all: the object abort-<number> ends its containers, and all go on
  with the next one. The object abort ends the attempt; the launcher leaves it, too.
- A machine that vanished says nothing. Each node listens to the next one, in a ring, as soon as all have left
  ready/0/<their address>; one that has not done so within some twelve minutes will not come.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from fastlaunch_train.node.aws_cli import AwsCli
from fastlaunch_train.node.commands import Clock, Stop
from fastlaunch_train.node.protocol import (
    ABORT,
    BLOCK,
    PEER,
    RANK_0,
    SPOT,
    STOP,
    WATCHDOG,
    NodeProgram,
    ready_name,
    run_abort_name,
)

#: One less than the port of the first run's rendezvous; each run has its own.
PORT = 29500
#: The discard port: whether it is open or closed, the kernel of a running machine answers.
_ANY_PORT = 9
_HERE, _SKIP = "here", "skip"


class Peers:
    """The requests of the launcher, and of the attempt's other nodes, if there are any.

    address: this node's. state: a folder for what is about to be sent. fail: called with the reason why this
    node can do nothing more.
    """

    def __init__(
        self,
        program: NodeProgram,
        cli: AwsCli,
        *,
        rank: int,
        address: str,
        state: Path,
        stop: Stop,
        clock: Clock,
        say: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self._num_nodes = program.num_nodes
        self._output = program.output
        self._cli = cli
        self._rank = rank
        self._address = address
        self._state = state
        self._stop = stop
        self._clock = clock
        self._say = say
        self._fail = fail
        self._lock = threading.Lock()
        #: Whether this node has asked all others to stop; then the object abort may be its own.
        self._has_alarmed = False
        #: Whether all nodes have done their last run.
        self._is_done = False
        self.is_alone = program.num_nodes == 1
        self.master = ""
        #: The runs that have failed on any node, `1`, and the starts of runs, `1.0`.
        self.failed: set[str] = set()
        #: Whether no checkpoint can be saved any more, because a peer can no longer train.
        self.is_hasty = False

    def begin(self) -> None:
        """Publish this node's address, if it is rank 0, and begin to listen to another node."""
        if self.is_alone:
            return
        if self._rank == 0:
            where = json.dumps({"address": self._address, "port": PORT})
            self._clock.attempts(5, 5, lambda: self._put(RANK_0, where))
        threading.Thread(target=self._listen, name="peer", daemon=True).start()

    def look(self) -> bool:
        """Note the requests; return whether they could be read."""
        names = self._cli.names(f"{self._output}/{ABORT}")
        if names is None:
            return False
        self.failed.update(name[len(ABORT) + 1 :] for name in names if name != ABORT)
        if ABORT not in names or self._has_alarmed:
            return True
        why = self._cli.read(f"{self._output}/{ABORT}")
        if why is None:
            return False
        if not self._has_alarmed:
            self._say(f"asked to stop: {why.strip()}")
            self.is_hasty = self.is_hasty or why.startswith("failed")
            self._stop.ask(reason_of(why))
        return True

    def find_master(self) -> bool:
        """Look up rank 0's address; return whether it is known, or this node is alone."""
        if self.is_alone:
            return True
        try:
            self.master = str(json.loads(self._cli.read(f"{self._output}/{RANK_0}") or "")["address"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def alarm(self, why: str) -> None:
        """Ask all others to stop before this node does, unless a stop has been requested already."""
        with self._lock:
            if self.is_alone or self._is_done or self._stop.reason or self._has_alarmed:
                return
            self._has_alarmed = True
        text = f"{why} ({socket.gethostname()})"
        if not self._put(ABORT, text, limit_s=10):
            again = threading.Thread(
                target=lambda: self._clock.attempts(9, 9, lambda: self._put(ABORT, text)), daemon=True
            )
            again.start()

    def meet(self, step: str, *, is_skipped: bool = False) -> bool | None:
        """Wait until all nodes have reached `step`; return None if they do not, or this one has to stop.

        Otherwise return whether to skip the run, which rank 0 decides for all.
        """
        if self.is_alone:
            return is_skipped
        word = _SKIP if is_skipped else _HERE
        is_there = self._clock.attempts(5, 5, lambda: self._put(ready_name(step, self._address), word))
        cut = self._stop.event
        if is_there and self._clock.attempts(600, 2, lambda: self._all_at(step), cut=cut):
            uri = f"{self._output}/{ready_name(step, self.master)}"
            first = word if self._rank == 0 else self._clock.attempts(5, 5, lambda: self._cli.read(uri))
            if first:
                return first.strip() == _SKIP
        if not self._stop.event.is_set():
            self._fail("peers")
        return None

    def part(self) -> None:
        """Wait until all nodes have done their last run."""
        self._is_done = self.meet("end") is not None

    def tell_failed(self, step: str) -> None:
        """Tell all others that a run, `1`, or a start of it, `1.0`, has failed here."""
        if not self.is_alone:
            self._clock.attempts(5, 2, lambda: self._put(run_abort_name(step), _HERE))

    def is_begun_again(self, number: int, step: str) -> bool:
        """Wait for rank 0's word; return whether it begins the run once more, as `step`."""
        begun = f"{self._output}/{ready_name(step, self.master)}"

        def look() -> bool:
            return str(number) in self.failed or bool(self._cli.names(begun))

        is_known = self._clock.attempts(600, 2, look, cut=self._stop.event)
        return bool(is_known) and str(number) not in self.failed

    def _all_at(self, step: str) -> list[str] | None:
        """Return the addresses of all nodes once all have reached `step`; None before."""
        names = self._cli.names(f"{self._output}/{ready_name(step)}") or []
        return names if len(names) == self._num_nodes else None

    def _put(self, name: str, text: str, limit_s: float = 20) -> bool:
        path = self._state / name.replace("/", "-")
        path.write_text(text + "\n")
        return self._cli.copy(path, f"{self._output}/{name}", limit_s=limit_s)

    def _listen(self) -> None:
        cut = self._stop.event
        while not self._put(ready_name("0", self._address), _HERE):
            if self._clock.wait(5, cut):
                return
        addresses = self._clock.attempts(36, 20, lambda: self._all_at("0"), cut=cut)
        if not addresses:
            if not cut.is_set():
                self._fail("peers")
            return
        peer = next_in_ring(addresses, self._address)
        # None until it has answered once.
        num_silent: int | None = None
        while num_silent != 3:
            if self._stop.reason or self._is_done:
                return
            if answers(peer):
                num_silent = 0
            elif num_silent is not None:
                num_silent += 1
            self._clock.wait(2)
        self.is_hasty = True
        self._say(f"{peer} does not answer")
        self.alarm(f"failed {peer} does not answer")
        self._stop.ask(PEER)


def reason_of(abort: str) -> str:
    """Return why a node stops, by the text of the object abort, which a node or the launcher has left."""
    return PEER if abort.split()[:1] in ([SPOT], [WATCHDOG], [BLOCK], ["failed"]) else STOP


def next_in_ring(addresses: Sequence[str], address: str) -> str:
    """Return the address that follows `address` in order; the first follows the last."""
    ordered = sorted(addresses)
    return ordered[(ordered.index(address) + 1) % len(ordered)]


def answers(address: str, port: int = _ANY_PORT) -> bool:
    """Return whether a machine is running: its kernel answers, whether the port is open or closed."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
