"""Reviews: the IMDB folder, CSV files, how they are split, and the made-up ones."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fastlaunch_train.data import reviews
from fastlaunch_train.data.reviews import END, NOT, PADDING, START
from fastlaunch_train.data.text import Sequences, batch_of
from fastlaunch_train.data.tokens import WordTokens
from fastlaunch_train.workloads.contract import DataRequest
from fastlaunch_train.workloads.registry import WorkloadError

VOCABULARY, LENGTH = 256, 32


@pytest.fixture
def acl_imdb(tmp_path: Path) -> Path:
    """Three good and three bad reviews in each of train and test, and one without label."""
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            folder = tmp_path / "aclImdb" / part / label
            folder.mkdir(parents=True)
            for number in range(3):
                (folder / f"{number}_8.txt").write_text(f"A {label} film of {part}, {number}.")
    (tmp_path / "aclImdb" / "train" / "unsup").mkdir()
    (tmp_path / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("unlabelled")
    return tmp_path / "aclImdb"


def test_imdbs_folder_is_read_whole(acl_imdb: Path) -> None:
    for path, number in ((acl_imdb, 12), (acl_imdb / "train", 6)):
        found = reviews.read_folder(str(path))
        assert len(found.texts) == number
        for text, label in zip(found.texts, found.classes, strict=True):
            assert f" {('neg', 'pos')[label]} " in text


@pytest.mark.parametrize(
    "lines",
    [
        'review,sentiment\n"Good, very\ngood",positive\nBad,negative\n',
        ',text,label\n0,"Good, very\ngood",1\n1,Bad,0\n',
    ],
)
def test_both_csv_files_are_read(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "reviews.csv"
    path.write_text(lines, encoding="utf-8-sig")
    found = reviews.read_csv(str(path))
    assert (list(found.texts), list(found.classes)) == (["Good, very\ngood", "Bad"], [1, 0])


def test_50000_reviews_are_split_as_in_the_experiment_and_others_in_proportion() -> None:
    for number, sizes in ((50_000, (35_000, 5_000, 10_000)), (1003, (703, 100, 200)), (10, (7, 1, 2))):
        whole = reviews.Reviews(texts=[str(i) for i in range(number)], classes=[i % 2 for i in range(number)])
        split = reviews.split_reviews(whole)
        assert tuple(len(split[name].texts) for name in ("train", "validation", "test")) == sizes
        assert sorted(itertools.chain(*(part.texts for part in split.values())), key=int) == whole.texts
        assert all(
            int(text) % 2 == label
            for part in split.values()
            for text, label in zip(part.texts, part.classes, strict=True)
        )
    again = reviews.split_reviews(whole)
    assert again == split


def test_reviews_are_cut_off_and_padded() -> None:
    words = WordTokens(["a b c d e"], vocabulary=50)
    found = reviews.as_sequences(reviews.Reviews(texts=["a b", "a b c d e"], classes=[1, 0]), words, 5)
    a, b, c = (int(word[1]) for word in words.encode(["a", "b", "c"]))
    assert found.tokens.tolist() == [
        [words.start, a, b, words.end, words.padding],
        [words.start, a, b, c, words.end],
    ]
    assert found.lengths is not None
    assert found.lengths.tolist() == [4, 5]
    batch = batch_of(found, torch.device("cpu"), torch.tensor([False, True]))
    assert batch["mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    assert batch["labels"].tolist() == [1, -100]


class NoTokens:
    """A tokenizer that adds no special tokens: of an empty text it makes nothing."""

    vocabulary, padding, identity = 256, 9, "none"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        return [torch.tensor(list(text.strip().encode())[:longest], dtype=torch.int32) for text in texts]


def test_a_review_without_a_token_has_something_to_attend_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        found = reviews.as_sequences(
            reviews.Reviews(texts=["", " \n", "a"], classes=[1, 0, 1]), NoTokens(), 3
        )
    assert found.tokens.tolist() == [[9, 9, 9], [9, 9, 9], [97, 9, 9]]
    assert batch_of(found, torch.device("cpu"))["mask"].tolist() == [[1, 0, 0]] * 3
    assert "2 of 3 reviews have no token" in caplog.text


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path, acl_imdb: Path) -> None:
    for text in (acl_imdb / "train" / "neg").iterdir():
        text.unlink()
    (acl_imdb / "test" / "pos" / "0_8.txt").write_bytes(b"\xff")
    (tmp_path / "a.txt").touch()
    for name, words in (
        ("nowhere", "does not exist"),
        ("aclImdb/train", "no review in neg$"),
        (".", "no review in neg and pos"),
        ("aclImdb", r"0_8\.txt is not UTF-8"),
        ("a.txt", "is a file"),
    ):
        with pytest.raises(WorkloadError, match=words):
            reviews.read_folder(str(tmp_path / name))
    with pytest.raises(WorkloadError, match="9 reviews"):
        reviews.split_reviews(reviews.Reviews(texts=["x"] * 9, classes=[0] * 9))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no CSV file"),
        (b"", "is empty"),
        (b"review,stars\nx,1\n", "review, stars"),
        (b"text,label\nx,1\ny,7\n", "line 3: label is '7'"),
        (b"text,label\nx\n", "line 2: label is ''"),
        (b"label,text\n1,x\n0,y, z\n", "line 3 has more values"),
        (b'text,label\n"' + b"x" * 2**18, "cannot be read: field"),
        (b"text,label\n", "no review"),
        (b"text,label\nx,1\ny,pos\n", "good reviews"),
        (b"text,label\n,1\n ,0\n", "text is empty"),
        (b"text,label\n\xff,1\n", "utf-8"),
    ],
)
def test_csv_files_that_cannot_be_used_are_refused(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "a.csv"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(WorkloadError, match=words):
        reviews.read_csv(str(path))


def synthetic(number: int = 4000) -> Sequences:
    return reviews.write_reviews(number, VOCABULARY, LENGTH, torch.Generator().manual_seed(1))


def judged(texts: Sequences) -> torch.Tensor:
    """What counting praise and blame says of each review, NOT turning the word after it round."""
    words = texts.tokens
    number = reviews.num_opinion_words(VOCABULARY)
    opinion = ((words >= 4 + number) & (words < 4 + 2 * number)).int()
    opinion -= ((words >= 4) & (words < 4 + number)).int()
    turned = words.roll(1, dims=1) == NOT
    balance = torch.where(turned, -opinion, opinion).sum(1)
    return torch.where(balance == 0, -1, (balance > 0).int())


def test_synthetic_reviews_say_what_they_are_but_for_a_tenth_of_the_labels() -> None:
    texts = synthetic()
    assert texts.classes is not None
    decided = judged(texts) >= 0
    right = (judged(texts) == texts.classes)[decided].double().mean()
    # 90% labels that are right times reviews that are decided by their words.
    assert 0.82 < right < 0.9
    assert texts.classes.double().mean() == pytest.approx(0.5, abs=0.03)
    turned_round = texts.tokens.clone()
    turned_round[turned_round == NOT] = VOCABULARY - 1
    ignorant = judged(Sequences(tokens=turned_round, classes=texts.classes, lengths=texts.lengths))
    assert (ignorant == texts.classes)[decided].double().mean() < right - 0.02


def test_synthetic_reviews_begin_end_and_are_padded() -> None:
    texts = synthetic()
    assert texts.lengths is not None
    rows = torch.arange(len(texts))
    assert (texts.tokens[:, 0] == START).all()
    assert (texts.tokens[rows, texts.lengths - 1] == END).all()
    assert ((texts.tokens == PADDING) == (torch.arange(LENGTH) >= texts.lengths[:, None])).all()
    assert 0 <= texts.tokens.min() <= texts.tokens.max() < VOCABULARY
    assert texts.lengths.min() >= 8
    assert 0.02 < (texts.lengths == LENGTH).double().mean() < 0.2
    assert 0.4 < 1 - texts.lengths.double().mean() / LENGTH < 0.6


def test_synthetic_reviews_depend_on_seed_rank_and_step_alone() -> None:
    def batches(**changes: int) -> list[list[list[int]]]:
        values = {"batch_size": 4, "seed": 0, "rank": 0, "world_size": 1, "num_workers": 0, "first_step": 1}
        request = DataRequest(source="synthetic", device=torch.device("cpu"), **(values | changes))
        found = reviews.synthetic_batches(VOCABULARY, LENGTH, request)
        return [batch["tokens"].tolist() for batch in itertools.islice(found, 4)]

    found = batches()
    assert batches(first_step=3)[:2] == found[2:]
    assert batches(seed=1)[0] != found[0] != batches(rank=1)[0]
    held_out = reviews.synthetic_splits(VOCABULARY, LENGTH)
    assert {name: len(part) for name, part in held_out.items()} == {"validation": 1000, "test": 2000}
    out = {tuple(text) for part in held_out.values() for text in part.tokens.tolist()}
    assert not out & {tuple(text) for batch in found for text in batch}
