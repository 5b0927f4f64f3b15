"""Container images: AWS's own by tag, flavour and region, and the user's by digest."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fastlaunch.core.errors import BadConfiguration, UnknownName, UserError
from fastlaunch.core.paths import shipped
from fastlaunch.core.yaml_file import YamlFile

FLAVOURS = ("ec2", "sagemaker")
#: The flavour of a tag that names none, by generation.
_USUAL_FLAVOUR = {"ubuntu": "sagemaker", "amzn2023": "ec2"}

#: AWS's gallery, which serves the same images to everybody. docs/get_started/index.md of
#: aws/deep-learning-containers, read 2026-11-20.
PUBLIC_GALLERY = "public.ecr.aws/deep-learning-containers"

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
_ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """One AWS Deep Learning Container for training on GPUs, in one flavour."""

    repository: str
    # Without the repository.
    tag: str
    # ec2 or sagemaker.
    flavour: str
    # The style of names and entrypoints: `ubuntu` up to PyTorch 2.10, `amzn2023` from 2.11.
    generation: str
    # Versions as they are written; None for what it does not hold or is not known to.
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
    # The last day on which AWS patches it.
    end_of_patch: datetime.date | None = None
    # The inferred part of this entry.
    uncertain: str | None = None

    @property
    def name(self) -> str:
        """`pytorch:2.13-cu133-amzn2023`."""
        return f"{self.repository}:{self.tag}"

    def is_over(self, today: datetime.date) -> bool:
        """Return whether AWS patches it no longer."""
        return self.end_of_patch is not None and today > self.end_of_patch

    def doubts(self, today: datetime.date) -> tuple[str, ...]:
        """Return the reasons against using it."""
        over = f"AWS has not patched it since {self.end_of_patch}" if self.is_over(today) else None
        return tuple(f"{self.name}: {doubt}" for doubt in (over, self.uncertain) if doubt)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Where a region's Deep Learning Containers are."""

    # Number of the account that serves them.
    account: str
    partition: str
    # The partition's, such as `amazonaws.com`.
    dns_suffix: str


@dataclass(frozen=True, kw_only=True)
class BaseImages:
    """The table of base images and registries."""

    # Newest PyTorch first, each in both flavours.
    images: tuple[BaseImage, ...]
    # By region.
    registries: Mapping[str, Registry]


def find_base_image(tag: str | None, *, flavour: str, today: datetime.date) -> BaseImage:
    """Return the base image of this tag; without one, the newest that is certain and that AWS still patches.

    tag: with or without `repository:`; a short form or a PyTorch version will do. flavour: ec2 or sagemaker.
    Raises UserError for a tag that is unknown or of the other flavour, and if AWS no longer patches any.
    """
    images = shipped_base_images().images
    of_flavour = [image for image in images if image.flavour == flavour]
    if tag is None:
        certain = [image for image in of_flavour if image.uncertain is None]
        if patched := [image for image in certain if not image.is_over(today)]:
            return patched[0]
        raise UserError(
            f"AWS patches none of the base images known here: {certain[0].name} ended on "
            f"{certain[0].end_of_patch}",
            f"update fastlaunch, or name one to use it all the same: {certain[0].tag}",
        )
    for image in (*of_flavour, *images):
        if _names(tag, image) and image.flavour == flavour:
            return image
        if _names(tag, image):
            (other,) = (same for same in of_flavour if same.torch == image.torch)
            raise UserError(f"base image {tag!r} is the {image.flavour} flavour", f"give {other.tag}")
    hint = "only images for GPUs are known" if "cpu" in tag.split("-") else None
    raise UnknownName("base image", tag, [image.tag for image in of_flavour], hint)


def training_base(tag: str | None, *, today: datetime.date) -> BaseImage:
    """Return the base image for jobs on AWS; see `find_base_image`.

    SageMaker gets the ec2 flavour, too. Its own differs by a toolkit and its entrypoint, which our jobs
    bypass, and runs with the same digest can be compared between the two services.
    """
    return find_base_image(tag, flavour="ec2", today=today)


