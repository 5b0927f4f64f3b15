"""Batches of images: the same for the same seed, rank and step, whatever was before."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from data_requests import request
from entrypoint import arguments, run
from PIL import Image

from fastlaunch_train.data.batches import NO_LABEL
from fastlaunch_train.data.images import (
    ImageShape,
    class_patterns,
    held_out_images,
    image_batches,
    images_per_epoch,
    make_images,
)
from fastlaunch_train.workloads.contract import Batch
from fastlaunch_train.workloads.registry import WorkloadError

SHAPE = ImageShape(size=16, num_classes=4)
TRAIN = Path(__file__).resolve().parents[2] / "train"


def batches(source: str, number: int, **changes: int) -> list[Batch]:
    return list(itertools.islice(image_batches(SHAPE, request(source, **changes)), number))


def same(left: Batch, right: Batch) -> bool:
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of 4, 3 and 3 images, each of one colour and half black, so that a flip shows."""
    for label, count in enumerate((4, 3, 3)):
        (tmp_path / f"class-{label}").mkdir()
        for index in range(count):
            picture = Image.new("RGB", (40, 30))
            picture.paste((80 * label + 40, 20 * index + 10, 7), (0, 0, 20, 30))
            picture.save(tmp_path / f"class-{label}" / f"{index}.png")
    return tmp_path


@pytest.fixture
def sources(folder: Path) -> list[str]:
    return ["synthetic", "loader", f"folder:{folder}"]


def test_batches_have_the_shape_and_type_that_models_take(sources: list[str]) -> None:
    for source in sources:
        images, labels = batches(source, 1)[0]
        assert images.shape == (4, 3, 16, 16)
        assert images.dtype == torch.float32
        assert labels.shape == (4,)
        assert labels.dtype == torch.int64
        assert 0 <= labels.min() <= labels.max() < 4


def test_a_resumed_run_sees_the_batches_it_would_have_seen(sources: list[str]) -> None:
    for source in sources:
        # 12 batches of 4 are several epochs of the folder's 10 images.
        whole = batches(source, 12)
        assert all(map(same, whole[7:], batches(source, 5, first_step=8)))
        assert not same(whole[0], whole[1])


def test_seeds_and_ranks_see_different_images(sources: list[str]) -> None:
    for source in sources:
        first = batches(source, 1, world_size=2)[0]
        assert not torch.equal(first[0], batches(source, 1, world_size=2, seed=1)[0][0])
        assert not torch.equal(first[0], batches(source, 1, world_size=2, rank=1)[0][0])
        assert same(first, batches(source, 1, world_size=2)[0])


@pytest.mark.full
def test_workers_change_nothing(sources: list[str]) -> None:
    for source in sources[1:]:
        assert all(map(same, batches(source, 3), batches(source, 3, num_workers=1)))


def test_images_leave_the_default_generator_alone(sources: list[str]) -> None:
    # What a model draws from it, as for dropout, is the same whether or not the run was resumed.
    for source in sources:
        before = torch.get_rng_state()
        batches(source, 2)
        assert torch.equal(torch.get_rng_state(), before), source


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
    keys = [
        [image.flatten().abs().sum().item() for image, _ in images_of(f"folder:{folder}", 20)][half]
        for half in (slice(0, 10), slice(10, 20))
    ]
    assert len({round(key, 3) for key in keys[0]}) == 10
    assert sorted(map(round, keys[0])) == sorted(map(round, keys[1]))
    assert keys[0] != keys[1]


def test_ranks_share_an_epoch_without_overlap(folder: Path) -> None:
    seen = [
        {
            round(image.flatten().abs().sum().item(), 3)
            for image, _ in images_of(f"folder:{folder}", 5, rank=rank, world_size=2)
        }
        for rank in (0, 1)
    ]
    assert len(seen[0] | seen[1]) == 10


def test_labels_are_the_folders_in_order_and_about_half_of_the_images_are_flipped(folder: Path) -> None:
    flipped = []
    for image, label in images_of(f"folder:{folder}", 100):
        colour = image[0] * SHAPE.std[0] + SHAPE.mean[0]
        assert colour.max() * 255 == pytest.approx(80 * label + 40, abs=1.5)
        flipped.append(bool(colour[:, -1].mean() > colour[:, 0].mean()))
    assert 25 < sum(flipped) < 75


