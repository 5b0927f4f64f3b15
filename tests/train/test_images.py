"""Batches of images: the same for the same seed, rank and step, whatever was before."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from data_requests import request
from entrypoint import ROOT, trained
from PIL import Image

from fastlaunch_train.data.images import (
    ImageShape,
    class_patterns,
    find_images,
    held_out_images,
    image_batches,
    images_per_epoch,
    make_images,
)
from fastlaunch_train.workloads.contract import NO_LABEL, Batch
from fastlaunch_train.workloads.registry import WorkloadError

SHAPE = ImageShape(size=16, num_classes=4)


def batches(source: str, number: int, **changes: int) -> list[Batch]:
    return list(itertools.islice(image_batches(SHAPE, request(source, **changes)), number))


def same(left: Batch, right: Batch) -> bool:
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def images_of(source: str, number: int, **changes: int) -> list[tuple[torch.Tensor, int]]:
    found = batches(source, number, batch_size=1, **changes)
    return [(images[0], int(labels[0])) for images, labels in found]


def keys_of(images: list[tuple[torch.Tensor, int]]) -> list[float]:
    """What tells images apart, flipped or not."""
    return [round(image.double().sum().item(), 2) for image, _ in images]


def make_folder(path: Path, counts: tuple[int, ...]) -> Path:
    """Make so many images of each class, each of one colour and half black, so that a flip shows."""
    for label, count in enumerate(counts):
        (path / f"class-{label}").mkdir(parents=True)
        for index in range(count):
            picture = Image.new("RGB", (40, 30))
            picture.paste((80 * label + 40, 8 * index + 10, 7), (0, 0, 20, 30))
            picture.save(path / f"class-{label}" / f"{index}.png")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "images", (4, 3, 3))


@pytest.fixture(params=["synthetic", "loader", "folder"])
def source(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"folder:{folder}" if request.param == "folder" else str(request.param)


def test_batches_depend_on_seed_rank_and_step_alone(source: str) -> None:
    default_generator = torch.get_rng_state()
    # 12 batches of 4 are several epochs of the folder's 10 images.
    whole = batches(source, 12)
    images, labels = whole[0]
    assert (images.shape, images.dtype) == ((4, 3, 16, 16), torch.float32)
    assert (labels.shape, labels.dtype) == ((4,), torch.int64)
    assert 0 <= labels.min() <= labels.max() < 4
    assert all(map(same, whole[7:], batches(source, 5, first_step=8)))
    assert not same(whole[0], whole[1])
    first = batches(source, 1, world_size=2)[0]
    assert same(first, batches(source, 1, world_size=2)[0])
    for changes in ({"seed": 1}, {"rank": 1}):
        assert not torch.equal(first[0], batches(source, 1, world_size=2, **changes)[0][0])
    # What a model draws from it, as for dropout, is the same whether or not the run was resumed.
    assert torch.equal(torch.get_rng_state(), default_generator)


@pytest.mark.full
def test_workers_change_nothing(folder: Path) -> None:
    for source in ("loader", f"folder:{folder}"):
        assert all(map(same, batches(source, 3), batches(source, 3, num_workers=1)))


def test_images_are_their_class_in_unit_noise() -> None:
    patterns = class_patterns(4, torch.device("cpu"))
    images, labels = make_images(patterns, 4000, 16, torch.Generator().manual_seed(1))
    distances = torch.stack(
        [
            (images - torch.nn.functional.interpolate(p[None], size=16)).pow(2).mean((1, 2, 3))
            for p in patterns
        ]
    )
    assert distances.min(0).values.mean() == pytest.approx(1.0, abs=0.01)
    # A tenth is drawn anew, and a quarter of that hits the right class again.
    wrong = (distances.argmin(0) != labels).double().mean()
    assert wrong == pytest.approx(0.1 * 0.75, abs=0.012)
    assert torch.bincount(labels).min() > 900


def test_an_epoch_of_a_folder_has_every_image_once_and_the_next_another_order(folder: Path) -> None:
    keys = keys_of(images_of(f"folder:{folder}", 20))
    assert len(set(keys[:10])) == 10
    assert sorted(keys[:10]) == sorted(keys[10:])
    assert keys[:10] != keys[10:]


def test_labels_are_the_folders_in_order_and_about_half_of_the_images_are_flipped(folder: Path) -> None:
    flipped = []
    for image, label in images_of(f"folder:{folder}", 100):
        colour = image[0] * SHAPE.std[0] + SHAPE.mean[0]
        assert colour.max() * 255 == pytest.approx(80 * label + 40, abs=1.5)
        flipped.append(bool(colour[:, -1].mean() > colour[:, 0].mean()))
    assert 25 < sum(flipped) < 75


def held_out(source: str, **changes: int) -> list[tuple[torch.Tensor, int]]:
    """Images and labels of all batches, what fills them up left out."""
    found = held_out_images(SHAPE, request(source, **changes), "validation")
    return [
        (image, int(label))
        for images, labels in found
        for image, label in zip(images, labels, strict=True)
        if label != NO_LABEL
    ]


def test_made_up_images_are_held_out_alike_for_every_seed_and_batch_size_and_none_is_trained_on() -> None:
    whole = held_out("synthetic", batch_size=256)
    others = held_out("loader", batch_size=100, seed=3)
    assert len(set(keys_of(whole))) > 1000 == len(whole) - 24
    assert all(torch.equal(a[0], b[0]) and a[1] == b[1] for a, b in zip(whole, others, strict=True))
    assert not any(torch.equal(image, out) for image, _ in images_of("synthetic", 50) for out, _ in whole)


def test_ranks_share_what_lies_beside_the_folder_in_equally_many_full_batches(tmp_path: Path) -> None:
    train = make_folder(tmp_path / "train", (4, 3, 3))
    validation = Path(shutil.copytree(train, tmp_path / "val"))
    source = f"folder:{train}"
    alone = held_out(source, batch_size=10)
    ranks = [{"rank": rank, "world_size": 2} for rank in (0, 1)]
    for rank in ranks:
        found = held_out_images(SHAPE, request(source, **rank), "validation")
        assert [len(labels) for _, labels in found] == [4, 4]
    shared = [pair for rank in ranks for pair in held_out(source, **rank)]
    assert sorted(keys_of(alone)) == sorted(keys_of(shared))
    assert [label for _, label in alone] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    # None of them is flipped: each is black on the right.
    assert all(image[0, :, 0].mean() > image[0, :, -1].mean() for image, _ in alone)
    (validation / "class-2").rename(validation / "class-9")
    find_images.cache_clear()
    with pytest.raises(WorkloadError, match="class-9"):
        image_batches(SHAPE, request(source))


def test_a_twentieth_of_a_folder_is_held_out_where_none_lies_beside(tmp_path: Path) -> None:
    source = f"folder:{make_folder(tmp_path / 'images', (25, 25))}"
    out = set(keys_of(held_out(source)))
    assert len(out) == 2
    assert out == set(keys_of(held_out(source, seed=1)))
    assert images_per_epoch(SHAPE, source) == 48
    trained = set(keys_of(images_of(source, 48)))
    assert len(trained) == 48
    assert not trained & out
    assert images_per_epoch(SHAPE, "synthetic") is None
    assert list(held_out_images(SHAPE, request(source), "test")) == []


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_unreadable_image_is_named(folder: Path, num_workers: int) -> None:
    path = folder / "class-0" / "0.png"
    whole = path.read_bytes()
    for damaged in (b"not an image", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(WorkloadError, match=r"0\.png cannot be read"):
            batches(f"folder:{folder}", 4, num_workers=num_workers)


def test_folders_that_cannot_be_used_are_refused_before_the_first_batch(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "class").mkdir(parents=True)
    (tmp_path / "file").touch()
    for part in ("parts/train", "parts/val", "gap/class-0"):
        shutil.copytree(folder / "class-0", tmp_path / part)
    (tmp_path / "gap" / "class-1").mkdir()
    for name, word in (
        ("nowhere", "No such file"),
        ("empty", "no valid file"),
        ("empty/class", "any class folder"),
        ("file", "Not a directory"),
        ("parts", "train and val"),
        ("gap", "class-1"),
    ):
        with pytest.raises(WorkloadError, match=word):
            image_batches(SHAPE, request(f"folder:{tmp_path / name}"))
    with pytest.raises(WorkloadError, match="the model 2"):
        image_batches(ImageShape(size=16, num_classes=2), request(f"folder:{folder}"))
    for source in ("folder:", "random"):
        with pytest.raises(WorkloadError, match="unknown data source"):
            image_batches(SHAPE, request(source))


_PARENT = """
import signal, sys, torch
from fastlaunch_train.data.images import ImageShape, image_batches
from fastlaunch_train.workloads.contract import DataRequest
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
request = DataRequest(source="loader", batch_size=2, seed=0, rank=0, world_size=1,
                      device=torch.device("cpu"), num_workers=1, first_step=1)
batches = image_batches(ImageShape(size=16, num_classes=4), request)
next(batches)
import multiprocessing
print(multiprocessing.active_children()[0].pid, flush=True)
for line in sys.stdin:
    next(batches)
    print("next", flush=True)
"""


@pytest.mark.full
def test_workers_outlive_ctrl_c_and_die_with_their_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT],
        env={**os.environ, "PYTHONPATH": str(ROOT / "train")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdin is not None and parent.stdout is not None
        try:
            worker = int(parent.stdout.readline())
            os.kill(worker, signal.SIGINT)
            for _ in range(8):
                parent.stdin.write("\n")
                parent.stdin.flush()
                assert parent.stdout.readline() == "next\n"
        finally:
            parent.kill()
    deadline = time.monotonic() + 10
    while _alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_workers_that_were_not_forked_read_images(folder: Path, tmp_path: Path) -> None:
    """The entrypoint is here a forkserver's child, and so are its workers; elsewhere that is the default."""
    more = ("--steps", "2", "--data", f"folder:{folder}", "--num-workers", "1")
    trained(tmp_path / "out", *more, workload="vit-tiny")