def registry(region: str) -> Registry:
    """Return where AWS's own images are for a region. Raises UnknownName for a region without."""
    registries = shipped_base_images().registries
    if region not in registries:
        raise UnknownName("region with Deep Learning Containers", region, registries)
    return registries[region]


def registry_host(account: str, region: str) -> str:
    """Return the host of an account's registry in a region."""
    return f"{account}.dkr.ecr.{region}.{registry(region).dns_suffix}"


def image_uri(base: BaseImage, region: str, digest: str) -> str:
    """Return the URI of a base image in a region by its digest, `sha256:...` or a placeholder of it."""
    return f"{registry_host(registry(region).account, region)}/{base.repository}@{digest}"


def public_uri(base: BaseImage) -> str:
    """Return the URI of a base image by its tag in AWS's gallery, which asks for no login."""
    return f"{PUBLIC_GALLERY}/{base.name}"


@dataclass(frozen=True, kw_only=True)
class OwnImage:
    """An image of the user's in ECR."""

    # Number of the registry's account.
    account: str
    repository: str
    # `sha256:...`
    digest: str


def own_image(uri: str, region: str) -> OwnImage:
    """Return the image that `uri` names by its digest, in ECR of the region where the job is.

    Raises BadConfiguration for any other.
    """
    name, separator, digest = uri.rpartition("@")
    if not separator or not _DIGEST.fullmatch(digest):
        raise BadConfiguration(
            f"image {uri!r} is not given by its digest",
            "a tag may move: give HOST/REPOSITORY@sha256:..., which `fastlaunch build --push` prints",
        )
    host, slash, repository = name.partition("/")
    match = _ECR.fullmatch(host)
    suffix = registry(region).dns_suffix
    if match is None or not slash or not repository or match["suffix"] != suffix:
        raise BadConfiguration(
            f"image {uri!r} is in no registry of ECR",
            f"fastlaunch build --push --region {region} puts one into ACCOUNT.dkr.ecr.{region}.{suffix}",
        )
    if match["region"] != region:
        raise BadConfiguration(
            f"the image is in {match['region']}, and the job in {region}",
            f"fastlaunch build --push --region {region}",
        )
    return OwnImage(account=match["account"], repository=repository.partition(":")[0], digest=digest)


def _names(text: str, image: BaseImage) -> bool:
    """Return whether `text` is the image's PyTorch version, or its tag in full or with parts left out."""
    repository, _, tag = text.rpartition(":")
    version, *parts = tag.split("-")
    if repository not in ("", image.repository) or not _VERSION.fullmatch(version):
        return False
    if not f"{image.torch}.".startswith(f"{version}."):
        return False
    if not parts:
        return not repository
    flavour = parts[-1] if parts[-1] in FLAVOURS else _USUAL_FLAVOUR[image.generation]
    return flavour == image.flavour and set(parts) <= set(image.tag.split("-"))


@cache
def shipped_base_images() -> BaseImages:
    """Return the table that ships with fastlaunch."""
    file = YamlFile(shipped("containers/base_images.yaml"))
    images = [
        file.record(
            BaseImage,
            *("images", index),
            without=("tags",),
            flavour=flavour,
            tag=file.value(str, "images", index, "tags", flavour),
        )
        for index in range(len(file.items("images")))
        for flavour in FLAVOURS
    ]
    registries = {
        region: Registry(account=account, partition=partition, dns_suffix=dns_suffix)
        for partition in file.mapping("partitions")
        for dns_suffix in [file.value(str, "partitions", partition, "dns_suffix")]
        for account in file.mapping("partitions", partition, "accounts")
        for region in file.value(tuple[str, ...], "partitions", partition, "accounts", account)
    }
    newest_first = sorted(images, key=lambda image: version(image.torch), reverse=True)
    return BaseImages(images=tuple(newest_first), registries=registries)


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of `2.10.0`, to compare."""
    return tuple(int(part) for part in text.split("."))
