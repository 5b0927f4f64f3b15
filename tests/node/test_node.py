"""The node's program on simulated instances, mostly with training that takes no time."""

import hashlib
import json
import random
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_nvidia_smi import report, xid
from moto_server import ACCOUNT
from node_scene import (
    BUCKET,
    FIRST,
    IMAGE,
    ONE_THREAD,
    RUNS,
    SECOND,
    Scene,
    ends,
    losses,
    node_program,
    node_run,
    outcome,
    states,
    steps,
)
from policy_check import Ask, allows
from sent_request import SentRequest
from simulated_instance import SimulatedInstance

from fastlaunch.aws.policies import names_by_hand, policy
from fastlaunch.jobs.code_bundle import pack
from fastlaunch.measure.outcome import outcome_of
from fastlaunch_train.node.protocol import IDLE_CODE, NodeProgram

RECORD = "rank-00000-attempt-1.jsonl"
#: Which goes on for long.
ENDLESS = node_run(steps=1000, checkpoint_every=500, FAKE_STEP_S="0.1")


def assert_records_arrived(scene: Scene, instance: SimulatedInstance, program: NodeProgram, num: int) -> None:
    """Every record of every run is in the bucket, byte for byte, `num` of them."""
    written = instance.records()
    arrived = {
        name.removeprefix("node-0/"): hashlib.sha256(data).hexdigest()
        for name, data in scene.joined(program).items()
        if "/rank-" in name
    }
    assert arrived == written and len(written) == num


def is_node_upload(request: SentRequest) -> bool:
    return "/node-0/" in request.parameters["Key"]


def test_two_runs_are_done_and_uploaded_before_the_machine_turns_itself_off(scene: Scene) -> None:
    program = node_program(node_run(FIRST, recipe="fp32"), node_run(SECOND, recipe="bf16", steps=300))
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"

    machine = scene.moto.instance(instance.instance_id)
    assert machine.state == "terminated"
    assert machine.state_reason.code == "Client.InstanceInitiatedShutdown"
    boot = json.loads(scene.objects(program.output)["boot.json"])
    booted_at = datetime.strptime(boot.pop("booted_at"), "%Y-%m-%dT%H:%M:%S%z")
    identity = {
        "schema": 1,
        "token": program.token,
        "instance_id": instance.instance_id,
        "instance_type": "g5.xlarge",
        "zone": machine.placement.zone,
    }
    assert boot == {**identity, "lifecycle": "on-demand"}
    status = scene.status(program)
    assert ends(status) == [("completed", 0)] * 2
    first, second = status.pop("runs")
    assert list(first) == ["run_id", "state", "exit_code", "started_s", "ended_s"]
    assert (first["run_id"], second["run_id"]) == (FIRST, SECOND)
    times = [status.pop(name) for name in ("boot_s", "pull_s")]
    times += [first["started_s"], first["ended_s"], second["started_s"], second["ended_s"]]
    times += [status.pop("uptime_s")]
    assert times == sorted(times)
    assert datetime.strptime(status.pop("billed_until"), "%Y-%m-%dT%H:%M:%S%z") >= booted_at
    assert status == {
        **{**identity, "node": 0, "outcome": "completed", "reason": None},
        **{"phases": [], "gpu_notes": [], "left_out": []},
    }

    files = scene.joined(program)
    # None if the runs end before the first look.
    assert set(files.pop("node-0/gpu-use.txt", b"").split()) <= {b"93%"}
    assert set(files) == {
        "node-0/log.txt",
        *(f"node-0/{run}/{name}" for run in (FIRST, SECOND) for name in ("log.txt", RECORD)),
    }
    assert b"step 5 of 5" in files[f"node-0/{FIRST}/log.txt"]
    assert b"fastlaunch" in files["node-0/log.txt"]
    assert_records_arrived(scene, instance, program, 2)
    assert len(scene.record(program, SECOND).steps) == 300


