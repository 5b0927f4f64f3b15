"""Two nodes of one attempt on simulated instances, on one network, with a real gloo process group.

What a node did, and why it stopped, is read in what it says last; how soon its peer's end reached it is
counted in its looks at the bucket, not in seconds of this machine.
"""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from instance_network import Switch
from node_scene import (
    FIRST,
    ONE_THREAD,
    RUNS,
    SECOND,
    Scene,
    losses,
    node_program,
    node_run,
    outcome,
    states,
)
from simulated_instance import SimulatedInstance

from fastlaunch_train.node.protocol import NodeProgram, NodeRun, newest_checkpoint

LONG = 20_000
Launch = Callable[..., list[SimulatedInstance]]


@pytest.fixture
def launch(switch: Switch, scene: Scene) -> Launch:
    """Boots the nodes of a program on one network; with real training if not said otherwise."""

    def boot(program: NodeProgram, **instance: Any) -> list[SimulatedInstance]:
        return scene.launch_nodes(program, switch=switch, **{"training": "real", "scale": 10.0, **instance})

    return boot


def two_nodes(*runs: NodeRun, **changes: Any) -> NodeProgram:
    return node_program(*runs, num_nodes=2, **changes)


def run_of(run_id: str = FIRST, **training: Any) -> NodeRun:
    """A run of real training."""
    return node_run(run_id, **{**ONE_THREAD, **training})


def ended(scene: Scene, nodes: list[SimulatedInstance], program: NodeProgram) -> list[dict[str, Any]]:
    """The last words of all nodes, which have turned themselves off."""
    assert [node.wait(300) for node in nodes] == ["shutdown"] * len(nodes)
    return [scene.status(program, rank) for rank in range(len(nodes))]


def wait_for_steps(node: SimulatedInstance) -> None:
    """Until the node's first run has recorded some."""
    end = time.monotonic() + 240
    while node.num_record_lines(FIRST) < 30:
        assert time.monotonic() < end and node.is_on, node.console
        time.sleep(0.2)


def looks_between(scene: Scene, program: NodeProgram, named: str) -> int:
    """How often anybody looked for what was asked of the attempt, after the object `named` was there."""
    key = f"{program.output.removeprefix('s3://').partition('/')[2]}/"
    sent = scene.moto.sent()
    begun = next(
        at
        for at, one in enumerate(sent)
        if one.action == "PutObject" and one.parameters.get("Key") == key + named
    )
    prefixes = [one.parameters.get("prefix") for one in sent[begun:] if one.action.startswith("ListObjects")]
    return prefixes.count(key + "abort")


def test_two_nodes_do_two_runs_together(scene: Scene, launch: Launch) -> None:
    program = two_nodes(run_of(FIRST), run_of(SECOND, recipe="bf16"))
    nodes = launch(program)
    statuses = ended(scene, nodes, program)
    consoles = "\n".join(node.console for node in nodes)
    assert [outcome(status) for status in statuses] == [("completed", None)] * 2, consoles
    assert [status["node"] for status in statuses] == [0, 1]
    assert [status["instance_id"] for status in statuses] == [node.instance_id for node in nodes]
    assert [states(status) for status in statuses] == [["completed"] * 2] * 2
    for run_id in (FIRST, SECOND):
        for rank in (0, 1):
            record = scene.record(program, run_id, rank=rank)
            assert (record.header["rank"], record.header["world_size"]) == (rank, 2)
            assert len(record.steps) == 5
    objects = scene.objects(program.output)
    assert json.loads(objects["boot.json"])["instance_id"] == nodes[0].instance_id
    assert json.loads(objects["node-1/boot.json"])["instance_id"] == nodes[1].instance_id
    assert json.loads(objects["rank0"]) == {"address": "10.253.0.10", "port": 29500}
    assert not [name for name in objects if name.startswith("abort")]
    for rank, node in enumerate(nodes):
        (call, *_) = [call for call in node.docker_calls() if call[0] == "run"]
        assert "--privileged" not in call
        assert call[call.index("--network") + 1] == "host"
        for given in (f"NODE_RANK={rank}", "MASTER_ADDR=10.253.0.10", "MASTER_PORT=29501"):
            assert f"FASTLAUNCH_{given}" in call


