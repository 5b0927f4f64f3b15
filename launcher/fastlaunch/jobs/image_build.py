"""Make the build context of an image with the training code, and the tag that follows from it."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.core.errors import UserError
from fastlaunch.core.paths import shipped
from fastlaunch.jobs.code_bundle import PROGRAMS, code_files, pack, site_files
from fastlaunch.jobs.wheels import wanted_pins
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA

DEFAULT_REPOSITORY = "fastlaunch"
#: repositoryName of ecr:CreateRepository, in botocore 1.44.5's model of it.
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(\/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


@dataclass(frozen=True, kw_only=True)
class BaseReference:
    """What the Dockerfile starts from."""

    # In a registry.
    uri: str
    # None if it could not be looked up.
    digest: str | None

    @property
    def host(self) -> str:
        """The registry's host."""
        return self.uri.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class ImageBuild:
    """One image to build."""

    # AWS's image; None where the Dockerfile itself names its base, and takes no other argument.
    base: BaseImage | None
    reference: BaseReference
    # The context's files, by path.
    files: Mapping[str, bytes]
    # None if it is not known.
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
    """Return the build context, None if a wheel has to be fetched first."""
    site = site_files(wheels, wanted_pins())
    return None if site is None else {**context_without_wheels(), **site}


def context_without_wheels() -> dict[str, bytes]:
    """Return the build context without site/, for which nothing has to be fetched."""
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
