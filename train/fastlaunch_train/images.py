"""Batches of images, from one of three sources: made on the device, through a loader, or from a folder."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fastlaunch_train.order import seed_of
from fastlaunch_train.workload import Batch, DataRequest
from fastlaunch_train.workloads import WorkloadError

#: Of the made-up images: labels that are replaced by a random class, so that loss has a floor above zero.
WRONG_LABELS = 0.1
#: Their classes' patterns are coarse, this many cells a side, and the same for every seed: seeds draw
#: other images of one and the same task.
PATTERN_CELLS = 4
PATTERN_SEED = 20231115
PATTERN_STRENGTH = 1.0


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
    from fastlaunch_train import image_loader

    if request.arm == "loader":
        return image_loader.random_images(shape, request)
    source, _, path = request.arm.partition(":")
    if source == "folder" and path:
        return image_loader.folder_images(path, shape, request)
    raise WorkloadError(
        f"unknown data source {request.arm!r}", "known: synthetic, loader, folder:PATH (PATH/CLASS/IMAGE)"
    )


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
