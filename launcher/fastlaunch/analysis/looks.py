"""Group sequential looks at runs: when they happen, how much of the 5% each spends, and what they settle.

A plan of at most M rounds has looks after rounds 3, 4, ..., M. A row's verdict is final once a look reaches
it, unless later runs contradict it: then it is unresolved. Nothing is stored; the looks are replayed from
the rounds of the runs.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.differences import Block, Differences, RunTime, blocks_of
from fastlaunch.analysis.statistics import (
    BETTER,
    LEVEL,
    TIE,
    TIE_HIGH,
    TIE_LOW,
    UNRESOLVED,
    WORSE,
    Difference,
    holm_levels,
)
from fastlaunch.core.ownership import FIRST_LOOK

#: The level of each look, for 1, 2, ... planned looks, such that at most 5% of tables are wrong;
#: tests/benchmarks/verdicts.py --looks prints the error rates.
_PLANNED = (0.05, 0.027, 0.02, 0.017, 0.014, 0.014, 0.0125, 0.0115, 0.0108, 0.01)
#: The level that the j-th added session may spend: 5%, then 1.2%, 0.6%, 0.3%, ...
_ADDED = (1.0, 0.24, 0.12, 0.06, 0.03, 0.016)


@dataclass(frozen=True, kw_only=True)
class Looked:
    """The result of the looks at a row."""

    difference: Difference  # by all runs, or by the runs that settled it if all runs would not
    level: float  # Holm's
    share: float  # of the 5%, from which the level follows
    kind: str  # better, worse, tie or unresolved
    next_level: float  # of the look at another session
    #: The verdict of the first runs, if all runs together say the opposite; the row is then unresolved.
    contradicted: str | None = None
    round: int | None  # the plan's round that settled it, or the last with a look; None without a plan
    max_rounds: int | None


def look_through(
    runs: Sequence[RunTime], rows: Collection[int], base: int, usd: Mapping[int, float] | None = None
) -> dict[int, Looked]:
    """Return the result of all looks at the runs, by row, without rows that cannot be tested.

    base: the row to compare with. usd: as for `Differences`.
    """
    looked: dict[int, Looked] = {}
    for shown, blocks, number, max_rounds in _looks(runs) if rows else ():
        differences = Differences(shown, usd, blocks)
        looked = _look(looked, shown, differences, rows, base, round=number, max_rounds=max_rounds)
    return looked


def look_again(
    before: dict[int, Looked],
    runs: Sequence[RunTime],
    rows: Collection[int],
    base: int,
    usd: Mapping[int, float] | None = None,
    *,
    round: int | None = None,
    max_rounds: int | None = None,
) -> dict[int, Looked]:
    """Return the results after one more look, at all of `runs`, given the earlier results."""
    return _look(before, runs, Differences(runs, usd), rows, base, round=round, max_rounds=max_rounds)


def _look(
    before: dict[int, Looked],
    runs: Sequence[RunTime],
    differences: Differences,
    rows: Collection[int],
    base: int,
    *,
    round: int | None,
    max_rounds: int | None,
) -> dict[int, Looked]:
    present = {run.row for run in runs}
    candidates = present.intersection(rows) if base in present else ()
    tested = {at: ahead for at in candidates if (ahead := differences.between(at, base))}
    settled = {at: seen for at, seen in before.items() if seen.kind != UNRESOLVED}
    # Holm's count keeps ties, which spend nothing more, and drops rows that differ.
    counted = [at for at in tested if at not in settled or settled[at].kind not in (BETTER, WORSE)]
    sessions = _sessions(runs)
    shares = {at: _share(sessions[at]) for at in tested}
    p_values = [1.0 if at in settled else tested[at].p_differs() for at in counted]
    levels = dict(zip(counted, look_levels([shares[at] for at in counted], p_values), strict=True))
    after = dict(before)
    for at, difference in tested.items():
        seen = settled.get(at)
        level = levels[at] if seen is None else seen.level * shares[at] / seen.share
        if seen is None:
            kind = difference.verdict(level)
            contradicted = before[at].contradicted if at in before else None
        elif _agrees(seen.kind, difference, level):
            kind, contradicted = seen.kind, seen.contradicted
        elif _contradicts(seen.kind, difference):
            kind, contradicted = UNRESOLVED, seen.kind
        else:
            continue
        after[at] = Looked(
            difference=difference,
            level=level,
            share=shares[at],
            kind=kind,
            next_level=level / shares[at] * share_of_session(len(sessions[at])),
            contradicted=contradicted,
            round=seen.round if seen else round,
            max_rounds=seen.max_rounds if seen else max_rounds,
        )
    return after


def _agrees(kind: str, difference: Difference, level: float) -> bool:
    """Return whether the difference still supports the verdict, even if another would be sharper."""
    if kind == TIE:
        return difference.is_tie(level)
    p_value = difference.p_above(0.0) if kind == BETTER else difference.p_below(0.0)
    return p_value < level / 2


def _contradicts(kind: str, difference: Difference) -> bool:
    """Return whether the difference's value alone supports another verdict."""
    value = difference.value
    if kind == TIE:
        return not math.log(TIE_LOW) <= value <= math.log(TIE_HIGH)
    return value <= 0 if kind == BETTER else value >= 0


