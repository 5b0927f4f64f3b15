"""`containers/base_images.yaml`, checked field by field; every fault is a BadFile with the line it is on."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastlaunch.core.errors import BadFile
from fastlaunch.core.paths import shipped
from fastlaunch.core.yaml_file import Located, read_yaml

SCHEMA = 1
FLAVOURS = ("ec2", "sagemaker")
GENERATIONS = ("ubuntu", "amzn2023")
_CONTENTS = ("transformer_engine", "flash_attn", "deepspeed", "efa", "nccl")


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """One AWS Deep Learning Container for training on GPUs, in one flavour.

    tag: without the repository. flavour: ec2 or sagemaker. generation: of names and entrypoints, `ubuntu` up
    to PyTorch 2.10, `amzn2023` from 2.11. end_of_life: the last day on which AWS mends it. Versions as they
    are written; None for what it does not hold or is not known to. uncertain: what of this was inferred.
    """

    repository: str
    tag: str
    flavour: str
    generation: str
    torch: str
    cuda: str
    python: str
    source: str
    transformer_engine: str | None = None
    flash_attn: str | None = None
    deepspeed: str | None = None
    efa: str | None = None
    nccl: str | None = None
    released: datetime.date | None = None
    end_of_life: datetime.date | None = None
    uncertain: str | None = None

    @property
    def name(self) -> str:
        """`pytorch:2.13-cu133-amzn2023`."""
        return f"{self.repository}:{self.tag}"

    def is_over(self, today: datetime.date) -> bool:
        """Whether AWS mends it no longer."""
        return self.end_of_life is not None and today > self.end_of_life

    def doubts(self, today: datetime.date) -> tuple[str, ...]:
        """What speaks against it, in words."""
        over = f"{self.name}: AWS has not mended it since {self.end_of_life}" if self.is_over(today) else None
        unsure = f"{self.name}: {self.uncertain}" if self.uncertain else None
        return tuple(filter(None, (over, unsure)))


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Where a region's Deep Learning Containers are: account number, partition and its DNS suffix."""

    account: str
    partition: str
    dns_suffix: str


@dataclass(frozen=True, kw_only=True)
class BaseImages:
    """images: newest PyTorch first, each in both flavours. registries: by region."""

    images: tuple[BaseImage, ...]
    registries: Mapping[str, Registry]


@cache
def shipped_base_images() -> BaseImages:
    """The table that ships with fastlaunch."""
    return read_base_images(shipped("containers/base_images.yaml"))


def read_base_images(path: Path) -> BaseImages:
    """What the file holds."""
    sections = read_yaml(path).fields("the image table", required=("schema", "images", "partitions"))
    if sections["schema"].whole("schema") != SCHEMA:
        raise sections["schema"].wrong("is of another schema", f"this version of fastlaunch reads {SCHEMA}")
    images: dict[str, BaseImage] = {}
    for entry in sections["images"].items("images"):
        for image in _images(entry):
            if image.name in images:
                raise entry.wrong(f"{image.name} is listed twice")
            images[image.name] = image
    newest_first = sorted(images.values(), key=lambda image: version(image.torch), reverse=True)
    return BaseImages(images=tuple(newest_first), registries=_registries(sections["partitions"]))


def version(text: str) -> tuple[int, ...]:
    """The numbers of `2.10.0`, to compare."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _images(entry: Located) -> list[BaseImage]:
    fields = entry.fields(
        "an image",
        required=("torch", "generation", "repository", "tags", "cuda", "python", "source"),
        optional=(*_CONTENTS, "released", "end_of_patch", "uncertain"),
    )
    if "end_of_patch" not in fields and "uncertain" not in fields:
        raise entry.wrong("an image has no `end_of_patch`", "where it is not known, say so under `uncertain`")
    tags = fields["tags"].fields("tags", required=FLAVOURS)
    dates = {name: fields[name].date(name) for name in ("released", "end_of_patch") if name in fields}
    versions = {name: _version(fields[name], name) for name in ("torch", "cuda", "python")}
    contents = {name: _version(fields[name], name) for name in _CONTENTS if name in fields}
    return [
        BaseImage(
            repository=fields["repository"].text("repository"),
            tag=tags[flavour].text(f"{flavour} tag"),
            flavour=flavour,
            generation=fields["generation"].choice("generation", GENERATIONS),
            source=fields["source"].text("source"),
            released=dates.get("released"),
            end_of_life=dates.get("end_of_patch"),
            uncertain=fields["uncertain"].text("uncertain") if "uncertain" in fields else None,
            **versions,
            **contents,
        )
        for flavour in FLAVOURS
    ]


def _version(field: Located, what: str) -> str:
    # 2.10 as a number is 2.1: a version with one dot needs quotes, and `text` says so.
    text = field.text(what)
    if not version(text):
        raise field.wrong(f"{what} is {text!r}; it is a version such as 2.13.0")
    return text


def _registries(section: Located) -> dict[str, Registry]:
    registries: dict[str, Registry] = {}
    for partition, entry in section.mapping("partitions").items():
        fields = entry.fields(partition.text, required=("dns_suffix", "accounts"))
        for account, regions in fields["accounts"].mapping("accounts").items():
            if len(account.text) != 12 or not account.text.isdecimal():
                problem = f"{account.text!r} is no account number, which has 12 digits"
                raise BadFile(section.file, problem, line=account.line)
            for region in regions.items("the regions of an account"):
                name = region.text("region")
                if name in registries:
                    raise region.wrong(f"{name} is listed twice")
                registries[name] = Registry(
                    account=account.text,
                    partition=partition.text,
                    dns_suffix=fields["dns_suffix"].text("dns_suffix"),
                )
    return registries
