"""What a server starts in a trial, each living its life in a thread: which one is drawn from the seed."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_BETWEEN_S = 0.02


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
        self._threads.append(thread)
        thread.start()

    def freeze(self) -> None:
        """From here on nothing lives on, as if every timer of the node's or of SageMaker's were broken."""
        self._frozen.set()
        for thread in self._threads:
            thread.join()
