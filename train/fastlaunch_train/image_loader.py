"""Images that come through torch's DataLoader and its worker processes: random ones, or those of a folder."""

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastlaunch_train.cpu_torchvision import prepare_torchvision
from fastlaunch_train.images import ImageShape, class_patterns, make_images
from fastlaunch_train.order import seed_of
from fastlaunch_train.workload import Batch, DataRequest
from fastlaunch_train.workloads import WorkloadError

#: The part of a photograph's shorter side that the centre crop keeps, as in ImageNet evaluation: 224 of 256.
CROP_SHARE = 0.875


def random_images(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """The synthetic task's images, made one by one in the worker processes."""
    keys = _numbered(request)
    return _batches(_RandomImages(shape, request.seed), keys, request)


def folder_images(path_text: str, shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """The images of PATH/CLASS/IMAGE: resized, centre-cropped, flipped at random, normalised.

    Classes are numbered in alphabetical order. Every epoch the images are shuffled anew and dealt to the
    ranks; what does not divide by their number is left out of that epoch. Batches run on over epoch ends.
    Raises WorkloadError for a folder that is missing, has no image, fewer images than ranks, or more classes
    than the model; and, when the batch is asked for, for an image that cannot be read.
    """
    prepare_torchvision()
    from torchvision.datasets import ImageFolder

    path = Path(path_text).expanduser()
    if not path.is_dir():
        raise WorkloadError(f"data folder {path} does not exist", "it holds one folder of images per class")
    try:
        found = ImageFolder(path, allow_empty=True)
    except FileNotFoundError:
        found = None
    if found is None or not found.samples:
        raise WorkloadError(f"data folder {path} holds no image", "images lie in PATH/CLASS/IMAGE")
    if len(found.classes) > shape.num_classes:
        raise WorkloadError(
            f"data folder {path} has {len(found.classes)} classes, and the model {shape.num_classes}",
            "take a workload of at least as many classes",
        )
    if len(found.samples) < request.world_size:
        raise WorkloadError(
            f"data folder {path} has {len(found.samples)} images for {request.world_size} ranks", None
        )
    keys = _shuffled(len(found.samples), request)
    return _batches(_FolderImages(found.samples, shape, request.seed), keys, request)


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """An image that could not be read. Returned by a worker: an exception would arrive as a traceback."""

    path: str
    reason: str


class _RandomImages(Dataset[Any]):
    """The image of each number, for ever."""

    def __init__(self, shape: ImageShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._patterns = class_patterns(shape.num_classes, torch.device("cpu"))

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed_of("loader", self._seed, number))
        images, labels = make_images(self._patterns, 1, self._shape.size, generator)
        return images[0], labels[0]


class _FolderImages(Dataset[Any]):
    """The image of each (epoch, index): the epoch decides whether it is flipped."""

    def __init__(self, samples: Sequence[tuple[str, int]], shape: ImageShape, seed: int) -> None:
        self._samples = samples
        self._shape = shape
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
        from PIL import Image
        from torchvision.transforms import functional as transforms

        epoch, index = key
        path, label = self._samples[index]
        size = self._shape.size
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return Unreadable(path=path, reason=str(error) or type(error).__name__)
        picture = transforms.resize(picture, round(size / CROP_SHARE))
        picture = transforms.center_crop(picture, [size, size])
        if seed_of("flip", self._seed, epoch, index) % 2:
            picture = transforms.hflip(picture)
        image = transforms.to_tensor(picture)
        image = transforms.normalize(image, list(self._shape.mean), list(self._shape.std))
        return image, torch.tensor(label)


def _numbered(request: DataRequest) -> Iterator[list[int]]:
    """This rank's share of all natural numbers, batch by batch: a global batch is a run of numbers."""
    for step in itertools.count(request.first_step):
        start = ((step - 1) * request.world_size + request.rank) * request.batch_size
        yield list(range(start, start + request.batch_size))


def _shuffled(num_images: int, request: DataRequest) -> Iterator[list[tuple[int, int]]]:
    """This rank's (epoch, index) pairs, batch by batch, from `first_step` on."""
    per_epoch = num_images // request.world_size
    position = (request.first_step - 1) * request.batch_size
    shuffled_epoch, order = -1, torch.empty(0)
    while True:
        keys = []
        for place in range(position, position + request.batch_size):
            epoch, offset = divmod(place, per_epoch)
            if epoch != shuffled_epoch:
                generator = torch.Generator().manual_seed(seed_of("shuffle", request.seed, epoch))
                shuffled_epoch, order = epoch, torch.randperm(num_images, generator=generator)
            keys.append((epoch, int(order[offset * request.world_size + request.rank])))
        position += request.batch_size
        yield keys


def _batches(dataset: Dataset[Any], keys: Iterator[list[Any]], request: DataRequest) -> Iterator[Batch]:
    on_gpu = request.device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch_sampler=_Endless(keys),
        num_workers=request.num_workers,
        collate_fn=_collate,
        pin_memory=on_gpu,
        # Else it draws from the default one, once more after a resume than without a stop.
        generator=torch.Generator(),
        worker_init_fn=_prepare_worker if request.num_workers else None,
    )
    for batch in loader:
        if isinstance(batch, Unreadable):
            raise WorkloadError(f"image {batch.path} cannot be read: {batch.reason}", "repair or remove it")
        images, labels = batch
        yield (
            images.to(request.device, non_blocking=on_gpu),
            labels.to(request.device, non_blocking=on_gpu),
        )


class _Endless:
    """A batch sampler that hands on an endless iterator."""

    def __init__(self, keys: Iterator[list[Any]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[Any]]:
        return self._keys


def _collate(items: list[Any]) -> Any:
    unreadable = next((item for item in items if isinstance(item, Unreadable)), None)
    if unreadable is not None:
        return unreadable
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.stack(labels)


def _prepare_worker(worker: int) -> None:
    """Make a worker process one that ends when its parent says so, or ends, and not before.

    It was forked with the parent's handlers, which count on threads that it has not. Ctrl-C reaches every
    process of the terminal: the parent still needs its workers for the step it is in.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = torch.multiprocessing.parent_process()
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
        if parent is not None and os.getppid() == 1 and parent.pid != 1:
            os._exit(1)
