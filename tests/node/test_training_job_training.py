"""Real training in simulated training jobs: vit-tiny on this CPU, by the container's own command. Slow."""

import random
import time

import pytest
from node_scene import FIRST, SECOND
from simulated_training_job import SimulatedTrainingJob, skip_without_namespaces
from training_scene import TrainingScene, tiny_job, training_plan

from fastlaunch_train.records.records import RankRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), skip_without_namespaces]
STEPS = 300
#: Threads of several processes that wait for each other by spinning take minutes on a busy machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def scene(jobs: TrainingScene) -> TrainingScene:
    return jobs


def launch(scene: TrainingScene, *jobs: object, **options: object) -> SimulatedTrainingJob:
    plan = training_plan(*jobs, environment=ONE_THREAD)  # type: ignore[arg-type]
    return scene.launch(plan, training="real", **options)


def losses(*records: RankRecord) -> dict[int, float | None]:
    return {step.step: step.loss for record in records for step in record.steps}


def test_two_recipes_are_trained_and_told_to_the_console(scene: TrainingScene) -> None:
    job = launch(scene, tiny_job("fp32"), tiny_job("bf16"))
    assert job.wait(300) == "Completed", job.told()
    for run_id, recipe in ((FIRST, "fp32"), (SECOND, "bf16")):
        record = scene.record(job, run_id)
        assert record.header["run_id"] == run_id
        assert record.header["recipe"]["name"] == recipe
        assert record.header["instance"] == "g5.xlarge"
        assert record.header["machine"]["service"] == "sagemaker"
        assert record.header["commit"] == "ab" * 20
        assert [step.step for step in record.steps] == [1, 2, 3, 4, 5]
        assert record.end is not None and record.end.status == "completed"


def test_a_run_that_spot_interrupts_goes_on_as_if_undisturbed(scene: TrainingScene) -> None:
    """The first run is left alone; the second one, which is the same, is interrupted in its midst."""
    spec = tiny_job(steps=STEPS, checkpoint_every=50, purchase="spot")
    job = launch(scene, spec, spec)
    scene.wait_for(job, rf"{job.name}/node-0/{SECOND}/rank-.*", timeout_s=300)
    time.sleep(random.Random(5).uniform(0, 1))
    job.interrupt()
    assert job.wait(400) == "Completed", job.told()
    assert job.rewritten() == []
    before, after = (scene.record(job, SECOND, attempt=attempt) for attempt in (1, 2))
    assert before.end is not None and before.end.status == "interrupted"
    assert after.steps[0].step == before.steps[-1].step + 1
    assert losses(before, after) == pytest.approx(losses(scene.record(job, FIRST)), rel=1e-4)


def test_two_hosts_train_together_one_run_after_the_other(scene: TrainingScene) -> None:
    job = launch(scene, tiny_job(num_nodes=2), tiny_job("bf16", num_nodes=2))
    assert job.wait(300) == "Completed", job.told()
    for run_id in (FIRST, SECOND):
        first, second = (scene.record(job, run_id, rank=rank, node=rank) for rank in (0, 1))
        assert (first.header["world_size"], first.header["num_nodes"]) == (2, 2)
        assert [step.step for step in second.steps] == [step.step for step in first.steps] == [1, 2, 3, 4, 5]


def test_two_hosts_of_which_one_dies_end_soon(scene: TrainingScene) -> None:
    job = launch(scene, tiny_job(steps=100_000, num_nodes=2))
    scene.wait_for(job, rf"{job.name}/node-0/{FIRST}/rank-.*", timeout_s=300)
    job.kill_host(1)
    assert job.wait(200) == "Failed", job.told()
    assert "algo-2 is gone" in job.failure_reason
    assert scene.status(job)["reason"] == "peer"


def test_a_workload_that_is_not_there_is_the_failure_that_sagemaker_shows(scene: TrainingScene) -> None:
    job = launch(scene, tiny_job(workload="./gone.py:build"), tiny_job())
    assert job.wait(200) == "Failed", job.told()
    assert "gone.py" in job.failure_reason.splitlines()[0], job.failure_reason
    assert [run["state"] for run in scene.status(job)["runs"]] == ["failed", "completed"]
