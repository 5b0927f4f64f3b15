"""AWS's base images: the shipped table against what is known elsewhere, tags, defaults, and own images."""

import ast
import datetime
import re

import pytest

from fastlaunch.catalog.container_images import (
    FLAVOURS,
    find_base_image,
    image_uri,
    own_image,
    public_uri,
    registry,
    registry_host,
    shipped_base_images,
    version,
)
from fastlaunch.core.errors import BadConfiguration, UnknownName, UserError
from fastlaunch.core.paths import training_package

TODAY = datetime.date(2026, 11, 21)
DIGEST = "sha256:" + "ab" * 32


# The shipped table


def test_the_shipped_table_is_consistent() -> None:
    images = shipped_base_images().images
    assert len({image.name for image in images}) == len(images)
    for image in images:
        release, *parts = image.tag.split("-")
        is_old = version(image.torch) < (2, 11)
        assert image.generation == ("ubuntu" if is_old else "amzn2023")
        assert image.repository == ("pytorch-training" if is_old else "pytorch")
        assert f"{image.torch}.".startswith(f"{release}.")
        assert f"cu{''.join(image.cuda.split('.')[:2])}" in parts
        assert not is_old or f"py{''.join(image.python.split('.')[:2])}" in parts
        assert (image.flavour in parts) == (is_old or image.flavour == "sagemaker")
        if image.uncertain is None:
            assert image.transformer_engine and image.released and image.end_of_patch
            assert image.end_of_patch.replace(year=image.end_of_patch.year - 1) == image.released
    assert [image.torch for image in images if image.uncertain] == ["2.14.0"] * 2


def test_registries_agree_with_botocores_partitions() -> None:
    from botocore.loaders import Loader

    partitions = Loader().load_data("partitions")["partitions"]
    for region, held in shipped_base_images().registries.items():
        assert re.fullmatch("[0-9]{12}", held.account)
        (owner,) = (one for one in partitions if re.fullmatch(one["regionRegex"].strip("^$"), region))
        assert (held.partition, held.dns_suffix) == (owner["id"], owner["outputs"]["dnsSuffix"])


