"""A submission on SageMaker: jobs that are asked for, waited for, followed, stopped and gone on with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cloud_world import World, opened_world, training_job
from fake_cloud import HALF, REST
from fake_training import TRAINING_S, FakeJob, FakeTrainingAws, at_second_start
from moto_training_jobs import SPOT_SHARE
from sagemaker_builders import training_site

from fastlaunch.aws.errors import ApiCall
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.errors import BadConfiguration, QuotaExceeded, Unreachable
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.attempt_cost import attempt_cost, minutes_used

EAST = training_site()
WEST = training_site(region="us-west-2", bucket="acme-west")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path, FakeTrainingAws, backend_type=SageMakerBackend, site=EAST) as opened:
        yield opened


def test_a_plain_run(world: World) -> None:
    (run,) = world.submit()
    assert (run.state, run.reason, run.backend) == (RunState.COMPLETED, None, "sagemaker")
    assert run.price is not None
    assert (run.price.service, run.price.usd_per_hour) == ("sagemaker", EAST.usd_per_hour)
    attempt = world.attempt(run)
    assert attempt.token == f"{run.id}-a1" == world.tokens()[0][1]
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
    assert world.tokens() == [("us-east-1", f"{run.id}-a1")] * 2
    assert len(world.aws.jobs.jobs) == 1


def test_a_name_that_another_request_has_used_is_a_definite_error(world: World) -> None:
    def take_name() -> None:
        (attempt,) = world.ledger.unfinished_attempts("sagemaker")
        plan = world.ledger.plan_of(attempt.id)
        assert plan is not None
        others = {**plan.request, "Environment": {"FASTLAUNCH_TOKEN": "somebody else's"}}
        world.aws.job = lambda job: None
        call = ApiCall(service="sagemaker", action="CreateTrainingJob", region="us-east-1")
        world.aws._answer(call, others)

    world.aws.refuse("CreateTrainingJob", Unreachable("no answer"))
    world.clock.at(1, take_name)
    with pytest.raises(BadConfiguration, match="must be unique"):
        world.submit(EAST, WEST)
    (run,) = world.ledger.select()
    assert run.state is RunState.FAILED
    attempt = world.attempt(run)
    assert attempt.handle is None and attempt.ended_at is not None
    assert world.aws.running() == [attempt.token]


def test_a_quota_leads_to_the_next_region(world: World) -> None:
    world.aws.answers = [QuotaExceeded("ResourceLimitExceeded: ml.p5.48xlarge for training job usage: 0")]
    (run,) = world.submit(EAST, EAST, WEST)
    # The quota is the type's in the region, whatever else might be taken instead.
    assert [region for region, _ in world.tokens()] == ["us-east-1", "us-west-2"]
    assert run.state is RunState.COMPLETED


def test_a_job_that_finds_no_capacity_is_tried_in_the_next_region(world: World) -> None:
    world.aws.job = at_second_start
    (run,) = world.submit(EAST, WEST)
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.tokens() == [("us-east-1", f"{run.id}-a1"), ("us-west-2", f"{run.id}-a2")]
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.billing.billed_s, one.billing.lived_s) == (RunState.FAILED, 0.0, 0.0)
    # Waiting for capacity cost nothing, neither money nor minutes.
    assert minutes_used([one], world.clock.now()) == 0 and two.max_minutes == 120
    assert run.spec is not None and run.spec["region"] == "us-west-2"
    assert world.reported("CapacityError")
    # Both write under one folder, so that the second would find what the first had saved.
    folders = [request["CheckpointConfig"]["S3Uri"] for _, request in world.aws.requests]
    assert [uri.rpartition("/")[2] for uri in folders] == [run.id, run.id]


# Stopping


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
    def again() -> None:
        raise KeyboardInterrupt

    def deaf(job: FakeJob) -> None:
        job.stops = False
        job.train(upto=0)
        world.clock.at(TRAINING_S + 60, lambda: setattr(world.stop, "by", "Ctrl-C"))
        world.clock.at(TRAINING_S + 75, again)

    world.aws.jobs.stopping_describes = None
    world.aws.job = deaf
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    (name,) = world.aws.running()
    assert world.aws.jobs.job(name).status == "Stopping"
    assert world.reported("once more leaves that to SageMaker")
    assert world.reported(f"training job {name} in us-east-1 was told to end")
    # Whoever looks next ends it in the ledger.
    world.aws.jobs.end(name, "Stopped")
    world.reconcile()
    (run,) = world.ledger.select()
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")


def test_detached_it_needs_no_timer_in_the_account(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert run.state is RunState.RUNNING
    assert world.reported("SageMaker ends it 120 min after it began to train")
    assert not world.reported("timer in the account")
    attempt = world.attempt(run)
    assert attempt.schedule is None and attempt.reason is None


# Going on


def test_resume_goes_on_under_the_first_attempts_folder(world: World) -> None:
    def run_out(job: FakeJob) -> None:
        first, second = job.run_ids()
        folder = f"fastlaunch/runs/{first}/{second}/checkpoints"

        def end() -> None:
            job.upload_records(first)
            job.upload_records(second, recipe="fp32", **HALF)
            world.aws.objects["acme-training", f"{folder}/step-00000020.pt"] = b"weights"
            job.say_last("interrupted", {first: "completed", second: "interrupted"}, reason="watchdog")
            job.end("Stopped", secondary="MaxRuntimeExceeded")

        job.get_machines()
        world.clock.at(TRAINING_S + 60, job.boot)
        world.clock.at(TRAINING_S + 600, end)

    world.aws.job = run_out
    first, run = world.submit(jobs=(training_job(), training_job("fp32", checkpoint_every=20)))
    assert run.state is RunState.INTERRUPTED, run.reason
    world.aws.job = lambda job: job.train(how=lambda run_id: {**REST, "recipe": "fp32"})
    after = world.launcher().resume(run)
    assert after.state is RunState.COMPLETED, after.reason
    assert after.summary is not None and after.summary.num_steps == 40
    one, two = (request["CheckpointConfig"]["S3Uri"] for _, request in world.aws.requests)
    assert one == two == f"s3://acme-training/fastlaunch/runs/{first.id}"
    (_, attempt) = world.ledger.attempts_of(run.id)
    assert attempt.output == f"{one}/{run.id}-a2" and attempt.run_ids == (run.id,)
    # What its machines took is not there any more; what it waited for them is.
    assert attempt.max_minutes == 120 - round((TRAINING_S + 600 - 120) / 60)


def test_a_job_that_sagemaker_starts_again_is_followed_on(world: World) -> None:
    def interrupted_once(job: FakeJob) -> None:
        (run_id,) = job.run_ids()
        job.get_machines()
        for seconds, do in (
            (60, job.boot),
            (120, lambda: job.upload_records(run_id, **HALF)),
            (180, lambda: world.aws.jobs.move(job.token, "Interrupted", "Restarting")),
            (900, lambda: world.aws.jobs.move(job.token, "Training")),
            (960, lambda: job.upload_records(run_id, attempt=2, **REST)),
            (1000, lambda: job.say_last("completed", {run_id: "completed"})),
            (1001, job.turn_off),
        ):
            world.clock.at(TRAINING_S + seconds, do)

    world.aws.job = interrupted_once
    (run,) = world.submit(jobs=(training_job(purchase="spot", checkpoint_every=20),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 40
    # One attempt of ours, whatever SageMaker made of it; at the on-demand price, for fewer seconds.
    attempt = world.attempt(run)
    assert len(world.aws.requests) == 1
    assert attempt.billing.usd_per_hour == EAST.usd_per_hour
    assert attempt.billing.billed_s is not None and attempt.billing.lived_s is not None
    assert attempt.billing.billed_s == pytest.approx(SPOT_SHARE * attempt.billing.lived_s, abs=1)
    assert "step 40/40" in world.shown.getvalue()


def test_a_job_that_nobody_noted_and_sagemaker_does_not_show_is_known_by_its_last_word(world: World) -> None:
    (run,) = world.submit(detach=True)
    attempt = world.attempt(run)
    world.clock.sleep(7200)
    with world.ledger.transaction():
        world.ledger._file.update("attempts", attempt.id, handle=None)
    world.aws.jobs.jobs.clear()
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED
