"""Build an image with the training code: its context, the tag that follows from it, and docker's commands.

Images are linux/amd64 in Docker's schema 2 without attestations: SageMaker has refused OCI manifests, and an
index with an attestation in it is not the image whose digest a job names.
"""

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.paths import shipped
from fastlaunch.jobs.code_bundle import PROGRAMS, code_files, pack, site_files, wanted_pins
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA

DEFAULT_REPOSITORY = "fastlaunch"
#: Extras are installed before what changes with the training code, so that their layer is built once.
_BEFORE = b"COPY site/"
#: The Python that has torch, as run_train.sh finds it.
_PYTHONS = "python /opt/venv/bin/python /opt/conda/bin/python python3"
_HAS_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
#: repositoryName of ecr:CreateRepository, in botocore 1.44.5's model of it.
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(\/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


@dataclass(frozen=True, kw_only=True)
class BaseReference:
    """What the Dockerfile starts from."""

    #: In a registry.
    uri: str
    #: None if it could not be looked up.
    digest: str | None

    @property
    def host(self) -> str:
        """The registry's host."""
        return self.uri.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class ImageBuild:
    """One image to build."""

    #: AWS's image; None where the Dockerfile itself names its base, and takes no other argument.
    base: BaseImage | None
    reference: BaseReference
    #: The context's files, by path.
    files: Mapping[str, bytes]
    #: None if it is not known.
    commit: str | None

    @property
    def build_args(self) -> dict[str, str]:
        """Arguments of the Dockerfile; all but the first become labels."""
        if self.base is None:
            return {"BASE_IMAGE": self.reference.uri}
        return {
            "BASE_IMAGE": self.reference.uri,
            "BASE_DIGEST": self.reference.digest or "unknown",
            "COMMIT": self.commit or "unknown",
            "RECIPE_SCHEMA": str(RECIPE_SCHEMA),
        }

    @property
    def tag(self) -> str:
        """`2.13.0-ec2-0123456789ab`: equal for equal contents and labels, so that it never has to move."""
        digest = hashlib.sha256()
        labels = {name: value for name, value in self.build_args.items() if name != "BASE_IMAGE"}
        # By digest the base is the same in every registry.
        labels["BASE"] = self.reference.digest or self.reference.uri
        for name, value in sorted(labels.items()):
            digest.update(f"{name}={value}\n".encode())
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return f"{self.kind}-{digest.hexdigest()[:12]}"

    @property
    def kind(self) -> str:
        """How the tag begins: `2.13.0-ec2`, or `ort`."""
        return "ort" if self.base is None else f"{self.base.torch}-{self.base.flavour}"

    @property
    def layers(self) -> dict[str, bytes]:
        """The files that the image adds to its base."""
        return {name: content for name, content in self.files.items() if name != "Dockerfile"}

    @property
    def size(self) -> int:
        """Bytes that the image adds to its base, uncompressed."""
        return sum(map(len, self.layers.values()))

    @property
    def upload_size(self) -> int:
        """The bytes of these layers to upload, compressed; an estimate."""
        return len(pack(self.layers))


def check_repository(name: str) -> None:
    """Raise UserError if no repository can have this name."""
    if not _REPOSITORY.fullmatch(name) or not 2 <= len(name) <= 256:
        raise UserError(
            f"{name!r} is not the name of a repository",
            "give 2 to 256 lower-case letters and digits, with . _ - or / between them",
        )


def context_files(wheels: Path) -> dict[str, bytes] | None:
    """Return the build context; None if a wheel has to be fetched first."""
    site = site_files(wheels, wanted_pins())
    return None if site is None else {**context_without_wheels(), **site}


def context_without_wheels() -> dict[str, bytes]:
    """Return the build context without site/, which needs wheels."""
    return {"Dockerfile": shipped("containers/Dockerfile").read_bytes(), **code_files()}


def ort_context() -> dict[str, bytes]:
    """Return the build context of containers/Dockerfile.ort, laid out as in a checkout."""
    code = code_files()
    programs = {f"containers/{name}": code.pop(name) for name in PROGRAMS}
    requirements = "containers/ort-requirements.txt"
    return {
        "Dockerfile": shipped("containers/Dockerfile.ort").read_bytes(),
        requirements: shipped(requirements).read_bytes(),
        **programs,
        **code,
    }


def ort_base() -> BaseReference:
    """Return the base that containers/Dockerfile.ort names, by its tag."""
    text = shipped("containers/Dockerfile.ort").read_text(encoding="utf-8")
    match = re.search(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
    assert match is not None, "it names one"
    return BaseReference(uri=match[1], digest=None)


def write_context(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the context into an empty folder, with the same modes whatever the user's umask."""
    (folder / "site").mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if path.suffix == ".sh" and path.parent == folder else 0o644)
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)


def read_extras() -> Mapping[str, tuple[str, ...]]:
    """Return what pip is asked for, by the name of the extra."""
    lines = shipped("containers/extras.txt").read_text(encoding="utf-8").splitlines()
    entries = (line.split() for line in lines if line.strip() and not line.startswith("#"))
    return {name: tuple(packages) for name, *packages in entries}


def packages_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return what pip is asked for to have these extras, in their order. Raises UnknownName."""
    known = read_extras()
    for name in names:
        if name not in known:
            raise UnknownName("extra", name, known)
    return tuple(dict.fromkeys(package for name in names for package in known[name]))


def with_extras(dockerfile: bytes, packages: Sequence[str]) -> bytes:
    """Return the Dockerfile with a step in which pip installs the packages, if there are any."""
    if not packages:
        return dockerfile
    before, separator, after = dockerfile.partition(_BEFORE)
    assert separator, "the Dockerfile copies site/"
    install = f"-m pip install --no-cache-dir --disable-pip-version-check {shlex.join(packages)}"
    run = (
        f"RUN for one in {_PYTHONS}; do \\\n"
        f'      "$one" -c "{_HAS_TORCH}" 2>/dev/null && exec "$one" {install}; \\\n'
        "    done; echo 'no Python with torch in this image' >&2; exit 1\n"
    )
    return before + run.encode() + separator + after


# docker


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line."""

    argv: tuple[str, ...]
    #: Added to the environment.
    env: Mapping[str, str] = field(default_factory=dict)
    #: What it reads; never shown.
    stdin: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        added = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*added, shlex.join(self.argv)])


