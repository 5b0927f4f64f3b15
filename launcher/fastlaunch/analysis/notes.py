"""Notes on rows beside their figures: waiting GPUs, several commits, several record versions."""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from statistics import median

from fastlaunch.analysis.convergence import COMPLETED, listed
from fastlaunch.analysis.differences import Differences, RunTime
from fastlaunch.analysis.pooling import (
    BARE_STEP,
    STEP,
    TOTAL,
    Group,
    MeasuredRun,
    data_of,
    log_sample_time_of,
)
from fastlaunch.analysis.statistics import LEVEL, mean_of
from fastlaunch.core.units import counted
from fastlaunch.measure.headers import changed_files
from fastlaunch.measure.summary import VERSION, RunSummary
from fastlaunch_train.records.contents import version_of

#: Length of git's short hashes.
_SHORT = 7
_MOST_SHOWN = 4
_COMMIT = re.compile(r"[0-9a-f]{7,64}(-dirty)?")
_Groups = Mapping[str | None, Sequence[MeasuredRun]]

_KINDS = {"records": "measured", "published": "published"}
#: Parts of a fingerprint that the row shows elsewhere.
_SHOWN_ELSEWHERE = ("device_name", "num_gpus_per_node", "data", VERSION)

#: Note steps on a CPU whose 95th percentile is this many times the 5th.
UNEVEN = 3.0
#: Note a GPU that runs kernels for less than this share of the time.
BUSY = 0.9


class NoteKind(StrEnum):
    """The kind of a note, for readers that select notes."""

    BAR = "bar"  # bars the row from being ranked, or would without --allow-unverified
    BATCH = "batch"  # another global batch than the baseline's
    COMMITS = "commits"  # runs of several commits make the row
    COMMITS_APART = "commits apart"  # and the commits' speeds differ by more than chance
    RUNS = "runs"  # about the row's own runs
    OTHER = "other"


class Note(str):
    """A sentence on a row, with its kind. Notes of one text are equal."""

    kind: NoteKind

    def __new__(cls, text: str, kind: NoteKind = NoteKind.OTHER) -> "Note":
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    @classmethod
    def of(cls, text: str) -> "Note":
        """Return the text as a note; a note stays what it is."""
        return text if isinstance(text, Note) else cls(text)

    @property
    def is_of_runs(self) -> bool:
        """Whether it is about the row's own runs, so that the baseline may have it too."""
        return self.kind in (NoteKind.COMMITS, NoteKind.COMMITS_APART, NoteKind.RUNS)


def schema_warnings(groups: Sequence[Group]) -> Iterator[str]:
    """Yield mixed record or recipe schemas, within a row and between rows of one workload."""
    for what in ("record", "recipe"):
        recipes: dict[str, list[str]] = {}
        for row in groups:
            schemas = _schemas(row, what)
            if len(schemas) > 1:
                yield f"{row.setup.recipe}: runs of {what} schema {listed(schemas)} make one row"
            for schema in schemas:
                recipes.setdefault(schema, []).append(row.setup.recipe)
        if len(recipes) > 1:
            sides = [f"{schema} ({', '.join(dict.fromkeys(names))})" for schema, names in recipes.items()]
            yield f"{groups[0].setup.workload}: rows of {what} schema {listed(sides)} are compared"


def script_warnings(groups: Sequence[Group]) -> Iterator[str]:
    """Yield how a script's rows are compared, and what is unknown about them, once for all rows."""
    if not groups[0].setup.is_script:
        return
    for group in groups:
        # Ignore the folder where they were typed and the script's path from there.
        name = group.setup.workload.rpartition("/")[2]
        commands = {
            tuple(name if word.rpartition("/")[2] == name else word for word in run.script): run.script
            for run in group.runs
            if run.script
        }
        if len(commands) > 1:
            first, second, *_ = (shlex.join(words[words.index("--") + 1 :]) for words in commands.values())
            yield (
                f"{group.setup.recipe} of {group.setup.workload} is one row of {len(commands)} commands, such"
                f" as `{first}` and `{second}`, whose difference counts as noise: vary it with -L, or choose"
                " the runs of one: fastlaunch compare submission=ID"
            )
    if len(groups) < 2:
        return
    reasons = {
        BARE_STEP: "by steps, because their samples are unknown: give them with fl.step(num_samples=...)",
        TOTAL: "by wall time, because no steps are recorded: record them with fl.steps(loader)",
    }
    for measure, how in reasons.items():
        rows = [group for group in groups if group.measure == measure]
        if rows:
            which = "" if len(rows) == len(groups) else f", {listed([row.setup.recipe for row in rows])}"
            yield f"{groups[0].setup.workload}{which}: compared {how}"