def look_levels(shares: Sequence[float], p_values: Sequence[float]) -> list[float]:
    """Return Holm's level of each p-value, for rows with these shares of the 5%."""
    levels = holm_levels([p / share for p, share in zip(p_values, shares, strict=True)])
    return [level * share for level, share in zip(levels, shares, strict=True)]


def share_of_session(num_before: int) -> float:
    """Return a session's share of the 5%, by the number of sessions before it."""
    return _ADDED[min(num_before, len(_ADDED) - 1)]


def share_of_plan(max_rounds: int) -> float:
    """Return the share of its session that each look at a plan of `max_rounds` may spend."""
    return _PLANNED[min(max(1, max_rounds - FIRST_LOOK + 1), len(_PLANNED)) - 1] / LEVEL


def share_of_both(runs: Iterable[RunTime], *rows: int) -> float:
    """Return the share of the 5% for a verdict between rows, given all looks at them."""
    sessions = _sessions(runs)
    return min(_share(sessions[row]) for row in rows)


def _sessions(runs: Iterable[RunTime]) -> Mapping[int, Mapping[str | None, int | None]]:
    """Return the most rounds of each session by row; None for a session without a plan."""
    sessions: dict[int, dict[str | None, int | None]] = defaultdict(dict)
    for run in runs:
        sessions[run.row][run.session] = run.max_rounds
    return sessions


def _share(sessions: Mapping[str | None, int | None]) -> float:
    """Return the share of the newest look at a row: less for each session after the first."""
    share = share_of_session(max(0, len(sessions) - 1))
    max_rounds = list(sessions.values())[-1] if sessions else None
    return share * (share_of_plan(max_rounds) if max_rounds else 1.0)


def _looks(
    runs: Sequence[RunTime],
) -> Iterator[tuple[Sequence[RunTime], Sequence[Block], int | None, int | None]]:
    """Yield the looks: after each session, and after rounds 3, 4, ... of one with a plan.

    A look is its runs and their blocks, the plan's round, and the most rounds of the plan.
    """
    blocks = [*blocks_of(runs).values()]
    plans = {run.session: run.max_rounds for run in runs if run.session is not None}
    if not plans:
        yield runs, blocks, None, None
    seen: set[str | None] = {None}
    for session, max_rounds in plans.items():
        earlier = [run for run in runs if run.session in seen]
        of_session = [run for run in runs if run.session == session]
        earlier_blocks = [block for block in blocks if block.first.session in seen]
        session_blocks = [block for block in blocks if block.first.session == session]
        seen.add(session)
        last = max((run.round or 0 for run in of_session), default=0)
        rounds = range(min(FIRST_LOOK, last), last + 1) if max_rounds else (None,)
        for number in rounds:
            shown = [run for run in of_session if number is None or (run.round or 0) <= number]
            shown_blocks = [
                block for block in session_blocks if number is None or (block.first.round or 0) <= number
            ]
            yield (*earlier, *shown), (*earlier_blocks, *shown_blocks), number, max_rounds
