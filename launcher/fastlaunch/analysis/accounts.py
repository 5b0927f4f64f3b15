"""How long a job takes, part by part: what comes once, and what each of its steps adds.

    boot, pull      a machine until it runs the job: its start, then code and image
    build, compile  the model, and compiling before the first step
    warm-up         what the first steps took beyond the step time
    steps           step time x steps
    evaluations     on held-out data: as often per step as the runs made them, and once at the end; once also
                    what the first took beyond the others
    checkpoints     as often per step as the runs wrote them

So the time is a straight line in the number of steps; for as many steps as a run did it is what the run took.
What is not known is left out and named, never guessed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.analysis.compiling import first_runs
from fastlaunch.analysis.rows import Row
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.measure.summarize import Interval, RunSummary

if TYPE_CHECKING:
    from fastlaunch_train.records.records import Eval

#: The parts, in the order of time; those that come once are the first five.
PARTS = ("boot", "pull", "build", "compile", "warmup", "steps", "evaluations", "checkpoints")
ONCE = PARTS[:5]
#: In words, where they are not the part's name.
WORDS = {"warmup": "warm-up"}


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What is done again and again between the steps: evaluating, writing checkpoints.

    every: steps from one to the next, on average; None if it was done at the end alone. once_s: what a job
    takes for it however long it is, such as an evaluation on test data at the end.
    """

    s_per_step: float
    once_s: float = 0.0
    every: float | None = None


NEVER = Repeated(s_per_step=0.0)


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a job takes, by runs that are repeats of each other, or by one run; means over the runs.

    step_time_s: with the interval that carries through to everything here. once_s: seconds by part of ONCE,
    None for what is not known. A published figure has no parts but its steps: the others are None.
    """

    step_time_s: Interval
    once_s: dict[str, float | None]
    evaluations: Repeated | None
    checkpoints: Repeated | None

    @property
    def unknown(self) -> tuple[str, ...]:
        """The parts that are left out, as they are not known."""
        return tuple(name for name, seconds in self.parts_s(1).items() if seconds is None)

    def parts_s(self, steps: float) -> dict[str, float | None]:
        """Seconds by part, in the order of PARTS, of a job of so many steps; None for what is not known."""
        between = {"evaluations": self.evaluations, "checkpoints": self.checkpoints}
        return {
            **{name: self.once_s[name] for name in ONCE},
            "steps": steps * self.step_time_s.value,
            **{
                name: None if part is None else part.once_s + steps * part.s_per_step
                for name, part in between.items()
            },
        }

    def total_s(self, steps: float) -> Interval:
        """Seconds of a job of so many steps, without the parts that are not known.

        The interval is that of the step time: the parts that come once are taken as they were measured.
        """
        time, rest = self.step_time_s, self.rest_s(steps)
        return Interval(
            value=rest + steps * time.value,
            low=None if time.low is None else rest + steps * time.low,
            high=None if time.high is None else rest + steps * time.high,
        )

    def rest_s(self, steps: float) -> float:
        """Seconds of everything but the steps."""
        parts = self.parts_s(steps)
        return sum(seconds for name, seconds in parts.items() if name != "steps" and seconds is not None)


def account_of_row(row: Row) -> Account | None:
    """The account of a row by all its runs; None if its step time is not known."""
    if row.step_time_s is None:
        return None
    runs = [run.summary for run in row.runs]
    return _account(row.step_time_s, runs, settled=runs[: row.num_runs or None])


def account_of_run(summary: RunSummary, step_time_s: Interval | None = None) -> Account | None:
    """The account of one run; None if its step time is not known. step_time_s: for a run that has none."""
    own = summary.step_time_s or step_time_s
    return None if own is None else _account(own, [summary], settled=[summary])


def _account(step_time_s: Interval, runs: Sequence[RunSummary], settled: Sequence[RunSummary]) -> Account:
    """What comes before the steps by all `runs`, and what is counted beside them by those that settled."""
    recorded = [run for run in runs if run.kind == "records"]
    timed = [run for run in settled if run.kind == "records"]
    return Account(
        step_time_s=step_time_s,
        once_s={
            "boot": mean_of([run.boot_s for run in recorded]),
            "pull": mean_of([run.pull_s for run in recorded]),
            "build": mean_of([run.build_s for run in recorded]),
            # A run without a phase of compiling did not compile before its steps.
            "compile": mean_of([run.compile_s or 0.0 for run in first_runs(recorded)]),
            "warmup": mean_of([_warmup_excess_s(run) for run in timed]),
        },
        evaluations=_mean_repeated([_evaluations(run) for run in timed]),
        checkpoints=_mean_repeated([_checkpoints(run) for run in timed]),
    )


def _warmup_excess_s(run: RunSummary) -> float | None:
    """What the steps cut as warm-up took beyond as many at the step time: below 0 where they were faster.

    None for a summary of a version that did not count them.
    """
    if run.warmup_s is None or run.num_warmup_steps is None or run.step_time_s is None:
        return None
    return run.warmup_s - run.num_warmup_steps * run.step_time_s.value


def _evaluations(run: RunSummary) -> Repeated:
    """Evaluations at every so many steps, as the run made them, and what comes on top after the last step."""
    if not run.evals:
        return NEVER
    last = max(line.step for line in run.evals)
    by_step: dict[int, float] = {}
    for line in run.evals:
        # Test data are scored at the end, also with the weights of an earlier step.
        step = line.step if line.split == "validation" else last
        by_step[step] = by_step.get(step, 0.0) + line.seconds
    at_end_s, before = by_step.pop(last), by_step
    # One before the first step is no period.
    before_start_s = before.pop(0, 0.0)
    if not before:
        return Repeated(s_per_step=0.0, once_s=before_start_s + at_end_s)
    every = max(before) / len(before)
    # A compiled model is compiled once more for the first evaluation, and for none after it.
    first_s, *others = (before[step] for step in sorted(before))
    others = others or [line.seconds for line in run.evals if (line.step, line.split) == (last, "validation")]
    first_more_s = max(0.0, first_s - sum(others) / len(others)) if others else 0.0
    each_s = (sum(before.values()) - first_more_s) / len(before)
    # At the end there is one anyhow; the rate has it already where the end is a multiple of the period.
    return Repeated(
        s_per_step=each_s / every,
        once_s=before_start_s + first_more_s + max(0.0, at_end_s - each_s),
        every=every,
    )


def evaluations_until(evals: "Sequence[Eval]", step: int) -> float:
    """Seconds of the evaluations up to that after `step` on validation data, it included."""
    return sum(line.seconds for line in evals if line.split == "validation" and line.step <= step)


def _checkpoints(run: RunSummary) -> Repeated | None:
    """Checkpoints as the run wrote them; None for a summary of a version that did not count them."""
    if run.checkpoints_s is None or not run.last_checkpoint_step or not run.num_checkpoints:
        return NEVER if run.checkpoint_s is None else None
    return Repeated(
        s_per_step=run.checkpoints_s / run.last_checkpoint_step,
        every=run.last_checkpoint_step / run.num_checkpoints,
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
    )
