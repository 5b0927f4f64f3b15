"""What tells the data of two runs apart: contents, names, generators, tokenizers; and what does not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from entrypoint import TINY, arguments, record, run
from PIL import Image

from fastlaunch_train.data import corpus, images, reviews
from fastlaunch_train.data.images import ImageShape, images_identity
from fastlaunch_train.data.text import TextSource
from fastlaunch_train.data.tokens import ByteTokens, WordTokens
from fastlaunch_train.records import data_identity
from fastlaunch_train.records.data_identity import (
    CONTENTS,
    NAMES_AND_SIZES,
    PIECES,
    digest_of_file,
    digest_of_files,
    user_workload_identity,
)

SHAPE = ImageShape(size=8, num_classes=3)


def text_source() -> TextSource:
    return TextSource(
        workload="toy",
        synthetic_batches=lambda request: corpus.synthetic_batches(256, 8, request),
        synthetic_splits=lambda: corpus.synthetic_splits(256, 8),
        synthetic_identity=corpus.SYNTHETIC,
        readers={"file": lambda path: corpus.read_text(path, ByteTokens(), 8)},
    )


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_text_is_known_by_its_contents_wherever_it_lies(tmp_path: Path) -> None:
    first = written(tmp_path, "a/one.txt", "the cat sat on the mat\n" * 9)
    again = written(tmp_path, "b/two.txt", first.read_text())
    other = written(tmp_path, "c/one.txt", first.read_text().replace("cat", "dog", 1))
    one, two, three = (text_source().identity(f"file:{path}") for path in (first, again, other))
    assert one == two
    assert one.digest != three.digest
    assert (one.covers, one.num_samples, one.tokenizer, one.generator) == (CONTENTS, 23, "bytes", None)


def test_reviews_are_known_by_texts_and_classes_in_their_order() -> None:
    def digest(texts: list[str], classes: list[int]) -> str:
        return reviews.Reviews(texts=texts, classes=classes).digest

    known = digest(["good", "bad"], [1, 0])
    assert known == digest(["good", "bad"], [1, 0])
    # Parts do not run into each other.
    for texts, classes in ((["good", "bad"], [1, 1]), (["bad", "good"], [0, 1]), (["goodb", "ad"], [1, 0])):
        assert digest(texts, classes) != known


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of more than 10,000 bytes, and folders of more than 100 files, count as large."""
    monkeypatch.setattr(data_identity, "MOST_BYTES", 10_000)
    monkeypatch.setattr(data_identity, "PIECE_BYTES", 10)
    monkeypatch.setattr(data_identity, "MOST_FILES", 100)


@pytest.mark.usefixtures("small_limits")
def test_a_change_at_either_end_of_a_large_file_is_seen_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    digests = set()
    for content in (b"-" * 10_001, b"x" + b"-" * 10_000, b"-" * 10_000 + b"x", b"-" * 10_002):
        path.write_bytes(content)
        digest, covers = digest_of_file(path)
        assert covers == PIECES
        digests.add(digest)
    assert len(digests) == 4
    # Between the pieces nothing is read.
    path.write_bytes(b"-" * 100 + b"x" + b"-" * 9_900)
    assert digest_of_file(path)[0] in digests
    path.write_bytes(b"-" * 10_000)
    assert digest_of_file(path)[1] == CONTENTS


@pytest.mark.usefixtures("small_limits")
def test_few_small_files_are_read_and_larger_ones_only_looked_at(tmp_path: Path) -> None:
    one, two = str(written(tmp_path, "1", "one")), str(written(tmp_path, "2", "two"))
    known = digest_of_files({"a": one, "b": two})
    assert known[1] == CONTENTS
    assert digest_of_files({"b": two, "a": one}) == known
    assert digest_of_files({"a": two, "b": one})[0] != known[0]
    assert digest_of_files({"a": one, "c": two})[0] != known[0]
    os.truncate(two, 10_000)
    large = digest_of_files({"a": one, "b": two})
    assert large[1] == NAMES_AND_SIZES
    os.truncate(two, 10_001)
    assert digest_of_files({"a": one, "b": two})[0] != large[0]


@pytest.mark.usefixtures("small_limits")
def test_of_a_folder_of_many_files_some_sizes_and_all_names_count(tmp_path: Path) -> None:
    # Files are there only where every third is looked at.
    files = {f"{number:03}": str(tmp_path / f"{number:03}") for number in range(201)}
    for name in list(files)[::3]:
        written(tmp_path, name, "text")
    digest, covers = digest_of_files(files)
    assert covers == NAMES_AND_SIZES
    files["001, renamed"] = files.pop("001")
    assert digest_of_files(files)[0] != digest


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)


