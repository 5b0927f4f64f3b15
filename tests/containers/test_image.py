"""The real Dockerfile on a small base, through a registry and back, run by a real docker daemon."""

import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_daemon import DockerDaemon, client, daemon_with_base
from moto_server import MotoServer
from node_scene import BUCKET, FIRST, REGION, RUNS, Scene, node_program, outcome, states
from simulated_instance import RealDocker, cannot_simulate
from small_base import PACKAGES, WORKLOADS, base_image, packages
from wheel_builder import make_wheel

from fastlaunch.jobs.code_bundle import pack
from fastlaunch.jobs.image_build import context_without_wheels, write_context
from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.node.protocol import NodeProgram, NodeRun
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

TRAINING = ("--recipe", "fp32", "--batch-size", "4", "--output", "/out")
BASE_DIGEST = f"sha256:{'b' * 64}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    yield from daemon_with_base("base:small", base_image())


def build(daemon: DockerDaemon, folder: Path, tag: str, *, buildkit: bool) -> None:
    """Build the image as `fastlaunch build` does, with one file in place of the wheels."""
    folder.mkdir()
    write_context({**context_without_wheels(), "site/a_wheel.py": b"ANSWER = 42\n"}, folder)
    arguments = {
        "BASE_IMAGE": "base:small",
        "BASE_DIGEST": BASE_DIGEST,
        "COMMIT": "0123abc",
        "RECIPE_SCHEMA": str(RECIPE_SCHEMA),
    }
    options = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
    daemon.docker("build", "--tag", tag, *options, folder, buildkit=buildkit)


