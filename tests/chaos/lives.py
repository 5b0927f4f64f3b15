"""What a server starts in a trial, each living its life in a thread: which one is drawn from the seed."""

import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moto_server import backend

from fastlaunch_train.node.protocol import NodeProgram, program_from_json

_BETWEEN_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Output:
    """An attempt's output, written straight into the server's S3: the network of the launcher is at fault.

    tags: of its machine or job.
    """

    tags: Mapping[str, str]

    def put(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        """Store an object: bytes, or a report, which gets the token."""
        bucket, prefix = self._place
        if not isinstance(content, bytes):
            token = f"{self.tags['fastlaunch:run']}-a{self.tags['fastlaunch:attempt']}"
            content = json.dumps({"schema": 1, "token": token, **content}).encode()
        backend("s3", "aws").put_object(bucket, f"{prefix}/{name}", content)

    def get(self, name: str) -> str:
        """Return an object's text; empty if there is none."""
        bucket, prefix = self._place
        stored = backend("s3", "aws").buckets[bucket].keys.get(f"{prefix}/{name}")
        return stored.value.decode() if stored else ""

    def run_ids(self) -> list[str]:
        """The runs to do, as the stored list names them."""
        return [run.run_id for run in self.program().runs]

    def program(self) -> NodeProgram:
        """The stored list of runs. Raises ValueError if none is there."""
        bucket, prefix = self._place
        (key,) = [
            key for key in backend("s3", "aws").buckets[bucket].keys if key.startswith(f"{prefix}/runs-")
        ]
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