def _schemas(row: Group, what: str) -> list[str]:
    """Return the schemas of the row's runs, in order; `unknown` for summaries that record none."""
    runs = [candidate.summary for candidate in row.runs]
    schemas = {getattr(run.environment, f"{what}_schema") for run in runs if run.setup.kind == "records"}
    known = [str(schema) for schema in sorted(schemas - {None})]
    return [*known, "unknown"] if None in schemas else known


def idle_note(runs: Sequence[RunSummary]) -> str | None:
    """Return a note if the GPUs of all or some of a row's runs wait much of the time; None if not known."""
    sampled = [run for run in runs if run.timing.utilization is not None]
    which = ""
    busy = mean_of([run.timing.utilization for run in sampled])
    if busy is not None and busy >= BUSY:
        slow = [run for run in sampled if (run.timing.utilization or 0.0) < BUSY]
        which, sampled = f"in {len(slow)} of {len(sampled)} runs ", slow
        busy = mean_of([run.timing.utilization for run in slow])
    if busy is None:
        return None
    fetching = mean_of([run.timing.data_wait_fraction for run in sampled]) or 0.0
    waits = f"{which}a GPU computes {math.floor(100 * busy + 1e-9)}% of the time and waits for"
    if fetching < (1 - busy) / 2:
        more = "a larger batch, or CUDA graphs where there are none,"
        return f"{waits} its host: {more} may gain more than a faster GPU"
    if runs[0].setup.data == "synthetic":
        return f"{waits} made-up data, and its host spends {fetching:.0%} of the time on writing them"
    workers = "workers" if runs[0].setup.is_script else "--num-workers"
    return (
        f"{waits} data, and its host spends {fetching:.0%} of the time on fetching them:"
        f" more {workers} or a faster disk may gain more than a faster GPU"
    )


def uneven_note(groups: Sequence[Group]) -> str | None:
    """Return a note if steps on a CPU vary several times within runs, as where threads outnumber cores."""
    spreads = []
    for group in groups:
        timings = [run.timing for run in group.summaries if run.setup.is_on_cpu]
        known = [
            timing.p95_step_time_s / timing.p5_step_time_s
            for timing in timings
            if timing.p95_step_time_s and timing.p5_step_time_s
        ]
        spreads += [median(known)] if known else []
    if max(spreads, default=1.0) < UNEVEN:
        return None
    return f"steps vary {max(spreads):.0f}x within a run: try OMP_NUM_THREADS=1"


def commit_notes(group: Group) -> Iterator[Note]:
    """Yield the commits of a row's runs, the number of runs of each, and how to compare one commit.

    Add each commit's mean speed if two are further apart than runs of one commit.
    """
    if group.setup.version:
        return  # whatever their commits, these ran the same files
    groups: dict[str | None, list[MeasuredRun]] = {}
    for candidate in group.runs:
        groups.setdefault(candidate.summary.environment.commit, []).append(candidate)
    if len(groups) < 2:
        return
    largest = sorted(groups, key=lambda commit: (commit is None, -len(groups[commit])))
    shown = largest[:_MOST_SHOWN]
    differ = _speeds_differ(group, groups)
    parts = [_named(commit, groups, _rate(group, groups[commit]) if differ else None) for commit in shown]
    if len(groups) > len(shown):
        parts.append(f"and {len(groups) - len(shown)} more")
    apart = ", further apart than one commit's runs" if differ else ""
    text = f"runs of several commits make one row: {', '.join(parts)}{apart}"
    if (glob := _glob(largest[0], groups)) is not None:
        text += f"; to compare one commit, run fastlaunch compare {shlex.quote(f'commit={glob}')}"
    yield Note(text, NoteKind.COMMITS_APART if differ else NoteKind.COMMITS)