def test_container_gets_what_the_program_says(scene: Scene) -> None:
    program = node_program(node_run(data="folder:/opt/data/it's $here", TOKENIZERS_PARALLELISM="it's off"))
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    login, pull, run = (call for call in instance.docker_calls() if call[0] != "info")
    assert login == ["login", "--username", "AWS", "--password-stdin", IMAGE.partition("/")[0]]
    assert pull == ["pull", "-q", IMAGE]
    after = run.index(IMAGE)
    assert not {"--network", "--privileged", "--device", "--cap-add", "--pid"} & set(run[:after])
    assert run[after + 1 :] == ["/fastlaunch/run_train.sh", "--output", "/out", *program.runs[0].arguments]
    assert {run[at + 1] for at, word in enumerate(run[:after]) if word == "-e"} == {
        f"FASTLAUNCH_RUN_ID={FIRST}",
        f"FASTLAUNCH_TOKEN={program.token}",
        "FASTLAUNCH_HUB=/fastlaunch-hub",
        *(f"{name}={value}" for name, value in program.environment.items()),
        "TOKENIZERS_PARALLELISM=it's off",
    }


def test_a_secret_reaches_the_container_and_nothing_else(scene: Scene) -> None:
    value = "s3cr3t täken"
    arn = scene.client("secretsmanager").create_secret(Name="hub", SecretString=value)["ARN"]
    scene.client("ssm").put_parameter(Name="/exit", Value="41", Type="SecureString")
    parameter = f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/exit"
    program = node_program(node_run(), secrets={"HUB": arn, "FAKE_EXIT": parameter})
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    assert ends(scene.status(program)) == [("failed", 41)]
    (run,) = (call for call in instance.docker_calls() if call[0] == "run")
    assert run[-1] == program.runs[0].arguments[-1]
    said = [instance.console, json.dumps(instance.docker_calls(), ensure_ascii=False)]
    said += [body.decode(errors="replace") for body in scene.objects(program.output).values()]
    assert not any("s3cr3t" in text for text in said)


@pytest.mark.parametrize(
    ("stored", "store_mib", "reason"),
    [
        ({}, 4096, "nothing lies under"),
        ({"1.txt": b"data"}, 1024, "and the disk has 1."),
        (None, 4096, "cannot be listed"),
    ],
)
def test_an_input_that_cannot_be_had_ends_the_machine(
    stored: dict[str, bytes] | None, store_mib: int, reason: str, scene: Scene
) -> None:
    uri = f"s3://{BUCKET if stored is not None else 'no-such-bucket'}/data/"
    for name, data in (stored or {}).items():
        scene.put(uri + name, data)
    program = node_program(node_run(), inputs={"d": uri})
    assert scene.launch(program, store_mib=store_mib).wait() == "shutdown"
    named, why = outcome(scene.status(program))
    assert named == "configuration" and why is not None
    assert why.startswith("input d: ") and reason in why


def test_requirements_that_cannot_be_installed_end_the_machine(scene: Scene) -> None:
    data = pack({"requirements.txt": b"no-such-package\n"}, folder="wheels")
    uri = f"s3://{BUCKET}/fastlaunch/code/requirements.tar.gz"
    scene.put(uri, data)
    sha256 = hashlib.sha256(data).hexdigest()
    program = node_program(node_run(), requirements_uri=uri, requirements_sha256=sha256)
    assert scene.launch(program, training="real").wait() == "shutdown"
    expected = "requirements: No matching distribution found for no-such-package"
    assert outcome(scene.status(program)) == ("configuration", expected)


def test_a_run_that_fails_does_not_stop_the_next_one(scene: Scene) -> None:
    program = node_program(node_run(FIRST, FAKE_FAIL_AT="3"), node_run(SECOND))
    instance = scene.launch(program)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("failed", f"run {FIRST}: exit code 1")
    assert ends(status) == [("failed", 1), ("completed", 0)]
    traceback = scene.joined(program)[f"node-0/{FIRST}/traceback-rank-00000-attempt-1.txt"]
    assert b"ValueError: no such thing" in traceback
    assert_records_arrived(scene, instance, program, 2)


