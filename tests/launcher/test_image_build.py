"""An image's context and its tag; and a real image, built by the real Dockerfile where docker can run."""

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
from wheel_builder import make_wheel

from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.jobs.code_bundle import pack
from fastlaunch.jobs.container_builder import build_command, find_builder, push_command, run_command
from fastlaunch.jobs.image_build import (
    BaseReference,
    ImageBuild,
    context_files,
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


def test_the_dockerfile_is_told_what_becomes_labels() -> None:
    assert BUILD.build_args == {
        "BASE_IMAGE": f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}",
        "BASE_DIGEST": DIGEST,
        "COMMIT": "c0ffee",
        "RECIPE_SCHEMA": str(RECIPE_SCHEMA),
    }
    unknown = replace(BUILD, commit=None, reference=BaseReference(uri="public/pytorch:tag", digest=None))
    assert (unknown.build_args["COMMIT"], unknown.build_args["BASE_DIGEST"]) == ("unknown", "unknown")


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
    builder = find_builder()
    assert files is not None and builder is not None
    base = f"{daemon.registry}/pytorch:tiny"
    daemon.docker("import", "--platform", "linux/amd64", "-", base, stdin=pack({}))
    build = replace(BUILD, files=files, reference=BaseReference(uri=base, digest=DIGEST))
    tag = f"{daemon.registry}/own:{build.tag}"
    context = tmp_path / "context"
    context.mkdir()
    write_context(build.files, context)
    run_command(build_command(builder, context, tag=tag, build_args=build.build_args), print)
    run_command(push_command(builder, tag), print)

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
