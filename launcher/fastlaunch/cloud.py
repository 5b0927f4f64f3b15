"""The life of a submission on AWS: rows, a machine somewhere, following it, another if EC2 takes it back."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch import locks, s3_sync
from fastlaunch.attempt_cost import minutes_used
from fastlaunch.aws import Aws
from fastlaunch.backends.ec2 import Ec2Backend
from fastlaunch.backends.ec2_site import Site
from fastlaunch.cloud_display import AttemptDisplay, ShownRun
from fastlaunch.cloud_finish import settle_run
from fastlaunch.cloud_follow import Follower
from fastlaunch.cloud_placing import Placing
from fastlaunch.cloud_resume import fits, resumable
from fastlaunch.cost_ceiling import MIN_MINUTES
from fastlaunch.errors import UserError
from fastlaunch.follow import Display
from fastlaunch.job import JobSpec
from fastlaunch.settings import Settings
from fastlaunch.stop_request import StopRequest
from fastlaunch.stored_sites import site_to_json
from fastlaunch.submission import launcher_lock, tell

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger, Run


@dataclass(frozen=True, kw_only=True)
class CloudSubmission:
    """What was asked for. sites: where, in the order to try. jobs_at: the jobs as they are at a site.

    max_minutes: of machine time over all attempts. detach: return as soon as a machine was started.
    """

    sites: tuple[Site, ...]
    jobs_at: Callable[[Site], tuple[JobSpec, ...]]
    max_minutes: int
    detach: bool = False


@dataclass(frozen=True, kw_only=True)
class CloudLauncher:
    """What a submission on AWS needs: who asks, where it is noted and kept, how it is shown and stopped."""

    aws: Aws
    ledger: "Ledger"
    home: Path
    settings: Settings
    display: Display
    stop: StopRequest
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    tell: Callable[[str], None] = tell

    def submit(self, submission: CloudSubmission, *, command: str) -> list["Run"]:
        """The runs, ended, or under way if detached; every row is committed before anything is started.

        Raises CloudRefused's kinds where no machine could be started, or where that is not known.
        """
        submission_id = self.ledger.add_submission(command)
        lock = launcher_lock(self.ledger, submission_id)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(lock), self.display:
            run_ids = self._add_rows(submission_id, submission)

            def jobs_at(site: Site) -> Mapping[str, JobSpec]:
                return dict(zip(run_ids, submission.jobs_at(site), strict=True))

            self._carry_out(run_ids, submission.sites, jobs_at, submission.max_minutes, submission.detach)
        return self.ledger.select(submission=submission_id)

    def resume(self, run: "Run", *, detach: bool = False) -> "Run":
        """The run after another attempt, from its last checkpoint, in the minutes that are left of its limit.

        Raises UserError where that cannot be; see `resumable`.
        """
        found = resumable(run, aws=self.aws, ledger=self.ledger, now=self.now())
        lock = launcher_lock(self.ledger, run.submission_id)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(lock), self.display:
            if not self.ledger.reopen(run.id, f"resumed from {found.checkpoint}"):
                raise UserError(f"run {run.id} is {self.ledger.get(run.id).state} by now")
            self._carry_out([run.id], found.sites, found.jobs_at, found.max_minutes, detach)
        return self.ledger.get(run.id)

    def _add_rows(self, submission_id: str, submission: CloudSubmission) -> list[str]:
        first = submission.sites[0]
        run_ids = []
        with self.ledger.transaction():
            self.ledger.set_sites(submission_id, [site_to_json(site) for site in submission.sites])
            for job in submission.jobs_at(first):
                run_ids.append(self.ledger.new_run_id())
                self.ledger.add_run(
                    submission_id,
                    run_ids[-1],
                    spec=job.to_json(),
                    plan=None,
                    workload=job.workload,
                    recipe=job.recipe.label,
                    instance=first.instance.name,
                    backend="ec2",
                    directory=s3_sync.run_folder(self.home.absolute(), run_ids[-1]),
                )
        return run_ids

    def _carry_out(
        self,
        run_ids: Sequence[str],
        sites: Sequence[Site],
        jobs_at: Callable[[Site], Mapping[str, JobSpec]],
        max_minutes: int,
        detach: bool,
    ) -> None:
        left, followed = tuple(run_ids), set[int]()
        why = "its launcher could not go on"
        try:
            while left:
                used = minutes_used(self._attempts(left), self.now())
                if used and max_minutes - used < MIN_MINUTES:
                    why = f"EC2 took its machine, and {max(0, max_minutes - used):.0f} minutes are too few"
                    self.tell(f"{why}: not resumed")
                    return
                attempt = self._placing().place(
                    sites,
                    lambda site, wanted=left: {run_id: jobs_at(site)[run_id] for run_id in wanted},  # type: ignore[misc]
                    max_minutes=int(max_minutes - used),
                )
                if attempt is None:
                    return
                if detach and not self.stop.by:
                    self._tell_detached(attempt)
                    return
                left = self._follower(attempt, run_ids).follow()
                followed.add(attempt.id)
                sites = self._sites_to_go_on(sites, attempt)
                if left:
                    self.tell(
                        "EC2 took the spot instance back: going on, on another, from the last checkpoint"
                    )
        except UserError as error:
            why = error.message
            raise
        finally:
            self._settle(run_ids, f"stopped by {self.stop.by}" if self.stop.by else why, followed)

    def _settle(self, run_ids: Sequence[str], why: str, followed: Collection[int]) -> None:
        """End the runs that no attempt holds any more: nobody would start them.

        followed: ids of attempts that have let go of their runs, though their machine may be shutting down.
        """
        unfinished = self.ledger.unfinished_attempts("ec2")
        held = {run_id for one in unfinished if one.id not in followed for run_id in one.run_ids}
        for run_id in self.ledger.existing(run_ids) - held:
            settle_run(self.ledger, run_id, why, stopped=bool(self.stop.by))

    def _sites_to_go_on(self, sites: Sequence[Site], attempt: "Attempt") -> Sequence[Site]:
        """From the start again; once a run has begun, only where its checkpoints and its type are."""
        if any(s3_sync.record_paths(self.home, run_id) for run_id in attempt.run_ids):
            return [site for site in sites if fits(site, attempt)]
        return sites

    def _attempts(self, run_ids: Sequence[str]) -> "list[Attempt]":
        return self.ledger.attempts_of(run_ids[0])

    def _backend(self) -> Ec2Backend:
        return Ec2Backend(aws=self.aws, home=self.home.absolute(), sleep=self.sleep, now=self.now)

    def _placing(self) -> Placing:
        return Placing(
            backend=self._backend(),
            ledger=self.ledger,
            settings=self.settings,
            stop=self.stop,
            tell=self.tell,
        )

    def _follower(self, attempt: "Attempt", run_ids: Sequence[str]) -> Follower:
        return Follower(
            attempt=attempt,
            backend=self._backend(),
            ledger=self.ledger,
            shown=AttemptDisplay(
                display=self.display,
                home=self.home,
                token=attempt.token,
                runs=[self._shown(run_id, run_ids) for run_id in attempt.run_ids],
                place=f"{attempt.instance} in {attempt.zone or attempt.region}",
            ),
            stop=self.stop,
            tell=self.tell,
        )

    def _shown(self, run_id: str, run_ids: Sequence[str]) -> ShownRun:
        run = self.ledger.get(run_id)
        assert run.spec is not None
        place = f"[{list(run_ids).index(run_id) + 1}/{len(run_ids)}] " if len(run_ids) > 1 else ""
        return ShownRun(id=run_id, label=place + run.recipe, num_steps=run.spec["steps"])

    def _tell_detached(self, attempt: "Attempt") -> None:
        assert attempt.handle is not None
        first = attempt.run_ids[0]
        self.tell(
            f"started {attempt.handle['instance_id']} ({attempt.instance}) in {attempt.region}. Nobody "
            f"follows it: only its own timer, which turns it off within {attempt.max_minutes} min, ends what "
            f"hangs. To follow it: fastlaunch logs -f {first}. To stop it: fastlaunch cancel {first}"
        )