def images_of(source: str, number: int, **changes: int) -> Iterator[tuple[torch.Tensor, int]]:
    for images, labels in batches(source, number, batch_size=1, **changes):
        yield images[0], int(labels[0])


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
    assert len(whole) == 1024
    for changes in ({"batch_size": 100}, {"batch_size": 256, "seed": 3}):
        others = held_out("synthetic", **changes)
        assert all(
            torch.equal(a, b) and left == right for (a, left), (b, right) in zip(whole, others, strict=True)
        )
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[:9], held_out("loader")[:9], strict=True))
    keys = {image.sum().item() for image, _ in whole}
    assert len(keys) == 1024
    assert not keys & {image.sum().item() for image, _ in images_of("synthetic", 50)}


def test_ranks_share_what_is_held_out_in_equally_many_full_batches(folder: Path) -> None:
    validation = folder / "val"
    shutil.copytree(folder, folder / "train", ignore=shutil.ignore_patterns("val", "train"))
    shutil.copytree(folder / "train", validation)
    source = f"folder:{folder / 'train'}"
    alone = held_out(source, batch_size=10)
    batches_of_ranks = [
        list(held_out_images(SHAPE, request(source, rank=rank, world_size=2), "validation"))
        for rank in (0, 1)
    ]
    assert [[len(labels) for _, labels in found] for found in batches_of_ranks] == [[4, 4], [4, 4]]
    shared = [pair for rank in (0, 1) for pair in held_out(source, rank=rank, world_size=2)]
    assert len(alone) == len(shared) == 10
    assert sorted(keys_of(alone)) == sorted(keys_of(shared))
    assert {label for _, label in alone} == {0, 1, 2}
    # None of them is flipped: each is black on the right.
    assert all(image[0, :, 0].mean() > image[0, :, -1].mean() for image, _ in alone)


def keys_of(images: list[tuple[torch.Tensor, int]]) -> list[float]:
    return [round(image.sum().item(), 2) for image, _ in images]


def test_a_twentieth_of_a_folder_is_held_out_where_none_lies_beside(tmp_path: Path) -> None:
    for label in range(2):
        (tmp_path / f"class-{label}").mkdir()
        for index in range(25):
            picture = Image.new("RGB", (20, 20), (100 * label + 4 * index, 0, 0))
            picture.save(tmp_path / f"class-{label}" / f"{index}.png")
    source = f"folder:{tmp_path}"
    out = set(keys_of(held_out(source)))
    assert len(out) == 2 == len(set(keys_of(held_out(source, seed=1))) & out)
    assert images_per_epoch(SHAPE, source) == 48
    trained = set(keys_of(list(images_of(source, 48))))
    assert len(trained) == 48
    assert not trained & out
    assert images_per_epoch(SHAPE, "synthetic") is None
    assert list(held_out_images(SHAPE, request(source), "test")) == []


def test_a_class_that_is_validated_on_alone_is_named(folder: Path) -> None:
    shutil.copytree(folder, folder / "train", ignore=shutil.ignore_patterns("train", "val"))
    (folder / "val" / "class-9").mkdir(parents=True)
    Image.new("RGB", (20, 20)).save(folder / "val" / "class-9" / "0.png")
    with pytest.raises(WorkloadError, match="has the class class-9, which"):
        image_batches(SHAPE, request(f"folder:{folder / 'train'}"))


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
    for part in ("parts/train", "parts/val", "parts/test", "gap/class-0"):
        shutil.copytree(folder / "class-0", tmp_path / part)
    (tmp_path / "gap" / "class-1").mkdir()
    for name, words in (
        ("nowhere", "does not exist"),
        ("empty", "holds no image"),
        ("empty/class", "holds no image"),
        ("file", "is a file"),
        ("parts", "test and train and val"),
        ("gap", "class-1"),
    ):
        with pytest.raises(WorkloadError, match=words):
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
        env={**os.environ, "PYTHONPATH": str(TRAIN)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        try:
            worker = int(parent.stdout.readline())
            os.kill(worker, signal.SIGINT)
            for _ in range(8):
                parent.stdin.write("\n")
                parent.stdin.flush()
                assert parent.stdout.readline() == "next\n"
        finally:
            parent.kill()
    for _ in range(200):
        if not _alive(worker):
            break
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_workers_that_were_not_forked_read_images(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The entrypoint is here a forkserver's child, and so are its workers; elsewhere that is the default.
    argv = ["--steps", "2", "--data", f"folder:{folder}", "--num-workers", "1"]
    exit_code, output = run(arguments(tmp_path_factory.mktemp("run"), *argv, workload="vit-tiny"))
    assert exit_code == 0, output