def test_a_run_that_fails_at_the_same_step_is_begun_again_once(scene: Scene) -> None:
    failing = node_run(FIRST, steps=9, checkpoint_every=2, FAKE_FAIL_AT="7")
    program = node_program(failing, node_run(SECOND))
    assert scene.launch(program).wait() == "shutdown"
    status = scene.status(program)
    assert ends(status) == [("failed", 1), ("completed", 0)]
    first, again = (scene.record(program, number=number) for number in (1, 2))
    assert (steps(first), steps(again)) == ([1, 2, 3, 4, 5, 6], [])
    assert f"node-0/{FIRST}/rank-00000-attempt-3.jsonl" not in scene.joined(program)
    assert outcome_of([first, again]).reason == "failed: ValueError: no such thing, and again after a restart"


def test_records_of_another_attempt_follow_those_of_a_run_that_was_begun_again(scene: Scene) -> None:
    run = node_run(FIRST, steps=9, checkpoint_every=2, FAKE_FAIL_AT="7")
    first = node_program(run)
    assert scene.launch(first).wait() == "shutdown"
    second = node_program(replace(run, environment={}), attempt=2)
    assert scene.launch(second).wait() == "shutdown"
    assert steps(scene.record(second, number=3)) == [7, 8, 9]


PENDING = report(1, {0: {"remapped_row_pending": "Yes"}})
NO_SECRET = f"arn:aws:secretsmanager:us-east-1:{ACCOUNT}:secret:none-x1y2z3"


