"""An image's context, its tag and docker's commands; and a real image where docker can run."""

import json
import os
import tarfile
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docker_daemon import CannotStart, DockerDaemon
from fake_builder import install
from wheel_builder import make_wheel

from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.code_bundle import pack
from fastlaunch.jobs.image_build import (
    BaseReference,
    Command,
    ImageBuild,
    build_command,
    context_files,
    has_buildx,
    login_command,
    run_command,
    write_context,
)
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA

BASE = next(image for image in shipped_base_images().images if image.torch == "2.13.0")
SCHEMA_2 = "application/vnd.docker.distribution.manifest.v2+json"
DIGEST = "sha256:" + "ab" * 32
BUILD = ImageBuild(
    base=BASE,
    reference=BaseReference(
        uri=f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}", digest=DIGEST
    ),
    files={"Dockerfile": b"FROM scratch\n", "run_train.sh": b"exec\n", "site/timm/__init__.py": b""},
    commit="c0ffee",
)


def test_a_tag_follows_from_contents_and_labels() -> None:
    assert BUILD.tag.startswith("2.13.0-ec2-")
    elsewhere = BaseReference(
        uri=BUILD.reference.uri.replace("us-east-1", "eu-central-1"), digest=BUILD.reference.digest
    )
    assert replace(BUILD, reference=elsewhere).tag == BUILD.tag
    assert replace(BUILD, files=dict(reversed(BUILD.files.items()))).tag == BUILD.tag
    others = (
        replace(BUILD, commit="c0ffee-dirty"),
        replace(BUILD, files={**BUILD.files, "run_train.sh": b"exec 2\n"}),
        replace(BUILD, files={**BUILD.files, "Dockerfile": b"FROM x\n"}),
        replace(BUILD, files={**BUILD.files, "more": b""}),
        replace(BUILD, reference=BaseReference(uri=BUILD.reference.uri, digest="sha256:" + "cd" * 32)),
        replace(BUILD, reference=BaseReference(uri=BUILD.reference.uri, digest=None)),
        replace(BUILD, reference=BaseReference(uri="public/pytorch:tag", digest=None)),
    )
    assert len({BUILD.tag, *(other.tag for other in others)}) == 1 + len(others)


def test_a_context_is_written_the_same_by_everybody(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        write_context(BUILD.files, tmp_path)
    finally:
        os.umask(umask)
    found = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*")}
    assert {name: oct(path.stat().st_mode & 0o777) for name, path in found.items()} == {
        "Dockerfile": "0o644",
        "run_train.sh": "0o755",
        "site": "0o755",
        "site/timm": "0o755",
        "site/timm/__init__.py": "0o644",
    }


@pytest.mark.parametrize("by_buildx", [True, False])
def test_both_builders_of_docker_make_schema_2(by_buildx: bool) -> None:
    command = build_command("/c", tag="r:t", build_args={"COMMIT": "c0ffee"}, by_buildx=by_buildx)
    program = ("docker", "buildx", "build") if by_buildx else ("docker", "build")
    assert command.argv[: len(program) + 2] == (*program, "--platform", "linux/amd64")
    options = {"--provenance=false", "--sbom=false", "--output", "type=docker,oci-mediatypes=false"}
    assert options & set(command.argv) == (options if by_buildx else set())
    arguments = ("--build-arg", "COMMIT=c0ffee", "--tag", "r:t", "--file", "/c/Dockerfile", "/c")
    assert command.argv[-7:] == arguments
    # The classic builder is requested by name.
    assert command.env == ({} if by_buildx else {"DOCKER_BUILDKIT": "0"})
    assert str(command).startswith("docker buildx build " if by_buildx else "DOCKER_BUILDKIT=0 docker build ")


def test_a_password_is_read_and_never_shown() -> None:
    command = login_command("host", user="AWS", password="hunter2")
    assert command.argv == ("docker", "login", "--username", "AWS", "--password-stdin", "host")
    assert command.stdin == "hunter2"
    assert "hunter2" not in f"{command} {command!r}"


def test_docker_says_whether_it_has_buildx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, buildx in enumerate((True, False)):
        fake = install(tmp_path / str(number), monkeypatch, "docker", buildx=buildx)
        assert has_buildx() == buildx
        assert fake.calls == []
    install(tmp_path / "none", monkeypatch)
    with pytest.raises(UserError, match="no docker"):
        has_buildx()


def test_a_command_gets_its_input_and_tells_its_output() -> None:
    told: list[str] = []
    script = 'read -r word; echo "$word $ADDED"; echo second >&2'
    run_command(Command(argv=("sh", "-c", script), env={"ADDED": "1"}, stdin="first\n"), told.append)
    assert told == ["first 1", "second"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("ERROR: write /var/lib/docker/tmp/x: no space left on device", "docker's disk is full"),
        ("Cannot connect to the Docker daemon at unix:///run/docker.sock.", "its daemon is not running"),
        ("permission denied while trying to connect to the Docker daemon socket at x", "may not talk"),
        ("denied: User: u is not authorized to perform: ecr:PutImage", "the registry refused"),
        ("tag invalid: The image tag 't' already exists, the repository is immutable.", "under this tag"),
        ("first\nERROR: something else\n", "`sh -c` ended with exit code 3: ERROR: something else"),
    ],
)
def test_a_failure_is_told_with_what_to_do(printed: str, message: str) -> None:
    script = 'printf "%s" "$1" >&2; exit 3'
    with pytest.raises(UserError) as caught:
        run_command(Command(argv=("sh", "-c", script, "sh", printed)), lambda line: None)
    assert message in caught.value.message and caught.value.hint


