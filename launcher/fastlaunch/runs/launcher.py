"""The life of a submission on AWS: rows, machines somewhere, following them, others if AWS takes those."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CloudBackend, Place
from fastlaunch.cloud_display import AttemptDisplay, ShownRun
from fastlaunch.cloud_words import ends_by_itself, machine_of
from fastlaunch.core import locks
from fastlaunch.core.errors import NoCapacity, UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.spec import JobSpec, names_apart
from fastlaunch.ledger.attempt_cost import minutes_used
from fastlaunch.placement.cost_ceiling import MIN_MINUTES
from fastlaunch.runs.deadline_schedule import arm
from fastlaunch.runs.display import Display
from fastlaunch.runs.finish import settle_run
from fastlaunch.runs.monitor import Follower
from fastlaunch.runs.provision import Placing
from fastlaunch.runs.resume import resumable, root_of, site_to_go_on
from fastlaunch.runs.stop_request import StopRequest
from fastlaunch.stored_sites import site_to_json
from fastlaunch.submission import launcher_lock, tell

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.run_attempts import Attempt


@dataclass(frozen=True, kw_only=True)
class CloudSubmission:
    """What was asked for. sites: where, in the order to try. jobs_at: the jobs as they are at a site.

    All sites are of one backend. max_minutes: of machine time over all attempts. num_nodes: machines of an
    attempt, as every job has it. detach: return as soon as they were started.
    """

    sites: tuple[Place, ...]
    jobs_at: Callable[[Place], tuple[JobSpec, ...]]
    max_minutes: int
    num_nodes: int = 1
    detach: bool = False


@dataclass(frozen=True, kw_only=True)
class CloudLauncher:
    """What a submission on AWS needs: who asks, where it is noted and kept, how it is shown and stopped.

    backends: by name; they sleep, and tell the time.
    """

    backends: Mapping[str, CloudBackend]
    aws: Aws
    ledger: "Ledger"
    home: Path
    settings: Settings
    display: Display
    stop: StopRequest
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

            def jobs_at(site: Place) -> Mapping[str, JobSpec]:
                return dict(zip(run_ids, submission.jobs_at(site), strict=True))

            self._carry_out(run_ids, submission.sites, jobs_at, submission.max_minutes, submission.detach)
        return self.ledger.select(submission=submission_id)

    def resume(self, run: "Run", *, detach: bool = False) -> "Run":
        """The run after another attempt, from its last checkpoint, in the minutes that are left of its limit.

        Raises UserError where that cannot be; see `resumable`.
        """
        found = resumable(run, backends=self.backends, aws=self.aws, ledger=self.ledger, now=self.now())
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
                assert job.num_nodes == submission.num_nodes, "all jobs are done on the same machines"
                run_ids.append(self.ledger.new_run_id())
                self.ledger.add_run(
                    submission_id,
                    run_ids[-1],
                    spec=job.to_json(),
                    plan=None,
                    workload=job.workload,
                    recipe=job.recipe.label,
                    instance=first.instance.name,
                    backend=first.backend,
                    directory=s3_sync.run_folder(self.home.absolute(), run_ids[-1]),
                )
        return run_ids

    def _carry_out(
        self,
        run_ids: Sequence[str],
        sites: Sequence[Place],
        jobs_at: Callable[[Place], Mapping[str, JobSpec]],
        max_minutes: int,
        detach: bool,
    ) -> None:
        left, followed, placing = tuple(run_ids), set[int](), self._placing(detach)
        why = "its launcher could not go on"
        try:
            while left:
                earlier = self.ledger.attempts_of(left[0])
                used = minutes_used(earlier, self.now())
                if used and max_minutes - used < MIN_MINUTES:
                    minutes = f"{max(0, max_minutes - used):.0f} minutes"
                    why = f"{self._backend(earlier[-1]).service} took its machine, and {minutes} are too few"
                    self.tell(f"{why}: not resumed")
                    return
                placed = placing.place(
                    sites,
                    lambda site, wanted=left: {run_id: jobs_at(site)[run_id] for run_id in wanted},  # type: ignore[misc]
                    max_minutes=int(max_minutes - used),
                    root=root_of(earlier),
                )
                if placed is None:
                    return
                attempt = placed.attempt
                if detach and self._leave(attempt):
                    return
                done = self._follower(attempt, run_ids).follow()
                left = done.left
                followed.add(attempt.id)
                if left and done.end.try_next:
                    placing.refuse(placed.site, NoCapacity(done.end.reason or "it got no machines"))
                elif left:
                    # From the start again: there may be capacity by now.
                    placing = self._placing(detach)
                    self.tell(f"{done.end.reason}: going on, on another, from the last checkpoint")
                sites = self._sites_to_go_on(sites, attempt)
        except UserError as error:
            why = error.message
            raise
        finally:
            self._settle(run_ids, f"stopped by {self.stop.by}" if self.stop.by else why, followed)

    def _settle(self, run_ids: Sequence[str], why: str, followed: Collection[int]) -> None:
        """End the runs that no attempt holds any more: nobody would start them.

        followed: ids of attempts that have let go of their runs, though their machine may be shutting down.
        """
        unfinished = [one for name in self.backends for one in self.ledger.unfinished_attempts(name)]
        held = {run_id for one in unfinished if one.id not in followed for run_id in one.run_ids}
        for run_id in self.ledger.existing(run_ids) - held:
            settle_run(self.ledger, run_id, why, stopped=bool(self.stop.by))

    def _sites_to_go_on(self, sites: Sequence[Place], attempt: "Attempt") -> Sequence[Place]:
        """From the start again; once a run has begun, only where its checkpoints and its type are."""
        if not any(s3_sync.record_paths(self.home, run_id) for run_id in attempt.run_ids):
            return sites
        # The type that it got may be another than the first that was asked for.
        attempt = self.ledger.attempt(attempt.id)
        return [own for site in sites if (own := site_to_go_on(site, attempt))]

    def _backend(self, attempt: "Attempt") -> CloudBackend:
        return self.backends[attempt.backend]

    def _placing(self, detach: bool) -> Placing:
        return Placing(
            backends=self.backends,
            ledger=self.ledger,
            settings=self.settings,
            stop=self.stop,
            tell=self.tell,
            detach=detach,
        )

    def _follower(self, attempt: "Attempt", run_ids: Sequence[str]) -> Follower:
        backend = self._backend(attempt)
        return Follower(
            attempt=attempt,
            backend=backend,
            ledger=self.ledger,
            settings=self.settings,
            shown=AttemptDisplay(
                display=self.display,
                home=self.home,
                token=attempt.token,
                runs=[self._shown(run_id, run_ids) for run_id in attempt.run_ids],
                place=_place(attempt),
                machine=machine_of(attempt, backend),
            ),
            stop=self.stop,
            tell=self.tell,
        )

    def _shown(self, run_id: str, run_ids: Sequence[str]) -> ShownRun:
        number = list(run_ids).index(run_id)
        specs = [JobSpec.from_json(self.ledger.get(one).spec or {}) for one in run_ids]
        place = f"[{number + 1}/{len(run_ids)}] " if len(run_ids) > 1 else ""
        return ShownRun(id=run_id, label=place + names_apart(specs)[number], num_steps=specs[number].steps)

    def _leave(self, attempt: "Attempt") -> bool:
        """Whether the attempt is left to itself, with a timer in the account where it has machines of EC2's.

        Not if the user asked to stop meanwhile: it is followed then, and stopped.
        """
        assert attempt.handle is not None
        backend, first = self._backend(attempt), attempt.run_ids[0]
        protection = ends_by_itself(attempt, backend)
        ids = attempt.handle.get("instance_ids")
        if ids and not self.stop.by:
            role = self.settings.aws.get(attempt.region or "", RegionSettings()).scheduler_role
            try:
                timer = arm(self.ledger, self.aws, attempt, role=role, ids=ids, now=self.now())
            except UserError as error:
                timer = f"no timer in the account was noted ({error.message})"
            except KeyboardInterrupt:
                # Asked twice to stop: it is followed to its end, and a third signal ends it at once.
                timer = "a timer in the account may have been made"
            protection = f"{protection}; {timer}"
        self.ledger.explain_attempt(attempt.id, None)
        if self.stop.by:
            return False
        self.tell(
            f"started {machine_of(attempt, backend)} ({_num(attempt)}{attempt.instance}). Nobody follows it: "
            f"{protection}. To follow it: fastlaunch logs -f {first}. To stop it: fastlaunch cancel {first}"
        )
        return True


def _place(attempt: "Attempt") -> str:
    """`p5.48xlarge in us-east-1`, `2 x p5.48xlarge in us-east-1`."""
    return f"{_num(attempt)}{attempt.instance} in {attempt.zone or attempt.region}"


def _num(attempt: "Attempt") -> str:
    return f"{attempt.num_nodes} x " if attempt.num_nodes > 1 else ""
