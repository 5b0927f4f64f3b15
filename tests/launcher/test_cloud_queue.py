"""A submission through a queue of AWS Batch: jobs wait, get their turn, are retried, stopped and reaped."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cloud_world import AFTER_FORGETTING_S, World, opened_world, training_job
from fake_cloud import HALF, REST
from fake_training import TRAINING_S, FakeJob, FakeTrainingAws, at_second_start
from moto_batch import ServiceJob
from sagemaker_builders import training_site

from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.backends.site import Queue
from fastlaunch.core.errors import BadConfiguration, Unreachable
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.ledger.attempt_cost import attempt_cost
from fastlaunch.ledger.ledger import Run
from fastlaunch.lifecycle.orphans import end, end_now, judge_job, known_attempts, take_inventory
from fastlaunch.lifecycle.sight import alarm

TEAM = Queue(name="team")
SITE = training_site(queue=TEAM)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path, FakeTrainingAws, backend_type=SageMakerBackend, site=SITE) as opened:
        opened.aws.queues.add("team", num_instances=1)
        yield opened


def queue_of(world: World) -> Any:
    return world.aws.queues.queues["us-east-1", "team"]


def service_job(world: World, run: Run) -> ServiceJob:
    job: ServiceJob = world.aws.queues.job(world.attempt(run).token)
    return job


def look(world: World, *runs: Run, seconds: float = 0.0) -> list[Run]:
    """Let time pass, look as `status` does, and return the runs."""
    world.clock.sleep(seconds)
    world.reconcile()
    return [world.ledger.get(run.id) for run in runs]


def test_a_plain_run_is_as_without_a_queue(world: World) -> None:
    (run,) = world.submit()
    assert (run.state, run.reason, run.backend) == (RunState.COMPLETED, None, "sagemaker")
    attempt, job = world.attempt(run), service_job(world, run)
    assert world.tokens() == [("us-east-1", attempt.token)]
    assert (attempt.instance, attempt.num_nodes, attempt.token) == ("p5.48xlarge", 1, f"{run.id}-a1")
    assert attempt.output == f"s3://acme-training/fastlaunch/runs/{run.id}/{attempt.token}"
    # Its start and its end count, and no minute in which it waited.
    assert (attempt.billing.billed_s, attempt.billing.source) == (340.0, "times")
    assert attempt_cost(attempt, world.clock.now()).usd == pytest.approx(340 / 3600 * SITE.usd_per_hour)
    assert attempt.handle is not None
    assert (attempt.handle["arn"], attempt.handle["service_job"]) == (job.arn, job.id)
    (name,) = job.training_jobs
    assert attempt.handle["training_jobs"] == [world.aws.jobs.job(name).arn]
    assert name.startswith(f"AWSBatch{attempt.token}") and job.status == "SUCCEEDED"


def test_a_queued_job_costs_nothing_and_says_where_it_stands(world: World) -> None:
    queue_of(world).num_instances = 0
    first, second = (world.submit(detach=True)[0] for _ in range(2))
    first, second = look(world, first, second, seconds=3 * 24 * 3600)
    assert first.reason == "queued (RUNNABLE, position 1 in queue team)"
    assert second.reason == "queued (RUNNABLE, position 2 in queue team)"
    attempt = world.attempt(first)
    assert attempt_cost(attempt, world.clock.now()).usd == 0.0
    assert attempt.launched_at is None and alarm(attempt, world.clock.now()) is None
    assert world.aws.jobs.jobs == {}
    # Its turn comes, and its time begins then.
    queue_of(world).num_instances = 1
    first, second = look(world, first, second, seconds=60)
    first, second = look(world, first, second, seconds=TRAINING_S + 60)
    assert first.reason is None and second.reason == "queued (RUNNABLE, position 1 in queue team)"
    first, second = look(world, first, second, seconds=600)
    assert first.state is RunState.COMPLETED
    assert world.attempt(first).billing.billed_s == 340.0


def test_a_higher_priority_goes_first(world: World) -> None:
    queue_of(world).num_instances = 0
    world.submit(detach=True)
    world.clock.sleep(1)
    (urgent,) = world.submit(replace(SITE, queue=replace(TEAM, priority=9)), detach=True)
    (urgent,) = look(world, urgent)
    assert urgent.reason == "queued (RUNNABLE, position 1 in queue team)"


def test_a_share_that_uses_less_goes_first(world: World) -> None:
    queue_of(world).sharing = "fairsharePolicy"
    speech, vision = (replace(SITE, queue=replace(TEAM, share=share)) for share in ("speech", "vision"))
    runs = [world.submit(site, detach=True)[0] for site in (vision, vision, speech)]
    runs = look(world, *runs)
    assert [run.reason for run in runs][1:] == [
        "queued (RUNNABLE, position 2 in queue team)",
        "queued (RUNNABLE, position 1 in queue team)",
    ]


# Started again


def fail_once(world: World, reason: str) -> None:
    """The first training job fails a while after it began; others train."""

    def do(job: FakeJob) -> None:
        if len(world.aws.jobs.jobs) > 1:
            job.train()
            return
        job.get_machines()
        world.clock.at(TRAINING_S + 60, job.boot)
        world.clock.at(TRAINING_S + 300, lambda: job.end("Failed", reason=reason))

    world.aws.job = do


def test_a_fault_of_sagemakers_is_retried_and_every_start_is_billed(world: World) -> None:
    fail_once(world, "InternalServerError: We encountered an internal error. Please try again.")
    (run,) = world.submit(replace(SITE, queue=replace(TEAM, retries=1)))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None and len(attempt.handle["training_jobs"]) == 2
    first_s = TRAINING_S + 300 - 120
    assert attempt.billing.billed_s == first_s + 340.0
    assert attempt.max_cost_usd == pytest.approx(2 * 130 / 60 * SITE.usd_per_hour)


def test_a_second_start_has_a_time_limit_of_its_own(world: World) -> None:
    fail_once(world, "InternalServerError: We encountered an internal error. Please try again.")
    (run,) = world.submit(replace(SITE, queue=replace(TEAM, retries=1)), detach=True)
    look(world, run, seconds=TRAINING_S + 200)
    queue_of(world).num_instances = 0
    (run,) = look(world, run, seconds=24 * 3600)
    assert run.reason == "queued (RUNNABLE, position 1 in queue team)"
    # It waits again, and costs nothing again.
    first_s = TRAINING_S + 300 - 120
    cost = attempt_cost(world.attempt(run), world.clock.now())
    assert cost.usd == pytest.approx(first_s / 3600 * SITE.usd_per_hour)
    assert alarm(world.attempt(run), world.clock.now()) is None
    queue_of(world).num_instances = 1
    look(world, run)
    look(world, run, seconds=TRAINING_S)
    cost = attempt_cost(world.attempt(run), world.clock.now())
    assert cost.usd == pytest.approx((first_s + TRAINING_S - 120) / 3600 * SITE.usd_per_hour)
    assert alarm(world.attempt(run), world.clock.now()) is None
    (run,) = look(world, run, seconds=600)
    assert run.state is RunState.COMPLETED
    # A day in the queue is neither billed, nor taken from what another attempt may use.
    billing = world.attempt(run).billing
    assert billing.billed_s == billing.lived_s == first_s + 340


@pytest.mark.parametrize("retries", [0, 3])
def test_a_program_that_fails_is_not_retried(world: World, retries: int) -> None:
    fail_once(world, "AlgorithmError: ExecuteUserScriptError, exit code: 1")
    (run,) = world.submit(replace(SITE, queue=replace(TEAM, retries=retries)))
    assert run.state is RunState.FAILED and "AlgorithmError" in str(run.reason)
    assert len(world.aws.jobs.jobs) == 1 and world.attempt(run).billing.billed_s == TRAINING_S + 180


def test_a_job_that_finds_no_capacity_waits_on(world: World) -> None:
    world.aws.job = at_second_start
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.attempt(run).billing.billed_s == 340.0 and len(world.aws.jobs.jobs) == 2


def test_a_request_that_sagemaker_refuses_ends_the_run_with_its_words(world: World) -> None:
    def refuse(job: FakeJob) -> None:
        job.end("Failed", reason="ClientError: Could not assume the role")

    world.aws.job = refuse
    (run,) = world.submit()
    assert run.state is RunState.FAILED and "Could not assume the role" in str(run.reason)
    assert world.attempt(run).billing.billed_s == 0.0


def test_an_end_counts_once_sagemaker_shows_what_it_billed(world: World) -> None:
    (run,) = world.submit(detach=True)
    look(world, run, seconds=300)
    world.clock.sleep(600)
    (name,) = service_job(world, run).training_jobs
    world.aws.queues.settle()
    world.aws.jobs.job(name).hidden = 1
    (run,) = look(world, run)
    assert run.state is RunState.RUNNING
    (run,) = look(world, run, seconds=60)
    assert run.state is RunState.COMPLETED and world.attempt(run).billing.billed_s == 340.0


def test_a_training_job_that_somebody_deleted_is_billed_by_the_times_of_the_queue(world: World) -> None:
    (run,) = world.submit(detach=True)
    world.clock.sleep(900)
    world.aws.queues.settle()
    world.aws.jobs.jobs.clear()
    (run,) = look(world, run, seconds=3 * 3600)
    assert run.state is RunState.COMPLETED
    assert world.attempt(run).billing.billed_s == 900.0


# Asked for


def test_a_lost_answer_is_asked_again_and_found_to_be_ours(world: World) -> None:
    world.aws.answers = ["lost"]
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    # Batch refused the second request, whose token the first had used.
    assert world.tokens() == [("us-east-1", f"{run.id}-a1")] * 2
    assert len(world.aws.queues.service_jobs) == 1 and len(world.aws.jobs.jobs) == 1


def test_a_used_token_whose_job_is_not_shown_is_unknown(world: World) -> None:
    (run,) = world.submit(detach=True)
    plan = world.ledger.plan_of(world.attempt(run).id)
    assert plan is not None
    job = service_job(world, run)
    job.request = {**job.request, "jobName": "hidden"}
    with pytest.raises(Unreachable, match="does not show it yet"):
        world.backend.execute(plan)


def test_a_refused_request_is_a_definite_error(world: World) -> None:
    queue_of(world).state = "DISABLED"
    with pytest.raises(BadConfiguration, match="is disabled"):
        world.submit()
    (run,) = world.ledger.select()
    assert run.state is RunState.FAILED and world.attempt(run).handle is None


def forget_handle(world: World, run: Run) -> None:
    """As a launcher leaves it that is killed before it noted the answer."""
    with world.ledger.transaction():
        world.ledger._file.update("attempts", world.attempt(run).id, handle=None)


def test_a_killed_launchers_job_is_found_in_the_queue(world: World) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    before = world.attempt(run).handle
    forget_handle(world, run)
    look(world, run)
    assert before is not None and world.attempt(run).handle == {
        **before,
        "launched_at": (world.attempt(run).handle or {})["launched_at"],
    }
    assert world.cancel(run) is RunState.CANCELLED


@pytest.mark.parametrize("has_queue", [True, False])
def test_a_request_that_was_never_sent_is_settled(world: World, has_queue: bool) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    forget_handle(world, run)
    if not has_queue:
        world.aws.queues.queues.clear()
    world.aws.queues.service_jobs.clear()
    (run,) = look(world, run)
    assert run.state is RunState.RUNNING
    (run,) = look(world, run, seconds=AFTER_FORGETTING_S)
    assert run.state.is_final and world.attempt(run).ending is Ending.NEVER_STARTED


def test_resume_goes_through_the_queue_again(world: World) -> None:
    def run_out(job: FakeJob) -> None:
        (run_id,) = job.run_ids()

        def end() -> None:
            job.upload_records(run_id, **HALF)
            folder = f"fastlaunch/runs/{run_id}/{run_id}/checkpoints"
            world.aws.objects["acme-training", f"{folder}/step-00000020.pt"] = b"weights"
            job.say_last("interrupted", {run_id: "interrupted"}, reason="watchdog")
            job.end("Stopped", secondary="MaxRuntimeExceeded")

        job.get_machines()
        world.clock.at(TRAINING_S + 60, job.boot)
        world.clock.at(TRAINING_S + 600, end)

    world.aws.job = run_out
    (run,) = world.submit(jobs=(training_job(checkpoint_every=20),))
    assert (run.state, world.attempt(run).ending) == (RunState.INTERRUPTED, Ending.TIME_LIMIT)
    world.aws.job = lambda job: job.train(how=lambda run_id: REST)
    after = world.launcher().resume(run)
    assert after.state is RunState.COMPLETED, after.reason
    assert [token for _, token in world.tokens()] == [f"{run.id}-a1", f"{run.id}-a2"]
    assert len(world.aws.queues.service_jobs) == 2


# Stopped


def test_cancel_takes_a_job_out_of_the_queue(world: World) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    assert world.cancel(run) is RunState.CANCELLED
    assert service_job(world, run).status == "FAILED"
    attempt = world.attempt(run)
    assert (attempt.ending, attempt.billing.billed_s) == (Ending.CANCELLED, 0.0)
    queue_of(world).num_instances = 1
    world.aws.queues.settle()
    assert world.aws.jobs.jobs == {}


def test_cancel_stops_a_job_that_has_its_turn(world: World) -> None:
    world.aws.job = lambda job: job.train(upto=0)
    (run,) = world.submit(replace(SITE, queue=replace(TEAM, retries=5)), detach=True)
    look(world, run, seconds=TRAINING_S + 120)
    state = world.cancel(run)
    assert state in (RunState.CANCELLED, RunState.INTERRUPTED)
    assert world.aws.running() == [] and len(world.aws.jobs.jobs) == 1
    attempt = world.attempt(run)
    assert attempt.ending is Ending.CANCELLED and attempt.ended_at is not None
    assert attempt.billing.billed_s and attempt.billing.billed_s > 0


def test_ctrl_c_while_it_is_queued_takes_it_out(world: World) -> None:
    queue_of(world).num_instances = 0
    world.clock.at(60, lambda: setattr(world.stop, "by", "Ctrl-C"))
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert service_job(world, run).is_terminated


def test_a_job_that_batch_does_not_show_for_an_hour_may_still_wait(world: World) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    look(world, run)
    hidden = dict(world.aws.queues.service_jobs)
    world.aws.queues.service_jobs.clear()
    for _ in range(4):
        (run,) = look(world, run, seconds=3 * 3600)
    assert run.state is RunState.RUNNING
    world.aws.queues.service_jobs.update(hidden)
    (run,) = look(world, run)
    assert world.attempt(run).absences == ()


# Reaped


def orphans_of(world: World, *, with_ledger: bool = True) -> list[Any]:
    world.aws.list_schedules = lambda region: []
    inventory = take_inventory(world.aws, ["us-east-1"])
    assert inventory.refused == ()
    known = known_attempts(world.ledger, world.backends, (), inventory.jobs) if with_ledger else {}
    now = world.clock.now()
    return [judge_job(job, known.get(job.name), now=now) for job in inventory.jobs]


def test_reap_knows_a_queued_job_by_its_tags_and_ends_it(world: World) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    world.clock.sleep(timedelta(days=2).total_seconds())
    (orphan,) = orphans_of(world, with_ledger=False)
    assert (orphan.id, orphan.run_id, orphan.is_ours) == (world.attempt(run).token, run.id, True)
    assert not orphan.must_go and orphan.hours == 0.0
    assert orphan.why == "it waits in queue team, which costs nothing"
    assert end(world.aws, [end_now(orphan)]) == []
    assert service_job(world, run).status == "FAILED" and orphans_of(world) == []


def test_reap_takes_a_job_out_whose_runs_have_ended(world: World) -> None:
    queue_of(world).num_instances = 0
    (run,) = world.submit(detach=True)
    world.ledger.set_state(run.id, RunState.CANCELLED, "given up")
    (orphan,) = orphans_of(world)
    assert orphan.must_go and "waits in queue team still" in orphan.why


def test_reap_counts_a_job_that_runs_once_and_by_its_own_time(world: World) -> None:
    world.aws.job = lambda job: job.get_machines()
    (run,) = world.submit(detach=True)
    look(world, run, seconds=TRAINING_S + 60)
    (orphan,) = orphans_of(world)
    assert not orphan.must_go and orphan.instance_type == "p5.48xlarge"
    world.clock.sleep(timedelta(minutes=120 + 60 + 10).total_seconds())
    (orphan,) = orphans_of(world, with_ledger=False)
    assert orphan.must_go and "over its time" in orphan.why
    assert end(world.aws, [orphan]) == []
    for _ in range(3):
        look(world, run, seconds=60)
    assert world.aws.running() == [] and len(world.aws.jobs.jobs) == 1
    assert world.ledger.get(run.id).state.is_final


def test_reap_stops_a_training_job_whose_queue_it_may_not_see(world: World) -> None:
    world.aws.job = lambda job: job.get_machines()
    (run,) = world.submit(detach=True)
    look(world, run, seconds=TRAINING_S + 60)
    queue_of(world).kind = "ECS"
    (orphan,) = orphans_of(world)
    (name,) = service_job(world, run).training_jobs
    assert (orphan.id, orphan.service_job, orphan.is_ours) == (name, None, True)
    assert orphan.known is not None and orphan.run_id == run.id