def test_a_run_that_dies_on_one_node_ends_on_both_and_the_next_one_is_done(
    scene: Scene, launch: Launch
) -> None:
    program = two_nodes(run_of(FIRST, steps=LONG), run_of(SECOND))
    nodes = launch(program)
    wait_for_steps(nodes[0])
    nodes[1].kill_container()
    statuses = ended(scene, nodes, program)
    assert outcome(statuses[1]) == ("failed", f"run {FIRST}: exit code 137")
    assert (statuses[1]["runs"][0]["exit_code"], states(statuses[1])) == (137, ["failed", "completed"])
    # Its own training noticed that the peer was gone, or the node was told.
    assert states(statuses[0])[0] in ("failed", "interrupted") and states(statuses[0])[1] == "completed"
    assert "abort-1" in scene.keys(program.output) and "abort" not in scene.keys(program.output)


@pytest.mark.parametrize("recipe", ["fp32", "fsdp2"])
def test_a_rank_that_is_killed_begins_the_run_again_on_both_nodes(
    recipe: str, scene: Scene, launch: Launch
) -> None:
    run = run_of(FIRST, recipe=recipe, steps=250, checkpoint_every=50)
    program = two_nodes(run, max_minutes=600)
    nodes = launch(program)
    scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-")
    nodes[1].kill_rank(1)
    statuses = ended(scene, nodes, program)
    assert [states(status) for status in statuses] == [["completed"]] * 2, nodes[1].console
    for rank in (0, 1):
        before, after = (scene.record(program, rank=rank, number=number) for number in (1, 2))
        assert after.header["first_step"] in range(51, 250, 50)
        assert [*losses(before, after)] == [*range(1, 251)]
    assert "abort-1.0" in scene.keys(program.output) and "abort-1" not in scene.keys(program.output)


def test_a_machine_that_vanishes_stops_the_other_one(scene: Scene, launch: Launch) -> None:
    program = two_nodes(run_of(FIRST, steps=LONG), run_of(SECOND))
    nodes = launch(program)
    wait_for_steps(nodes[0])
    nodes[1].close()
    assert nodes[0].wait(300) == "shutdown"
    status = scene.status(program)
    assert states(status)[0] != "completed" and states(status)[1] == "not-started"
    assert outcome(status) == ("interrupted", "peer"), nodes[0].console
    assert scene.objects(program.output)["abort"].startswith(b"failed 10.253.0.11 does not answer")


def test_shards_of_a_lost_machine_are_gone_on_with_on_two_others(scene: Scene, launch: Launch) -> None:
    """They go on from the last checkpoint of which both nodes have sent their shards."""
    folder = f"{RUNS}/{FIRST}/checkpoints"
    sharded = {"recipe": "fsdp2", "checkpoint_every": 10}
    program = two_nodes(run_of(FIRST, steps=LONG, **sharded))
    nodes = launch(program)
    scene.wait_for(f"{folder}/step-00000010-a1-of-00002.pt")
    end = time.monotonic() + 240
    while not newest_checkpoint(scene.keys(folder)):
        assert time.monotonic() < end, "\n".join(node.console for node in nodes)
        time.sleep(0.2)
    nodes[1].close()
    assert nodes[0].wait(300) == "shutdown"
    assert outcome(scene.status(program)) == ("interrupted", "peer"), nodes[0].console
    saved = newest_checkpoint(scene.keys(folder))
    step = int(saved[0][5:13])

    again = two_nodes(run_of(FIRST, steps=step + 15, **sharded), attempt=2)
    nodes = launch(again)
    consoles = [outcome(status) for status in ended(scene, nodes, again)]
    assert consoles == [("completed", None)] * 2, "\n".join(node.console for node in nodes)
    for rank in (0, 1):
        assert scene.record(again, rank=rank, number=2).steps[0].step == step + 1
        assert f"going on from {saved[0]}" in nodes[rank].console
    assert newest_checkpoint(scene.keys(folder))[0] == f"step-{step + 10:08d}-a2-of-00002.pt"


def test_a_spot_notice_on_one_node_saves_what_both_did_and_another_attempt_goes_on(
    scene: Scene, launch: Launch
) -> None:
    training = {"steps": 500, "checkpoint_every": 50}
    alone = two_nodes(run_of(SECOND, **training))
    assert [outcome(one) for one in ended(scene, launch(alone), alone)] == [("completed", None)] * 2
    undisturbed = scene.record(alone, SECOND)

    program = two_nodes(run_of(FIRST, **training), is_spot=True)
    nodes = launch(program)
    wait_for_steps(nodes[1])
    nodes[1].spot_notice()
    scene.wait_for(f"{program.output}/node-1/status.json")
    assert nodes[0].wait(300) == "shutdown"
    statuses = [scene.status(program, rank) for rank in (0, 1)]
    assert [outcome(status) for status in statuses] == [("interrupted", "peer"), ("interrupted", "spot")]
    assert [states(status) for status in statuses] == [["interrupted"]] * 2
    # Only the one that EC2 takes waits for that: turned off by itself it would be billed.
    assert nodes[1].is_on and "turning off" not in nodes[1].console
    nodes[1].take()
    before = scene.record(program)
    last = before.steps[-1].step
    assert f"step-{last:08d}.pt" in scene.keys(f"{RUNS}/{FIRST}/checkpoints")

    again = two_nodes(run_of(FIRST, **training), attempt=2, is_spot=True)
    assert [outcome(status) for status in ended(scene, launch(again), again)] == [("completed", None)] * 2
    after = scene.record(again, number=2)
    assert after.steps[0].step == last + 1
    assert losses(before, after) == pytest.approx(losses(undisturbed), rel=1e-4)


