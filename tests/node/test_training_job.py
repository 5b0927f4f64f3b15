"""The program of a training job's container in simulated jobs, with training that takes no time. Slow."""

import json

import pytest
from node_scene import FIRST, SECOND
from simulated_training_job import skip_without_namespaces
from training_scene import TrainingScene, tiny_job, training_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), skip_without_namespaces]
SLOWLY = {"FAKE_STEP_S": "0.1"}
RECORD = rf"{FIRST}-a1/node-0/{FIRST}/rank-00000-attempt-1\.jsonl\.\d+"


@pytest.fixture
def scene(jobs: TrainingScene) -> TrainingScene:
    return jobs


@pytest.mark.parametrize("mounts", ["each", "whole"])
def test_two_runs_are_done_and_all_that_they_left_arrives(mounts: str, scene: TrainingScene) -> None:
    jobs = tiny_job(checkpoint_every=2), tiny_job("bf16", steps=300)
    job = scene.launch(training_plan(*jobs), mounts=mounts)
    assert job.wait() == "Completed", job.told()
    status = scene.status(job)
    assert (status["outcome"], status["token"], status["instance_type"]) == (
        "completed",
        job.name,
        "g5.xlarge",
    )
    assert [(run["run_id"], run["state"]) for run in status["runs"]] == [
        (FIRST, "completed"),
        (SECOND, "completed"),
    ]
    assert len(scene.record(job, SECOND).steps) == 300
    files = scene.joined(job)
    assert b"step 5 of 5" in files[f"node-0/{FIRST}/log.txt"] and "step 5 of 5" in job.told()
    assert b"completed" in files["node-0/log.txt"]
    objects = scene.objects(job)
    assert f"{FIRST}/checkpoints/step-00000004.pt" in objects
    assert json.loads(objects[f"{job.name}/boot.json"])["host"] == "algo-1"
    assert job.rewritten() == []
    # What is written aside and then renamed may be copied only where there is no other place for it.
    assert mounts == "each" or not any("/." in f"/{name}" for name in objects)


def test_a_run_that_fails_says_why_and_does_not_stop_the_next_one(scene: TrainingScene) -> None:
    plan = training_plan(tiny_job(), tiny_job(steps=2), environment={"FAKE_FAIL_AT": "3"})
    job = scene.launch(plan)
    assert job.wait() == "Failed"
    assert job.failure_reason.startswith("AlgorithmError: ValueError: no such thing (run ")
    status = scene.status(job)
    assert (status["outcome"], status["reason"]) == ("failed", f"run {FIRST}: exit code 1")
    assert [run["state"] for run in status["runs"]] == ["failed", "completed"]
    traceback = scene.joined(job)[f"node-0/{FIRST}/traceback-rank-00000-attempt-1.txt"]
    assert b'File "my.py", line 7' in traceback


def test_a_job_that_is_stopped_keeps_a_checkpoint_of_its_last_step(scene: TrainingScene) -> None:
    plan = training_plan(tiny_job(steps=1000, checkpoint_every=500), tiny_job(), environment=SLOWLY)
    job = scene.launch(plan)
    scene.wait_for(job, RECORD)
    scene.client("sagemaker").stop_training_job(TrainingJobName=job.name)
    assert job.wait() == "Stopped"
    assert job.failure_reason == ""
    status = scene.status(job)
    assert (status["outcome"], status["reason"]) == ("interrupted", "stop")
    assert [(run["state"], run["exit_code"]) for run in status["runs"]] == [
        ("interrupted", 130),
        ("not-started", None),
    ]
    last = scene.record(job).steps[-1].step
    assert f"{FIRST}/checkpoints/step-{last:08d}.pt" in scene.objects(job)


@pytest.mark.parametrize("notice", [True, False])
def test_spot_interrupted_goes_on_and_truncates_nothing(notice: bool, scene: TrainingScene) -> None:
    plan = training_plan(
        *(tiny_job(steps=steps, checkpoint_every=5, purchase="spot") for steps in (3, 60)),
        environment=SLOWLY,
    )
    job = scene.launch(plan)
    scene.wait_for(job, rf"{SECOND}/checkpoints/step-\d+\.pt")
    if notice:
        job.interrupt()
    else:
        job.lose()
    assert job.wait() == "Completed", job.told()
    assert [run["state"] for run in scene.status(job)["runs"]] == ["completed", "completed"]
    assert job.rewritten() == []
    assert job.told().count(f"run {FIRST}: completed before") == 1
    before, after = (scene.record(job, SECOND, attempt=attempt) for attempt in (1, 2))
    steps = [step.step for step in before.steps]
    assert after.steps[-1].step == 60 and after.steps[0].step > 5
    if notice:
        assert steps + [step.step for step in after.steps] == list(range(1, 61))
    log = scene.joined(job)[f"node-0/{SECOND}/log.txt"].decode()
    assert f"step {steps[-1]} of 60" in log and log.index("step 60 of 60") > log.index(f"step {steps[-1]} of")


