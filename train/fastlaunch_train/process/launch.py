"""What whoever starts the training says about its circumstances, through environment variables. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch_train.recipes.recipes import RecipeError

#: Seconds to end in where nobody says otherwise; under the 30 after which plain torchrun kills its workers.
DEFAULT_STOP_GRACE_S = 25.0


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Circumstances of this process.

    attempt: least number of this attempt, from 1; attempts on new machines find no records of those before.
    stop_grace_s: seconds that a rank may take to end after it was asked to.
    fabric: of several nodes: `efa` where nothing else will do, `any` for whatever there is.
    print_metrics: whether rank 0 prints a line for programs about once a second.
    """

    attempt: int = 1
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    fabric: str = "any"
    print_metrics: bool = False


def read_launched(environment: Mapping[str, str]) -> Launched:
    """The circumstances by FASTLAUNCH_ATTEMPT, FASTLAUNCH_STOP_GRACE_S, FASTLAUNCH_FABRIC (`efa` or `any`)
    and FASTLAUNCH_PRINT_METRICS (1); empty is as if not set.

    Raises RecipeError for a value that means nothing.
    """
    attempt = environment.get("FASTLAUNCH_ATTEMPT") or "1"
    grace = environment.get("FASTLAUNCH_STOP_GRACE_S") or str(DEFAULT_STOP_GRACE_S)
    return Launched(
        attempt=_attempt(attempt),
        stop_grace_s=_seconds(grace),
        fabric=_one_of("FASTLAUNCH_FABRIC", environment, ("any", "efa")),
        print_metrics=_one_of("FASTLAUNCH_PRINT_METRICS", environment, ("0", "1")) == "1",
    )


def _one_of(name: str, environment: Mapping[str, str], words: tuple[str, ...]) -> str:
    """What the variable says; the first of `words` if that is nothing."""
    text = environment.get(name) or words[0]
    if text not in words:
        raise RecipeError(f"{name} is {text!r}, not {' or '.join(words)}", "unset it, or give one of them")
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
