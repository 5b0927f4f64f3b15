"""Images that come through torch's DataLoader and its worker processes: random ones, or those of a folder."""

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.data.order import NO_LABEL, seed_of, share, shuffled
from fastlaunch_train.images import ImageShape, class_patterns, make_images
from fastlaunch_train.records.data_identity import DataIdentity, digest_of_files
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Batch, DataRequest

#: The part of a photograph's shorter side that the centre crop keeps, as in ImageNet evaluation: 224 of 256.
CROP_SHARE = 0.875
#: Of a folder without one to validate on, one image in so many is held out.
HELD_OUT_EVERY = 20
#: Folders of images to validate on, beside one to train on; and what else lies there.
_VALIDATION = ("val", "valid", "validation")
_PARTS = {"train", "test", *_VALIDATION}


def random_images(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """The synthetic task's images, made one by one in the worker processes."""
    keys = _numbered(request)
    return _batches(_RandomImages(shape, request.seed), keys, request)


def folder_images(path: str, shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """The images of PATH/CLASS/IMAGE to train on: resized, centre-cropped, flipped at random, normalised.

    Every epoch they are shuffled anew and dealt to the ranks, as `order.shuffled` says. Raises what
    `find_images` does; and, when the batch is asked for, WorkloadError for an image that cannot be read.
    """
    found = find_images(path, shape.num_classes)
    dataset = _FolderImages(found.train, shape, request.seed)
    return _batches(dataset, shuffled(len(found.train), request), request)


def held_out_folder_images(path: str, shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """The images that are held out, none of them flipped, as `order.share` deals them; errors as above."""
    found = find_images(path, shape.num_classes)
    return _batches(_HeldOutImages(found.held_out, shape), share(len(found.held_out), request), request)


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """Paths and class numbers of a folder's images: those to train on, and those held out."""

    train: Sequence[tuple[str, int]]
    held_out: Sequence[tuple[str, int]]


@lru_cache(maxsize=4)
def find_images(path_text: str, num_classes: int) -> FolderImages:
    """The images of PATH/CLASS/IMAGE, classes numbered in alphabetical order.

    Beside a folder called train that called val, valid or validation is held out. Else it is a twentieth of
    the images, chosen by their names, so that it stays the same whatever the seed.
    Raises WorkloadError for a folder that is missing, has no image, a class without one or more classes than
    the model, that holds parts of the data in place of classes, and for a class to validate on that is none
    to train on.
    """
    path = Path(path_text).expanduser()
    classes, samples = _images_of(path)
    if len(classes) > num_classes:
        raise WorkloadError(
            f"data folder {path} has {len(classes)} classes, and the model {num_classes}",
            "take a workload of at least as many classes",
        )
    empty = sorted(set(range(len(classes))) - {label for _, label in samples})
    if empty:
        raise WorkloadError(
            f"data folder {path} holds no image of class {classes[empty[0]]}",
            "put its images there, or remove the folder",
        )
    beside = _validation_beside(path)
    if beside is None:
        chosen = sorted(samples, key=lambda sample: seed_of("held-out", *Path(sample[0]).parts[-2:]))
        held_out = set(chosen[: len(samples) // HELD_OUT_EVERY])
        train = [sample for sample in samples if sample not in held_out]
        return FolderImages(train=train, held_out=sorted(held_out))
    names, found = _images_of(beside)
    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise WorkloadError(
            f"data folder {beside} has the class {unknown[0]}, which {path} has not",
            "classes to validate on are among those to train on",
        )
    return FolderImages(
        train=samples, held_out=[(file, classes.index(names[number])) for file, number in found]
    )


@lru_cache(maxsize=4)
def folder_identity(path: str, num_classes: int) -> DataIdentity:
    """What the images of `find_images` are, those held out included; names are CLASS/.../IMAGE.

    Raises OSError for an image that cannot be read.
    """
    found = find_images(path, num_classes)
    root = Path(path).expanduser()
    roots = {"train": root, "held out": _validation_beside(root) or root}
    # Text alone: of a million names, what `Path` and `os.path` make of each takes half a minute.
    files = {
        f"{part}/{file.removeprefix(str(roots[part])).lstrip(os.sep)}": file
        for part, samples in (("train", found.train), ("held out", found.held_out))
        for file, _ in samples
    }
    digest, covers = digest_of_files(files)
    return DataIdentity(digest=digest, covers=covers, num_samples=len(found.train))


def _images_of(path: Path) -> tuple[list[str], list[tuple[str, int]]]:
    prepare_torchvision()
    from torchvision.datasets import ImageFolder

    if not path.is_dir():
        raise WorkloadError(
            f"data folder {path} " + ("is a file" if path.exists() else "does not exist"),
            "give a folder that holds one folder of images per class",
        )
    try:
        found = ImageFolder(path, allow_empty=True)
    except FileNotFoundError:
        found = None
    if found is None or not found.samples:
        raise WorkloadError(f"data folder {path} holds no image", "images lie in PATH/CLASS/IMAGE")
    if "train" in found.classes and set(found.classes) <= _PARTS:
        # Else the model would learn which part an image lies in.
        raise WorkloadError(
            f"data folder {path} holds parts of the data, {' and '.join(found.classes)}, and no classes",
            f"give --data folder:{path / 'train'}; `val` beside it is held out",
        )
    return found.classes, found.samples


def _validation_beside(path: Path) -> Path | None:
    if path.name != "train":
        return None
    named = (path.parent / name for name in _VALIDATION)
    return next((folder for folder in named if folder.is_dir()), None)


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
        epoch, index = key
        flip = seed_of("flip", self._seed, epoch, index) % 2 == 1
        return _read(self._samples[index], self._shape, flip=flip)


class _HeldOutImages(Dataset[Any]):
    """The image of each index; without label, to fill up a batch, that of None."""

    def __init__(self, samples: Sequence[tuple[str, int]], shape: ImageShape) -> None:
        self._samples = samples
        self._shape = shape

    def __getitem__(self, index: int | None) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
        sample = (self._samples[0][0], NO_LABEL) if index is None else self._samples[index]
        return _read(sample, self._shape, flip=False)


def _read(
    sample: tuple[str, int], shape: ImageShape, *, flip: bool
) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
    from PIL import Image
    from torchvision.transforms import functional as transforms

    path, label = sample
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return Unreadable(path=path, reason=str(error) or type(error).__name__)
    picture = transforms.resize(picture, round(shape.size / CROP_SHARE))
    picture = transforms.center_crop(picture, [shape.size, shape.size])
    if flip:
        picture = transforms.hflip(picture)
    image = transforms.normalize(transforms.to_tensor(picture), list(shape.mean), list(shape.std))
    return image, torch.tensor(label)


def _numbered(request: DataRequest) -> Iterator[list[int]]:
    """This rank's share of all natural numbers, batch by batch: a global batch is a run of numbers."""
    for step in itertools.count(request.first_step):
        start = ((step - 1) * request.world_size + request.rank) * request.batch_size
        yield list(range(start, start + request.batch_size))


def _batches(dataset: Dataset[Any], keys: Iterator[list[Any]], request: DataRequest) -> Iterator[Batch]:
    on_gpu = request.device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch_sampler=_Once(keys),
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


class _Once:
    """A batch sampler that hands on an iterator, which may be endless."""

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
    """Make a worker process one that can read images, and ends when its parent says so, or ends, not before.

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
    # Where it was not forked but started anew, its parent's preparation is not its own.
    prepare_torchvision()
