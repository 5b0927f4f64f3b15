"""The node's program on simulated instances, with training that takes no time. Slow: seconds per instance."""

import hashlib
import json
import random
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from node_scene import FIRST, IMAGE, RUNS, SECOND, Scene, node_program, node_run
from simulated_instance import SimulatedInstance, cannot_simulate

from fastlaunch_train.node.protocol import NodeProgram
from fastlaunch_train.records.records import read_record

RECORD = "rank-00000-attempt-1.jsonl"
REASON = cannot_simulate()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]


def test_two_runs_are_done_and_uploaded_before_the_machine_turns_itself_off(
    scene: Scene, tmp_path: Path
) -> None:
    program = node_program(node_run(FIRST, recipe="fp32"), node_run(SECOND, recipe="bf16", steps=300))
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"

    machine = scene.moto.instance(instance.instance_id)
    assert machine.state == "terminated"
    assert machine.state_reason.code == "Client.InstanceInitiatedShutdown"
    objects = scene.objects(program.output)
    boot = json.loads(objects["boot.json"])
    assert boot == {
        "schema": 1,
        "token": program.token,
        "instance_id": instance.instance_id,
        "instance_type": "g5.xlarge",
        "zone": machine.placement.zone,
        "lifecycle": "on-demand",
        "booted_at": boot["booted_at"],
    }
    booted_at = datetime.strptime(boot["booted_at"], "%Y-%m-%dT%H:%M:%S%z")
    status = scene.status(program)
    first, second = status.pop("runs")
    assert list(first) == ["run_id", "state", "exit_code", "started_s", "ended_s"]
    assert (first["run_id"], first["state"], first["exit_code"]) == (FIRST, "completed", 0)
    assert (second["run_id"], second["state"], second["exit_code"]) == (SECOND, "completed", 0)
    times = ("boot_s", "pull_s", "uptime_s", "billed_until")
    assert {key: value for key, value in status.items() if key not in times} == {
        "schema": 1,
        "token": program.token,
        "instance_id": instance.instance_id,
        "instance_type": "g5.xlarge",
        "zone": machine.placement.zone,
        "node": 0,
        "outcome": "completed",
        "reason": None,
    }
    order = [status["boot_s"], status["pull_s"], first["started_s"], first["ended_s"], second["started_s"]]
    assert order == sorted(order) and second["ended_s"] <= status["uptime_s"]
    assert datetime.strptime(status["billed_until"], "%Y-%m-%dT%H:%M:%S%z") >= booted_at

    files = scene.joined(program)
    assert set(files) == {
        "node-0/log.txt",
        *(f"node-0/{run}/{name}" for run in (FIRST, SECOND) for name in ("log.txt", RECORD)),
    }
    assert b"step 5 of 5" in files[f"node-0/{FIRST}/log.txt"]
    assert b"fastlaunch" in files["node-0/log.txt"]
    assert_records_arrived(scene, instance, program, 2)
    for path in scene.bring_home(program, tmp_path)[SECOND]:
        assert len(read_record(path).steps) == 300


def test_container_gets_what_the_program_says(scene: Scene) -> None:
    program = node_program(
        node_run(data="folder:/opt/data/it's $here", environment={"TOKENIZERS_PARALLELISM": "it's off"})
    )
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    calls = instance.docker_calls()
    assert [call[0] for call in calls if call[0] != "info"] == ["login", "pull", "run"]
    assert calls[1] == ["login", "--username", "AWS", "--password-stdin", IMAGE.partition("/")[0]]
    run = next(call for call in calls if call[0] == "run")
    after = run.index(IMAGE)
    assert run[after + 1 :] == ["/fastlaunch/run_train.sh", *program.runs[0].arguments, "--output", "/out"]
    given = {run[at + 1] for at, word in enumerate(run[:after]) if word == "-e"}
    assert given == {
        f"FASTLAUNCH_RUN_ID={FIRST}",
        f"FASTLAUNCH_TOKEN={program.token}",
        *(f"{name}={value}" for name, value in program.environment.items()),
        "TOKENIZERS_PARALLELISM=it's off",
    }