def test_a_host_that_fails_does_not_let_the_others_wait(scene: TrainingScene) -> None:
    """Its peer would go on for minutes, and then the second run is done by both."""
    environment = {**SLOWLY, "FAKE_FAIL_AT": "30", "FAKE_FAIL_RANK": "1"}
    plan = training_plan(
        tiny_job(steps=3000, num_nodes=2), tiny_job(steps=10, num_nodes=2), environment=environment
    )
    job = scene.launch(plan)
    assert job.wait() == "Failed", job.told()
    assert len(scene.record(job).steps) < 3000
    assert job.failure_reason.startswith(f"AlgorithmError: ValueError: no such thing (run {FIRST} on algo-2")
    assert [run["state"] for run in scene.status(job, 1)["runs"]] == ["failed", "completed"]
    assert [run["state"] for run in scene.status(job, 0)["runs"]] == ["interrupted", "completed"]
    outcomes = [(scene.status(job, node)["outcome"], scene.status(job, node)["reason"]) for node in (0, 1)]
    assert outcomes == [("interrupted", "peer"), ("failed", f"run {FIRST}: exit code 1")]
    for node in (0, 1):
        assert len(scene.record(job, SECOND, rank=node, node=node).steps) == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_dies_ends_the_others_soon(rank: int, scene: TrainingScene) -> None:
    plan = training_plan(tiny_job(steps=3000, num_nodes=2), tiny_job(num_nodes=2), environment=SLOWLY)
    job = scene.launch(plan)
    scene.wait_for(job, rf"{FIRST}-a1/node-{1 - rank}/{FIRST}/rank-.*")
    job.kill_host(rank)
    assert job.wait() == "Failed"
    assert f"algo-{rank + 1} is gone" in job.failure_reason
    status = scene.status(job, 1 - rank)
    assert (status["outcome"], status["reason"]) == ("interrupted", "peer")
    assert [run["state"] for run in status["runs"]] == ["interrupted", "not-started"]
    assert len(scene.record(job, rank=1 - rank, node=1 - rank).steps) > 0


def test_both_hosts_are_stopped_and_started_again_together(scene: TrainingScene) -> None:
    job_spec = tiny_job(steps=60, checkpoint_every=5, num_nodes=2, purchase="spot")
    job = scene.launch(training_plan(job_spec, environment=SLOWLY))
    scene.wait_for(job, rf"{FIRST}/checkpoints/step-\d+\.pt")
    job.interrupt()
    assert job.wait() == "Completed", job.told()
    for node in (0, 1):
        assert scene.status(job, node)["outcome"] == "completed"
        assert scene.record(job, rank=node, node=node, attempt=2).steps[-1].step == 60
    assert job.rewritten() == []


@pytest.mark.parametrize("mounts", ["each", "whole"])
def test_a_full_disk_ends_the_job_and_what_was_recorded_arrives(mounts: str, scene: TrainingScene) -> None:
    plan = training_plan(
        tiny_job(steps=100, checkpoint_every=5),
        tiny_job(),
        environment={"FAKE_CHECKPOINT_BYTES": str(400 * 2**20)},
    )
    job = scene.launch(plan, volume_mib=300, mounts=mounts)
    assert job.wait() == "Failed"
    assert "No space left on device" in job.failure_reason and "disk full" in job.failure_reason
    status = scene.status(job)
    assert (status["outcome"], status["reason"]) == ("configuration", "disk full")
    assert [run["state"] for run in status["runs"]] == ["failed", "not-started"]
    assert len(scene.record(job).steps) == 5
    assert b"No space left on device" in scene.joined(job)[f"node-0/{FIRST}/log.txt"]


def test_code_that_is_not_what_was_asked_for_is_not_run(scene: TrainingScene) -> None:
    job = scene.launch(training_plan(), code=b"something else")
    assert job.wait() == "Failed"
    assert "code bundle not usable" in job.failure_reason
    assert "FAILED" in job.told() and "step 1" not in job.told()


def test_an_attempt_in_another_job_finds_what_the_one_before_left(scene: TrainingScene) -> None:
    spec = tiny_job(steps=60, checkpoint_every=5)
    first = scene.launch(training_plan(spec, environment=SLOWLY))
    scene.wait_for(first, rf"{FIRST}/checkpoints/step-\d+\.pt")
    scene.client("sagemaker").stop_training_job(TrainingJobName=first.name)
    assert first.wait() == "Stopped"
    second = scene.launch(training_plan(spec, attempt=2, root=FIRST))
    assert second.wait() == "Completed", second.told()
    done = [step.step for step in scene.record(first).steps]
    after = [step.step for step in scene.record(second, attempt=2).steps]
    assert done + after == list(range(1, 61))
