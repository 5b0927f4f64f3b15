"""docker (with or without buildx) and podman: their command lines, and what their failures mean.

Images are linux/amd64 in Docker's schema 2 without attestations: SageMaker has refused OCI manifests, and an
index with an attestation in it is not the image whose digest a job names.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.core.errors import UserError

PLATFORM = "linux/amd64"
KINDS = ("buildx", "docker", "podman")
_PROBE_LIMIT_S = 20


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line."""

    argv: tuple[str, ...]
    # Added to the environment.
    env: Mapping[str, str] = field(default_factory=dict)
    # What it reads; never shown.
    stdin: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        added = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*added, shlex.join(self.argv)])


def find_builder() -> str | None:
    """Return what builds images here: buildx, docker (its classic builder), podman, or None."""
    if not shutil.which("docker"):
        return "podman" if shutil.which("podman") else None
    with suppress(OSError, subprocess.TimeoutExpired):
        argv = ("docker", "buildx", "version")
        probe = subprocess.run(
            argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PROBE_LIMIT_S, check=False
        )
        return "buildx" if probe.returncode == 0 else "docker"
    return "docker"


def build_command(builder: str, context: Path | str, *, tag: str, build_args: Mapping[str, str]) -> Command:
    """Return what builds the context's Dockerfile into an image under `tag`, on this machine."""
    options = [*("--platform", PLATFORM), *_FORMAT[builder]]
    for name, value in build_args.items():
        options += ["--build-arg", f"{name}={value}"]
    options += ["--tag", tag, "--file", f"{context}/Dockerfile", str(context)]
    env = {"DOCKER_BUILDKIT": "0"} if builder == "docker" else {}
    return Command(argv=(*_BUILD[builder], *options), env=env)


def login_command(builder: str, host: str, *, user: str, password: str | None = None) -> Command:
    """Return what logs in to a registry, with the password on stdin; without one, only to be shown."""
    argv = (_program(builder), "login", "--username", user, "--password-stdin", host)
    return Command(argv=argv, stdin=password)


def push_command(builder: str, tag: str) -> Command:
    """Return what uploads the image `tag` to the registry that the tag names."""
    options = ("--format", "v2s2") if builder == "podman" else ()
    return Command(argv=(_program(builder), "push", *options, tag))


def run_command(command: Command, report: Callable[[str], None]) -> None:
    """Run it, and report every line that it prints as it comes. Raises UserError if it fails."""
    last: deque[str] = deque(maxlen=40)
    try:
        with subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdin=subprocess.PIPE if command.stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            if process.stdin is not None:
                # One short line, which fits the pipe: neither side waits for the other.
                process.stdin.write(command.stdin or "")
                process.stdin.close()
            for line in process.stdout:
                last.append(line.rstrip())
                report(line.rstrip())
    except FileNotFoundError:
        raise no_builder() from None
    except BrokenPipeError:
        pass
    if process.returncode != 0:
        raise _failure(command, process.returncode, "\n".join(last))


def no_builder() -> UserError:
    """Return the error that nothing here can build an image."""
    return UserError(
        "there is neither docker nor podman here, and building an image needs one",
        "install Docker (docs.docker.com/engine/install) or podman; or submit without an image of your own",
    )


#: (a pattern in the output, what happened, what to do); the first match counts.
_FAILURES = (
    (
        r"no space left on device",
        "the disk of {program} is full",
        "free some: {program} system prune removes what no container uses; a base image takes some 30 GB",
    ),
    (
        r"permission denied.*(docker|podman).*sock|dial unix \S*: connect: permission denied",
        "this user may not talk to the docker daemon",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    (
        r"cannot connect to the docker daemon|is the docker daemon running|unable to connect to podman"
        r"|failed to connect to the docker api|cannot connect to podman",
        "{program} is installed, and its daemon is not running",
        "sudo systemctl start docker, or start Docker Desktop; with podman: podman machine start",
    ),
    (
        r"no basic auth credentials|authorization token has expired|pull access denied|unauthorized"
        r"|not authorized|authentication required|denied: user",
        "the registry refused: not logged in, or the login has expired",
        "try again; if that does not help, the credentials lack ecr:BatchGetImage or ecr:PutImage, or the"
        " repository belongs to somebody else",
    ),
    (
        r"tag invalid.*immutable|imagetagalreadyexists",
        "the repository has another image under this tag already, and its tags cannot be moved",
        "give another --repository",
    ),
    (
        r"unknown flag|unknown shorthand|unrecognized option",
        "this version of {program} is too old for the options that an image for AWS needs",
        "update it, or remove its buildx plugin so that the classic builder is used",
    ),
    (
        r"exec format error",
        "this machine cannot run linux/amd64 containers",
        "{program} run --privileged --rm tonistiigi/binfmt --install amd64",
    ),
    (
        r"no such host|i/o timeout|network is unreachable|connection refused|tls handshake timeout",
        "the registry cannot be reached",
        "check the network and try again: what was uploaded already is kept",
    ),
)


def _failure(command: Command, code: int, output: str) -> UserError:
    program = command.argv[0]
    for pattern, message, hint in _FAILURES:
        if re.search(pattern, output, re.IGNORECASE):
            return UserError(message.format(program=program), hint.format(program=program))
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    what = " ".join(command.argv[:2])
    # 137: how a shell, or docker itself, reports a process that was killed.
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return UserError(f"`{what}` was killed", "most often for lack of memory: see `dmesg`")
    return UserError(
        f"`{what}` ended with exit code {code}{f': {last.strip()}' if last else ''}",
        "what it printed above says more",
    )


def _program(builder: str) -> str:
    return "podman" if builder == "podman" else "docker"


_BUILD = {
    "buildx": ("docker", "buildx", "build"),
    "docker": ("docker", "build"),
    "podman": ("podman", "build"),
}
#: The classic builder knows schema 2 only.
_FORMAT = {
    "buildx": (
        *("--provenance=false", "--sbom=false"),
        *("--output", "type=docker,oci-mediatypes=false", "--progress", "plain"),
    ),
    "docker": (),
    "podman": ("--format", "docker"),
}