def test_a_run_that_fails_does_not_stop_the_next_one(scene: Scene) -> None:
    failing = node_run(FIRST, environment={"FAKE_FAIL_AT": "3"})
    program = node_program(failing, node_run(SECOND))
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("failed", f"run {FIRST}: exit code 1")
    assert [(run["state"], run["exit_code"]) for run in status["runs"]] == [("failed", 1), ("completed", 0)]
    traceback = scene.joined(program)[f"node-0/{FIRST}/traceback-rank-00000-attempt-1.txt"]
    assert b"ValueError: no such thing" in traceback
    assert_records_arrived(scene, instance, program, 2)


@pytest.mark.parametrize(
    ("what", "reason", "changes", "machine"),
    [
        ("image", "image pull", {}, {"missing_images": (IMAGE,)}),
        ("code", "code", {"code_sha256": "0" * 64}, {}),
        ("fabric manager", "fabric manager", {"has_nvswitch": True}, {"fabric_manager": False}),
        ("GPU", "driver", {"num_gpus": 8}, {}),
    ],
)
def test_a_machine_that_cannot_run_anything_says_why(
    what: str, reason: str, changes: dict[str, Any], machine: dict[str, Any], scene: Scene
) -> None:
    program = node_program(node_run(FIRST), **changes)
    instance = scene.launch(program, scale=40.0, **machine)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("configuration", reason), what
    assert [run["state"] for run in status["runs"]] == ["not-started"]
    assert b"failed: configuration" in scene.joined(program)["node-0/log.txt"]


def test_what_a_driver_lost_on_the_way_ends_the_node(scene: Scene) -> None:
    """A container that docker cannot start is the machine's fault: the next run would fare no better."""
    program = node_program(node_run(FIRST), node_run(SECOND))
    instance = scene.launch(program, broken_runtime=True)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("configuration", "container: exit code 125")
    assert [(run["state"], run["exit_code"]) for run in status["runs"]] == [
        ("failed", 125),
        ("not-started", None),
    ]