def test_a_region_has_its_registry() -> None:
    for region, host in (
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("eu-south-1", "692866216735.dkr.ecr.eu-south-1.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
    ):
        assert registry_host(registry(region).account, region) == host
    with pytest.raises(UnknownName, match="us-east-3"):
        registry("us-east-3")


def test_the_training_code_keeps_to_the_oldest_images_python() -> None:
    oldest = min(version(image.python)[:2] for image in shipped_base_images().images)
    # Of the standard library, what came after 3.10 and is easily reached for.
    newer = re.compile(
        r"datetime\.UTC|import UTC|StrEnum|tomllib|ExceptionGroup|add_note|file_digest|\bSelf\b"
    )
    assert oldest == (3, 10)
    for path in training_package().rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        ast.parse(source, feature_version=oldest)
        assert not newer.search(re.sub("#.*", "", source)), path


# Which one


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_default_is_the_newest_certain_one(flavour: str) -> None:
    found = find_base_image(None, flavour=flavour, today=TODAY)
    assert (found.torch, found.flavour, found.transformer_engine) == ("2.13.0", flavour, "2.17.0")


def test_the_default_is_never_past_its_end() -> None:
    last = datetime.date(2027, 7, 20)
    assert find_base_image(None, flavour="ec2", today=last).torch == "2.13.0"
    with pytest.raises(UserError, match="AWS patches none of the base images"):
        find_base_image(None, flavour="ec2", today=last + datetime.timedelta(days=1))


@pytest.mark.parametrize(
    ("text", "flavour", "tag"),
    [
        ("2.12-cu130-amzn2023", "ec2", "2.12-cu130-amzn2023"),
        ("2.12.1-cu130-amzn2023", "ec2", "2.12-cu130-amzn2023"),
        ("pytorch:2.11-cu130-amzn2023", "ec2", "2.11-cu130-amzn2023"),
        ("2.11-cu130-amzn2023-sagemaker", "sagemaker", "2.11-cu130-amzn2023-sagemaker"),
        ("2.9-gpu-py312-ec2", "ec2", "2.9.0-gpu-py312-cu130-ubuntu22.04-ec2"),
        ("2.9-gpu-py312", "sagemaker", "2.9.0-gpu-py312-cu130-ubuntu22.04-sagemaker"),
        ("2.10", "ec2", "2.10.0-gpu-py313-cu130-ubuntu22.04-ec2"),
        ("2.1", "ec2", "2.1.0-gpu-py310-cu121-ubuntu20.04-ec2"),
        ("2.14", "ec2", "2.14-cu133-amzn2023"),
    ],
)
def test_an_image_goes_by_several_names(text: str, flavour: str, tag: str) -> None:
    assert find_base_image(text, flavour=flavour, today=TODAY).tag == tag


@pytest.mark.parametrize(
    "text",
    [
        "2.12.0-cu130-amzn2023",
        "2.12-cu133-amzn2023",
        "2.9-gpu-py313-ec2",
        "2.9.0-gpu-py312-cu130-ubuntu24.04-ec2",
        "pytorch:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2",
        "2",
        "",
        "latest",
    ],
)
def test_another_image_is_not_taken_for_it(text: str) -> None:
    with pytest.raises(UnknownName, match="unknown base image"):
        find_base_image(text, flavour="ec2", today=TODAY)


def test_another_flavour_or_kind_is_refused_as_such() -> None:
    with pytest.raises(UserError, match="is the sagemaker flavour") as caught:
        find_base_image("2.9-gpu-py312", flavour="ec2", today=TODAY)
    assert caught.value.hint == "give 2.9.0-gpu-py312-cu130-ubuntu22.04-ec2"
    with pytest.raises(UnknownName) as unknown:
        find_base_image("2.11-cpu-amzn2023", flavour="ec2", today=TODAY)
    assert unknown.value.hint == "only images for GPUs are known"


def test_names_in_registries() -> None:
    base = find_base_image(None, flavour="ec2", today=TODAY)
    assert (
        image_uri(base, "us-west-2", DIGEST)
        == f"763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch@{DIGEST}"
    )
    assert image_uri(base, "us-west-2", "<image-digest>").endswith("/pytorch@<image-digest>")
    assert public_uri(base) == "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"


# The user's own


@pytest.mark.parametrize(
    "uri",
    [
        f"123456789012.dkr.ecr.us-east-1.amazonaws.com/fastlaunch@{DIGEST}",
        f"123456789012.dkr.ecr.us-east-1.amazonaws.com/team/vit:tag@{DIGEST}",
        f"123456789012.dkr.ecr-fips.us-east-1.amazonaws.com/fastlaunch@{DIGEST}",
    ],
)
def test_an_own_image_by_digest_in_the_region_will_do(uri: str) -> None:
    found = own_image(uri, "us-east-1")
    assert (found.account, found.digest) == ("123456789012", DIGEST)
    assert found.repository in ("fastlaunch", "team/vit")


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("123456789012.dkr.ecr.us-east-1.amazonaws.com/fastlaunch:tag", "not given by its digest"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com/fastlaunch@{DIGEST[:-1]}", "not given by its digest"),
        (f"123456789012.dkr.ecr.us-west-2.amazonaws.com/fastlaunch@{DIGEST}", "is in us-west-2"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com.cn/fastlaunch@{DIGEST}", "in no registry of ECR"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com.evil.io/fastlaunch@{DIGEST}", "in no registry"),
        (f"123456789012.dkr.ecr.us-east-1.amazonaws.com@{DIGEST}", "in no registry of ECR"),
        (f"ghcr.io/acme/fastlaunch@{DIGEST}", "in no registry of ECR"),
    ],
)
def test_any_other_image_is_refused(uri: str, problem: str) -> None:
    with pytest.raises(BadConfiguration, match=problem):
        own_image(uri, "us-east-1")