def has_buildx() -> bool:
    """Return whether docker builds with buildx, and not with its classic builder alone.

    Raises UserError if there is no docker.
    """
    if not shutil.which("docker"):
        raise UserError(
            "there is no docker here, and building an image needs it",
            "install it (docs.docker.com/engine/install), or submit without an image of your own",
        )
    try:
        argv = ("docker", "buildx", "version")
        probe = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def build_command(
    context: Path | str, *, tag: str, build_args: Mapping[str, str], by_buildx: bool
) -> Command:
    """Return what builds the context's Dockerfile into an image under `tag`, on this machine."""
    options = ["--platform", "linux/amd64"]
    if by_buildx:
        # The classic builder knows schema 2 only.
        options += ["--provenance=false", "--sbom=false"]
        options += ["--output", "type=docker,oci-mediatypes=false", "--progress", "plain"]
    for name, value in build_args.items():
        options += ["--build-arg", f"{name}={value}"]
    options += ["--tag", tag, "--file", f"{context}/Dockerfile", str(context)]
    if by_buildx:
        return Command(argv=("docker", "buildx", "build", *options))
    return Command(argv=("docker", "build", *options), env={"DOCKER_BUILDKIT": "0"})


def login_command(host: str, *, user: str, password: str | None = None) -> Command:
    """Return what logs in to a registry, with the password on stdin; without one, only to be shown."""
    argv = ("docker", "login", "--username", user, "--password-stdin", host)
    return Command(argv=argv, stdin=password)


def run_command(command: Command, report: Callable[[str], None]) -> None:
    """Run a command, and report every line that it prints. Raises UserError if it fails."""
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
    except BrokenPipeError:
        pass
    if process.returncode != 0:
        raise _failure(command, process.returncode, "\n".join(last))


#: (a pattern in the output, what happened, what to do); the first match counts.
_FAILURES = (
    (
        r"no space left on device",
        "docker's disk is full",
        "free some: docker system prune removes what no container uses; a base image takes some 30 GB",
    ),
    (
        r"permission denied.*docker.*sock|dial unix \S*: connect: permission denied",
        "this user may not talk to the docker daemon",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    (
        r"cannot connect to the docker daemon|is the docker daemon running"
        r"|failed to connect to the docker api",
        "docker is installed, and its daemon is not running",
        "sudo systemctl start docker, or start Docker Desktop",
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
        r"exec format error",
        "this machine cannot run linux/amd64 containers",
        "docker run --privileged --rm tonistiigi/binfmt --install amd64",
    ),
    (
        r"no such host|i/o timeout|network is unreachable|connection refused|tls handshake timeout",
        "the registry cannot be reached",
        "check the network and try again: what was uploaded already is kept",
    ),
)


def _failure(command: Command, code: int, output: str) -> UserError:
    for pattern, message, hint in _FAILURES:
        if re.search(pattern, output, re.IGNORECASE):
            return UserError(message, hint)
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    what = " ".join(command.argv[:2])
    # 137: how a shell, or docker itself, reports a process that was killed.
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return UserError(f"`{what}` was killed", "most often for lack of memory: see `dmesg`")
    return UserError(
        f"`{what}` ended with exit code {code}{f': {last.strip()}' if last else ''}",
        "what it printed above says more",
    )
