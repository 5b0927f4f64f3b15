"""What a server starts in a trial, each living its life in a thread: which one is drawn from the seed."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_cloud import listed_runs
from moto_server import backend

from fastlaunch_train.node.protocol import NodeProgram, program_from_json

_BETWEEN_S = 0.02


class Objects:
    """The server's S3 by bucket and key, without the network of the launcher, which is at fault."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        buckets = list(backend("s3", "aws").buckets.values())
        return iter([(bucket.name, key) for bucket in buckets for key in list(bucket.keys)])

    def __getitem__(self, place: tuple[str, str]) -> bytes:
        bucket, key = place
        stored: bytes = backend("s3", "aws").buckets[bucket].keys[key].value
        return stored

    def __setitem__(self, place: tuple[str, str], body: bytes) -> None:
        backend("s3", "aws").put_object(*place, body)


@dataclass(frozen=True, kw_only=True)
class Output:
    """An attempt's output. tags: of its machine or job."""

    tags: Mapping[str, str]

    @property
    def token(self) -> str:
        return f"{self.tags['fastlaunch:run']}-a{self.tags['fastlaunch:attempt']}"

    def put(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        """Store an object: bytes, or a report, which gets the token."""
        bucket, prefix = self._place
        if not isinstance(content, bytes):
            content = json.dumps({"schema": 1, "token": self.token, **content}).encode()
        Objects()[bucket, f"{prefix}/{name}"] = content

    def get(self, name: str) -> str:
        """Return an object's text; empty if there is none."""
        bucket, prefix = self._place
        try:
            return Objects()[bucket, f"{prefix}/{name}"].decode()
        except KeyError:
            return ""

    def run_ids(self) -> list[str]:
        """The runs to do, as the stored list names them."""
        return listed_runs(Objects(), *self._place)

    def program(self) -> NodeProgram:
        """The stored list of runs. Raises ValueError if none is there."""
        bucket, prefix = self._place
        (key,) = [each for where, each in Objects() if where == bucket and each.startswith(f"{prefix}/runs-")]
        return program_from_json(self.get(key.removeprefix(f"{prefix}/")))

    @property
    def _place(self) -> tuple[str, str]:
        bucket, _, prefix = self.tags["fastlaunch:output"].removeprefix("s3://").partition("/")
        return bucket, prefix


@dataclass(kw_only=True)
class Lives:
    """Machines or jobs, each living its life in a thread until `freeze`.

    drawn: what may become of one, with its weight. live: the life of one, by region, name, fate, and what
    takes a while and returns whether time stands still. fates: instead of those that are drawn, by turns.
    """

    drawn: dict[str, int]
    live: Callable[[str, str, str, Callable[[], bool]], None]
    rng: random.Random
    fates: Sequence[str] = ()
    lived: dict[str, str] = field(default_factory=dict)
    _frozen: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, region: str, name: str) -> None:
        """Let it live; called by the server when it has made it."""
        (drawn,) = self.rng.choices(list(self.drawn), list(self.drawn.values()))
        fate = self.fates[len(self.lived) % len(self.fates)] if self.fates else drawn
        self.lived[name] = fate
        pace_s = _BETWEEN_S * self.rng.random()
        thread = threading.Thread(
            target=self.live, args=(region, name, fate, lambda: self._frozen.wait(pace_s)), daemon=True
        )
        thread.start()
        # One that is not started yet cannot be waited for, and this may be called while all is frozen.
        self._threads.append(thread)

    def freeze(self) -> None:
        """From here on nothing lives on, as if every timer of the node's or of SageMaker's were broken."""
        self._frozen.set()
        for thread in self._threads:
            thread.join()
