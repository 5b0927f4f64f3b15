"""Batches of images, from one of three sources: made on the device, through a loader, or from a folder.

Some are held out of each: of those made up images that no seed draws, of a folder as `image_loader` says.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastlaunch_train.data.order import NO_LABEL, seed_of, share
from fastlaunch_train.records.data_identity import DataIdentity
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Batch, DataRequest

#: Of the made-up images: labels that are replaced by a random class, so that loss has a floor above zero.
WRONG_LABELS = 0.1
#: Their classes' patterns are coarse, this many cells a side, and the same for every seed: seeds draw
#: other images of one and the same task.
PATTERN_CELLS = 4
PATTERN_SEED = 20231115
PATTERN_STRENGTH = 1.0
#: Of the made-up images: how many are held out.
NUM_HELD_OUT = 1024
#: Another version for every change of what is made: runs on other images are no repeats of each other.
MADE_UP = DataIdentity(generator="images", generator_version=1, seeded_by="seed, rank, step")
MADE_UP_ONE_BY_ONE = DataIdentity(generator="single images", generator_version=1, seeded_by="seed, number")


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What a model takes: square images of `size` pixels and three channels, normalised by mean and std."""

    size: int
    num_classes: int
    # ImageNet's, as everyone publishes them.
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


def image_batches(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """Endless batches: images (batch, 3, size, size) in fp32 and labels (batch,) in int64, on the device.

    What step n of a rank gets depends on seed, rank, world size, batch size and n alone.
    Raises WorkloadError for an unknown source or a folder that cannot be used.
    """
    if request.arm == "synthetic":
        return _synthetic(shape, request)
    # torch's loader is imported by those who use it: it costs little, torchvision's transforms much.
    from fastlaunch_train.data import images as image_loader

    if request.arm == "loader":
        return image_loader.random_images(shape, request)
    return image_loader.folder_images(_folder(request.arm), shape, request)


def held_out_images(shape: ImageShape, request: DataRequest, split: str) -> Iterator[Batch]:
    """This rank's batches of what is held out for `validation`, as `order.share` deals them; else none.

    As `image_batches`, but for the labels of what fills up a batch, which are `NO_LABEL`.
    """
    if split != "validation":
        return iter(())
    if request.arm in ("synthetic", "loader"):
        return _synthetic_held_out(shape, request)
    from fastlaunch_train.data import images as image_loader

    return image_loader.held_out_folder_images(_folder(request.arm), shape, request)


def images_per_epoch(shape: ImageShape, arm: str) -> int | None:
    """Images of a folder to train on; None of those made up, which have no end."""
    if arm in ("synthetic", "loader"):
        return None
    from fastlaunch_train.data import images as image_loader

    return len(image_loader.find_images(_folder(arm), shape.num_classes).train)


def images_identity(shape: ImageShape, arm: str) -> DataIdentity:
    """What the images of a source are. Those of a folder by the names in their classes' folders, and their
    contents or sizes, as `data_identity.digest_of_files` says: the names are listed anyway, by every rank.
    """
    made_up = {"synthetic": MADE_UP, "loader": MADE_UP_ONE_BY_ONE}
    if arm in made_up:
        return made_up[arm]
    from fastlaunch_train.data import images as image_loader

    return image_loader.folder_identity(_folder(arm), shape.num_classes)


def class_patterns(num_classes: int, device: torch.device) -> torch.Tensor:
    """The signal of each class: (classes, 3, cells, cells), the same on every device."""
    generator = torch.Generator().manual_seed(PATTERN_SEED)
    patterns = torch.randn(num_classes, 3, PATTERN_CELLS, PATTERN_CELLS, generator=generator)
    return (PATTERN_STRENGTH * patterns).to(device)


def make_images(
    patterns: torch.Tensor, num_images: int, size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (num_images, 3, size, size), each its class's pattern in unit noise, and their labels.

    A tenth of the labels is drawn anew, from all classes.
    """
    device, num_classes = patterns.device, len(patterns)
    classes, others = torch.randint(num_classes, (2, num_images), generator=generator, device=device)
    wrong = torch.rand(num_images, generator=generator, device=device) < WRONG_LABELS
    images = torch.randn(num_images, 3, size, size, generator=generator, device=device)
    images += torch.nn.functional.interpolate(patterns[classes], size=(size, size))
    return images, torch.where(wrong, others, classes)


def _synthetic(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    patterns = class_patterns(shape.num_classes, request.device)
    generator = torch.Generator(request.device)
    for step in itertools.count(request.first_step):
        generator.manual_seed(seed_of("synthetic", request.seed, request.rank, step))
        yield make_images(patterns, request.batch_size, shape.size, generator)


def _synthetic_held_out(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    patterns = class_patterns(shape.num_classes, request.device)
    generator = torch.Generator(request.device)
    for numbers in share(NUM_HELD_OUT, request):
        made = []
        # One by one: how many are in a batch must not change them.
        for number in numbers:
            generator.manual_seed(seed_of("held-out", PATTERN_SEED, number or 0))
            image, label = make_images(patterns, 1, shape.size, generator)
            made.append((image, torch.full_like(label, NO_LABEL) if number is None else label))
        images, labels = zip(*made, strict=True)
        yield torch.cat(images), torch.cat(labels)


def _folder(arm: str) -> str:
    source, _, path = arm.partition(":")
    if source == "folder" and path:
        return path
    raise WorkloadError(
        f"unknown data source {arm!r}", "known: synthetic, loader, folder:PATH (PATH/CLASS/IMAGE)"
    )
