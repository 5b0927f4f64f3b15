"""A submission on SageMaker: jobs that are asked for, waited for, followed, stopped and gone on with."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_cloud import Clock
from fake_training import TRAINING_S, FakeJob, FakeTrainingAws
from moto_training_jobs import SPOT_SHARE
from sagemaker_builders import training_job, training_site

from fastlaunch.backends.placements import SageMakerPlacement
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.errors import BadConfiguration, QuotaExceeded, Unreachable
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.attempt_cost import attempt_cost, minutes_used
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.runs.cancel import cancel
from fastlaunch.runs.display import PlainLines
from fastlaunch.runs.launcher import Launcher, Submission
from fastlaunch.runs.reconcile import reconcile
from fastlaunch.runs.stop_request import StopRequest

EAST = training_site()
WEST = training_site(region="us-west-2", bucket="acme-west")


@dataclass
class World:
    home: Path
    clock: Clock
    aws: FakeTrainingAws
    ledger: Ledger
    stop: StopRequest
    told: list[str]
    shown: io.StringIO

    @property
    def backends(self) -> dict[str, CloudBackend]:
        backend = SageMakerBackend(aws=self.aws, home=self.home, sleep=self.clock.sleep, now=self.clock.now)
        return {"sagemaker": backend}

    @property
    def settings(self) -> Settings:
        return Settings(home=self.home)

    def launcher(self) -> Launcher:
        return Launcher(
            backends=self.backends,
            ledger=self.ledger,
            settings=self.settings,
            display=PlainLines(stream=self.shown, clock=lambda: self.clock.now().timestamp()),
            stop=self.stop,
            report=self.told.append,
        )

    def submit(
        self, *sites: SageMakerPlacement, jobs: tuple[JobSpec, ...] = (training_job(),), **how: Any
    ) -> list[Run]:
        submission = Submission(
            placements=sites or (EAST,),
            jobs_at=lambda at: tuple(
                replace(one, instance=at.instance.name, region=at.region) for one in jobs
            ),
            max_minutes=120,
            **how,
        )
        return self.launcher().submit(submission, command="fastlaunch submit")

    def reconcile(self) -> None:
        reconcile(self.ledger, dict(self.backends))  # type: ignore[arg-type]

    def names(self) -> list[tuple[str, str]]:
        return [(region, request["TrainingJobName"]) for region, request in self.aws.requests]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    with Ledger(tmp_path / "ledger.sqlite", clock=clock.now) as ledger:
        yield World(
            home=tmp_path,
            clock=clock,
            aws=FakeTrainingAws(clock),
            ledger=ledger,
            stop=StopRequest(),
            told=[],
            shown=io.StringIO(),
        )


def test_a_plain_run(world: World) -> None:
    (run,) = world.submit()
    assert (run.state, run.reason, run.backend) == (RunState.COMPLETED, None, "sagemaker")
    assert run.price is not None
    assert (run.price.service, run.price.usd_per_hour) == ("sagemaker", EAST.usd_per_hour)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.token == f"{run.id}-a1" == world.names()[0][1]
    assert (attempt.backend, attempt.instance, attempt.num_nodes) == ("sagemaker", "p5.48xlarge", 1)
    assert attempt.output == f"s3://acme-training/fastlaunch/runs/{run.id}/{attempt.token}"
    # It had machines from 120 s on, and ended 460 s after it was asked for: waiting is not billed.
    assert (attempt.billing.billed_s, attempt.billing.source) == (340.0, "times")
    cost = attempt_cost(attempt, world.clock.now())
    assert cost.usd == pytest.approx(340 / 3600 * EAST.usd_per_hour)
    assert world.aws.running() == []


def test_what_it_waits_for_is_noted_for_other_commands(world: World) -> None:
    seen: list[str | None] = []

    def look(job: FakeJob) -> None:
        job.train()
        for seconds in (60, 150, TRAINING_S + 30):
            world.clock.at(seconds, lambda: seen.append(world.ledger.select()[0].reason))

    world.aws.job = look
    world.submit()
    assert seen == ["waiting for capacity", "downloading the image and the code", None]


# Asking


def test_a_lost_answer_is_asked_again_and_found_to_be_ours(world: World) -> None:
    world.aws.answers = ["lost"]
    (run,) = world.submit(EAST, WEST)
    assert run.state is RunState.COMPLETED
    # The second request met the first one's job.
    assert world.names() == [("us-east-1", f"{run.id}-a1")] * 2
    assert len(world.aws.jobs.jobs) == 1


def test_a_name_that_another_request_has_used_is_a_definite_error(world: World) -> None:
    def take_name(answer: Any = None) -> None:
        (attempt,) = world.ledger.unfinished_attempts("sagemaker")
        plan = world.ledger.plan_of(attempt.id)
        assert plan is not None
        others = {**plan.request, "Environment": {"FASTLAUNCH_TOKEN": "somebody else's"}}
        other = world.aws.job
        world.aws.job = lambda job: None
        world.aws._answer(_asked("us-east-1"), others)
        world.aws.job = other

    world.aws.refusals["CreateTrainingJob"] = [Unreachable("no answer")]
    world.clock.at(1, take_name)
    with pytest.raises(BadConfiguration, match="must be unique"):
        world.submit(EAST, WEST)
    (run,) = world.ledger.select()
    assert run.state is RunState.FAILED
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is None and attempt.ended_at is not None
    assert [job.name for job in world.aws.jobs.live()] == [attempt.token]


def _asked(region: str) -> Any:
    from fastlaunch.aws.errors import ApiCall

    return ApiCall(service="sagemaker", action="CreateTrainingJob", region=region)


def test_a_quota_leads_to_the_next_region(world: World) -> None:
    world.aws.answers = [QuotaExceeded("ResourceLimitExceeded: ml.p5.48xlarge for training job usage: 0")]
    (run,) = world.submit(EAST, EAST, WEST)
    # The quota is the type's in the region, whatever else might be taken instead.
    assert [region for region, _ in world.names()] == ["us-east-1", "us-west-2"]
    assert run.state is RunState.COMPLETED


def test_a_job_that_finds_no_capacity_is_tried_in_the_next_region(world: World) -> None:
    def first_none(job: FakeJob) -> None:
        if len(world.aws.jobs.jobs) == 1:
            job.find_no_capacity(after_s=3000)
        else:
            job.train()

    world.aws.job = first_none
    (run,) = world.submit(EAST, WEST)
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.names() == [("us-east-1", f"{run.id}-a1"), ("us-west-2", f"{run.id}-a2")]
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.billing.billed_s, one.billing.lived_s) == (RunState.FAILED, 0.0, 0.0)
    # Waiting for capacity cost nothing, neither money nor minutes.
    assert minutes_used([one], world.clock.now()) == 0 and two.max_minutes == 120
    assert run.spec is not None and run.spec["region"] == "us-west-2"
    assert any("CapacityError" in line for line in world.told)
    # Both write under one folder, so that the second would find what the first had saved.
    folders = [request["CheckpointConfig"]["S3Uri"] for _, request in world.aws.requests]
    assert [uri.rpartition("/")[2] for uri in folders] == [run.id, run.id]


# Stopping


def test_ctrl_c_lets_the_container_write_its_end(world: World) -> None:
    def interrupt(job: FakeJob) -> None:
        job.train(upto=1, how=lambda run_id: {"steps": 80, "header": {"steps": 200}, "status": "interrupted"})
        world.clock.at(TRAINING_S + 200, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.jobs.stopping_describes = None
    world.aws.job = interrupt
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C")
    assert run.summary is not None and run.summary.num_steps == 80
    assert world.aws.running() == []
    assert any("stopping training job" in line for line in world.told)


def test_ctrl_c_while_it_waits_for_capacity_ends_it(world: World) -> None:
    def wait(job: FakeJob) -> None:
        job.move(30, "Pending")
        world.clock.at(60, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.job = wait
    (run,) = world.submit(EAST, WEST)
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert world.aws.running() == [] and len(world.aws.requests) == 1
    assert world.ledger.attempts_of(run.id)[0].billing.billed_s == 0


def test_a_second_ctrl_c_leaves_the_end_to_sagemaker(world: World) -> None:
    def twice() -> None:
        world.stop.by = "Ctrl-C"
        world.clock.at(15, interrupt)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def deaf(job: FakeJob) -> None:
        job.stops = False
        job.train(upto=0)
        world.clock.at(TRAINING_S + 60, twice)

    world.aws.jobs.stopping_describes = None
    world.aws.job = deaf
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    (name,) = world.aws.running()
    assert world.aws.jobs.job(name).status == "Stopping"
    assert any("once more leaves that to SageMaker" in line for line in world.told)
    assert any(f"training job {name} in us-east-1 is stopping" in line for line in world.told)
    # Whoever looks next ends it in the ledger.
    world.aws.jobs.end(name, "Stopped")
    world.reconcile()
    (run,) = world.ledger.select()
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")


def test_detached_it_needs_no_timer_in_the_account(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert run.state is RunState.RUNNING
    (line,) = world.told
    assert "SageMaker ends it 120 min after it began to train" in line
    assert "timer in the account" not in line
    (attempt,) = world.ledger.unfinished_attempts("sagemaker")
    assert attempt.schedule is None and attempt.reason is None


# By other commands


def test_a_detached_job_is_seen_and_then_ended(world: World) -> None:
    (run,) = world.submit(EAST, detach=True)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.instance, attempt.launched_at) == ("p5.48xlarge", None)
    world.clock.sleep(60)
    world.reconcile()
    assert world.ledger.get(run.id).reason == "waiting for capacity"
    world.clock.sleep(90)
    world.reconcile()
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.launched_at is not None and world.ledger.get(run.id).state is RunState.RUNNING
    world.clock.sleep(600)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED
    assert world.ledger.unfinished_attempts("sagemaker") == []


def test_a_job_that_nobody_noted_is_adopted(world: World) -> None:
    (run,) = world.submit(detach=True)
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE attempts SET handle = NULL, state = 'planned'")
        world.ledger._file.write("UPDATE runs SET state = 'planned'")
    world.reconcile()
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None and attempt.handle["job_name"] == attempt.token
    assert world.ledger.get(run.id).state is RunState.RUNNING


def test_cancel_stops_the_job_with_all_its_runs(world: World) -> None:
    world.aws.job = lambda job: job.train(upto=0)
    first, second = world.submit(jobs=(training_job(), training_job("fp32")), detach=True)
    world.clock.sleep(TRAINING_S + 90)
    (backend,) = world.backends.values()
    state = cancel(first, backend=backend, ledger=world.ledger)  # type: ignore[arg-type]
    assert state is RunState.CANCELLED
    assert world.ledger.get(second.id).state is RunState.CANCELLED
    assert world.aws.running() == []


# Going on


def interrupted(world: World, *sites: SageMakerPlacement, got: str | None = None) -> Run:
    """The second run of a job that failed, with a checkpoint at step 80."""

    def fail(job: FakeJob) -> None:
        if got:
            world.aws.jobs.select(job.token, f"ml.{got}")
        first, second = job.run_ids()
        job.get_machines()
        world.clock.at(TRAINING_S + 60, job.boot)

        def end() -> None:
            job.upload_records(first, steps=200, batch_size=64, world_size=8, instance=got)
            how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted", "instance": got}
            job.upload_records(second, batch_size=64, world_size=8, recipe="fp32", **how)
            world.aws.objects["acme-training", f"{root}/{second}/checkpoints/step-00000080.pt"] = b"w"
            job.say_last("interrupted", {first: "completed", second: "interrupted"}, reason="watchdog")
            job.end("Stopped", secondary="MaxRuntimeExceeded")

        root = f"fastlaunch/runs/{first}"
        world.clock.at(TRAINING_S + 1800, end)

    world.aws.job = fail
    _, second = world.submit(*sites, jobs=(training_job(), training_job("fp32", checkpoint_every=40)))
    assert second.state is RunState.INTERRUPTED, second.reason
    return second


def test_resume_goes_on_under_the_first_attempts_folder(world: World) -> None:
    run = interrupted(world)
    world.aws.job = lambda job: job.train(
        how=lambda run_id: {"steps": 120, "first_step": 81, "recipe": "fp32"}
    )
    first = world.ledger.select()[0]
    after = world.launcher().resume(run)
    assert after.state is RunState.COMPLETED, after.reason
    assert after.summary is not None and after.summary.num_steps == 200
    one, two = (request["CheckpointConfig"]["S3Uri"] for _, request in world.aws.requests)
    assert one == two == f"s3://acme-training/fastlaunch/runs/{first.id}"
    (_, attempt) = world.ledger.attempts_of(run.id)
    assert attempt.output == f"{one}/{run.id}-a2" and attempt.run_ids == (run.id,)
    # What its machines took is not there any more; what it waited for them is.
    assert attempt.max_minutes == 120 - round((TRAINING_S + 1800 - 120) / 60)


# Several nodes


def test_two_hosts_are_one_job(world: World) -> None:
    def train_both(job: FakeJob) -> None:
        other = FakeJob(aws=job.aws, instance_id=job.instance_id, request=job.request, rank=1)
        for host in (other, job):
            host.train(how=lambda run_id: {"num_nodes": 2, "world_size": 16})

    world.aws.job = train_both
    (run,) = world.submit(jobs=(training_job(num_nodes=2, num_gpus=16),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and (run.summary.setup.num_gpus, run.summary.setup.num_nodes) == (16, 2)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.num_nodes == 2 and len(world.aws.requests) == 1
    seconds = attempt.billing.billed_s
    assert seconds is not None
    usd = attempt_cost(attempt, world.clock.now()).usd
    assert usd == pytest.approx(2 * seconds / 3600 * EAST.usd_per_hour)


def test_a_job_that_sagemaker_starts_again_is_followed_on(world: World) -> None:
    def interrupted_once(job: FakeJob) -> None:
        (run_id,) = job.run_ids()
        job.get_machines()
        how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted"}
        usual = {"batch_size": 64, "world_size": 8}
        for seconds, do in (
            (60, job.boot),
            (120, lambda: job.upload_records(run_id, **usual, **how)),
            (180, lambda: world.aws.jobs.move(job.token, "Interrupted", "Restarting")),
            (900, lambda: world.aws.jobs.move(job.token, "Training")),
            (960, lambda: job.upload_records(run_id, **usual, attempt=2, steps=120, first_step=81)),
            (1000, lambda: job.say_last("completed", {run_id: "completed"})),
            (1001, job.turn_off),
        ):
            world.clock.at(TRAINING_S + seconds, do)

    world.aws.job = interrupted_once
    (run,) = world.submit(jobs=(training_job(purchase="spot", checkpoint_every=20),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 200
    # One attempt of ours, whatever SageMaker made of it; at the on-demand price, for fewer seconds.
    (attempt,) = world.ledger.attempts_of(run.id)
    assert len(world.aws.requests) == 1
    assert attempt.billing.usd_per_hour == EAST.usd_per_hour
    assert attempt.billing.billed_s is not None and attempt.billing.lived_s is not None
    assert attempt.billing.billed_s == pytest.approx(SPOT_SHARE * attempt.billing.lived_s, abs=1)
    assert "step 200/200" in world.shown.getvalue()
