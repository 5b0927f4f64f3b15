"""docker, buildx and podman: which is taken, what they are asked, and what their failures mean."""

from pathlib import Path

import pytest
from fake_builder import install

from fastlaunch.core.errors import UserError
from fastlaunch.jobs.container_builder import (
    KINDS,
    Command,
    build_command,
    find_builder,
    login_command,
    push_command,
    run_command,
)

ARGS = {"BASE_IMAGE": "host/base@sha256:0", "COMMIT": "c0ffee"}
BUILD_ARGS = ("--build-arg", "BASE_IMAGE=host/base@sha256:0", "--build-arg", "COMMIT=c0ffee")
REST = ("--tag", "r:t", "--file", "/c/Dockerfile", "/c")


@pytest.mark.parametrize(
    ("builder", "program", "options"),
    [
        # Schema 2 without attestations.
        (
            "buildx",
            ("docker", "buildx", "build"),
            *[("--provenance=false", "--sbom=false", "--output", "type=docker,oci-mediatypes=false")],
        ),
        ("docker", ("docker", "build"), ()),
        ("podman", ("podman", "build"), ("--format", "docker")),
    ],
)
def test_every_builder_makes_dockers_format(
    builder: str, program: tuple[str, ...], options: tuple[str, ...]
) -> None:
    command = build_command(builder, "/c", tag="r:t", build_args=ARGS)
    assert command.argv[: len(program) + 2] == (*program, "--platform", "linux/amd64")
    assert set(options) <= set(command.argv)
    assert command.argv[-9:] == (*BUILD_ARGS, *REST)
    # The classic builder is asked for by name.
    assert command.env == ({"DOCKER_BUILDKIT": "0"} if builder == "docker" else {})
    assert str(command).startswith("DOCKER_BUILDKIT=0 docker build " if builder == "docker" else program[0])
    push = ("podman", "push", "--format", "v2s2") if builder == "podman" else ("docker", "push")
    assert push_command(builder, "r:t").argv == (*push, "r:t")


@pytest.mark.parametrize("builder", KINDS)
def test_a_password_is_read_and_never_shown(builder: str) -> None:
    command = login_command(builder, "host", user="AWS", password="hunter2")
    assert command.argv[1:] == ("login", "--username", "AWS", "--password-stdin", "host")
    assert command.stdin == "hunter2"
    assert "hunter2" not in f"{command} {command!r}"


def test_what_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (names, buildx, found) in enumerate(
        (
            (("docker", "podman"), True, "buildx"),
            (("docker", "podman"), False, "docker"),
            (("podman",), True, "podman"),
            ((), True, None),
        )
    ):
        fake = install(tmp_path / str(number), monkeypatch, *names, buildx=buildx)
        assert find_builder() == found
        assert fake.calls == []


def test_a_command_gets_its_input_and_tells_its_output() -> None:
    told: list[str] = []
    script = 'read -r word; echo "$word $ADDED"; echo second >&2'
    run_command(Command(argv=("sh", "-c", script), env={"ADDED": "1"}, stdin="first\n"), told.append)
    assert told == ["first 1", "second"]


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("ERROR: write /var/lib/docker/tmp/x: no space left on device", "the disk of sh is full"),
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


def test_a_builder_that_was_killed_or_has_gone_is_named() -> None:
    for end in ("kill -KILL $$", "exit 137"):
        with pytest.raises(UserError, match="`sh -c` was killed"):
            run_command(Command(argv=("sh", "-c", end)), lambda line: None)
    with pytest.raises(UserError, match="neither docker nor podman"):
        run_command(Command(argv=("no-such-builder", "build")), lambda line: None)
