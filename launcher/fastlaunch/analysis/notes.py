"""A row of several commits of the training code: said, with the speed of each where these differ."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from fastlaunch.analysis.pooling import STEP, Candidate, Pool, log_time_of, samples_per_step
from fastlaunch.analysis.statistics import LEVEL, Arm, p_value, pooled_spread, uncertainty

#: What the note begins with; any row may have it, the baseline too.
OF_COMMITS = "runs of several commits make one row: "
#: What it says where the row's mean is that of several speeds.
FURTHER_APART = ", further apart than one commit's runs"
#: As git shortens one.
_SHORT = 7
_MOST_SHOWN = 4
_COMMIT = re.compile(r"[0-9a-f]{7,64}(-dirty)?")

_Groups = Mapping[str | None, Sequence[Candidate]]


def commit_notes(pool: Pool) -> Iterator[str]:
    """Which commits the runs of a row are of, how many of each, and how to compare those of one alone.

    And the mean speed of each, where two are further apart than runs of one commit lie.
    """
    groups: dict[str | None, list[Candidate]] = {}
    for candidate in pool.all_runs:
        groups.setdefault(candidate.summary.commit, []).append(candidate)
    if len(groups) < 2:
        return
    largest = sorted(groups, key=lambda commit: (commit is None, -len(groups[commit])))
    shown = largest[:_MOST_SHOWN]
    differ = _speeds_differ(pool, groups)
    parts = [_named(commit, groups, _rate(pool, groups[commit]) if differ else None) for commit in shown]
    if len(groups) > len(shown):
        parts.append(f"and {len(groups) - len(shown)} more")
    text = f"{OF_COMMITS}{', '.join(parts)}{FURTHER_APART if differ else ''}"
    if (glob := _glob(largest[0], groups)) is not None:
        text += f"; for one alone, run fastlaunch compare {shlex.quote(f'commit={glob}')}"
    yield text


def other_commits(pool: Pool, base: Pool) -> Iterator[str]:
    """That no commit has runs both in a row and in its baseline, where those of both are known."""
    ours, theirs = (
        dict.fromkeys(commit for run in item.all_runs if (commit := run.summary.commit))
        for item in (pool, base)
    )
    if ours and theirs and not ours.keys() & theirs.keys():
        both = {*ours, *theirs}
        row, baseline = (" and ".join(_short(commit, both) for commit in of) for of in (ours, theirs))
        yield f"of another commit than the baseline: {row} against {baseline}"


def _speeds_differ(pool: Pool, groups: _Groups) -> bool:
    """Whether two commits are further apart than the spread of the row's runs within a commit allows."""
    if not pool.is_steady or pool.measure != STEP:
        return False
    times = [_log_times(runs) for runs in groups.values()]
    spread = pooled_spread(times)
    arms = [Arm(log_time=sum(of_one) / len(of_one), num_runs=len(of_one)) for of_one in times]
    pairs = list(combinations(arms, 2))
    return any(
        p_value(one.log_time - other.log_time, uncertainty([one, other], spread)) < LEVEL / len(pairs)
        for one, other in pairs
    )


def _log_times(runs: Sequence[Candidate]) -> list[float]:
    return [time for run in runs if (time := log_time_of(run.summary)[1]) is not None]


def _rate(pool: Pool, runs: Sequence[Candidate]) -> str:
    """`825 images/s`."""
    times = _log_times(runs)
    # Held back from overflowing: absurd numbers in a foreign file are no bug of ours.
    rate = samples_per_step(pool) * math.exp(min(-sum(times) / len(times), 700.0))
    number = f"{rate:,.0f}" if 100 <= rate < 1e12 else f"{rate:.3g}"
    return f"{number} {pool.first.sample_unit}/s"


def _named(commit: str | None, groups: _Groups, rate: str | None) -> str:
    """`76689a9 (2 runs, 825 images/s)`."""
    number = len(groups[commit])
    facts = [f"{number} run{'' if number == 1 else 's'}", *([rate] if rate else [])]
    return f"{_short(commit, groups)} ({', '.join(facts)})"


def _short(commit: str | None, known: Iterable[str | None]) -> str:
    if commit is None:
        return "unknown"
    # What was changed since a commit is no part of its hash, and what a foreign file calls one may be long.
    name, dash, state = commit.partition("-")
    text = f"{name[: _length(commit, known)]}{dash}{state[:20]}"
    return "".join(character if character.isprintable() else "?" for character in text)


def _length(commit: str, known: Iterable[str | None]) -> int:
    """So many of its characters as tell it from the others known, but for what is behind a dash."""
    names = {other.partition("-")[0] for other in known if other} - {commit.partition("-")[0]}
    length = _SHORT
    while any(other[:length] == commit[:length] for other in names) and length < len(commit):
        length += 1
    return length


def _glob(commit: str | None, groups: _Groups) -> str | None:
    """A pattern that fits this commit of the row's alone; None for one that is not known, or is no hash."""
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    start = commit[: _length(commit, groups)]
    return commit if any(o and o != commit and o.startswith(start) for o in groups) else f"{start}*"