def test_abort_by_the_launcher_stops_both_within_a_few_looks(scene: Scene, launch: Launch) -> None:
    slow = node_run(steps=LONG, checkpoint_every=LONG, FAKE_STEP_S="0.1")
    program = two_nodes(slow, node_run(SECOND))
    nodes = launch(program, training="fake")
    wait_for_steps(nodes[0])
    scene.put(f"{program.output}/abort", b"stop\n")
    statuses = ended(scene, nodes, program)
    assert [outcome(status) for status in statuses] == [("interrupted", "stop")] * 2
    assert [states(status) for status in statuses] == [["interrupted", "not-started"]] * 2
    for rank in (0, 1):
        assert f"node-{rank}/{FIRST}/nccl-node-{rank}.txt" in scene.joined(program)
    # Five seconds lie between two looks of a node, so that two of them are within twenty.
    assert looks_between(scene, program, "abort") <= 2 * len(nodes)


def test_what_one_node_cannot_run_stops_the_other_one(scene: Scene, launch: Launch) -> None:
    """Training that exits with 78 has found another fabric than the one it was asked to use."""
    program = two_nodes(node_run(FAKE_EXIT="78"), node_run(SECOND))
    statuses = ended(scene, launch(program, training="fake"), program)
    assert ("configuration", "fabric") in [outcome(status) for status in statuses]
    assert {outcome(status) for status in statuses} <= {("configuration", "fabric"), ("interrupted", "peer")}
    assert {states(status)[1] for status in statuses} == {"not-started"}


def test_nodes_that_need_efa_and_have_none_start_nothing(scene: Scene, launch: Launch) -> None:
    program = two_nodes(node_run(), needs_efa=True)
    nodes = launch(program, training="fake")
    statuses = ended(scene, nodes, program)
    assert ("configuration", "fabric") in [outcome(status) for status in statuses]
    assert not [call for node in nodes for call in node.docker_calls() if call[0] in ("pull", "run")]


def test_a_run_that_is_settled_is_skipped_by_all(scene: Scene, launch: Launch) -> None:
    program = two_nodes(node_run(FIRST), node_run(SECOND))
    scene.put(f"{program.output}/skip/{FIRST}", b"")
    statuses = ended(scene, launch(program, training="fake"), program)
    assert [outcome(status) for status in statuses] == [("completed", None)] * 2
    assert [states(status) for status in statuses] == [["not-started", "completed"]] * 2


def test_rank_0_that_never_comes_is_not_waited_for_without_end(scene: Scene, launch: Launch) -> None:
    program = two_nodes(node_run(), max_minutes=600)
    (node,) = launch(program, training="fake", boots=[1], scale=20.0)
    assert node.wait(300) == "shutdown"
    assert outcome(scene.status(program, 1)) == ("configuration", "rank 0")
    assert scene.objects(program.output)["abort"].startswith(b"failed configuration rank 0")


@pytest.mark.parametrize(("left_s", "reason"), [(40, "interrupted"), (-60, "configuration")])
def test_a_block_that_ends_stops_its_nodes_or_does_not_start_them(
    left_s: int, reason: str, scene: Scene, launch: Launch
) -> None:
    """Training is asked to stop 45 minutes before; `left_s` of them are left at boot, by the wall clock."""
    ends_at = datetime.now(UTC) + timedelta(minutes=45, seconds=left_s * 10)
    slow = node_run(steps=LONG, FAKE_STEP_S="0.1")
    program = two_nodes(slow, block_ends_at=ends_at.isoformat(timespec="seconds"))
    nodes = launch(program, training="fake")
    statuses = ended(scene, nodes, program)
    assert (reason, "block") in [outcome(status) for status in statuses]
    assert {status["reason"] for status in statuses} <= {"block", "peer"}
    wanted = "interrupted" if left_s > 0 else "not-started"
    assert [states(status) for status in statuses] == [[wanted]] * 2
