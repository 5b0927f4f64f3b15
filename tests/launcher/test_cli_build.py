"""`fastlaunch build` with a docker that builds nothing and an AWS on loopback."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_builder import FakeBuilder, install
from fake_train.launcher import app_context
from moto_cloud import _connect
from wheel_builder import make_wheel

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.image_build import context_without_wheels, ort_context
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA

if TYPE_CHECKING:
    from moto_server import MotoServer

BASE_DIGEST = "sha256:" + "ba" * 32
PUSHED_DIGEST = "sha256:" + "cd" * 32
DLC = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
TAG = "2.13-cu133-amzn2023"


class AwsWithPushes(Aws):
    """AWS on loopback, where an image is there once the fake docker was asked to push it."""

    def __init__(self, fake: FakeBuilder) -> None:
        super().__init__(connect=_connect)
        self._fake = fake

    def image_digest(self, region: str, account: str, repository: str, tag: str) -> str | None:
        pushed = [call["argv"][-1] for call in self._fake.calls if call["argv"][1] == "push"]
        if f"{account}.dkr.ecr.{region}.amazonaws.com/{repository}:{tag}" in pushed:
            return PUSHED_DIGEST
        return super().image_digest(region, account, repository, tag)


def build(*argv: str, aws: Aws | None = None, today: str = "2026-11-21", commit: str = "c0ffee") -> int:
    """Exit code of `fastlaunch build ARGV`."""
    now = datetime.fromisoformat(today).replace(tzinfo=UTC)
    context = replace(
        app_context("build", *argv), connect=lambda: aws or Aws(), now=lambda: now, find_commit=lambda: commit
    )
    return run(["build", *argv], context)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    """A docker, and a list of one tiny wheel, which was fetched before."""
    pin = make_wheel(load_settings().home / "wheels")
    listed = tmp_path / "wheels.txt"
    listed.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(listed))
    return install(tmp_path, monkeypatch, "docker")


@pytest.fixture
def server(aws_server: "MotoServer") -> "MotoServer":
    """An AWS that has the base image."""
    aws_server.images["us-east-1", "763104351884", "pytorch", TAG] = BASE_DIGEST
    return aws_server


def commands(fake: FakeBuilder) -> list[str]:
    """What docker was called for, in order."""
    return [call["argv"][2 if call["argv"][1] == "buildx" else 1] for call in fake.calls]


def test_a_dry_run_needs_nothing_and_shows_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert build("--push", "--dry-run") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    context = ["Dockerfile", "run_sagemaker.sh", "run_train.sh", "train/", "site/"]
    assert [line.split()[0] for line in lines[1:6]] == context
    name = f"{OWN.replace('123456789012', '<account>')}/fastlaunch:2.13.0-ec2-<content>"
    assert [line.strip() for line in lines[lines.index("commands:") + 1 :]] == [
        f"docker login --username AWS --password-stdin {DLC}",
        f"docker login --username AWS --password-stdin '{name.partition('/')[0]}'",
        "docker buildx build --platform linux/amd64 --provenance=false --sbom=false"
        " --output type=docker,oci-mediatypes=false --progress plain"
        f" --build-arg 'BASE_IMAGE={DLC}/pytorch@<base-digest>' --build-arg 'BASE_DIGEST=<base-digest>'"
        f" --build-arg COMMIT=c0ffee --build-arg RECIPE_SCHEMA={RECIPE_SCHEMA} --tag '{name}'"
        " --file '<context>/Dockerfile' '<context>'",
        f"docker push '{name}'",
    ]
    assert "there is no docker" in err
    assert not load_settings().home.exists()
    assert build("--push", "--dry-run") == 0
    assert capsys.readouterr().out == out


def test_an_image_is_built_from_the_base_by_digest(
    server: "MotoServer", docker: FakeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build() == 0
    out, err = capsys.readouterr()
    assert commands(docker) == ["login", "build"]
    login, building = docker.calls
    assert login["argv"][-1] == DLC
    assert login["stdin"] and login["stdin"] not in out + err
    assert {f"BASE_IMAGE={DLC}/pytorch@{BASE_DIGEST}", f"BASE_DIGEST={BASE_DIGEST}"} <= set(building["argv"])
    name = out.strip()
    assert name.startswith("fastlaunch:2.13.0-ec2-") and name in building["argv"]
    context = {"Dockerfile", "run_train.sh", "site/tiny/__init__.py", "train/fastlaunch_train/__main__.py"}
    assert context <= set(building["context"])
    assert not Path(building["argv"][-1]).exists()
    assert build() == 0
    assert capsys.readouterr().out.strip() == name


def test_an_image_is_pushed_once_and_named_by_its_digest(
    server: "MotoServer", docker: FakeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    aws = AwsWithPushes(docker)
    argv = ("--push", "--yes", "--repository", "team/vit")
    assert build(*argv, aws=aws) == 0
    out, err = capsys.readouterr()
    assert commands(docker) == ["login", "login", "build", "push"]
    assert [call["argv"][-1] for call in docker.calls[:2]] == [DLC, OWN]
    assert docker.calls[-1]["argv"][-1].startswith(f"{OWN}/team/vit:2.13.0-ec2-")
    assert out == f"{OWN}/team/vit@{PUSHED_DIGEST}\n"
    assert f"next: fastlaunch submit --image {out.strip()}" in err
    (made,) = server.sent("CreateRepository")
    assert made.parameters["imageTagMutability"] == "IMMUTABLE"

    assert build(*argv, aws=aws) == 0
    assert capsys.readouterr().out == out and len(docker.calls) == 4
    assert build(*argv, aws=aws, commit="beef") == 0
    assert len(docker.calls) == 8


def test_nothing_is_built_or_made_before_the_user_agrees(
    server: "MotoServer", docker: FakeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build("--push") == 2
    assert "--yes" in capsys.readouterr().err
    assert docker.calls == [] and server.sent("CreateRepository") == []


def test_a_failed_build_pushes_nothing_and_leaves_no_repository(
    server: "MotoServer",
    docker: FakeBuilder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = install(
        tmp_path / "full", monkeypatch, "docker", failing=["buildx"], says="no space left on device"
    )
    assert build("--push", "--yes") == 2
    out, err = capsys.readouterr()
    assert out == "" and "disk" in err
    assert commands(fake)[-1] == "build"
    assert server.sent("CreateRepository") == []


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--base", "2.13-cu132-amzn2023"], "did you mean 2.13-cu133-amzn2023"),
        (["--base", "2.9-gpu-py312-ec2", "--flavour", "sagemaker"], "flavour"),
        (["--region", "us-east-3"], "did you mean"),
        (["--repository", "Team/Vit"], "'Team/Vit'"),
        (["--ort", "--with", "torchao"], "--ort"),
        (["--with", "torch"], "lightning, peft, torchao, transformers"),
        ([], "there is no docker"),
    ],
)
def test_what_cannot_be_built_is_refused(
    argv: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, monkeypatch)
    assert build(*argv) == 2
    assert part in capsys.readouterr().err


def test_the_image_with_ortmodule_has_a_base_of_its_own(
    docker: FakeBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build("--ort") == 0
    (building,) = docker.calls
    assert capsys.readouterr().out.startswith("fastlaunch:ort-")
    assert "BASE_IMAGE=pytorch/pytorch:2.3.1-cuda11.8-cudnn8-devel" in building["argv"]
    context = {"Dockerfile", "containers/ort-requirements.txt", "containers/run_train.sh"}
    assert {*context, "train/fastlaunch_train/__main__.py"} <= set(building["context"])


def test_the_context_holds_all_that_its_dockerfile_copies() -> None:
    for files in (ort_context(), context_without_wheels() | {"site/x": b""}):
        copied = re.findall(r"^COPY (.*) /fastlaunch/\S*$", files["Dockerfile"].decode(), re.MULTILINE)
        assert copied
        for source in " ".join(copied).split():
            assert any(name == source or name.startswith(source.rstrip("/") + "/") for name in files), source
