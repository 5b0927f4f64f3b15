"""The program of a training job's container in simulated jobs, mostly with training that takes no time."""

import json
import random
import time
from typing import Any

import pytest
from node_scene import FIRST, ONE_THREAD, SECOND, ends, losses, outcome, states, steps
from simulated_training_job import SimulatedTrainingJob
from training_scene import TrainingScene, tiny_job, training_plan

from fastlaunch.jobs.job import Job
from fastlaunch_train.node.protocol import IDLE_CODE

SLOWLY = {"FAKE_STEP_S": "0.1"}


@pytest.mark.parametrize("mounts", ["each", "whole"])
def test_two_runs_are_done_and_all_that_they_left_arrives(mounts: str, jobs: TrainingScene) -> None:
    job = jobs.launch(training_plan(tiny_job(checkpoint_every=2), tiny_job("bf16", steps=300)), mounts=mounts)
    assert job.wait() == "Completed", job.console
    status = jobs.status(job)
    assert outcome(status) == ("completed", None)
    assert (status["token"], status["instance_type"]) == (job.name, "g5.xlarge")
    assert [(run["run_id"], run["state"]) for run in status["runs"]] == [
        (FIRST, "completed"),
        (SECOND, "completed"),
    ]
    assert len(jobs.record(job, SECOND).steps) == 300
    files = jobs.joined(job)
    assert b"step 5 of 5" in files[f"node-0/{FIRST}/log.txt"] and "step 5 of 5" in job.console
    assert b"completed" in files["node-0/log.txt"]
    objects = jobs.objects(job.uri)
    assert f"{FIRST}/checkpoints/step-00000004.pt" in objects
    assert json.loads(objects[f"{job.name}/boot.json"])["host"] == "algo-1"
    assert job.rewritten() == []
    # What is written aside and then renamed may be copied only where there is no other place for it.
    assert mounts == "each" or not any("/." in f"/{name}" for name in objects)


def test_a_job_that_is_stopped_keeps_a_checkpoint_and_another_job_goes_on_from_it(
    jobs: TrainingScene,
) -> None:
    run = tiny_job(steps=60, checkpoint_every=50)
    first = jobs.launch(training_plan(run, tiny_job(), environment=SLOWLY))
    jobs.wait_for(f"{first.output}/node-0/{FIRST}/rank-")
    jobs.client("sagemaker").stop_training_job(TrainingJobName=first.name)
    assert first.wait() == "Stopped"
    assert first.failure_reason == ""
    status = jobs.status(first)
    assert outcome(status) == ("interrupted", "stop")
    assert ends(status) == [("interrupted", 130), ("not-started", None)]
    done = steps(jobs.record(first))
    assert f"{FIRST}/checkpoints/step-{done[-1]:08d}.pt" in jobs.objects(first.uri)

    second = jobs.launch(training_plan(run, attempt=2, root=FIRST))
    assert second.wait() == "Completed", second.console
    assert done + steps(jobs.record(second, number=2)) == list(range(1, 61))


def test_a_run_that_idles_is_ended_and_the_next_one_is_done(jobs: TrainingScene) -> None:
    runs = tiny_job(idle_timeout_s=120.0), tiny_job(steps=3, idle_timeout_s=120.0)
    job = jobs.launch(training_plan(*runs, environment={**SLOWLY, "FAKE_HANG_AT": "4"}), scale=40.0)
    jobs.wait_for(f"{job.output}/node-0/{FIRST}/rank-")
    job.hosts[0].gpus_show(1)
    assert job.wait() == "Failed", job.console
    status = jobs.status(job)
    assert outcome(status) == ("failed", f"run {FIRST}: exit code {IDLE_CODE}")
    assert ends(status) == [("failed", IDLE_CODE), ("completed", 0)]
    # It was asked, and left its record.
    assert steps(jobs.record(job)) == [1, 2, 3]