def test_images_are_known_by_their_place_and_contents_and_held_out_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str, change: Callable[[Path], None] = lambda path: None) -> str:
        root = tmp_path / name
        for number in range(4):
            picture(root / "train" / ("cat", "dog")[number % 2] / f"{number}.png", number)
        picture(root / "val" / "cat" / "9.png", 9)
        change(root)
        return f"folder:{root / 'train'}"

    known = images_identity(SHAPE, folder("known"))
    assert (known.covers, known.num_samples, known.generator) == (CONTENTS, 4, None)
    assert images_identity(SHAPE, folder("elsewhere")) == known
    monkeypatch.chdir(tmp_path / "known")
    assert images_identity(SHAPE, "folder:train/") == known
    for number, change in enumerate(
        (
            lambda root: picture(root / "train" / "cat" / "0.png", 77),
            lambda root: picture(root / "val" / "cat" / "9.png", 77),
            lambda root: (root / "train" / "cat" / "0.png").rename(root / "train" / "dog" / "0.png"),
            lambda root: (root / "val" / "cat" / "9.png").unlink() or picture(root / "val/dog/9.png", 9),
        )
    ):
        assert images_identity(SHAPE, folder(f"other-{number}", change)).digest != known.digest


def test_a_workload_of_the_users_own_is_known_by_its_file_and_what_data_names(tmp_path: Path) -> None:
    own, text = written(tmp_path, "my.py", "a = 1\n"), written(tmp_path, "data/t.txt", "text")
    known = user_workload_identity(f"{own}:build", "synthetic")
    assert known.digest is None
    assert known.generator == f"own {digest_of_file(own)[0]}"
    read = [
        user_workload_identity(f"{own}:build", source) for source in (f"file:{text}", f"folder:{text.parent}")
    ]
    assert all(each.digest and each.covers == CONTENTS for each in read)
    # What such a name means is the workload's own business.
    assert user_workload_identity(f"{own}:build", "file:s3-key") == known
    own.write_text("a = 2\n")
    assert user_workload_identity(f"{own}:build", "synthetic") != known


def test_a_folder_of_links_is_known_by_what_they_lead_to(tmp_path: Path) -> None:
    own = written(tmp_path, "my.py", "")
    digests = set()
    for text in ("one", "other"):
        lies = written(tmp_path, f"lies/{text}/1.txt", text).parent
        (tmp_path / text).mkdir()
        (tmp_path / text / "cat").symlink_to(lies)
        (tmp_path / text / "back").symlink_to(tmp_path / text)
        digests.add(user_workload_identity(f"{own}:build", f"folder:{tmp_path / text}").digest)
    assert len(digests) == 2


def test_tokenizers_are_known_by_what_they_make_of_a_text() -> None:
    texts = ["the cat", "the dog"]
    assert WordTokens(texts, 9).identity == WordTokens(texts[::-1], 9).identity
    assert len({WordTokens(texts, 9).identity, WordTokens(texts, 6).identity, ByteTokens().identity}) == 3


def test_generators_still_make_what_their_versions_made() -> None:
    """Who changes what is made up gives it another version, or runs on other data would be pooled."""
    language = corpus.language(256)
    assert corpus.SYNTHETIC.generator_version == 1
    assert (int(language.lexicon.sum()), len(language.followers)) == (16_535, 16)
    found = reviews.synthetic_splits(256, 16)["validation"]
    assert reviews.SYNTHETIC.generator_version == 1
    assert found.classes is not None
    assert (int(found.tokens.sum()), int(found.classes.sum())) == (750_674, 497)
    patterns = images.class_patterns(3, torch.device("cpu"))
    made, labels = images.make_images(patterns, 4, 8, torch.Generator().manual_seed(1))
    assert images.SYNTHETIC.generator_version == images.SYNTHETIC_LOADER.generator_version == 1
    assert float(made.sum()) == pytest.approx(124.7565, abs=1e-3)
    assert labels.tolist() == [1, 2, 0, 2]


def test_the_header_says_what_was_trained_on_and_no_path(tmp_path: Path) -> None:
    secret = written(tmp_path / "home-of-the-user", "text.txt", "text")
    exit_code, output = run(arguments(tmp_path / "out", "--data", f"file:{secret}"))
    assert exit_code == 0, output
    header = record(tmp_path / "out").header
    assert header["data"] == "file"
    assert header["data_identity"] == user_workload_identity(f"{TINY}:build", f"file:{secret}").to_record()
    assert header["workload"]["model_identity"] is None
    assert len(header["data_identity"]["digest"]) == data_identity.DIGITS
    assert "home-of-the-user" not in str(header)


def test_the_header_of_a_run_that_fails_before_has_no_identity(tmp_path: Path) -> None:
    exit_code, output = run(arguments(tmp_path, "--batch-size", "3", "--set", "grad_accumulation=2"))
    assert exit_code == 2, output
    assert record(tmp_path).header["data_identity"] is None