@pytest.fixture(scope="module")
def image(daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The image by digest, after it was pushed, removed and pulled."""
    tag = f"{daemon.registry}/fastlaunch:test"
    build(daemon, tmp_path_factory.mktemp("context") / "1", tag, buildkit=False)
    told = daemon.docker("push", tag)
    found = re.search(r"digest: (sha256:[0-9a-f]{64})", told)
    assert found is not None, told
    daemon.docker("rmi", tag)
    by_digest = f"{daemon.registry}/fastlaunch@{found[1]}"
    daemon.docker("pull", "-q", by_digest)
    return by_digest


def run_arguments(name: str, image: str, out: Path, *training: str, **environment: str) -> list[str]:
    """As the node's program runs it, but for the folder that stands for what AWS's image holds."""
    given = [part for key, value in environment.items() for part in ("-e", f"{key}={value}")]
    return [
        *("run", "--name", name, "--entrypoint", "/bin/bash", "--network", "none", "--stop-timeout", "100"),
        *("-v", f"{out}:/out", "-v", f"{packages()}:{PACKAGES}:ro", *given),
        *(image, "/fastlaunch/run_train.sh", *training, *TRAINING),
    ]


def record(out: Path, *, rank: int = 0, attempt: int = 1) -> RankRecord:
    return read_record(out / f"rank-{rank:05d}-attempt-{attempt}.jsonl")


@pytest.mark.parametrize("buildkit", [False, True], ids=["classic", "buildkit"])
def test_the_dockerfile_builds_with_both_builders_and_labels_the_image(
    daemon: DockerDaemon, tmp_path: Path, buildkit: bool
) -> None:
    tag = f"fastlaunch:{buildkit}".lower()
    build(daemon, tmp_path / "context", tag, buildkit=buildkit)
    (told,) = json.loads(daemon.docker("inspect", tag))
    config = told["Config"]
    assert config["Labels"] == {
        "org.opencontainers.image.title": "fastlaunch",
        "org.opencontainers.image.revision": "0123abc",
        "org.opencontainers.image.base.digest": BASE_DIGEST,
        "fastlaunch.recipe-schema": str(RECIPE_SCHEMA),
    }
    assert config["Entrypoint"] == ["/bin/bash", "/fastlaunch/run_train.sh"]
    assert config["WorkingDir"] == "/fastlaunch/user"
    base = json.loads(daemon.docker("inspect", "base:small"))[0]["RootFS"]["Layers"]
    assert told["RootFS"]["Layers"][: len(base)] == base, "nothing of the base is changed"


def test_a_pulled_image_trains(daemon: DockerDaemon, image: str, tmp_path: Path) -> None:
    arguments = run_arguments(
        "plain",
        image,
        tmp_path,
        *("--workload", f"{WORKLOADS}/tiny.py:build", "--steps", "20"),
        FASTLAUNCH_RUN_ID="20261121-090312-k3f9",
        FASTLAUNCH_IMAGE_DIGEST=image.partition("@")[2],
        FASTLAUNCH_NPROC="2",
    )
    daemon.docker(*arguments)
    for rank in range(2):
        read = record(tmp_path, rank=rank)
        assert read.end is not None
        assert (read.end.status, len(read.steps)) == ("completed", 20)
        header = read.header
        assert (header["run_id"], header["world_size"]) == ("20261121-090312-k3f9", 2)
        assert header["image_digest"] == image.partition("@")[2]


@pytest.fixture
def scene(daemon: DockerDaemon) -> Iterator[Scene]:
    if reason := cannot_simulate():
        pytest.skip(reason)
    server = MotoServer()
    server.reset()
    server.set_up_region(REGION)
    # On the daemon's file system: its socket is linked into the instance.
    folder = daemon.folder / "instances"
    folder.mkdir()
    scene = Scene(moto=server, folder=folder)
    yield scene
    scene.close()
    server.close()


def wait_for_records(scene: Scene, program: NodeProgram) -> None:
    """Until training has done something that was uploaded; AssertionError if it ends before."""
    for _ in range(150):
        names = scene.keys(program.output)
        assert "node-0/status.json" not in names, scene.joined(program)
        if any("/rank-00001-" in name for name in names):
            return
        time.sleep(1)
    raise TimeoutError(scene.joined(program))


def test_a_simulated_spot_instance_pulls_it_and_brings_a_checkpoint_of_45_s_home(
    daemon: DockerDaemon, image: str, scene: Scene, tmp_path: Path
) -> None:
    daemon.remove_containers()
    daemon.docker("rmi", image)
    training = (*TRAINING[:4], "--workload", f"{WORKLOADS}/tiny.py:slow_checkpoint", "--steps", "100000")
    run = NodeRun(
        run_id=FIRST,
        arguments=(*training, "--checkpoint-every", "100000"),
        environment={"CHECKPOINT_S": "45", "FASTLAUNCH_NPROC": "2"},
    )
    make_wheel(tmp_path / "wheels", "needed")
    wheels = sorted((tmp_path / "wheels").iterdir())
    required = pack({"requirements.txt": b"needed\n"}, folder="wheels", wheels=wheels)
    uri = f"s3://{BUCKET}/fastlaunch/code/needed.tar.gz"
    scene.put(uri, required)
    program = node_program(
        run,
        **{"image": image, "code_uri": None, "code_sha256": None, "num_gpus": 0, "is_spot": True},
        requirements_uri=uri,
        requirements_sha256=hashlib.sha256(required).hexdigest(),
    )
    options = ("--network", "none", "-v", f"{packages()}:{PACKAGES}:ro")
    docker = RealDocker(socket=daemon.socket, client=client(), options=options)
    # A fast clock would give up on what it sends in the last seconds.
    instance = scene.launch(program, docker=docker, scale=2.0)
    wait_for_records(scene, program)
    # Into an image that its containers are made of.
    prepared = ("--rm", "--entrypoint", "/usr/local/bin/python", "fastlaunch-prepared")
    assert daemon.docker("run", *prepared, "-c", "import needed; print(needed.__version__)") == "1.2"
    instance.spot_notice()
    scene.wait_for(f"{program.output}/node-0/status.json", 200)
    status = scene.status(program)
    assert outcome(status) == ("interrupted", "spot"), scene.joined(program)
    assert states(status) == ["interrupted"]
    names = ("rank-00000-attempt-1.jsonl", "rank-00001-attempt-1.jsonl")
    files = scene.joined(program)
    for name in names:
        (tmp_path / name).write_bytes(files[f"node-0/{FIRST}/{name}"])
    records = [read_record(tmp_path / name) for name in names]
    ends = [record.end for record in records]
    assert [end.status for end in ends if end] == ["interrupted", "interrupted"]
    (num_steps,) = {end.num_steps for end in ends if end}
    assert scene.keys(f"{RUNS}/{FIRST}/checkpoints") == [f"step-{num_steps:08d}.pt"]
    assert records[0].header["image_digest"] == program.environment["FASTLAUNCH_IMAGE_DIGEST"]
    instance.take()
    assert scene.moto.instance(instance.instance_id).state == "terminated"


def test_site_and_train_are_importable_and_the_base_is_not_shadowed(daemon: DockerDaemon, image: str) -> None:
    program = "import a_wheel, fastlaunch_train; print(a_wheel.ANSWER, fastlaunch_train.__file__)"
    told = daemon.docker(
        *("run", "--rm", "--network", "none", "--entrypoint", "/usr/local/bin/python"),
        *("-e", "PYTHONPATH=/fastlaunch/train:/fastlaunch/site", image, "-c", program),
    )
    assert told == "42 /fastlaunch/train/fastlaunch_train/__init__.py"
