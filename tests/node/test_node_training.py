"""Real training on simulated instances: vit-tiny on this CPU, through the container's own command. Slow."""

import random
import time
from pathlib import Path

import pytest
from node_scene import FIRST, RUNS, SECOND, Scene, node_program, node_run
from simulated_instance import cannot_simulate

from fastlaunch_train.records.records import RankRecord, read_record

REASON = cannot_simulate()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
STEPS = 500
#: Threads of several processes that wait for each other by spinning take minutes on a busy machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def record_of(scene: Scene, folder: Path, *, run_id: str = FIRST, attempt: int = 1) -> RankRecord:
    program = node_program(node_run(FIRST), attempt=attempt)
    (path,) = scene.bring_home(program, folder / str(attempt))[run_id]
    return read_record(path)


def num_lines(output: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in output.glob("rank-*.jsonl"))


def losses(*records: RankRecord) -> dict[int, float | None]:
    return {step.step: step.loss for record in records for step in record.steps}


def test_two_recipes_are_trained_one_after_the_other(scene: Scene, tmp_path: Path) -> None:
    program = node_program(
        node_run(FIRST, recipe="fp32", environment=ONE_THREAD),
        node_run(SECOND, recipe="bf16", environment=ONE_THREAD),
    )
    instance = scene.launch(program, training="real", scale=10.0)
    assert instance.wait(200) == "shutdown"
    assert scene.status(program)["outcome"] == "completed", scene.joined(program)
    for run_id, recipe in ((FIRST, "fp32"), (SECOND, "bf16")):
        record = record_of(scene, tmp_path, run_id=run_id)
        assert record.header["run_id"] == run_id
        assert record.header["recipe"]["name"] == recipe
        assert record.header["instance"] == "g5.xlarge"
        assert record.header["image_digest"] == f"sha256:{'b' * 64}"
        assert [step.step for step in record.steps] == [1, 2, 3, 4, 5]
        assert record.end is not None and record.end.status == "completed"


def test_run_that_spot_interrupts_goes_on_where_it_was(scene: Scene, tmp_path: Path) -> None:
    run = node_run(FIRST, steps=STEPS, checkpoint_every=50, environment=ONE_THREAD)
    alone = node_program(node_run(SECOND, steps=STEPS, checkpoint_every=50, environment=ONE_THREAD))
    assert scene.launch(alone, training="real", scale=10.0).wait(300) == "shutdown"
    (path,) = scene.bring_home(alone, tmp_path / "alone")[SECOND]
    undisturbed = read_record(path)

    program = node_program(run, is_spot=True)
    instance = scene.launch(program, training="real", scale=10.0)
    scene.wait_for(f"{program.output}/boot.json")
    # Into the record, which is written about once a second; the moment within that second is chance.
    lines = random.Random(5).randrange(50, STEPS // 2)
    while num_lines(instance.disk / "var/lib/fastlaunch/out" / FIRST) < lines:
        time.sleep(0.05)
    instance.spot_notice()
    scene.wait_for(f"{program.output}/node-0/status.json")
    assert scene.status(program)["reason"] == "spot"
    assert scene.status(program)["runs"][0]["state"] == "interrupted", scene.joined(program)
    before = record_of(scene, tmp_path)
    assert before.end is not None and before.end.status == "interrupted"
    scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-{before.steps[-1].step:08d}.pt")
    assert instance.is_on
    instance.take()

    again = node_program(run, attempt=2, is_spot=True)
    assert scene.launch(again, training="real", scale=10.0).wait(300) == "shutdown"
    assert scene.status(again)["outcome"] == "completed", scene.joined(again)
    after = record_of(scene, tmp_path, attempt=2)
    assert after.steps[0].step == before.steps[-1].step + 1
    assert losses(before, after) == pytest.approx(losses(undisturbed), rel=1e-4)
