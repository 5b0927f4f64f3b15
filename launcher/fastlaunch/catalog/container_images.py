"""Container images: AWS's own by tag, flavour and region, and the user's by digest."""

import datetime
import re
from dataclasses import dataclass

from fastlaunch.base_image_file import FLAVOURS, BaseImage, BaseImages, Registry, shipped_base_images
from fastlaunch.core.errors import BadConfiguration, UnknownName, UserError

#: AWS's gallery, which serves the same images to everybody. docs/get_started/index.md of
#: aws/deep-learning-containers, read 2026-11-20.
PUBLIC_GALLERY = "public.ecr.aws/deep-learning-containers"

_UBUNTU = re.compile(
    r"(?P<torch>\d+\.\d+(\.\d+)?)-(?P<device>gpu|cpu)-py(?P<python>\d{2,3})"
    r"(-(?P<cuda>cu\d{3}))?(-(?P<os>ubuntu\d\d\.\d\d))?(-(?P<flavour>ec2|sagemaker))?"
)
_AMZN2023 = re.compile(
    r"(?P<torch>\d+\.\d+(\.\d+)?)-(?P<cuda>cu\d{3}|cpu)-(?P<os>amzn2023)(-(?P<flavour>sagemaker))?"
)
_ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr(-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Tag:
    """What a tag says. torch: as written, with or without its last number. cuda: `13.0`, None for CPU images.

    python: None where the tag does not tell it. cuda is also None for an alias such as `2.10-gpu-py313`.
    """

    torch: str
    generation: str
    flavour: str
    is_gpu: bool
    cuda: str | None = None
    python: str | None = None


def parse_tag(text: str) -> Tag | None:
    """What a tag of either generation says, None if it is of neither.

    An old tag without a flavour is SageMaker's, a new one EC2's.
    """
    if match := _UBUNTU.fullmatch(text):
        python = match["python"]
        return Tag(
            torch=match["torch"],
            generation="ubuntu",
            flavour=match["flavour"] or "sagemaker",
            is_gpu=match["device"] == "gpu",
            cuda=_cuda(match["cuda"]),
            python=f"{python[0]}.{python[1:]}",
        )
    if match := _AMZN2023.fullmatch(text):
        return Tag(
            torch=match["torch"],
            generation="amzn2023",
            flavour=match["flavour"] or "ec2",
            is_gpu=match["cuda"] != "cpu",
            cuda=_cuda(match["cuda"]),
        )
    return None


def find_base_image(
    tag: str | None, *, flavour: str, today: datetime.date, table: BaseImages | None = None
) -> BaseImage:
    """The base image of this tag; without one, the newest that is certain and that AWS still mends.

    tag: with or without `repository:`; a short form of it or a PyTorch version will do. flavour: ec2 or
    sagemaker. table: instead of the shipped one. Raises UserError for a tag that is unknown or of the other
    flavour, and if every image is past its end.
    """
    if flavour not in FLAVOURS:
        raise UnknownName("flavour", flavour, FLAVOURS)
    images = (table or shipped_base_images()).images
    of_flavour = [image for image in images if image.flavour == flavour]
    if tag is None:
        certain = [image for image in of_flavour if image.uncertain is None]
        for image in certain:
            if not image.is_over(today):
                return image
        newest = certain[0]
        raise UserError(
            f"every base image known here is past its end: {newest.name} ended on {newest.end_of_life}",
            f"update fastlaunch, or name one to use it all the same: {newest.tag}",
        )
    for image in of_flavour:
        if _names(tag, image):
            return image
    for image in images:
        if _names(tag, image):
            (other,) = (one for one in of_flavour if one.torch == image.torch)
            raise UserError(f"base image {tag!r} is the {image.flavour} flavour", f"give {other.tag}")
    wanted = parse_tag(tag.rpartition(":")[2])
    hint = None if wanted is None or wanted.is_gpu else "only images for GPUs are known"
    raise UnknownName("base image", tag, [image.tag for image in of_flavour], hint)


def training_base(tag: str | None, *, today: datetime.date) -> BaseImage:
    """The base image that jobs on AWS train in, on EC2 and on SageMaker; see `find_base_image`.

    It is the ec2 flavour on both: SageMaker's differs by its toolkit and the entrypoint that starts it, which
    a job goes round, and runs of the same digest can be compared between the two.
    """
    return find_base_image(tag, flavour="ec2", today=today)


def registry(region: str) -> Registry:
    """Where AWS's own images are for a region. Raises UserError for a region without."""
    registries = shipped_base_images().registries
    if region not in registries:
        raise UnknownName("region with Deep Learning Containers", region, registries)
    return registries[region]


def registry_account(region: str) -> str:
    """Number of the account that serves AWS's own images in a region."""
    return registry(region).account


def registry_host(account: str, region: str) -> str:
    """Host of an account's registry in a region."""
    return f"{account}.dkr.ecr.{region}.{registry(region).dns_suffix}"


def image_uri(base: BaseImage, region: str, digest: str) -> str:
    """The base image in a region by its digest, `sha256:...` or a placeholder of it."""
    return f"{registry_host(registry_account(region), region)}/{base.repository}@{digest}"


def public_uri(base: BaseImage) -> str:
    """The base image by its tag in AWS's gallery, which asks for no login."""
    return f"{PUBLIC_GALLERY}/{base.name}"


@dataclass(frozen=True, kw_only=True)
class OwnImage:
    """An image of the user's in ECR. account: number of the registry's. digest: `sha256:...`."""

    account: str
    repository: str
    digest: str


def own_image(uri: str, region: str) -> OwnImage:
    """The image of the user's that `uri` names: by its digest, in ECR of the region where the job is.

    Raises BadConfiguration for any other.
    """
    name, separator, digest = uri.rpartition("@")
    if not separator or not _DIGEST.fullmatch(digest):
        raise BadConfiguration(
            f"image {uri!r} is not given by its digest",
            "a tag may move: give HOST/REPOSITORY@sha256:..., which `fastlaunch build --push` prints",
        )
    host, slash, repository = name.partition("/")
    found = _ECR.fullmatch(host)
    suffix = registry(region).dns_suffix
    if found is None or not slash or not repository or found["suffix"] != suffix:
        raise BadConfiguration(
            f"image {uri!r} is in no registry of ECR",
            f"fastlaunch build --push --region {region} puts one into ACCOUNT.dkr.ecr.{region}.{suffix}",
        )
    if found["region"] != region:
        raise BadConfiguration(
            f"the image is in {found['region']}, and the job in {region}",
            f"fastlaunch build --push --region {region}",
        )
    return OwnImage(account=found["account"], repository=repository.partition(":")[0], digest=digest)


def _names(text: str, image: BaseImage) -> bool:
    """Whether `text` means the image: its tag in full or in short, or its PyTorch version."""
    repository, _, tag = text.rpartition(":")
    if repository not in ("", image.repository):
        return False
    if tag == image.tag:
        return True
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", tag):
        return not repository and _same_version(tag, image.torch)
    wanted = parse_tag(tag)
    return (
        wanted is not None
        and wanted.is_gpu
        and (wanted.generation, wanted.flavour) == (image.generation, image.flavour)
        and _same_version(wanted.torch, image.torch)
        and (wanted.cuda is None or image.cuda.startswith(wanted.cuda))
        and (wanted.python is None or _same_version(wanted.python, image.python))
        and (not (os := re.search(r"ubuntu[\d.]+", tag)) or os[0] in image.tag)
    )


def _same_version(short: str, full: str) -> bool:
    return f"{full}.".startswith(f"{short}.")


def _cuda(text: str | None) -> str | None:
    return f"{text[2:4]}.{text[4:]}" if text and text.startswith("cu") else None