def test_a_run_that_fails_at_the_same_step_is_begun_again_once(jobs: TrainingScene) -> None:
    failing = tiny_job(steps=9, checkpoint_every=2)
    job = jobs.launch(training_plan(failing, environment={"FAKE_FAIL_AT": "7"}))
    assert job.wait() == "Failed", job.console
    assert ends(jobs.status(job)) == [("failed", 1)]
    assert [steps(jobs.record(job, number=number)) for number in (1, 2)] == [[1, 2, 3, 4, 5, 6], []]
    assert "ValueError: no such thing, and again after a restart (run" in job.failure_reason


@pytest.mark.parametrize("notice", [True, False])
def test_spot_interrupted_goes_on_and_truncates_nothing(notice: bool, jobs: TrainingScene) -> None:
    runs = (tiny_job(steps=num, checkpoint_every=5, purchase="spot") for num in (3, 60))
    job = jobs.launch(training_plan(*runs, environment=SLOWLY))
    jobs.wait_for(f"{job.uri}/{SECOND}/checkpoints/step-")
    if notice:
        job.interrupt()
    else:
        job.lose()
    assert job.wait() == "Completed", job.console
    assert states(jobs.status(job)) == ["completed", "completed"]
    assert job.rewritten() == []
    assert job.console.count(f"run {FIRST}: completed before") == 1
    before, after = (steps(jobs.record(job, SECOND, number=number)) for number in (1, 2))
    assert after[-1] == 60 and after[0] > 5
    if notice:
        assert before + after == list(range(1, 61))
    log = jobs.joined(job)[f"node-0/{SECOND}/log.txt"].decode()
    last = f"step {before[-1]} of 60"
    assert last in log and log.index("step 60 of 60") > log.index(last)


def test_a_host_that_fails_does_not_let_the_others_wait(jobs: TrainingScene) -> None:
    """Its peer would go on for minutes, and then the second run is done by both."""
    environment = {**SLOWLY, "FAKE_FAIL_AT": "30", "FAKE_FAIL_RANK": "1"}
    runs = tiny_job(steps=3000, num_nodes=2), tiny_job(steps=10, num_nodes=2)
    job = jobs.launch(training_plan(*runs, environment=environment))
    assert job.wait() == "Failed", job.console
    assert len(jobs.record(job).steps) < 3000
    assert job.failure_reason.startswith(f"AlgorithmError: ValueError: no such thing (run {FIRST} on algo-2")
    statuses = [jobs.status(job, node) for node in (0, 1)]
    assert [states(status) for status in statuses] == [["interrupted", "completed"], ["failed", "completed"]]
    assert [outcome(status) for status in statuses] == [
        ("interrupted", "peer"),
        ("failed", f"run {FIRST}: exit code 1"),
    ]
    for rank in (0, 1):
        assert len(jobs.record(job, SECOND, rank=rank).steps) == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_dies_ends_the_others_soon(rank: int, jobs: TrainingScene) -> None:
    plan = training_plan(tiny_job(steps=3000, num_nodes=2), tiny_job(num_nodes=2), environment=SLOWLY)
    job = jobs.launch(plan)
    jobs.wait_for(f"{job.output}/node-{1 - rank}/{FIRST}/rank-")
    job.kill_host(rank)
    assert job.wait() == "Failed"
    assert f"algo-{rank + 1} is gone" in job.failure_reason
    status = jobs.status(job, 1 - rank)
    assert outcome(status) == ("interrupted", "peer")
    assert states(status) == ["interrupted", "not-started"]
    assert jobs.record(job, rank=1 - rank).steps


def test_both_hosts_are_stopped_and_started_again_together(jobs: TrainingScene) -> None:
    run = tiny_job(steps=60, checkpoint_every=5, num_nodes=2, purchase="spot")
    job = jobs.launch(training_plan(run, environment=SLOWLY))
    jobs.wait_for(f"{job.uri}/{FIRST}/checkpoints/step-")
    job.interrupt()
    assert job.wait() == "Completed", job.console
    for rank in (0, 1):
        assert jobs.status(job, rank)["outcome"] == "completed"
        assert steps(jobs.record(job, rank=rank, number=2))[-1] == 60
    assert job.rewritten() == []


