"""What compiling takes a job, from runs of which some found it done.

torch keeps what it compiled on the disk, so that a recipe's second run on a machine compiles in a part of the
time. A job on a machine of its own is a first run.
"""

from collections.abc import Sequence

from fastlaunch.measure.summarize import RunSummary


def first_runs(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs that compiled all by themselves; every run where each found some of it done."""
    return [run for run in runs if not run.compile_cached] or list(runs)


def only_from_cache(runs: Sequence[RunSummary]) -> bool:
    """Whether no run tells what a first run takes to compile."""
    return bool(runs) and all(run.compile_cached for run in runs)
