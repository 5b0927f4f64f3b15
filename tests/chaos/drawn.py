"""What a trial draws from its seed: how the service fails, and when the launcher is killed."""

import random
from dataclasses import dataclass
from enum import StrEnum

from faulty_proxy import Fault
from network import Faults, Moment
from submissions import launch_of


class View(StrEnum):
    """What a command sees: all that lives, none of it, or another account, of which it has the login."""

    TRUE = "true"
    STALE = "stale"
    STRANGE = "strange"


_FAULTS = (Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.THROTTLE)


@dataclass(frozen=True, kw_only=True)
class Death:
    """When the launcher is killed: at a commit, at a moment of the network, or after seconds; one of them."""

    commit: int | None = None
    before_commit: bool = False
    moment: Moment | None = None
    after_s: float = 2.0


def draw_faults(rng: random.Random, submission: str) -> Faults:
    """Mostly a service that is nearly well, at times one that is hardly there."""

    def often(most: float) -> float:
        return most * rng.random() if rng.random() < 0.5 else 0.0

    return Faults(
        refused=often(0.2),
        throttled=often(0.3),
        unsent=often(0.2),
        lost=often(0.2),
        lost_launches=rng.choice((0.0, 0.0, 0.5, 1.0)),
        no_capacity=rng.choice((0.0, 0.0, 0.4)),
        hidden=rng.choice((0, 0, 3, 10)),
        expires_at=rng.randint(1, 40) if rng.random() < 0.15 else None,
        timers=rng.choice((None, None, *_FAULTS)) if "detached" in submission else None,
        stale=_draw_stale(rng),
    )


def _draw_stale(rng: random.Random) -> tuple[int, int]:
    """Looks that show nothing: for a while, from the first one or in the middle, or none."""
    first = rng.choice((1, rng.randint(2, 12)))
    return rng.choice(((0, 0), (first, first + rng.choice((1, 3, 30)))))


def draw_view(rng: random.Random) -> View:
    """What somebody sees who types a command that looks: mostly what is there."""
    return rng.choice((View.TRUE, View.TRUE, View.TRUE, View.STALE, View.STRANGE))


def draw_death(rng: random.Random, submission: str) -> Death:
    launch = launch_of(submission)
    kinds = ["commit", "commit", "request", "launch", "time"]
    kind = rng.choice([*kinds, "timer", "timer"] if "detached" in submission else kinds)
    if kind == "commit":
        return Death(commit=rng.randint(1, 14), before_commit=rng.random() < 0.5)
    if kind == "request":
        return Death(moment=Moment(n=rng.randint(1, 40), after=rng.random() < 0.5))
    if kind == "launch":
        return Death(moment=Moment(n=rng.randint(1, 3), action=launch, after=rng.random() < 0.7))
    if kind == "timer":
        return Death(moment=Moment(n=rng.randint(1, 2), action="CreateSchedule", after=rng.random() < 0.5))
    return Death(after_s=rng.choice((rng.uniform(0.02, 1.5), 5.0)))
