"""`fastlaunch build` with a docker that builds nothing and an AWS on loopback."""

import re
from collections.abc import Sequence
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
from fastlaunch.images.build import context_without_wheels, ort_context
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


def build(
    *argv: str, aws: Aws | None = None, today: str = "2026-11-21", commit: str | None = "c0ffee"
) -> int:
    """Exit code of `fastlaunch build ARGV`."""
    now = datetime.fromisoformat(today).replace(tzinfo=UTC)
    context = replace(
        app_context("build", *argv), connect=lambda: aws or Aws(), now=lambda: now, find_commit=lambda: commit
    )
    return run(["build", *argv], context)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of one tiny wheel, which was fetched before."""
    folder = load_settings().home / "wheels"
    pin = make_wheel(folder)
    listed = tmp_path / "wheels.txt"
    listed.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(listed))
    return folder


def asked(fake: FakeBuilder) -> list[Sequence[str]]:
    return [call["argv"][:3] if call["argv"][1] == "buildx" else call["argv"][:2] for call in fake.calls]


# --dry-run


def test_a_dry_run_needs_nothing_and_says_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert build("--push", "--dry-run") == 0
    told = capsys.readouterr()
    out = told.out.splitlines()
    context = ["Dockerfile", "run_sagemaker.sh", "run_train.sh", "train/", "site/"]
    assert [line.split()[0] for line in out[1:6]] == context
    assert out[5].endswith("timm 1.0.31, not fetched yet")
    commands = [line.strip() for line in out[out.index("commands:") + 1 :]]
    name = f"{OWN.replace('123456789012', '<account>')}/fastlaunch:2.13.0-ec2-<content>"
    assert commands == [
        f"docker login --username AWS --password-stdin {DLC}",
        f"docker login --username AWS --password-stdin '{name.partition('/')[0]}'",
        "docker buildx build --platform linux/amd64 --provenance=false --sbom=false"
        " --output type=docker,oci-mediatypes=false --progress plain"
        f" --build-arg 'BASE_IMAGE={DLC}/pytorch@<base-digest>' --build-arg 'BASE_DIGEST=<base-digest>'"
        f" --build-arg COMMIT=c0ffee --build-arg RECIPE_SCHEMA={RECIPE_SCHEMA} --tag '{name}'"
        " --file '<context>/Dockerfile' '<context>'",
        f"docker push '{name}'",
    ]
    assert "neither docker nor podman" in told.err
    assert not load_settings().home.exists()
    assert build("--push", "--dry-run") == 0
    assert capsys.readouterr().out == told.out


def test_a_dry_run_says_what_pip_would_install(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, "docker")
    assert build("--dry-run", "--with", "transformers,lightning", "--with", "torchao") == 0
    told = capsys.readouterr()
    assert told.err.startswith("pip installs in the image, from the network: transformers==")
    assert ", lightning==" in told.err and ", torchao==" in told.err
    assert build("--dry-run", "--with", "torch") == 2
    assert "known: lightning, torchao, transformers" in capsys.readouterr().err


# Building


def test_an_image_is_built_from_the_base_by_digest(
    aws_server: "MotoServer",
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws_server.images["us-east-1", "763104351884", "pytorch", TAG] = BASE_DIGEST
    fake = install(tmp_path, monkeypatch, "docker")
    assert build() == 0
    told = capsys.readouterr()
    assert asked(fake) == [["docker", "login"], ["docker", "buildx", "build"]]
    login, building = fake.calls
    assert login["argv"][-1] == DLC
    assert login["stdin"] and login["stdin"] not in told.out + told.err
    assert f"BASE_IMAGE={DLC}/pytorch@{BASE_DIGEST}" in building["argv"]
    assert f"BASE_DIGEST={BASE_DIGEST}" in building["argv"]
    name = told.out.strip()
    assert name.startswith("fastlaunch:2.13.0-ec2-") and name in building["argv"]
    context = building["context"]
    assert {"Dockerfile", "run_train.sh", "site/tiny/__init__.py"} <= set(context)
    assert "train/fastlaunch_train/__main__.py" in context
    assert not Path(building["argv"][-1]).exists()
    assert "did buildx" in told.err

    assert build() == 0
    assert capsys.readouterr().out.strip() == name


def test_without_credentials_the_base_comes_by_tag_and_that_is_said(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install(tmp_path, monkeypatch, "docker")
    assert build() == 0
    (building,) = fake.calls
    assert f"BASE_IMAGE=public.ecr.aws/deep-learning-containers/pytorch:{TAG}" in building["argv"]
    assert "BASE_DIGEST=unknown" in building["argv"]
    assert f"pytorch:{TAG} is taken by its tag, which may move" in capsys.readouterr().err


# Pushing


def test_an_image_is_pushed_once_and_named_by_its_digest(
    aws_server: "MotoServer",
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws_server.images["us-east-1", "763104351884", "pytorch", TAG] = BASE_DIGEST
    fake = install(tmp_path, monkeypatch, "docker")
    aws = AwsWithPushes(fake)
    assert build("--push", "--yes", "--repository", "team/vit", aws=aws) == 0
    told = capsys.readouterr()
    assert asked(fake) == [
        *(["docker", "login"], ["docker", "login"]),
        *(["docker", "buildx", "build"], ["docker", "push"]),
    ]
    assert [call["argv"][-1] for call in fake.calls[:2]] == [DLC, OWN]
    assert fake.calls[-1]["argv"][-1].startswith(f"{OWN}/team/vit:2.13.0-ec2-")
    assert told.out == f"{OWN}/team/vit@{PUSHED_DIGEST}\n"
    assert "to upload: about " in told.err and "10 GB or more" in told.err
    assert told.err.endswith(
        f"next: fastlaunch submit --image {OWN}/team/vit@{PUSHED_DIGEST} --instance p5.48xlarge"
        " --recipe te-fp8\n"
    )
    (made,) = aws_server.sent("CreateRepository")
    assert made.parameters["imageTagMutability"] == "IMMUTABLE"

    assert build("--push", "--yes", "--repository", "team/vit", aws=aws) == 0
    again = capsys.readouterr()
    assert again.out == told.out and "exists already" in again.err
    assert len(fake.calls) == 4
    assert build("--push", "--yes", "--repository", "team/vit", aws=aws, commit="beef") == 0
    assert len(fake.calls) == 8


def test_nothing_is_built_or_made_before_the_user_agrees(
    aws_server: "MotoServer",
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws_server.images["us-east-1", "763104351884", "pytorch", TAG] = BASE_DIGEST
    fake = install(tmp_path, monkeypatch, "docker")
    assert build("--push") == 2
    assert "add --yes" in capsys.readouterr().err
    assert fake.calls == [] and aws_server.sent("CreateRepository") == []


def test_a_failed_build_pushes_nothing_and_leaves_no_repository(
    aws_server: "MotoServer",
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws_server.images["us-east-1", "763104351884", "pytorch", TAG] = BASE_DIGEST
    fake = install(
        tmp_path, monkeypatch, "docker", failing=["buildx"], says="write /x: no space left on device"
    )
    assert build("--push", "--yes") == 2
    told = capsys.readouterr()
    assert "error: the disk of docker is full" in told.err and told.out == ""
    assert asked(fake)[-1] == ["docker", "buildx", "build"]
    assert aws_server.sent("CreateRepository") == []


# Refusals


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--base", "2.13-cu132-amzn2023"], "did you mean 2.13-cu133-amzn2023"),
        (["--base", "2.9-gpu-py312-ec2", "--flavour", "sagemaker"], "is the ec2 flavour"),
        (["--region", "us-east-3"], "did you mean"),
        (["--repository", "Team/Vit"], "'Team/Vit' is not the name of a repository"),
        (["--repository", "team/"], "is not the name of a repository"),
        (["--repository", "x"], "is not the name of a repository"),
        ([], "neither docker nor podman"),
    ],
)
def test_what_cannot_be_built_is_refused(
    argv: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(tmp_path, monkeypatch)
    assert build(*argv) == 2
    assert problem in capsys.readouterr().err


def test_a_base_that_the_registry_lacks_is_refused(
    aws_server: "MotoServer",
    wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = install(tmp_path, monkeypatch, "docker")
    assert build("--base", "2.14") == 2
    told = capsys.readouterr().err
    assert "warning: pytorch:2.14-cu133-amzn2023: only its SageMaker tag was seen" in told
    assert "us-east-1 has no base image pytorch:2.14-cu133-amzn2023" in told
    assert fake.calls == []


def test_an_image_past_its_end_is_used_by_name_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, "docker")
    assert build("--base", "2.6.0", "--dry-run") == 0
    tag = "pytorch-training:2.6.0-gpu-py312-cu126-ubuntu22.04-ec2"
    assert f"warning: {tag}: AWS has not patched it since 2026-01-29\n" in capsys.readouterr().err
    assert build("--dry-run", today="2028-01-01") == 2
    assert "AWS patches none of the base images" in capsys.readouterr().err


# ORTModule


def test_the_image_with_ortmodule_has_a_base_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install(tmp_path, monkeypatch, "docker")
    assert build("--ort") == 0
    (building,) = fake.calls
    told = capsys.readouterr()
    assert told.out.startswith("fastlaunch:ort-")
    assert [word for word in building["argv"] if word.startswith("BASE_")] == [
        "BASE_IMAGE=pytorch/pytorch:2.3.1-cuda11.8-cudnn8-devel"
    ]
    assert {
        *("Dockerfile", "containers/ort-requirements.txt", "containers/run_train.sh"),
        *("containers/run_sagemaker.sh", "train/fastlaunch_train/__main__.py"),
    } <= set(building["context"])
    assert build("--ort", "--dry-run", "--push") == 0
    told = capsys.readouterr()
    assert "/fastlaunch:ort-<content>" in told.out and "site/" not in told.out


def test_the_context_holds_all_that_its_dockerfile_copies() -> None:
    for files in (ort_context(), context_without_wheels() | {"site/x": b""}):
        copied = re.findall(r"^COPY (.*) /fastlaunch/\S*$", files["Dockerfile"].decode(), re.MULTILINE)
        assert copied
        for source in " ".join(copied).split():
            assert any(name == source or name.startswith(source.rstrip("/") + "/") for name in files), source