def test_a_builder_that_was_killed_is_named() -> None:
    for end in ("kill -KILL $$", "exit 137"):
        with pytest.raises(UserError, match="`sh -c` was killed"):
            run_command(Command(argv=("sh", "-c", end)), lambda line: None)


@pytest.fixture
def daemon() -> Iterator[DockerDaemon]:
    try:
        started = DockerDaemon()
    except CannotStart as why:
        pytest.skip(str(why))
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_image_is_schema_2_with_its_labels(
    daemon: DockerDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real Dockerfile with whatever builder there is, over a base in which nothing can run."""
    wheels = tmp_path / "wheels"
    pin = make_wheel(wheels)
    listed = tmp_path / "wheels.txt"
    listed.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(listed))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{daemon.socket}")
    files = context_files(wheels)
    assert files is not None
    base = f"{daemon.registry}/pytorch:tiny"
    daemon.docker("import", "--platform", "linux/amd64", "-", base, stdin=pack({}))
    build = replace(BUILD, files=files, reference=BaseReference(uri=base, digest=DIGEST))
    tag = f"{daemon.registry}/own:{build.tag}"
    context = tmp_path / "context"
    context.mkdir()
    write_context(build.files, context)
    building = build_command(context, tag=tag, build_args=build.build_args, by_buildx=has_buildx())
    run_command(building, print)
    run_command(Command(argv=("docker", "push", tag)), print)

    media_type, manifest = manifest_of(daemon, "own", build.tag)
    assert media_type == SCHEMA_2
    assert manifest["config"]["mediaType"] == "application/vnd.docker.container.image.v1+json"
    (told,) = json.loads(daemon.docker("image", "inspect", tag))
    assert (told["Os"], told["Architecture"]) == ("linux", "amd64")
    labels = told["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == "c0ffee"
    assert labels["org.opencontainers.image.base.digest"] == DIGEST
    assert labels["fastlaunch.recipe-schema"] == str(RECIPE_SCHEMA)
    daemon.docker("create", "--name", "one", tag)
    daemon.docker("export", "--output", str(tmp_path / "image.tar"), "one")
    with tarfile.open(tmp_path / "image.tar") as archive:
        found = {member.name: member for member in archive}
    assert {name for name in build.layers if f"fastlaunch/{name}" not in found} == set()
    assert found["fastlaunch/run_train.sh"].mode & 0o111
    assert found["fastlaunch/run_sagemaker.sh"].mode & 0o111


def manifest_of(daemon: DockerDaemon, repository: str, tag: str) -> tuple[str, dict[str, Any]]:
    """Media type and content of what the registry has, of whatever type that is."""
    others = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
    request = urllib.request.Request(
        f"http://{daemon.registry}/v2/{repository}/manifests/{tag}",
        headers={"Accept": f"{SCHEMA_2}, {others}"},
    )
    with urllib.request.urlopen(request) as answer:
        return answer.headers["Content-Type"], json.load(answer)
