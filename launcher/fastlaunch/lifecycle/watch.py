"""Runs as `watch` shows them, look by look: what is known here at any time, what AWS says at intervals."""

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.attempt_cost import total_cost
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.advice import PROGRESS, Advice
from fastlaunch.lifecycle.collect import doing, has_record
from fastlaunch.lifecycle.describe import ceiling_usd
from fastlaunch.lifecycle.display import Progress, RecordTail
from fastlaunch.lifecycle.sight import alarm
from fastlaunch_train.node.protocol import GPU_USE_QUERY, mean_gpu_use

#: After looks that failed the next one waits twice as long each time, up to this.
_MAX_WAIT_S = 300.0
#: What ended on AWS is shown for so long beside what is under way.
_LATELY = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run at one moment; None is not known, or does not apply."""

    run: str
    recipe: str
    instance: str | None
    state: str
    purchase: str | None
    #: Counts from 1; None before the first, and on this machine.
    attempt: int | None
    is_final: bool
    #: It ended, and not as it should have.
    has_failed: bool
    step: int | None = None
    num_steps: int | None = None
    step_time_s: float | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    #: Mean over the GPUs, from 0 to 1.
    gpu_use: float | None = None
    #: The cost of its machines, which other runs may share.
    cost_usd: float | None = None
    projected_usd: float | None = None
    max_cost_usd: float | None = None
    #: Until the machines' time is over; of a run here until its steps are done, at their pace.
    time_left_s: float | None = None
    #: What it does while it takes no steps, or how it ended.
    note: str | None = None
    alarm: str | None = None
    #: Since AWS last answered; None for a run on this machine.
    seen_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known at one moment."""

    now: datetime
    runs: Sequence[LiveRun]
    #: The cost of all their machines together; None where a price is not known.
    cost_usd: float | None = None
    #: What the last look at AWS failed of.
    problems: Sequence[str] = ()
    #: Until the next look; None while AWS is asked.
    next_look_s: float | None = None
    #: Interrupted runs that `status` goes on with.
    num_interrupted: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether all runs have."""
        return all(run.is_final for run in self.runs)


class Source(Protocol):
    """Where views come from."""

    def question(self) -> Callable[[], list[str]]:
        """Return what asks AWS what is new, in any thread, and returns what failed, in words."""

    def answered(self, problems: Sequence[str]) -> None:
        """Take note that AWS has been asked."""

    def read(self) -> View:
        """Return what is known, asking nobody."""


def at_once(ask: Callable[[], list[str]]) -> Callable[[], list[str] | None]:
    """Ask; return what returns the answer."""
    problems = ask()
    return lambda: problems


def in_thread(ask: Callable[[], list[str]]) -> Callable[[], list[str] | None]:
    """Ask in a thread, for which nobody waits; return what returns the answer, None until it is there."""
    answers: list[list[str]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            errors.append(error)

    Thread(target=run, name="watch", daemon=True).start()

    def answer() -> list[str] | None:
        if errors:
            raise errors[0]
        return answers[0] if answers else None

    return answer


def views(
    source: Source,
    *,
    interval_s: float,
    tick_s: float,
    sleep: Callable[[float], None],
    start: Callable[[Callable[[], list[str]]], Callable[[], list[str] | None]] = at_once,
) -> Iterator[View]:
    """Yield views until all runs have ended.

    AWS is asked every `interval_s`, less often while that fails; what is known here is read every `tick_s`,
    also while `start`, `at_once` or `in_thread`, has it asked.
    """
    num_failures, problems = 0, list[str]()
    while True:
        answer = start(source.question())
        while (found := answer()) is None:
            yield replace(source.read(), problems=problems, next_look_s=None)
            sleep(tick_s)
        problems = found
        source.answered(problems)
        num_failures = num_failures + 1 if problems else 0
        left_s = wait_s(interval_s, num_failures)
        while left_s > 0:
            view = replace(source.read(), problems=problems, next_look_s=left_s)
            yield view
            if view.has_ended:
                return
            sleep(min(tick_s, left_s))
            left_s -= tick_s


def wait_s(interval_s: float, num_failures: int) -> float:
    """Return how long the next look waits after so many failures in a row."""
    return max(interval_s, min(interval_s * 2.0**num_failures, _MAX_WAIT_S))


@dataclass(kw_only=True)
class LedgerSource:
    """Views of runs in the ledger.

    ask: reconciles the ledger, which it opens itself, and fetches what these runs have uploaded; returns what
    failed.
    local_gpu_use: of this machine's GPUs, from 0 to 1.
    """

    ledger: Ledger
    home: Path
    now: Callable[[], datetime]
    ask: Callable[[Sequence[Run]], list[str]]
    advice: Advice
    local_gpu_use: Callable[[], float | None] = lambda: None
    #: As `Ledger.select` takes them; empty for what is under way, and what ended lately.
    selectors: Sequence[str] = ()
    _answered_at: datetime | None = None
    _gpu_use: float | None = None
    #: Runs that were seen under way.
    _seen: set[str] = field(default_factory=set)
    _tails: dict[Path, RecordTail] = field(default_factory=dict)

    def question(self) -> Callable[[], list[str]]:
        runs = self._runs()
        is_here = any(run.backend not in CLOUD_BACKENDS and not run.state.is_final for run in runs)

        def ask() -> list[str]:
            self._gpu_use = self.local_gpu_use() if is_here else None
            return self.ask(runs)

        return ask

    def answered(self, problems: Sequence[str]) -> None:
        if not problems:
            self._answered_at = self.now()

    def read(self) -> View:
        now, runs = self.now(), self._runs()
        attempts = {run.id: self.ledger.attempts_of(run.id) for run in runs}
        unfinished = {run.id for run in runs if not run.state.is_final}
        machines = {
            each.id: each for some in attempts.values() for each in some if each.backend in CLOUD_BACKENDS
        }
        return View(
            now=now,
            runs=[self._live(run, attempts[run.id], unfinished, now) for run in runs],
            cost_usd=total_cost(machines.values(), now).usd if machines else None,
            num_interrupted=len(self.ledger.goes_on()),
        )

    def _runs(self) -> list[Run]:
        if self.selectors:
            return self.ledger.select(self.selectors)
        unfinished = self.ledger.select(["state=planned", "state=running"])
        self._seen |= {run.id for run in unfinished}
        ended = {run.id for run in self.ledger.ended_on_aws(self.now() - _LATELY)} if self._seen else set()
        runs = {run.id: run for run in unfinished}
        others = sorted((self._seen | ended) - runs.keys())
        return [*runs.values(), *(self.ledger.get(run_id) for run_id in others)]

    def _live(
        self, run: Run, attempts: Sequence[Attempt], unfinished: Iterable[str], now: datetime
    ) -> LiveRun:
        is_cloud = run.backend in CLOUD_BACKENDS
        seen_s = (now - self._answered_at).total_seconds() if is_cloud and self._answered_at else None
        return live_run(
            run,
            attempts if is_cloud else (),
            progress=self._progress(run, attempts),
            home=self.home,
            now=now,
            waiting=set(unfinished) - {run.id},
            gpu_use=self._gpu_use_of(run, attempts),
            seen_s=seen_s,
        )

    def _gpu_use_of(self, run: Run, attempts: Sequence[Attempt]) -> float | None:
        if run.state.is_final:
            return None
        if run.backend not in CLOUD_BACKENDS:
            return self._gpu_use
        return s3_sync.gpu_use(self.home, attempts[-1].token) if attempts else None

    def _progress(self, run: Run, attempts: Sequence[Attempt]) -> Progress | None:
        """Return how far the run is by its record, of which only what is new is read."""
        if run.directory is None or not run.directory.is_dir():
            return None
        if run.backend in CLOUD_BACKENDS and not (attempts and has_record(run.id, attempts[-1], self.home)):
            return None
        with self.advice.guard(PROGRESS):
            return self._tails.setdefault(run.directory, RecordTail(run.directory)).read()
        return None


def live_run(
    run: Run,
    attempts: Sequence[Attempt],
    *,
    progress: Progress | None,
    home: Path,
    now: datetime,
    waiting: Iterable[str] = (),
    gpu_use: float | None = None,
    seen_s: float | None = None,
) -> LiveRun:
    """Return the run as it is shown. attempts: of a run on AWS. waiting: ids of other runs to be done."""
    last = attempts[-1] if attempts else None
    cost_usd = total_cost(attempts, now).usd if attempts else None
    ceiling = ceiling_usd(attempts) if attempts else None
    is_final, measured = run.state.is_final, run.summary.timing.step_time_s if run.summary else None
    has_steps = progress is not None and progress.step > 0
    if is_final:
        note = run.reason
    elif last is None and run.backend in CLOUD_BACKENDS:
        note = run.reason or "waiting for a machine to be asked for"
    elif has_steps:
        note = None
    elif last is not None:
        note = doing(run, attempts, home)
    elif run.state is RunState.PLANNED and {*waiting}:
        note = "waiting for its turn"
    else:
        note = (progress and progress.phase) or "starting"
    shown = progress or Progress(step=0, num_steps=None)
    return LiveRun(
        run=run.id,
        recipe=run.recipe,
        instance=run.instance,
        state=str(run.state),
        purchase=run.purchase if run.backend in CLOUD_BACKENDS else None,
        attempt=last.n if last else None,
        is_final=is_final,
        has_failed=is_final and run.state is not RunState.COMPLETED and not run.is_unneeded,
        step=shown.step if has_steps else None,
        num_steps=shown.num_steps,
        step_time_s=measured.value if measured else shown.step_time_s,
        samples_per_s=_samples_per_s(run) or shown.samples_per_s,
        loss=run.summary.quality.final_loss if run.summary else shown.loss,
        gpu_use=gpu_use,
        cost_usd=cost_usd,
        projected_usd=cost_usd
        if is_final
        else projected_usd(last, cost_usd, ceiling, shown.seconds_left, waiting),
        max_cost_usd=ceiling,
        time_left_s=None if is_final else _time_left_s(last, now) if last else shown.seconds_left,
        note=note,
        alarm=alarm(last, now) if last else None,
        seen_s=None if is_final else seen_s,
    )


def _samples_per_s(run: Run) -> float | None:
    """Return the rate of a run that has ended, by the step time that it is compared with."""
    timing = run.summary.timing if run.summary else None
    if timing is None or timing.step_time_s is None or timing.samples_per_step is None:
        return None
    return timing.samples_per_step / timing.step_time_s.value


def projected_usd(
    attempt: Attempt | None,
    cost_usd: float | None,
    ceiling: float | None,
    seconds_left: float | None,
    waiting: Iterable[str],
) -> float | None:
    """Return what the attempt's machines will have cost by the end of its steps, its ceiling at most.

    None before there is a rate, and while other runs wait for the machine. seconds_left: of the steps.
    """
    if attempt is None or cost_usd is None or seconds_left is None or {*waiting} & {*attempt.run_ids}:
        return None
    if attempt.billing.usd_per_hour is None:
        return None
    usd = cost_usd + seconds_left / 3600 * attempt.billing.usd_per_hour * attempt.num_nodes
    return usd if ceiling is None else min(usd, max(ceiling, cost_usd))


def _time_left_s(attempt: Attempt | None, now: datetime) -> float | None:
    """Return how long the machines may take yet; None before they are there."""
    if attempt is None or attempt.launched_at is None or attempt.max_minutes is None:
        return None
    ends_at = datetime.fromisoformat(attempt.launched_at) + timedelta(minutes=attempt.max_minutes)
    return max(0.0, (ends_at - now).total_seconds())


def gpu_use_here() -> float | None:
    """Return the mean use of this machine's GPUs, from 0 to 1; None if nvidia-smi does not tell."""
    try:
        asked = subprocess.run(GPU_USE_QUERY, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return mean_gpu_use(asked.stdout) if asked.returncode == 0 else None