def test_a_full_disk_ends_the_node_and_what_was_recorded_arrives(scene: Scene) -> None:
    large = {"FAKE_CHECKPOINT_BYTES": str(400 * 2**20)}
    program = node_program(node_run(FIRST, checkpoint_every=5, environment=large), node_run(SECOND))
    instance = scene.launch(program, store_mib=300)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("configuration", "disk full")
    assert [run["state"] for run in status["runs"]] == ["failed", "not-started"]
    assert_records_arrived(scene, instance, program, 1)
    assert b"No space left on device" in scene.joined(program)[f"node-0/{FIRST}/log.txt"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_spot_taken_at_a_random_moment_loses_nothing_and_goes_on_from_its_checkpoint(
    seed: int, scene: Scene, tmp_path: Path
) -> None:
    run = node_run(FIRST, steps=60, checkpoint_every=5, environment={"FAKE_STEP_S": "0.1"})
    program = node_program(run, node_run(SECOND), is_spot=True)
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/boot.json")
    time.sleep(random.Random(seed).uniform(0, 7))
    instance.spot_notice()
    scene.wait_for(f"{program.output}/node-0/status.json")
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("interrupted", "spot")
    assert status["billed_until"] == json.loads(instance.metadata.values["spot/instance-action"])["time"]
    assert status["runs"][1]["state"] == "not-started"
    assert_records_arrived(scene, instance, program)
    before = scene.bring_home(program, tmp_path / "1").get(FIRST, [])
    done = [step.step for path in before for step in read_record(path).steps]
    if done:
        # Of the last step that was done.
        scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-{done[-1]:08d}.pt")
    time.sleep(1)
    # It has not turned itself off: that would be billed.
    assert instance.is_on and "turning off" not in instance.console
    instance.take()
    assert scene.moto.instance(instance.instance_id).state_reason.code == "Server.SpotInstanceTermination"
    again = node_program(run, node_run(SECOND), attempt=2, is_spot=True)
    assert scene.launch(again).wait() == "shutdown"
    assert scene.status(again)["outcome"] == "completed"
    after = read_record(scene.bring_home(again, tmp_path / "2")[FIRST][0])
    assert done + [step.step for step in after.steps] == list(range(1, 61))


def test_node_that_hangs_is_stopped_by_its_watchdog(scene: Scene) -> None:
    deaf = node_run(FIRST, environment={"FAKE_HANG_AT": "4", "FAKE_DEAF": "1"})
    program = node_program(deaf, node_run(SECOND), max_minutes=8)
    instance = scene.launch(program, scale=10.0)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("interrupted", "watchdog")
    assert [(run["state"], run["exit_code"]) for run in status["runs"]] == [
        ("interrupted", 137),
        ("not-started", None),
    ]
    assert_records_arrived(scene, instance, program, 1)
    # Half of the two minutes that are left.
    assert ["stop", "-t", "60", "fastlaunch"] in instance.docker_calls()


def test_node_whose_program_hangs_is_turned_off_by_the_timer_of_its_first_line(scene: Scene) -> None:
    program = node_program(node_run(FIRST, steps=1000, environment={"FAKE_STEP_S": "1"}), max_minutes=3)
    instance = scene.launch(program, scale=10.0)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    instance.cut_network()
    assert instance.wait() == "timer"
    assert scene.moto.instance(instance.instance_id).state == "terminated"
    assert "node-0/status.json" not in scene.keys(program.output)


def test_node_that_reaches_nothing_turns_itself_off(scene: Scene) -> None:
    instance = scene.launch(node_program(node_run()), connected=False)
    assert instance.wait() == "shutdown"
    (run_list,) = scene.keys(RUNS)
    assert "/runs-" in run_list, "nothing but what the launcher stored"
    assert "run" not in [call[0] for call in instance.docker_calls()]
    assert "turning off" in scene.moto.console[instance.instance_id]


@pytest.mark.parametrize("what", ["agent", "run list", "AWS CLI"])
def test_a_machine_without_what_it_needs_turns_itself_off(what: str, scene: Scene) -> None:
    program = node_program(node_run())
    (instance_id,) = scene.run_instances(program)
    agent, run_list = scene.fetched(program)
    if what != "AWS CLI":
        scene.put((agent if what == "agent" else run_list).uri, b"something else")
    instance = scene.boot(instance_id, has_aws_cli=what != "AWS CLI")
    assert instance.wait() == "shutdown"
    assert not instance.docker_calls()
    if what != "AWS CLI":
        assert b"no agent" in scene.joined(program)["node-0/log.txt"] or what != "agent"
        assert "boot.json" in scene.keys(program.output)


def test_an_agent_that_is_killed_does_not_leave_its_machine_on(scene: Scene) -> None:
    program = node_program(node_run(steps=1000, environment={"FAKE_STEP_S": "1"}))
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    instance.kill_agent()
    assert instance.wait(30) == "shutdown"


def test_a_run_that_the_launcher_has_settled_is_skipped(scene: Scene) -> None:
    program = node_program(node_run(FIRST), node_run(SECOND))
    scene.put(f"{program.output}/skip/{SECOND}", b"")
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("completed", None)
    assert [run["state"] for run in status["runs"]] == ["completed", "not-started"]
    assert_records_arrived(scene, instance, program, 1)


@pytest.mark.parametrize("how", ["cut", "refused"])
def test_uploads_that_fail_for_a_while_lose_nothing(how: str, scene: Scene, tmp_path: Path) -> None:
    program = node_program(node_run(steps=120, checkpoint_every=20, environment={"FAKE_STEP_S": "0.1"}))
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    if how == "cut":
        instance.cut_network()
        end = time.monotonic() + 60
        while "not sent, will try again" not in instance.console:
            assert time.monotonic() < end, instance.console
            time.sleep(0.2)
        instance.mend_network()
    else:
        # Some objects of a round get through and others do not.
        lots = iter(random.Random(7).choices((True, True, True, True, False), k=10_000))
        refusal = scene.moto.refuse("PutObject", "SlowDown", where=lambda request: next(lots))
        time.sleep(5)
        scene.moto.allow(refusal)
    assert instance.wait() == "shutdown"
    if how == "refused":
        assert any(sent.status == 503 for sent in scene.moto.sent("PutObject"))
    assert scene.status(program)["outcome"] == "completed"
    assert_records_arrived(scene, instance, program, 1)
    (record,) = scene.bring_home(program, tmp_path)[FIRST]
    assert len(read_record(record).steps) == 120
    # The first one came while the run was going on.
    assert len([key for key in scene.keys(program.output) if f"{FIRST}/{RECORD}" in key]) > 1
    assert scene.keys(f"{RUNS}/{FIRST}/checkpoints")[-1] == "step-00000120.pt"


def test_no_segment_is_ever_written_twice_with_other_bytes(scene: Scene) -> None:
    lots = iter(random.Random(11).choices((True, True, True, False), k=10_000))
    refusal = scene.moto.refuse(
        "PutObject",
        "SlowDown",
        where=lambda request: "/node-0/" in request.parameters["Key"] and next(lots),
    )
    program = node_program(node_run(steps=150, environment={"FAKE_STEP_S": "0.1"}))
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    time.sleep(2)
    scene.moto.allow(refusal)
    assert instance.wait() == "shutdown"
    sizes: dict[str, set[int]] = {}
    for sent in scene.moto.sent("PutObject"):
        if sent.status == 200 and "/node-0/" in sent.parameters["Key"]:
            sizes.setdefault(sent.parameters["Key"], set()).add(len(sent.body))
    assert sizes and all(len(found) == 1 for found in sizes.values())


def test_abort_stops_the_node_cleanly(scene: Scene) -> None:
    run = node_run(steps=1000, checkpoint_every=500, environment={"FAKE_STEP_S": "0.1"})
    program = node_program(run, node_run(SECOND))
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    scene.put(f"{program.output}/abort", b"stop\n")
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert (status["outcome"], status["reason"]) == ("interrupted", "stop")
    assert [(run["state"], run["exit_code"]) for run in status["runs"]] == [
        ("interrupted", 130),
        ("not-started", None),
    ]
    assert_records_arrived(scene, instance, program, 1)
    assert len(scene.keys(f"{RUNS}/{FIRST}/checkpoints")) == 1


def test_a_shutdown_that_does_not_come_to_its_end_is_forced(scene: Scene) -> None:
    """A service may take half an hour to stop, and the bill goes on meanwhile."""
    program = node_program(node_run())
    instance = scene.launch(program, shutdown_ends=False)
    assert instance.wait() == "shutdown"
    assert scene.status(program)["outcome"] == "completed"
    assert "poweroff -ff" in (scene.folder / instance.instance_id / "sim" / "systemctl.log").read_text()


def test_what_the_last_uploads_take_is_billed_too(scene: Scene) -> None:
    refusal = scene.moto.refuse(
        "PutObject", "SlowDown", where=lambda request: "/node-0/" in request.parameters["Key"]
    )
    program = node_program(node_run())
    instance = scene.launch(program)
    while instance.is_on and not re.search(r"fastlaunch [0-9.]+: completed", instance.console):
        time.sleep(0.2)
    time.sleep(2)
    allowed_at = datetime.now(UTC).replace(microsecond=0)
    scene.moto.allow(refusal)
    assert instance.wait() == "shutdown"
    billed_until = scene.status(program)["billed_until"]
    assert datetime.strptime(billed_until, "%Y-%m-%dT%H:%M:%S%z") >= allowed_at


def test_machine_that_somebody_terminates_is_gone_at_once(scene: Scene) -> None:
    instance = scene.launch(node_program(node_run(steps=1000)))
    scene.client("ec2").terminate_instances(InstanceIds=[instance.instance_id])
    assert instance.wait() == "terminated"


def assert_records_arrived(
    scene: Scene, instance: SimulatedInstance, program: NodeProgram, num: int | None = None
) -> None:
    """Every record of every run is in the bucket, byte for byte, `num` of them."""
    written = instance.records()
    arrived = {
        name.removeprefix("node-0/"): hashlib.sha256(data).hexdigest()
        for name, data in scene.joined(program).items()
        if "/rank-" in name
    }
    assert arrived == written
    assert num is None or len(written) == num
