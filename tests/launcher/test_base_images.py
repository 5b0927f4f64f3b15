"""AWS's base images: the shipped table against what is known elsewhere, tags, defaults, and own images."""

import ast
import datetime
import re
from pathlib import Path

import pytest

from fastlaunch.catalog.container_images import (
    FLAVOURS,
    BaseImage,
    find_base_image,
    image_uri,
    own_image,
    parse_tag,
    public_uri,
    read_base_images,
    registry_account,
    registry_host,
    shipped_base_images,
    version,
)
from fastlaunch.core.errors import BadConfiguration, BadFile, UnknownName, UserError
from fastlaunch.core.paths import training_package

TODAY = datetime.date(2026, 11, 21)
DIGEST = "sha256:" + "ab" * 32


# The shipped table


@pytest.mark.parametrize("image", shipped_base_images().images, ids=lambda image: image.name)
def test_what_a_tag_says_is_what_the_table_says(image: BaseImage) -> None:
    told = parse_tag(image.tag)
    assert told is not None and told.is_gpu
    assert (told.generation, told.flavour) == (image.generation, image.flavour)
    assert f"{image.torch}.".startswith(f"{told.torch}.")
    assert told.cuda is not None and image.cuda.startswith(told.cuda)
    assert told.python is None or image.python.startswith(told.python)
    assert image.repository == {"ubuntu": "pytorch-training", "amzn2023": "pytorch"}[image.generation]
    minor = tuple(int(part) for part in image.torch.split(".")[:2])
    assert image.generation == ("ubuntu" if minor <= (2, 10) else "amzn2023")


def test_what_is_certain_has_dates_and_what_is_not_says_why() -> None:
    for image in shipped_base_images().images:
        if image.uncertain is None:
            assert image.released is not None and image.end_of_patch is not None and image.transformer_engine
            assert image.end_of_patch.replace(year=image.end_of_patch.year - 1) == image.released
    assert [image.torch for image in shipped_base_images().images if image.uncertain] == ["2.14.0"] * 2


def test_registries_agree_with_botocores_partitions() -> None:
    from botocore.loaders import Loader

    partitions = Loader().load_data("partitions")["partitions"]
    for region, registry in shipped_base_images().registries.items():
        (owner,) = (one for one in partitions if re.fullmatch(one["regionRegex"].strip("^$"), region))
        assert (registry.partition, registry.dns_suffix) == (owner["id"], owner["outputs"]["dnsSuffix"])


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("us-east-1", "763104351884.dkr.ecr.us-east-1.amazonaws.com"),
        ("eu-south-1", "692866216735.dkr.ecr.eu-south-1.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
        ("us-gov-east-1", "446045086412.dkr.ecr.us-gov-east-1.amazonaws.com"),
        ("us-isob-east-1", "094389454867.dkr.ecr.us-isob-east-1.sc2s.sgov.gov"),
    ],
)
def test_a_region_has_its_registry(region: str, host: str) -> None:
    assert registry_host(registry_account(region), region) == host


def test_a_region_without_registry_gets_the_nearest() -> None:
    with pytest.raises(UnknownName, match="us-east-3") as caught:
        registry_account("us-east-3")
    assert caught.value.hint and "us-east-1" in caught.value.hint


def test_the_training_code_keeps_to_the_oldest_images_python() -> None:
    oldest = min(version(image.python)[:2] for image in shipped_base_images().images)
    # Of the standard library, what came after 3.10 and is easily reached for.
    newer = re.compile(
        r"datetime\.UTC|import UTC|StrEnum|tomllib|ExceptionGroup|add_note|file_digest|\bSelf\b"
    )
    assert oldest == (3, 10)
    for path in training_package().rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=oldest)
        assert not newer.search(ast.unparse(tree)), path  # without comments


# Which one


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_default_is_the_newest_certain_one(flavour: str) -> None:
    found = find_base_image(None, flavour=flavour, today=TODAY)
    assert (found.torch, found.flavour, found.transformer_engine) == ("2.13.0", flavour, "2.17.0")


def test_the_default_is_never_past_its_end() -> None:
    last = datetime.date(2027, 7, 20)
    assert find_base_image(None, flavour="ec2", today=last).torch == "2.13.0"
    with pytest.raises(UserError, match="AWS patches none of the base images") as caught:
        find_base_image(None, flavour="ec2", today=last + datetime.timedelta(days=1))
    assert caught.value.hint and caught.value.hint.endswith("2.13-cu133-amzn2023")


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
    with pytest.raises(UnknownName, match="unknown base image") as caught:
        find_base_image(text, flavour="ec2", today=TODAY)
    assert caught.value.hint and "2.13-cu133-amzn2023" in caught.value.hint


def test_the_other_flavour_is_refused_with_its_counterpart() -> None:
    with pytest.raises(UserError, match="is the sagemaker flavour") as caught:
        find_base_image("2.9-gpu-py312", flavour="ec2", today=TODAY)
    assert caught.value.hint == "give 2.9.0-gpu-py312-cu130-ubuntu22.04-ec2"


def test_an_image_for_cpus_is_refused_as_such() -> None:
    with pytest.raises(UnknownName) as caught:
        find_base_image("2.11-cpu-amzn2023", flavour="ec2", today=TODAY)
    assert caught.value.hint == "only images for GPUs are known"


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
    with pytest.raises(BadConfiguration, match=problem) as caught:
        own_image(uri, "us-east-1")
    assert caught.value.hint


# A damaged table


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("torch: 2.13.0", "torch: 2.10", 2, "put quotes around it"),
        ("torch: 2.13.0", "torch: newest", 2, "is a version"),
        ("    end_of_patch: 2027-07-20\n", "", 2, "has no `end_of_patch`"),
        ("2027-07-20", "soon", 8, "end_of_patch"),
        ("generation: amzn2023", "generation: debian", 3, "ubuntu, amzn2023"),
        (", sagemaker: b", "", 5, "tags.sagemaker is empty"),
        ("sagemaker: b", "sagemaker: a", 2, "pytorch:a is listed twice"),
        ('"763104351884"', '"76310435188"', 14, "12 digits"),
        ("[us-east-1]", "[us-east-1, us-east-1]", 14, "us-east-1 is listed twice"),
    ],
)
def test_a_damaged_table_names_the_line(old: str, new: str, line: int, problem: str, tmp_path: Path) -> None:
    text = """images:
  - torch: 2.13.0
    generation: amzn2023
    repository: pytorch
    tags: {ec2: a, sagemaker: b}
    cuda: 13.3.0
    python: "3.12"
    end_of_patch: 2027-07-20
    source: a test
partitions:
  aws:
    dns_suffix: amazonaws.com
    accounts:
      "763104351884": [us-east-1]
schema: 1
"""
    path = tmp_path / "images.yaml"
    path.write_text(text)
    assert len(read_base_images(path).images) == 2
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(BadFile) as caught:
        read_base_images(path)
    assert problem in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.line == line
