"""Follows runs: asks AWS at intervals, reads what is here at any time, and says where each run stands.

`watch`, `logs` and `status` show what a `Follower` says.
"""

import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS
from fastlaunch.core.errors import Unreachable, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.attempt_cost import Cost, cost_text, total_cost
from fastlaunch.ledger.ledger import Ledger, Run, open_ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import doing, has_record, summary_of
from fastlaunch.lifecycle.describe import attempt_to_dict, ceiling_usd, run_to_dict
from fastlaunch.lifecycle.display import Progress, RecordTail, describe
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.schedules import needs_timer
from fastlaunch.lifecycle.sight import alarm
from fastlaunch.lifecycle.world import PROGRESS
from fastlaunch_train.node.protocol import GPU_USE_QUERY, mean_gpu_use

if TYPE_CHECKING:
    from fastlaunch.lifecycle.world import World

#: The wait doubles after each look that failed, up to this.
_MAX_WAIT_S = 300.0
#: Most machines to fetch from within one look: more take too long.
_MAX_FETCHED = 16


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run at one moment; None is not known, or does not apply."""

    run: Run
    #: Those on AWS; empty for a run on this machine.
    attempts: Sequence[Attempt] = ()
    #: By its record; None before its first step.
    progress: Progress | None = None
    #: What it does or waits for; None once it has ended.
    doing: str | None = None
    #: Mean over the GPUs, from 0 to 1.
    gpu_use: float | None = None
    #: The cost of its machines, which other runs may share.
    cost: Cost | None = None
    projected_usd: float | None = None
    max_cost_usd: float | None = None
    #: Until the machines' time is over; for a run here, until its steps are done at their pace.
    time_left_s: float | None = None
    alarm: str | None = None
    #: Since AWS last answered; None for a run on this machine.
    seen_s: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it ended without completing, though it was needed."""
        state = self.run.state
        return state.is_final and state is not RunState.COMPLETED and not self.run.is_unneeded

    @property
    def step(self) -> int | None:
        return self.progress.step if self.progress else None

    @property
    def step_time_s(self) -> float | None:
        """The measured step time once the run has ended; until then, the step time of its last blocks."""
        if self.run.state.is_final:
            return self.run.summary.step_time_s if self.run.summary else None
        return self.progress.step_time_s if self.progress else None

    @property
    def samples_per_s(self) -> float | None:
        if not self.run.state.is_final:
            return self.progress.samples_per_s if self.progress else None
        per_step = self.run.summary.timing.samples_per_step if self.run.summary else None
        return per_step / self.step_time_s if per_step and self.step_time_s else None

    @property
    def loss(self) -> float | None:
        if self.run.summary:
            return self.run.summary.quality.final_loss
        return self.progress.loss if self.progress else None

    @property
    def cost_usd(self) -> float | None:
        return self.cost.usd if self.cost else None

    @property
    def note(self) -> str | None:
        """How it ended, or what it does while it takes no steps."""
        return self.run.reason if self.run.state.is_final else None if self.progress else self.doing

    def to_dict(self, *, home: Path, now: datetime) -> dict[str, Any]:
        """Return it as plain data, its attempts included."""
        return {
            **run_to_dict(self.run),
            "doing": self.doing,
            "step": self.step,
            "num_steps": self.progress and self.progress.num_steps,
            "step_time_s": self.step_time_s,
            "samples_per_s": self.samples_per_s,
            "loss": self.loss,
            "gpu_use": self.gpu_use,
            "cost_usd": self.cost_usd,
            "sunk_usd": self.cost and self.cost.sunk_usd,
            "cost_is_final": self.cost and self.cost.is_final,
            "projected_usd": self.projected_usd,
            "max_cost_usd": self.max_cost_usd,
            "time_left_s": self.time_left_s,
            "alarm": self.alarm,
            "seen_s": self.seen_s,
            "attempts": [attempt_to_dict(self.run, it, home=home, now=now) for it in self.attempts],
        }

    def in_words(self) -> str | None:
        """`step 40/200, 652 images/s, loss 2.31; attempt 2 in us-east-1a; $3.10 so far, at most $55.04`.

        For a run that has ended: its reason and what its machines cost.
        """
        reason, cost = self.run.reason, self.cost
        if cost is None:
            return self.doing or reason
        text = cost_text(cost, self.run.spec)
        if self.run.state.is_final:
            return f"{reason}; {text}" if reason else text
        last = self.attempts[-1]
        nodes = f" on {last.num_nodes} nodes" if last.num_nodes > 1 else ""
        place = f"attempt {last.n} in {last.zone or last.region}{nodes}"
        # SageMaker reports its discount for spot when the job has ended.
        is_discounted = last.backend == "sagemaker" and self.run.purchase == "spot"
        spot = " before spot's discount" if is_discounted and last.ended_at is None else ""
        ceiling = self.max_cost_usd
        is_within = ceiling is not None and (cost.usd is None or cost.usd < ceiling)
        bound = f", at most ${ceiling:,.2f}" if is_within else ""
        runs = f" for {len(last.run_ids)} runs" if len(last.run_ids) > 1 else ""
        alarmed = f"ALARM: {self.alarm}; " if self.alarm else ""
        timer = "no timer in the account yet; " if needs_timer(last) else ""
        return f"{alarmed}{timer}{self.doing}; {place}; {text}{spot}{bound}{runs}"


