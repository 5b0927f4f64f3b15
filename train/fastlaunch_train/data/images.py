"""Batches of images from three sources: made on the device, made by loader processes, or read from a folder.

Each holds some images out: synthetic images that no seed draws, and a folder's by `find_images`.
"""

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

from fastlaunch_train.data.batches import seed_of, share, shuffled
from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.records.data_identity import DataIdentity, digest_of_files
from fastlaunch_train.workloads.contract import NO_LABEL, Batch, DataRequest
from fastlaunch_train.workloads.registry import WorkloadError

#: The part of a photograph's shorter side that the centre crop keeps, as in ImageNet evaluation: 224 of 256.
CROP_SHARE = 0.875
#: One image in this many is held out of a folder that has none to validate on.
HELD_OUT_EVERY = 20
#: Names of validation folders beside one called train; and of all parts of the data, which are no classes.
_VALIDATION = ("val", "valid", "validation")
_PARTS = {"train", "test", *_VALIDATION}

#: Synthetic labels that are replaced by a random class, so that the loss has a floor above zero.
WRONG_LABELS = 0.1
#: Each class has a coarse pattern, this many cells a side. It is the same for every seed: seeds draw
#: different images of one task.
PATTERN_CELLS = 4
PATTERN_SEED = 20231115
PATTERN_STRENGTH = 1.0
#: Number of held-out synthetic images.
NUM_HELD_OUT = 1024
#: Every change of the images needs a new version: runs on different images are no repeats of each other.
SYNTHETIC = DataIdentity(generator="images", generator_version=1, seeded_by="seed, rank, step")
SYNTHETIC_LOADER = DataIdentity(generator="single images", generator_version=1, seeded_by="seed, number")


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """A model's input: square images of three channels, normalised by mean and standard deviation."""

    size: int  #: pixels a side
    num_classes: int
    # ImageNet's commonly published values.
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


def image_batches(shape: ImageShape, request: DataRequest) -> Iterator[Batch]:
    """Return endless batches on the device: images (batch, 3, size, size), fp32, and labels (batch,), int64.

    A rank's batch of step n depends only on seed, rank, world size, batch size and n. Images of a folder are
    resized, centre-cropped, flipped at random and normalised, and dealt as `batches.shuffled` says.
    Raises WorkloadError for an unknown source, a folder that cannot be used, and, with its batch, for an
    image that cannot be read.
    """
    if request.source == "synthetic":
        return _synthetic(shape, request)
    if request.source == "loader":
        return _batches(_SyntheticImages(shape, request.seed), _numbers(request), request)
    train = find_images(_folder(request.source), shape.num_classes).train
    keys = (
        [(index, seed_of("flip", request.seed, epoch, index) % 2 == 1) for epoch, index in batch]
        for batch in shuffled(len(train), request)
    )
    return _batches(_FolderImages(train, shape), keys, request)


def held_out_images(shape: ImageShape, request: DataRequest, split: str) -> Iterator[Batch]:
    """Return this rank's validation batches, dealt as `batches.share` says; none for another split.

    They are as those of `image_batches`, without flips. Samples that fill up a batch are labelled `NO_LABEL`.
    """
    if split != "validation":
        return iter(())
    if request.source in ("synthetic", "loader"):
        return _synthetic_held_out(shape, request)
    held_out = find_images(_folder(request.source), shape.num_classes).held_out
    keys = ([(index, False) for index in batch] for batch in share(len(held_out), request))
    return _batches(_FolderImages(held_out, shape), keys, request)


def images_per_epoch(shape: ImageShape, source: str) -> int | None:
    """Return the number of a folder's training images; None for synthetic images, which have no end."""
    if source in ("synthetic", "loader"):
        return None
    return len(find_images(_folder(source), shape.num_classes).train)


def images_identity(shape: ImageShape, source: str) -> DataIdentity:
    """Return the identity of a source's images; a folder's is by names and contents or sizes."""
    synthetic = {"synthetic": SYNTHETIC, "loader": SYNTHETIC_LOADER}
    return synthetic.get(source) or folder_identity(_folder(source), shape.num_classes)