@pytest.mark.parametrize("mounts", ["each", "whole"])
def test_a_full_disk_ends_the_job_and_what_was_recorded_arrives(mounts: str, jobs: TrainingScene) -> None:
    large = {"FAKE_CHECKPOINT_BYTES": str(400 * 2**20)}
    plan = training_plan(tiny_job(steps=100, checkpoint_every=5), tiny_job(), environment=large)
    job = jobs.launch(plan, volume_mib=300, mounts=mounts)
    assert job.wait() == "Failed"
    assert "No space left on device" in job.failure_reason and "disk full" in job.failure_reason
    status = jobs.status(job)
    assert outcome(status) == ("configuration", "disk full")
    assert states(status) == ["failed", "not-started"]
    assert len(jobs.record(job).steps) == 5
    assert b"No space left on device" in jobs.joined(job)[f"node-0/{FIRST}/log.txt"]


def test_code_that_is_not_what_was_asked_for_is_not_run(jobs: TrainingScene) -> None:
    job = jobs.launch(training_plan(), code=b"something else")
    assert job.wait() == "Failed"
    assert "code bundle not usable" in job.failure_reason
    assert "FAILED" in job.console and "step 1" not in job.console


def launch_real(jobs: TrainingScene, *specs: Job) -> SimulatedTrainingJob:
    """With vit-tiny on this CPU, by the container's own command."""
    real: dict[str, Any] = {"training": "real"}
    return jobs.launch(training_plan(*specs, environment=ONE_THREAD), **real)


def test_real_training_goes_on_after_an_interruption_as_if_undisturbed(jobs: TrainingScene) -> None:
    """The first run is left alone; the second one, which is the same, is interrupted in its midst."""
    spec = tiny_job(steps=300, checkpoint_every=50, purchase="spot")
    job = launch_real(jobs, spec, spec)
    jobs.wait_for(f"{job.output}/node-0/{SECOND}/rank-", timeout_s=300)
    time.sleep(random.Random(5).uniform(0, 1))
    job.interrupt()
    assert job.wait(400) == "Completed", job.console
    assert job.rewritten() == []
    before, after = (jobs.record(job, SECOND, number=number) for number in (1, 2))
    assert before.end is not None and before.end.status == "interrupted"
    assert after.steps[0].step == before.steps[-1].step + 1
    undisturbed = jobs.record(job)
    assert losses(before, after) == pytest.approx(losses(undisturbed), rel=1e-4)
    header = undisturbed.header
    assert (header["run_id"], header["recipe"]["name"], header["instance"]) == (FIRST, "fp32", "g5.xlarge")
    assert (header["machine"]["service"], header["commit"]) == ("sagemaker", "ab" * 20)


def test_real_training_on_two_hosts_does_one_run_after_the_other(jobs: TrainingScene) -> None:
    job = launch_real(jobs, tiny_job(num_nodes=2), tiny_job("bf16", num_nodes=2))
    assert job.wait(300) == "Completed", job.console
    for run_id in (FIRST, SECOND):
        for rank in (0, 1):
            record = jobs.record(job, run_id, rank=rank)
            assert (record.header["world_size"], record.header["num_nodes"]) == (2, 2)
            assert steps(record) == [1, 2, 3, 4, 5]


def test_a_workload_that_is_not_there_is_the_failure_that_sagemaker_shows(jobs: TrainingScene) -> None:
    job = launch_real(jobs, tiny_job(workload="./gone.py:build"), tiny_job())
    assert job.wait(200) == "Failed", job.console
    assert "gone.py" in job.failure_reason.splitlines()[0], job.failure_reason
    assert states(jobs.status(job)) == ["failed", "completed"]