def version_notes(row: Group, base: Group) -> Iterator[str]:
    """Yield the files and commits in which a script differs from the baseline's version."""
    if row.setup.version == base.setup.version:
        return
    ours, theirs = row.first.environment, base.first.environment
    if not ours.files or not theirs.files:
        which = "this row" if not ours.files else "the baseline"
        yield f"the version of {row.setup.workload} that {which} ran is not known"
        return
    files = changed_files(ours.files, theirs.files)
    both = {ours.commit, theirs.commit}
    commits = f", commit {_short(ours.commit, both)} against {_short(theirs.commit, both)}" * (len(both) > 1)
    yield f"another version of {row.setup.workload} than the baseline{commits}: {files} changed"


def other_commits(group: Group, base: Group) -> Iterator[str]:
    """Yield a note if no commit has runs both in a row and in its baseline, where commits are known."""
    if group.setup.version:
        return
    ours, theirs = (
        dict.fromkeys(commit for run in item.runs if (commit := run.summary.environment.commit))
        for item in (group, base)
    )
    if ours and theirs and not ours.keys() & theirs.keys():
        both = {*ours, *theirs}
        row, baseline = (" and ".join(_short(commit, both) for commit in side) for side in (ours, theirs))
        yield f"ran another commit than the baseline: {row} against {baseline}"


def _speeds_differ(group: Group, groups: _Groups) -> bool:
    """Return whether two commits differ by more than the scatter of runs within a commit explains."""
    if group.measure != STEP:
        return False
    # Treat the commits as rows on one host without known rounds.
    times = [
        RunTime(row=number, log_time=time, host=None)
        for number, runs in enumerate(groups.values())
        for time in _log_times(runs)
    ]
    differences = Differences(times)
    pairs = [differences.between(*pair) for pair in combinations(range(len(groups)), 2)]
    return any(pair and pair.p_differs() < LEVEL / len(pairs) for pair in pairs)


def _log_times(runs: Sequence[MeasuredRun]) -> list[float]:
    return [time for run in runs if (time := log_sample_time_of(run.summary)) is not None]


def _rate(group: Group, runs: Sequence[MeasuredRun]) -> str:
    """Return `825 images/s`."""
    times = _log_times(runs)
    # Avoid an overflow: absurd numbers in a foreign file are not our bug.
    rate = math.exp(min(-sum(times) / len(times), 700.0))
    number = f"{rate:,.0f}" if 100 <= rate < 1e12 else f"{rate:.3g}"
    return f"{number} {group.setup.sample_unit}/s"


def _named(commit: str | None, groups: _Groups, rate: str | None) -> str:
    """Return `76689a9 (2 runs, 825 images/s)`."""
    number = len(groups[commit])
    return f"{_short(commit, groups)} ({', '.join([counted(number, 'run'), *([rate] if rate else [])])})"


def _short(commit: str | None, known: Iterable[str | None]) -> str:
    if commit is None:
        return "unknown"
    # `-dirty` is not part of the hash, and a foreign file may name a long one.
    name, dash, state = commit.partition("-")
    return f"{name[: _length(commit, known)]}{dash}{state[:20]}"


def _length(commit: str, known: Iterable[str | None]) -> int:
    """Return how many characters tell a commit from the others, ignoring the part after a dash."""
    names = {other.partition("-")[0] for other in known if other} - {commit.partition("-")[0]}
    lengths = range(_SHORT, len(commit))
    return next((n for n in lengths if all(other[:n] != commit[:n] for other in names)), len(commit))


def _glob(commit: str | None, groups: _Groups) -> str | None:
    """Return a pattern that matches only this commit of the row; None if it is unknown or not a hash."""
    if commit is None or not _COMMIT.fullmatch(commit):
        return None
    start = commit[: _length(commit, groups)]
    return commit if any(o and o != commit and o.startswith(start) for o in groups) else f"{start}*"