@dataclass(frozen=True, kw_only=True)
class View:
    """What is known at one moment."""

    now: datetime
    runs: Sequence[LiveRun]
    #: The cost of all their machines together; None if a price is not known.
    cost_usd: float | None = None
    #: Errors of the last look at AWS.
    problems: Sequence[str] = ()
    #: Until the next look; None while AWS is asked.
    next_look_s: float | None = None
    #: Number of interrupted runs that `status` and `watch` resume.
    num_interrupted: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether all runs have ended."""
        return all(live.run.state.is_final for live in self.runs)


def at_once(ask: Callable[[], list[str]]) -> Callable[[], list[str] | None]:
    """Ask, wait, and return a function that returns the answer."""
    problems = ask()
    return lambda: problems


def in_thread(ask: Callable[[], list[str]]) -> Callable[[], list[str] | None]:
    """Ask in a thread; return a function that returns the answer, None until it is there."""
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


@dataclass(kw_only=True)
class Follower:
    """Follows runs in the ledger. Only `go_on` starts anything, and only what has ended in the ledger ends.

    choose: returns the runs; every run that it once returned is followed to its end. fetch: downloads what
    these runs uploaded, over a ledger that may be another thread's; see `fetch_unfollowed`. go_on: resumes
    runs whose machine AWS took; returns whether any still waits for one. local_gpu_use: returns the mean use
    of this machine's GPUs, from 0 to 1.
    """

    world: "World"
    ledger: Ledger
    choose: Callable[[], Sequence[Run]]
    fetch: Callable[[Ledger, Sequence[Run]], Mapping[str, UserError]] = lambda ledger, runs: {}
    go_on: Callable[[], bool] = lambda: False
    local_gpu_use: Callable[[], float | None] = lambda: None
    _answered_at: datetime | None = None
    _gpu_use: float | None = None
    _seen: set[str] = field(default_factory=set)
    _tails: dict[Path, RecordTail] = field(default_factory=dict)

    def views(
        self,
        *,
        interval_s: float,
        tick_s: float,
        start: Callable[[Callable[[], list[str]]], Callable[[], list[str] | None]] = at_once,
    ) -> Iterator[View]:
        """Yield views until all runs have ended and none waits to go on.

        Ask AWS every `interval_s`, less often while that fails. Read what is known here every `tick_s`, also
        while a thread asks. start: `at_once` or `in_thread`.
        """
        num_failures, problems = 0, list[str]()
        while True:
            answer = start(self.question())
            while (answered := answer()) is None:
                yield replace(self.read(), problems=problems, next_look_s=None)
                self.world.sleep(tick_s)
            problems = answered
            if not problems:
                self._answered_at = self.world.now()
            is_waiting = self.go_on()
            num_failures = num_failures + 1 if problems else 0
            left_s = max(interval_s, min(interval_s * 2.0**num_failures, _MAX_WAIT_S))
            while left_s > 0:
                view = replace(self.read(), problems=problems, next_look_s=left_s)
                yield view
                if view.has_ended and not is_waiting:
                    return
                self.world.sleep(min(tick_s, left_s))
                left_s -= tick_s

    def question(self) -> Callable[[], list[str]]:
        """Return a function that reconciles the ledger with AWS and fetches what is new, in any thread.

        The function returns what failed, in words.
        """
        runs = self._runs()
        is_here = any(run.backend not in CLOUD_BACKENDS and not run.state.is_final for run in runs)

        def ask() -> list[str]:
            self._gpu_use = self.local_gpu_use() if is_here else None
            world, problems = self.world, list[str]()
            try:
                with open_ledger(world.settings, clock=world.now) as ledger:
                    reconcile(ledger, world.backends, world.settings, warn=problems.append)
                    refused = self.fetch(ledger, runs)
            except UserError as error:
                return [*problems, error.message]
            return [*problems, *not_here(refused)]

        return ask

    def read(self) -> View:
        """Return what is known on this machine, without asking AWS."""
        now, runs = self.world.now(), self._runs()
        attempts = {run.id: self.ledger.attempts_of(run.id) for run in runs}
        unfinished = {run.id for run in runs if not run.state.is_final}
        on_aws = filter(lambda attempt: attempt.backend in CLOUD_BACKENDS, chain(*attempts.values()))
        machines = {attempt.id: attempt for attempt in on_aws}
        return View(
            now=now,
            runs=[self._live(run, attempts[run.id], unfinished - {run.id}, now) for run in runs],
            cost_usd=total_cost(machines.values(), now).usd if machines else None,
            num_interrupted=len(self.ledger.goes_on()),
        )

    def _runs(self) -> list[Run]:
        chosen = {run.id: run for run in self.choose()}
        others = sorted(self._seen - chosen.keys())
        self._seen |= chosen.keys()
        return [*chosen.values(), *(self.ledger.get(run_id) for run_id in others)]

    def _live(self, run: Run, attempts: Sequence[Attempt], waiting: Iterable[str], now: datetime) -> LiveRun:
        is_cloud, home = run.backend in CLOUD_BACKENDS, self.world.settings.home
        gpu_use = None if is_cloud or run.state.is_final else self._gpu_use
        if is_cloud and attempts and not run.state.is_final:
            gpu_use = s3_sync.gpu_use(home, attempts[-1].token)
        return live_run(
            run,
            attempts if is_cloud else (),
            progress=self._progress(run, attempts),
            home=home,
            now=now,
            waiting=waiting,
            gpu_use=gpu_use,
            seen_s=(now - self._answered_at).total_seconds() if is_cloud and self._answered_at else None,
        )

    def _progress(self, run: Run, attempts: Sequence[Attempt]) -> Progress | None:
        """Return how far the run is by its record. Only what is new is read."""
        if run.directory is None or not run.directory.is_dir():
            return None
        if run.state.is_final and run.directory not in self._tails:
            # The summary has it, and the record may be long.
            return None
        is_cloud, home = run.backend in CLOUD_BACKENDS, self.world.settings.home
        if is_cloud and not (attempts and has_record(run.id, attempts[-1], home)):
            return None
        with self.world.advice.guard(PROGRESS):
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
    """Return where the run stands. attempts: at it, on AWS. waiting: ids of other runs to be done."""
    last = attempts[-1] if attempts else None
    cost = total_cost(attempts, now) if attempts else None
    ceiling = ceiling_usd(attempts) if attempts else None
    has_steps = progress is not None and progress.step > 0
    left_s = progress.seconds_left if progress else None
    cost_usd = cost.usd if cost else None
    projected = projected_usd(last, cost_usd, ceiling, left_s, waiting)
    does = None
    if run.state.is_final:
        projected, left_s, seen_s = cost_usd, None, None
    elif progress is not None and has_steps:
        does = describe(progress)
    elif run.backend in CLOUD_BACKENDS:
        does = doing(run, attempts, home, progress)
    elif run.state is RunState.PLANNED and {*waiting}:
        does = "waiting for its turn"
    else:
        does = (progress and progress.phase) or "starting"
    if last and not run.state.is_final:
        # The time left to the machines is unknown before they are there.
        left_s = None
        if last.launched_at and last.max_minutes is not None:
            ends_at = datetime.fromisoformat(last.launched_at) + timedelta(minutes=last.max_minutes)
            left_s = max(0.0, (ends_at - now).total_seconds())
    return LiveRun(
        run=run,
        attempts=attempts,
        progress=progress if has_steps else None,
        doing=does,
        gpu_use=gpu_use,
        cost=cost,
        projected_usd=projected,
        max_cost_usd=ceiling,
        time_left_s=left_s,
        alarm=alarm(last, now) if last else None,
        seen_s=seen_s,
    )


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


def gpu_use_here() -> float | None:
    """Return the mean use of this machine's GPUs, from 0 to 1; None without an answer of nvidia-smi."""
    try:
        answer = subprocess.run(GPU_USE_QUERY, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return mean_gpu_use(answer.stdout) if answer.returncode == 0 else None


def under_way(ledger: Ledger, *, since: datetime) -> list[Run]:
    """Return the runs under way or to go on and, beside them, what ended on AWS after `since`."""
    unfinished = {run.id: run for run in ledger.select(["state=planned", "state=running"])}
    unfinished |= {run_id: ledger.get(run_id) for run_id in ledger.goes_on()}
    ended = ledger.ended_on_aws(since) if unfinished else []
    return [*unfinished.values(), *(run for run in ended if run.id not in unfinished)]


def current_runs(ledger: Ledger, *, since: datetime | None = None) -> list[Run]:
    """Return the runs under way and those of the last submission, and what ended on AWS after `since`."""
    last = ledger.last_submission()
    unfinished = ledger.select(["state=planned", "state=running"])
    ended = ledger.ended_on_aws(since) if since else []
    others = [run for run in (*ended, *unfinished) if run.submission_id != last]
    return others + (ledger.select(submission=last) if last else [])


def fetch_output(world: "World", attempts: Iterable[Attempt]) -> dict[str, UserError]:
    """Download what is new of the attempts; return the errors by token."""
    refused: dict[str, UserError] = {}
    unreachable: dict[str, Unreachable] = {}
    for attempt in attempts:
        if attempt.region is None or attempt.output is None:
            continue
        if attempt.region in unreachable:
            # Another request would wait as long for no answer.
            refused[attempt.token] = unreachable[attempt.region]
            continue
        try:
            synced = s3_sync.sync(
                world.aws,
                world.settings.home,
                region=attempt.region,
                output=attempt.output,
                token=attempt.token,
                run_ids=attempt.run_ids,
                num_nodes=attempt.num_nodes,
                known=world.known_segments,
            )
            if synced.left_out:
                refused[attempt.token] = synced.left_out
        except UserError as error:
            refused[attempt.token] = error
            if isinstance(error, Unreachable):
                unreachable[attempt.region] = error
    return refused


def fetch_unfollowed(world: "World", ledger: Ledger, runs: Sequence[Run]) -> dict[str, UserError]:
    """Download what is new of these runs from machines that no launcher follows; return the errors."""
    attempts: dict[str, Attempt] = {}
    for run in runs:
        if run.backend not in CLOUD_BACKENDS or run.state.is_final or len(attempts) >= _MAX_FETCHED:
            continue
        for attempt in ledger.attempts_of(run.id)[-1:]:
            if attempt.handle and not attempt.ended_at and not ledger.launcher_lives(run):
                attempts[attempt.token] = attempt
    return fetch_output(world, attempts.values())


def fetch_ended(world: "World", ledger: Ledger, runs: Iterable[Run]) -> dict[str, UserError]:
    """Download what is not here of ended runs on AWS, and summarize them anew; return the errors."""
    home = world.settings.home
    ended = [run for run in runs if run.backend in CLOUD_BACKENDS and run.state.is_final]
    attempts = {attempt.token: attempt for run in ended for attempt in ledger.attempts_of(run.id)}
    refused = fetch_output(world, attempts.values())
    for run in ended:
        summary = summary_of(run, ledger.attempts_of(run.id), home)
        if summary is not None and summary != run.summary:
            ledger.set_summary(run.id, summary)
    return refused


def not_here(refused: Mapping[str, UserError]) -> list[str]:
    """Return sentences on what could not be brought home. refused: the errors by token."""
    return [f"what {token} uploaded is not here: {error.message}" for token, error in refused.items()]
