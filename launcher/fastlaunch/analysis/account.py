"""What runs took before and between their steps, part by part.

`$ per million samples` leaves these parts out. A recipe that compiles for ten minutes to save a second a step
costs more for a job of under 600 steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.analysis.compare import Row, time_on_type_s
from fastlaunch.analysis.pooling import first_runs
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.measure.summary import Interval, RunSummary, Startup
from fastlaunch_train.records.records import Eval

#: The parts of a job before its steps, in order of time.
ONCE = ("boot", "pull", "build", "compile", "warmup")
#: The words for parts that texts call by another name.
WORDS = {"warmup": "warm-up"}


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What recurs between the steps: evaluating, writing checkpoints."""

    s_per_step: float
    once_s: float = 0.0  # seconds that any job takes for it, such as scoring test data at the end
    every: float | None = None  # mean steps from one to the next; None if it came only at the end
    beside_s: float = 0.0  # seconds of each that pass beside the steps


@dataclass(frozen=True, kw_only=True)
class Account:
    """The time of a job by part, from one run or from the means over repeats.

    Unknown parts are None. A published figure has only its steps.
    """

    step_time_s: Interval
    once_s: dict[str, float | None]  # seconds by part of ONCE
    between: dict[str, Repeated | None]  # of evaluations and checkpoints

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts that are not included because they are unknown."""
        return tuple(name for name, seconds in self.parts_s(1).items() if seconds is None)

    def parts_s(self, steps: float) -> dict[str, float | None]:
        """Return the seconds of each part, in order, for a job of `steps` steps; None if unknown."""
        return {
            **self.once_s,
            "steps": steps * self.step_time_s.value,
            **{
                name: None if part is None else part.once_s + steps * part.s_per_step
                for name, part in self.between.items()
            },
        }


NEVER = Repeated(s_per_step=0.0)


def account_of_row(row: Row) -> Account | None:
    """Return the account of a row by all its runs, or None if its step time is unknown."""
    if row.speed.step_time_s is None or (step_time_s := time_on_type_s(row.group)) is None:
        return None
    return _account(step_time_s, row.group.summaries)


def account_of_run(summary: RunSummary, step_time_s: Interval | None = None) -> Account | None:
    """Return the account of one run, or None if its step time is unknown.

    step_time_s: the step time to use if the run has none.
    """
    seconds = summary.timing.step_time_s or step_time_s
    return None if seconds is None else _account(seconds, [summary])


def _account(step_time_s: Interval, runs: Sequence[RunSummary]) -> Account:
    recorded = [run for run in runs if run.setup.kind == "records"]
    return Account(
        step_time_s=step_time_s,
        once_s={
            "boot": mean_of([run.startup.boot_s for run in recorded]),
            "pull": mean_of([_pull_s(run.startup) for run in recorded]),
            "build": mean_of([run.startup.build_s for run in recorded]),
            # A run without a compile phase did not compile before its steps.
            "compile": mean_of([run.startup.compile_s or 0.0 for run in first_runs(recorded)]),
            "warmup": mean_of([_warmup_excess_s(run) for run in recorded]),
        },
        between={
            "evaluations": _mean_repeated([_evaluations(run) for run in recorded]),
            "checkpoints": _mean_repeated([_checkpoints(run) for run in recorded]),
        },
    )


def _pull_s(startup: Startup) -> float | None:
    """Return the seconds of fetching all that a run needs, weights from the hub included."""
    return None if startup.pull_s is None else startup.pull_s + (startup.fetch_s or 0.0)


def _warmup_excess_s(run: RunSummary) -> float | None:
    """Return the extra seconds of the warm-up steps over as many later steps; 0 if they were faster.

    None for a summary from a version that did not count warm-up steps.
    """
    if run.timing.warmup_s is None or run.timing.num_warmup_steps is None or run.timing.step_time_s is None:
        return None
    return max(0.0, run.timing.warmup_s - run.timing.num_warmup_steps * run.timing.step_time_s.value)


def _evaluations(run: RunSummary) -> Repeated:
    """Return the time of evaluations per step, at the run's own interval, and the extra time at the end."""
    if not run.quality.evals:
        return NEVER
    last = max(line.step for line in run.quality.evals)
    by_step: dict[int, float] = {}
    for line in run.quality.evals:
        # The run scores test data at the end, including once with the weights of an earlier step.
        step = line.step if line.split == "validation" else last
        by_step[step] = by_step.get(step, 0.0) + line.seconds
    at_end_s, before = by_step.pop(last), by_step
    # An evaluation before the first step sets no period.
    before_start_s = before.pop(0, 0.0)
    if not before:
        return Repeated(s_per_step=0.0, once_s=before_start_s + at_end_s)
    every = max(before) / len(before)
    # A compiled model compiles again for the first evaluation only.
    first_s, *others = (before[step] for step in sorted(before))
    others = others or [
        line.seconds for line in run.quality.evals if (line.step, line.split) == (last, "validation")
    ]
    first_more_s = max(0.0, first_s - sum(others) / len(others)) if others else 0.0
    each_s = (sum(before.values()) - first_more_s) / len(before)
    # Every run evaluates at the end; the rate already includes it if the end is a multiple of the period.
    return Repeated(
        s_per_step=each_s / every,
        once_s=before_start_s + first_more_s + max(0.0, at_end_s - each_s),
        every=every,
    )


def evaluations_until(evals: Sequence[Eval], step: int) -> float:
    """Return the seconds of the evaluations on validation data up to and including `step`."""
    return sum(line.seconds for line in evals if line.split == "validation" and line.step <= step)


def _checkpoints(run: RunSummary) -> Repeated | None:
    """Return the time of checkpoints as the run wrote them; None if its summary does not count them."""
    if run.checkpoints.total_s is None or not run.checkpoints.last_step or not run.checkpoints.number:
        return NEVER if run.checkpoints.longest_s is None else None
    return Repeated(
        s_per_step=run.checkpoints.total_s / run.checkpoints.last_step,
        every=run.checkpoints.last_step / run.checkpoints.number,
        beside_s=run.checkpoints.write_s or 0.0,
    )


def _mean_repeated(parts: Sequence[Repeated | None]) -> Repeated | None:
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    periods = [part.every for part in known if part.every is not None]
    return Repeated(
        s_per_step=sum(part.s_per_step for part in known) / len(known),
        once_s=sum(part.once_s for part in known) / len(known),
        every=sum(periods) / len(periods) if len(periods) == len(known) else None,
        beside_s=sum(part.beside_s for part in known) / len(known),
    )