def class_patterns(num_classes: int, device: torch.device) -> torch.Tensor:
    """Return the pattern of each class: (classes, 3, cells, cells), the same on every device."""
    generator = torch.Generator().manual_seed(PATTERN_SEED)
    patterns = torch.randn(num_classes, 3, PATTERN_CELLS, PATTERN_CELLS, generator=generator)
    return (PATTERN_STRENGTH * patterns).to(device)


def make_images(
    patterns: torch.Tensor, num_images: int, size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (num_images, 3, size, size), the patterns of their classes in unit noise, and labels.

    A share WRONG_LABELS of the labels is drawn anew, from all classes.
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
        # Images are made one by one, so that the batch size does not change them.
        for number in numbers:
            generator.manual_seed(seed_of("held-out", PATTERN_SEED, number or 0))
            image, label = make_images(patterns, 1, shape.size, generator)
            made.append((image, torch.full_like(label, NO_LABEL) if number is None else label))
        images, labels = zip(*made, strict=True)
        yield torch.cat(images), torch.cat(labels)


def _folder(source: str) -> str:
    kind, _, path = source.partition(":")
    if kind == "folder" and path:
        return path
    raise WorkloadError(
        f"unknown data source {source!r}", "known: synthetic, loader, folder:PATH (PATH/CLASS/IMAGE)"
    )


@dataclass(frozen=True, kw_only=True)
class FolderImages:
    """A folder's images, each a path and the number of its class."""

    train: Sequence[tuple[str, int]]
    held_out: Sequence[tuple[str, int]]


@lru_cache(maxsize=4)
def find_images(path_text: str, num_classes: int) -> FolderImages:
    """Return the images of PATH/CLASS/IMAGE, classes numbered in alphabetical order.

    The held-out images lie in val, valid or validation beside a folder called train; without one, they are a
    twentieth of the images, chosen by their names and so the same for every seed.
    Raises WorkloadError for a folder that does not exist, has no images, a class without images or more
    classes than the model, or holds parts of the data instead of classes, and for a class to validate on
    that is not one to train on.
    """
    path = Path(path_text).expanduser()
    classes, samples = _images_of(path)
    if len(classes) > num_classes:
        raise WorkloadError(
            f"data folder {path} has {len(classes)} classes, and the model {num_classes}",
            "use a workload with at least as many classes",
        )
    validation = _validation_folder(path)
    if validation is None:
        ranked = sorted(samples, key=lambda sample: seed_of("held-out", *Path(sample[0]).parts[-2:]))
        held_out = set(ranked[: len(samples) // HELD_OUT_EVERY])
        train = [sample for sample in samples if sample not in held_out]
        return FolderImages(train=train, held_out=sorted(held_out))
    names, validated = _images_of(validation, allow_empty=True)
    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise WorkloadError(
            f"data folder {validation} has the class {unknown[0]}, which {path} does not have",
            "validate on classes that are trained on",
        )
    return FolderImages(
        train=samples, held_out=[(file, classes.index(names[number])) for file, number in validated]
    )


@lru_cache(maxsize=4)
def folder_identity(path: str, num_classes: int) -> DataIdentity:
    """Return the identity of the images of `find_images`, held-out ones included, named CLASS/.../IMAGE.

    Raises OSError for an image that cannot be read.
    """
    images = find_images(path, num_classes)
    root = Path(path).expanduser()
    roots = {"train": root, "held out": _validation_folder(root) or root}
    # Names are plain strings: `Path` and `os.path` take half a minute for a million.
    files = {
        f"{part}/{file.removeprefix(str(roots[part])).lstrip(os.sep)}": file
        for part, samples in (("train", images.train), ("held out", images.held_out))
        for file, _ in samples
    }
    digest, covers = digest_of_files(files)
    return DataIdentity(digest=digest, covers=covers, num_samples=len(images.train))


def _images_of(path: Path, *, allow_empty: bool = False) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the classes of a folder, and (path, class's number) of each image. Raises WorkloadError.

    allow_empty: a class may be without images.
    """
    prepare_torchvision()
    from torchvision.datasets import ImageFolder

    try:
        folder = ImageFolder(path, allow_empty=allow_empty)
    except OSError as error:
        raise WorkloadError(
            f"data folder {path} cannot be used: {error}", "give a folder of images in PATH/CLASS/IMAGE"
        ) from None
    if "train" in folder.classes and set(folder.classes) <= _PARTS:
        # The model would learn which part of the data an image is in.
        raise WorkloadError(
            f"data folder {path} holds parts of the data, {' and '.join(folder.classes)}, and no classes",
            f"give --data folder:{path / 'train'}; `val` beside it is held out",
        )
    return folder.classes, folder.samples


def _validation_folder(path: Path) -> Path | None:
    if path.name != "train":
        return None
    beside = (path.parent / name for name in _VALIDATION)
    return next((folder for folder in beside if folder.is_dir()), None)


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """An image that could not be read. Returned by a worker: an exception would arrive as a traceback."""

    path: str
    reason: str


class _SyntheticImages(Dataset[Any]):
    """The synthetic image of each number."""

    def __init__(self, shape: ImageShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._patterns = class_patterns(shape.num_classes, torch.device("cpu"))

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed_of("loader", self._seed, number))
        images, labels = make_images(self._patterns, 1, self._shape.size, generator)
        return images[0], labels[0]


class _FolderImages(Dataset[Any]):
    """The image of each (index, whether to flip it); index None is an unlabelled image, to fill a batch."""

    def __init__(self, samples: Sequence[tuple[str, int]], shape: ImageShape) -> None:
        self._samples = samples
        self._shape = shape

    def __getitem__(self, key: tuple[int | None, bool]) -> tuple[torch.Tensor, torch.Tensor] | Unreadable:
        from PIL import Image
        from torchvision.datasets.folder import default_loader
        from torchvision.transforms import functional as transforms

        index, is_flipped = key
        path, label = (self._samples[0][0], NO_LABEL) if index is None else self._samples[index]
        try:
            picture = default_loader(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            return Unreadable(path=path, reason=str(error) or type(error).__name__)
        shape = self._shape
        picture = transforms.resize(picture, round(shape.size / CROP_SHARE))
        picture = transforms.center_crop(picture, [shape.size, shape.size])
        if is_flipped:
            picture = transforms.hflip(picture)
        image = transforms.normalize(transforms.to_tensor(picture), list(shape.mean), list(shape.std))
        return image, torch.tensor(label)


def _numbers(request: DataRequest) -> Iterator[list[int]]:
    """Yield this rank's share of all natural numbers: a global batch is a range of numbers."""
    for step in itertools.count(request.first_step):
        start = ((step - 1) * request.world_size + request.rank) * request.batch_size
        yield list(range(start, start + request.batch_size))


def _batches(dataset: Dataset[Any], keys: Iterator[list[Any]], request: DataRequest) -> Iterator[Batch]:
    on_gpu = request.device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch_sampler=keys,
        num_workers=request.num_workers,
        collate_fn=_collate,
        pin_memory=on_gpu,
        # The loader would draw a seed from the default generator, and after a resume once more than without.
        generator=torch.Generator(),
        worker_init_fn=_prepare_worker if request.num_workers else None,
    )
    for batch in loader:
        if isinstance(batch, Unreadable):
            raise WorkloadError(f"image {batch.path} cannot be read: {batch.reason}", "repair or remove it")
        images, labels = batch
        yield (images.to(request.device, non_blocking=on_gpu), labels.to(request.device, non_blocking=on_gpu))


def _collate(items: list[Any]) -> Any:
    unreadable = next((item for item in items if isinstance(item, Unreadable)), None)
    if unreadable is not None:
        return unreadable
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.stack(labels)


def _prepare_worker(worker: int) -> None:
    """Set up a worker process to read images, and to end only when its parent says so or ends.

    A forked worker has the parent's signal handlers, which need threads that it does not have. Ctrl-C reaches
    every process of a terminal, and the parent needs its workers until the end of its step.
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
    # A worker that was spawned, not forked, needs to do this itself.
    prepare_torchvision()
