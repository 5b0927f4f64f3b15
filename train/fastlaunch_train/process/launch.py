"""What the process that starts a training tells it through environment variables. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch_train.recipes.recipe import RecipeError

#: Seconds to end in by default; plain torchrun kills its workers after 30.
DEFAULT_STOP_GRACE_S = 25.0


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How this process was started."""

    #: The least number of this attempt, from 1: on a new machine it finds no records of those before it.
    attempt: int = 1
    stop_grace_s: float = DEFAULT_STOP_GRACE_S  #: how long a rank may take to end after a signal
    fabric: str = "any"  #: between nodes; `efa`: nothing else will do
    print_metrics: bool = False  #: whether rank 0 prints a line for programs about once a second


def read_launch_settings(environment: Mapping[str, str]) -> LaunchSettings:
    """Read FASTLAUNCH_ATTEMPT, _STOP_GRACE_S, _FABRIC (`efa` or `any`) and _PRINT_METRICS (1).

    An empty variable counts as unset. Raises RecipeError for a value that means nothing.
    """
    attempt = environment.get("FASTLAUNCH_ATTEMPT") or "1"
    grace = environment.get("FASTLAUNCH_STOP_GRACE_S") or str(DEFAULT_STOP_GRACE_S)
    return LaunchSettings(
        attempt=_attempt(attempt),
        stop_grace_s=_seconds(grace),
        fabric=_word("FASTLAUNCH_FABRIC", environment, ("any", "efa")),
        print_metrics=_word("FASTLAUNCH_PRINT_METRICS", environment, ("0", "1")) == "1",
    )


def _word(name: str, environment: Mapping[str, str], words: tuple[str, ...]) -> str:
    """Return what the variable says; the first of `words` if it is unset."""
    text = environment.get(name) or words[0]
    if text not in words:
        raise RecipeError(f"{name} is {text!r}, not {' or '.join(words)}", "unset it, or take one of these")
    return text


def _attempt(text: str) -> int:
    # More digits than this are a mistake, and would make a file name that no disk takes.
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= 1):
        raise RecipeError(f"FASTLAUNCH_ATTEMPT is {text!r}, not a whole number from 1", "unset it, or count")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise RecipeError(
            f"FASTLAUNCH_STOP_GRACE_S is {text!r}, not a number of seconds up to a day",
            f"unset it for {DEFAULT_STOP_GRACE_S:g} s, or give a number",
        )
    return seconds