def difference_notes(row: Group, base: Group, *, by_speed: bool) -> Iterator[str]:
    """Yield differences between a row and its baseline that no column shows.

    by_speed: whether they are compared by speed because a row has no price.
    """
    ours, theirs = row.setup, base.setup
    if ours.global_batch != theirs.global_batch:
        batches = f"global batch {ours.global_batch} against {theirs.global_batch}"
        yield Note(f"throughput, not training progress: {batches}", NoteKind.BATCH)
    if ours.sequence_length != theirs.sequence_length:
        yield f"sequence length {ours.sequence_length} against {theirs.sequence_length}: other samples"
    if by_speed:
        yield "by speed: no price is known"
    if ours.data != theirs.data:
        yield f"data {ours.data} against {theirs.data}"
    elif data_of(row.first) != data_of(base.first):
        yield f"trained on other data: {data_of(row.first)} against {data_of(base.first)}"
    if ours.fingerprint and theirs.fingerprint:
        names = dict.fromkeys((*theirs.fingerprint, *ours.fingerprint))
        values = {name: [side.fingerprint.get(name, "none") for side in (ours, theirs)] for name in names}
        differing = [
            f"{name} ({value} against {other})"
            for name, (value, other) in values.items()
            if name not in _SHOWN_ELSEWHERE and value != other
        ]
        if differing:
            yield f"differs from the baseline in {', '.join(differing)}"
    elif ours.kind != theirs.kind:
        yield f"{_KINDS[ours.kind]} against {_KINDS[theirs.kind]}: versions may differ"
    yield from other_commits(row, base)
    limits, others = _power_limits(row), _power_limits(base)
    if limits and others and not set(limits) & set(others):
        yield f"GPUs at a power limit of {listed(limits)} against {listed(others)}"


def run_notes(group: Group) -> Iterator[str]:
    """Yield notes on a row's own runs."""
    if group.first.figures.derived:
        yield "derived from published percentages"
    versions = {version_of(run.environment.files): run.environment.files for run in group.summaries}
    versions.pop(None, None)
    if len(versions) > 1:
        first, *_, last = versions.values()
        files = changed_files(first, last)
        yield f"runs of {len(versions)} versions of {group.setup.workload} make one row: {files} changed"
    yield from commit_notes(group)
    if len(limits := _power_limits(group)) > 1:
        yield f"runs on GPUs at power limits of {listed(limits)} make one row"
    summaries = group.summaries
    if note := idle_note(summaries):
        yield note
    if all(run.startup.compile_cached for run in summaries):
        yield "compiled from a cache: a first run takes longer to compile"
    yield from notes_on_figures(summaries)
    of_checks = {check.warning for run in summaries for check in run.quality.checks}
    for warning in summaries[0].warnings:
        # A warning of one run is shown with that run; failed checks have their own notes.
        if all(warning in run.warnings for run in summaries) and warning not in of_checks:
            yield Note(warning, NoteKind.RUNS)


def notes_on_figures(summaries: Sequence[RunSummary]) -> Iterator[Note]:
    """Yield what the figures of some of a row's runs leave out, early ends, and late compilation."""
    texts = [*dict.fromkeys(text for run in summaries for text in run.uncounted)]
    by_end: dict[str, list[RunSummary]] = {}
    for run in summaries:
        if run.status != COMPLETED:
            by_end.setdefault(run.ended or f"ended as {run.status}", []).append(run)
    for ended, early in by_end.items():
        fewest, most = (of(run.num_steps for run in early) for of in (min, max))
        steps = counted(most, "step") if fewest == most else f"{fewest:,} to {most:,} steps"
        texts.append(f"{_share(early, summaries)} made {steps}, which count, and {ended}")
    if late := [run for run in summaries if run.timing.compiled_late]:
        which = _share(late, summaries)
        texts.append(f"{which} compiled within the measured steps, which are billed and count")
    yield from (Note(text, NoteKind.RUNS) for text in texts)


def _share(some: Sequence[RunSummary], summaries: Sequence[RunSummary]) -> str:
    """Return `its run`, `all its runs` or `2 of its 3 runs`."""
    if len(some) < len(summaries):
        return f"{len(some)} of its {len(summaries)} runs"
    return "its run" if len(some) == 1 else "all its runs"


def _power_limits(group: Group) -> list[str]:
    """Return the known power limits of its runs' GPUs: `400 W`, `700 W`."""
    limits = {run.summary.environment.power_limit_w or 0 for run in group.runs} - {0}
    return [f"{watts:g} W" for watts in sorted(limits)]