@pytest.mark.parametrize(
    ("expected", "changes", "machine"),
    [
        (("configuration", "image pull"), {}, {"missing_images": (IMAGE,)}),
        (("configuration", "code"), {"code_sha256": "0" * 64}, {}),
        (("configuration", "secret"), {"secrets": {"HUB": NO_SECRET}}, {}),
        (("configuration", "driver"), {}, {"num_gpus": 0}),
        # A container that docker cannot start is the machine's fault: the next run would fare no better.
        (("configuration", "container: exit code 125"), {}, {"broken_runtime": True}),
        (("hardware", "GPU 0: a row remap is pending"), {}, {"gpus": PENDING}),
        (("hardware", "1 of 8 GPUs are there"), {"num_gpus": 8}, {}),
        (("hardware", "fabric manager"), {"has_nvswitch": True}, {"fabric_manager": False}),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_machine_that_cannot_run_anything_says_why(
    expected: tuple[str, str], changes: dict[str, Any], machine: dict[str, Any], scene: Scene
) -> None:
    program = node_program(node_run(FIRST), node_run(SECOND), **changes)
    instance = scene.launch(program, scale=40.0, **machine)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == expected
    begun = ("failed", 125) if "broken_runtime" in machine else ("not-started", None)
    assert ends(status) == [begun, ("not-started", None)]
    assert f"failed: {expected[0]}".encode() in scene.joined(program)["node-0/log.txt"]
    # Faulty GPUs are found before the image is pulled.
    assert expected[0] == "configuration" or not instance.docker_calls()


def test_a_fabric_manager_that_lost_a_race_at_boot_is_restarted(scene: Scene) -> None:
    program = node_program(node_run(), has_nvswitch=True)
    instance = scene.launch(program, fabric_manager="late")
    assert instance.wait() == "shutdown"
    assert outcome(scene.status(program)) == ("completed", None)
    calls = (scene.folder / instance.instance_id / "sim" / "systemctl.log").read_text()
    assert calls.count("restart nvidia-fabricmanager") == 1


def test_an_xid_of_the_hardware_ends_a_training_that_waits_for_its_gpu(scene: Scene) -> None:
    program = node_program(ENDLESS, node_run(SECOND))
    instance = scene.launch(program)
    instance.kernel_says(xid(31))
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    instance.kernel_says(xid(79, "GPU has fallen off the bus."))
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("hardware", "Xid 79 at 0000:53:00 (fallen off the bus)")
    assert ends(status) == [("interrupted", 130), ("not-started", None)]
    assert status["gpu_notes"] == ["Xid 31 at 0000:53:00", status["reason"]]
    # For another machine to go on from.
    assert len(scene.keys(f"{RUNS}/{FIRST}/checkpoints")) == 1
    assert_records_arrived(scene, instance, program, 1)


def test_a_run_that_idles_is_ended_and_the_next_one_is_done(scene: Scene) -> None:
    waiting = node_run(FIRST, FAKE_HANG_AT="4")
    program = node_program(waiting, node_run(SECOND), idle_timeout_s=900.0)
    instance = scene.launch(program, scale=40.0)
    instance.gpus_show(1)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("failed", f"run {FIRST}: exit code {IDLE_CODE}")
    assert ends(status) == [("failed", IDLE_CODE), ("completed", 0)]
    # It was asked, and left its record.
    assert_records_arrived(scene, instance, program, 2)


def test_a_full_disk_ends_the_node_and_what_was_recorded_arrives(scene: Scene) -> None:
    large = str(400 * 2**20)
    program = node_program(node_run(FIRST, checkpoint_every=5, FAKE_CHECKPOINT_BYTES=large), node_run(SECOND))
    instance = scene.launch(program, store_mib=300)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("configuration", "disk full")
    assert states(status) == ["failed", "not-started"]
    assert_records_arrived(scene, instance, program, 1)
    assert b"No space left on device" in scene.joined(program)[f"node-0/{FIRST}/log.txt"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_spot_taken_at_a_random_moment_loses_nothing_and_goes_on_from_its_checkpoint(
    seed: int, scene: Scene
) -> None:
    runs = node_run(FIRST, steps=60, checkpoint_every=5, FAKE_STEP_S="0.1"), node_run(SECOND)
    program = node_program(*runs, is_spot=True)
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/boot.json")
    time.sleep(random.Random(seed).uniform(0, 7))
    instance.spot_notice()
    scene.wait_for(f"{program.output}/node-0/status.json")
    status = scene.status(program)
    assert outcome(status) == ("interrupted", "spot")
    assert status["billed_until"] == json.loads(instance.metadata.values["spot/instance-action"])["time"]
    assert states(status)[1] == "not-started"
    assert_records_arrived(scene, instance, program, len(instance.records()))
    done = steps(scene.record(program)) if instance.records() else []
    if done:
        # Of the last step that was done.
        scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-{done[-1]:08d}.pt")
    time.sleep(1)
    # It has not turned itself off: that would be billed.
    assert instance.is_on and "turning off" not in instance.console
    instance.take()
    assert scene.moto.instance(instance.instance_id).state_reason.code == "Server.SpotInstanceTermination"
    again = node_program(*runs, attempt=2, is_spot=True)
    assert scene.launch(again).wait() == "shutdown"
    assert scene.status(again)["outcome"] == "completed"
    assert done + steps(scene.record(again, number=2)) == list(range(1, 61))


def test_node_that_hangs_is_stopped_by_its_watchdog(scene: Scene) -> None:
    program = node_program(node_run(FIRST, FAKE_HANG_AT="4", FAKE_DEAF="1"), node_run(SECOND), max_minutes=8)
    # The agent has 12 of our seconds to end the container and to send all, which a busy machine may need.
    instance = scene.launch(program, scale=5.0)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("interrupted", "watchdog")
    assert ends(status) == [("interrupted", 137), ("not-started", None)]
    assert_records_arrived(scene, instance, program, 1)
    # Half of the two minutes that are left.
    assert ["stop", "-t", "60", "fastlaunch"] in instance.docker_calls()


def test_node_whose_program_hangs_is_turned_off_by_the_timer_of_its_first_line(scene: Scene) -> None:
    program = node_program(ENDLESS, max_minutes=3)
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
    program = node_program(ENDLESS)
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
    assert outcome(status) == ("completed", None)
    assert states(status) == ["completed", "not-started"]
    assert_records_arrived(scene, instance, program, 1)


@pytest.mark.parametrize("how", ["cut", "refused"])
def test_uploads_that_fail_for_a_while_lose_nothing(how: str, scene: Scene) -> None:
    program = node_program(node_run(steps=120, checkpoint_every=20, FAKE_STEP_S="0.1"))
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
    puts = scene.moto.sent("PutObject")
    assert any(put.status == 503 for put in puts) == (how == "refused")
    # A segment may be written twice, and never with other bytes.
    sizes: dict[str, set[int]] = {}
    for put in puts:
        if put.status == 200 and is_node_upload(put) and re.search(r"\.\d{12}$", put.parameters["Key"]):
            sizes.setdefault(put.parameters["Key"], set()).add(len(put.body))
    assert sizes and all(len(lengths) == 1 for lengths in sizes.values())
    assert scene.status(program)["outcome"] == "completed"
    assert_records_arrived(scene, instance, program, 1)
    assert len(scene.record(program).steps) == 120
    # The first one came while the run was going on.
    assert len([key for key in scene.keys(program.output) if f"{FIRST}/{RECORD}" in key]) > 1
    assert scene.keys(f"{RUNS}/{FIRST}/checkpoints")[-1] == "step-00000120.pt"


def test_abort_stops_the_node_cleanly(scene: Scene) -> None:
    program = node_program(ENDLESS, node_run(SECOND))
    instance = scene.launch(program)
    scene.wait_for(f"{program.output}/node-0/{FIRST}/rank-")
    scene.put(f"{program.output}/abort", b"stop\n")
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert outcome(status) == ("interrupted", "stop")
    assert ends(status) == [("interrupted", 130), ("not-started", None)]
    assert_records_arrived(scene, instance, program, 1)
    assert len(scene.keys(f"{RUNS}/{FIRST}/checkpoints")) == 1


def test_a_shutdown_that_does_not_come_to_its_end_is_forced_and_the_last_uploads_are_billed(
    scene: Scene,
) -> None:
    """A service may take half an hour to stop, and the bill goes on meanwhile."""
    refusal = scene.moto.refuse("PutObject", "SlowDown", where=is_node_upload)
    program = node_program(node_run())
    instance = scene.launch(program, shutdown_ends=False)
    while instance.is_on and not re.search(r"fastlaunch [0-9.]+: completed", instance.console):
        time.sleep(0.2)
    time.sleep(2)
    allowed_at = datetime.now(UTC).replace(microsecond=0)
    scene.moto.allow(refusal)
    assert instance.wait() == "shutdown"
    status = scene.status(program)
    assert status["outcome"] == "completed"
    assert datetime.strptime(status["billed_until"], "%Y-%m-%dT%H:%M:%S%z") >= allowed_at
    assert "poweroff -ff" in (scene.folder / instance.instance_id / "sim" / "systemctl.log").read_text()


#: What a request to S3 needs, where that is not its own name. docs.aws.amazon.com/AmazonS3, "Required
#: permissions for Amazon S3 API operations".
RIGHTS = {
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListObjects": "ListBucket",
    "ListObjectsV2": "ListBucket",
}


def ask_of(request: SentRequest) -> Ask:
    """What the request asks IAM for."""
    if request.service != "s3":
        return Ask(action=f"{request.service}:{request.action}")
    right = RIGHTS.get(request.action, request.action)
    bucket = f"arn:aws:s3:::{request.parameters['Bucket']}"
    if right == "ListBucket":
        context = {"s3:prefix": request.parameters["prefix"]}
        return Ask(action="s3:ListBucket", resource=bucket, context=context)
    return Ask(action=f"s3:{right}", resource=f"{bucket}/{request.parameters['Key']}")


def test_a_machine_asks_for_nothing_that_its_role_may_not(scene: Scene) -> None:
    """A second attempt, which goes on from a checkpoint and leaves others, and fetches an input."""
    scene.put(f"s3://{BUCKET}/data/1.txt", b"data")
    data = f"s3://{BUCKET}/data/"
    # A file that a submission uploads lies where the code does.
    file = f"s3://{BUCKET}/fastlaunch/code/0123/train.jsonl"
    scene.put(file, b"data")
    scene.put(f"{RUNS}/{FIRST}/checkpoints/step-00000002.pt", b'{"step": 2}')
    program = node_program(node_run(FIRST, steps=6, checkpoint_every=2), attempt=2)
    program = replace(program, inputs={"d": data, "local-data": file})
    assert scene.launch(program).wait() == "shutdown"
    requests = scene.moto.sent()
    asks = [ask_of(one) for one in requests if one.headers.get("user-agent", "").startswith("aws-cli")]
    assert {ask.action for ask in asks} >= {
        *("s3:PutObject", "s3:GetObject", "s3:ListBucket", "ecr:GetAuthorizationToken")
    }
    held = [policy("node", names_by_hand(account=ACCOUNT, bucket=BUCKET, inputs=(data,)))]
    assert [ask for ask in asks if not allows(held, ask)] == []


def test_real_fine_tuning_reads_an_uploaded_file_and_sends_its_checkpoints(scene: Scene) -> None:
    row = json.dumps({"text": "abcdefgh " * 9})
    uri = f"s3://{BUCKET}/fastlaunch/code/0123/train.jsonl"
    scene.put(uri, (8 * f"{row}\n").encode())
    run = node_run(
        workload="hf-lora:llama-tiny",
        recipe="bf16",
        steps=6,
        checkpoint_every=3,
        data="file:/opt/ml/input/data/local-data/train.jsonl",
        **ONE_THREAD,
    )
    program = node_program(run, inputs={"local-data": uri})
    assert scene.launch(program, training="real", scale=10.0).wait(300) == "shutdown"
    assert scene.status(program)["outcome"] == "completed", scene.joined(program)
    assert len(scene.record(program).steps) == 6
    scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-00000006.pt")


def test_a_rank_that_is_killed_goes_on_from_the_last_checkpoint_to_the_bit(scene: Scene) -> None:
    training = {"steps": 300, "checkpoint_every": 50, "FASTLAUNCH_NPROC": "2", **ONE_THREAD}
    real: dict[str, Any] = {"training": "real", "scale": 10.0}
    alone = node_program(node_run(SECOND, **training))  # type: ignore[arg-type]
    assert scene.launch(alone, **real).wait(300) == "shutdown"
    program = node_program(node_run(FIRST, **training))  # type: ignore[arg-type]
    instance = scene.launch(program, **real)
    scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-")
    instance.kill_rank(1)
    assert instance.wait(300) == "shutdown"
    assert ends(scene.status(program)) == [("completed", 0)], scene.joined(program)
    before, after = (scene.record(program, number=number) for number in (1, 2))
    assert after.header["first_step"] in range(51, 300, 50)
    assert "SIGKILL" in after.header["restarted_after"]
    assert losses(before, after) == losses(scene.record(alone, SECOND))


def test_real_training_that_spot_interrupts_goes_on_where_it_was(scene: Scene) -> None:
    """vit-tiny on this CPU, through the container's own command; another run is left alone."""
    training = {"steps": 500, "checkpoint_every": 50, **ONE_THREAD}
    real: dict[str, Any] = {"training": "real", "scale": 10.0}
    alone = node_program(node_run(SECOND, **training))  # type: ignore[arg-type]
    assert scene.launch(alone, **real).wait(300) == "shutdown"
    undisturbed = scene.record(alone, SECOND)
    header = undisturbed.header
    assert (header["run_id"], header["recipe"]["name"], header["instance"]) == (SECOND, "fp32", "g5.xlarge")
    assert header["image_digest"] == f"sha256:{'b' * 64}"

    run = node_run(FIRST, **training)  # type: ignore[arg-type]
    program = node_program(run, is_spot=True)
    instance = scene.launch(program, **real)
    scene.wait_for(f"{program.output}/boot.json")
    # Into the record, which is written about once a second; the moment within that second is chance.
    while instance.num_record_lines(FIRST) < random.Random(5).randrange(50, 250):
        time.sleep(0.05)
    instance.spot_notice()
    scene.wait_for(f"{program.output}/node-0/status.json")
    assert scene.status(program)["reason"] == "spot"
    assert states(scene.status(program)) == ["interrupted"], scene.joined(program)
    before = scene.record(program)
    assert before.end is not None and before.end.status == "interrupted"
    scene.wait_for(f"{RUNS}/{FIRST}/checkpoints/step-{before.steps[-1].step:08d}.pt")
    assert instance.is_on
    instance.take()

    again = node_program(run, attempt=2, is_spot=True)
    assert scene.launch(again, **real).wait(300) == "shutdown"
    assert scene.status(again)["outcome"] == "completed", scene.joined(again)
    after = scene.record(again, number=2)
    assert after.steps[0].step == before.steps[-1].step + 1
    assert losses(before, after) == pytest.approx(losses(undisturbed), rel=1e-4)
