"""Text: a synthetic language of known entropy, files cut into sequences, tokenizers, and reviews."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data_requests import CPU, request

from fastlaunch_train.data import corpus, reviews
from fastlaunch_train.data.reviews import END, NOT, PADDING, START
from fastlaunch_train.data.text import Sequences, TextSource, batch_of
from fastlaunch_train.data.tokens import ByteTokens, WordTokens, chosen_tokenizer
from fastlaunch_train.workloads.contract import Batch
from fastlaunch_train.workloads.registry import WorkloadError

LENGTH = 16
VOCABULARY = 256


def text_source(length: int = LENGTH) -> TextSource:
    return TextSource(
        workload="toy",
        synthetic_batches=lambda request: corpus.synthetic_batches(VOCABULARY, length, request),
        synthetic_splits=lambda: corpus.synthetic_splits(VOCABULARY, length),
        synthetic_identity=corpus.SYNTHETIC,
        readers={"file": lambda path: corpus.read_text(path, ByteTokens(), LENGTH)},
    )


def text_file(folder: Path, data: bytes) -> str:
    """The data source of a file that holds `data`."""
    (folder / "text.txt").write_bytes(data)
    return f"file:{folder / 'text.txt'}"


def tokens(batches: Iterator[Batch], number: int) -> list[list[list[int]]]:
    return [batch["tokens"].tolist() for batch in itertools.islice(batches, number)]


def texts(batches: Iterator[Batch], number: int = 99) -> list[tuple[int, ...]]:
    """The tokens of every sample in `number` batches."""
    return [tuple(text) for batch in tokens(batches, number) for text in batch]


@pytest.mark.parametrize("kind", [corpus, reviews])
def test_synthetic_texts_depend_on_seed_rank_and_step_alone(kind: Any) -> None:
    def batches(number: int, **changes: int) -> list[list[list[int]]]:
        return tokens(kind.synthetic_batches(VOCABULARY, 32, request(**changes)), number)

    found = batches(6)
    assert batches(3, first_step=4) == found[3:]
    assert found[0] != found[1]
    assert batches(1, seed=1)[0] != found[0] != batches(1, rank=1)[0]
    held_out = kind.synthetic_splits(VOCABULARY, 32)
    sizes = {"validation": 64} if kind is corpus else {"validation": 1000, "test": 2000}
    assert {name: len(part) for name, part in held_out.items()} == sizes
    out = {tuple(text) for part in held_out.values() for text in part.tokens.tolist()}
    assert not out & {tuple(text) for batch in batches(80) for text in batch}


def test_synthetic_texts_that_are_held_out_are_the_same_for_every_seed_and_batch_size() -> None:
    text = text_source()
    whole = texts(text.held_out(request(batch_size=64), "validation"))
    assert len(whole) == 64
    assert texts(text.held_out(request(batch_size=8, seed=5), "validation")) == whole
    assert list(text.held_out(request(), "test")) == []


def test_the_entropy_of_the_language_is_that_of_its_texts() -> None:
    """Coded with the chain's own probabilities, texts take as many nats per token as it says."""
    language = corpus.language(64)
    texts = language.write(4000, 2 * corpus.WORD_LENGTH, torch.Generator().manual_seed(1)).tokens
    number_of = {tuple(word): number for number, word in enumerate(language.lexicon.tolist())}
    words = [[number_of[tuple(text[i : i + 4])] for i in (0, 4)] for text in texts.tolist()]
    steps = torch.tensor([(second - first) % len(number_of) for first, second in words])
    firsts = torch.bincount(language.lexicon[:, 0].long()).double() / len(number_of)
    nats = (
        math.log(len(number_of)) + firsts[texts[:, 0].long()].log() - language.followers.double()[steps].log()
    )
    assert language.entropy(8) == pytest.approx(float(nats.mean()) / 7, rel=0.02)


@pytest.mark.parametrize("vocabulary", [16, 256, 32000])
def test_words_differ_and_tokens_are_of_the_vocabulary(vocabulary: int) -> None:
    language = corpus.language(vocabulary)
    assert len({tuple(word) for word in language.lexicon.tolist()}) == len(language.lexicon)
    assert 0 <= language.lexicon.min() <= language.lexicon.max() < vocabulary
    assert float(language.followers.sum()) == pytest.approx(1)
    # Far from what guessing costs, and from nothing.
    assert 0.1 < language.entropy(64) < 0.4 * math.log(vocabulary)


def test_a_file_is_cut_into_sequences_and_its_beginning_held_out(tmp_path: Path) -> None:
    # 45 sequences and a half: three, a twentieth rounded up, are held out.
    data = " ".join(map(str, range(1000))).encode()
    source = text_file(tmp_path, data[: 45 * LENGTH + 8])
    text = text_source()
    assert text.samples_per_epoch(source) == 42
    assert text.samples_per_epoch("synthetic") is None
    (tmp_path / "text.txt").unlink()  # it is read once
    held_out = texts(text.held_out(request(source, batch_size=3), "validation"))
    trained = texts(text.batches(request(source, batch_size=6)), 7)
    assert bytes(itertools.chain(*held_out)) == data[: 3 * LENGTH]
    starts = range(3 * LENGTH, 45 * LENGTH, LENGTH)
    assert sorted(trained) == sorted(tuple(data[start : start + LENGTH]) for start in starts)


def test_what_fills_up_a_batch_has_no_labels(tmp_path: Path) -> None:
    source = text_file(tmp_path, bytes(range(128)) * 2)
    (batch,) = text_source().held_out(request(source), "validation")
    assert (batch["labels"][0] == batch["tokens"][0]).all()
    assert (batch["labels"][1:] == -100).all()
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64


def test_a_file_of_one_sequence_is_trained_on(tmp_path: Path) -> None:
    source = text_file(tmp_path, b"x" * LENGTH)
    assert text_source().samples_per_epoch(source) == 1
    assert list(text_source().held_out(request(source), "validation")) == []


def test_lines_are_given_to_the_tokenizer_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two\nthree\n", encoding="utf-8-sig")
    words = WordTokens(["one two three"], vocabulary=10)
    found = corpus.read_text(str(path), words, 7).splits["train"].tokens
    one, two, three = (int(word[1]) for word in words.encode(["one", "two", "three"]))
    assert found.tolist() == [[words.start, one, two, words.end, words.start, three, words.end]]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for name, data in (("empty", b" \n"), ("short", b"abc"), ("latin", "ä".encode("latin-1") * 99)):
        (tmp_path / name).write_bytes(data)
    for name, words in (
        ("nowhere", "No such file"),
        ("", "Is a directory"),
        ("empty", "is empty"),
        ("short", "3 tokens"),
        ("latin", "not UTF-8"),
    ):
        with pytest.raises(WorkloadError, match=words):
            corpus.read_text(str(tmp_path / name), ByteTokens(), LENGTH)
    with pytest.raises(WorkloadError, match="unknown data source 'loader'"):
        text_source().batches(request("loader"))


def test_bytes_are_tokens() -> None:
    assert [text.tolist() for text in ByteTokens().encode(["aä", ""])] == [[97, 195, 164], []]
    assert ByteTokens().encode(["abc"], longest=2)[0].tolist() == [97, 98]


def test_the_most_frequent_words_have_tokens() -> None:
    words = WordTokens(["Don't stop, don't", "stop. Zebra"], vocabulary=7)
    assert words.vocabulary == 7
    assert WordTokens(["stop. Zebra", "Don't stop, don't"], vocabulary=7).identity == words.identity
    number_of = {word: int(words.encode([word])[0][1]) for word in ("don't", "STOP", ",", ".", "zebra", "no")}
    assert number_of == {"don't": 4, "STOP": 5, ",": 6, ".": 1, "zebra": 1, "no": 1}
    assert words.unknown == 1
    assert words.encode(["Stop, zebra!"])[0].tolist() == [words.start, 5, 6, 1, 1, words.end]
    assert words.encode(["stop stop stop"], longest=4)[0].tolist() == [words.start, 5, 5, words.end]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    chosen_tokenizer(None, None, 256, "toy", otherwise=ByteTokens)
    with pytest.raises(WorkloadError, match="has 256 tokens, the model 255") as caught:
        chosen_tokenizer(None, None, 255, "toy", otherwise=ByteTokens)
    assert "--tokenizer" in (caught.value.hint or "")


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
    marked = next((acl_imdb / "train" / "pos").iterdir())
    marked.write_text(marked.read_text(), encoding="utf-8-sig")
    for path, number in ((acl_imdb, 12), (acl_imdb / "train", 6)):
        found = reviews.read_folder(str(path))
        assert len(found.texts) == number
        for text, label in zip(found.texts, found.classes, strict=True):
            assert f" {('neg', 'pos')[label]} " in text and "\ufeff" not in text


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
    assert reviews.split_reviews(whole) == split


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
    batch = batch_of(found, CPU, torch.tensor([False, True]))
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
    assert batch_of(found, CPU)["mask"].tolist() == [[1, 0, 0]] * 3
    assert "2 of 3 reviews have no token" in caplog.text


def test_folders_of_reviews_that_cannot_be_used_are_refused(tmp_path: Path, acl_imdb: Path) -> None:
    for text in (acl_imdb / "train" / "neg").iterdir():
        text.unlink()
    (acl_imdb / "test" / "pos" / "0_8.txt").write_bytes(b"\xff")
    (tmp_path / "a.txt").touch()
    for name, words in (
        ("nowhere", "does not exist"),
        ("aclImdb/train", "no review in neg$"),
        (".", "no review in neg and pos"),
        ("aclImdb", r"0_8\.txt cannot be read"),
        ("a.txt", "is a file"),
    ):
        with pytest.raises(WorkloadError, match=words):
            reviews.read_folder(str(tmp_path / name))
    with pytest.raises(WorkloadError, match="9 reviews"):
        reviews.split_reviews(reviews.Reviews(texts=["x"] * 9, classes=[0] * 9))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"review,stars\nx,1\n", "review, stars"),
        (b"text,label\nx,1\ny,7\n", "line 3: label is '7'"),
        (b"text,label\nx\n", "line 2: label is ''"),
        (b"label,text\n1,x\n0,y, z\n", "line 3 has more values"),
        (b'text,label\n"' + b"x" * 2**18, "field"),
        (b"text,label\n", "no bad review"),
        (b"text,label\nx,1\ny,pos\n", "no bad review"),
        (b"text,label\n\xff,1\n", "utf-8"),
    ],
)
def test_csv_files_that_cannot_be_used_are_refused(tmp_path: Path, data: bytes | None, word: str) -> None:
    path = tmp_path / "a.csv"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(WorkloadError, match=word):
        reviews.read_csv(str(path))


@pytest.fixture(scope="module")
def synthetic() -> Sequences:
    return reviews.write_reviews(4000, VOCABULARY, 32, torch.Generator().manual_seed(1))


def judged(texts: Sequences) -> torch.Tensor:
    """What counting praise and blame says of each review, NOT turning the word after it round."""
    words = texts.tokens
    number = reviews.num_opinion_words(VOCABULARY)
    opinion = ((words >= 4 + number) & (words < 4 + 2 * number)).int()
    opinion -= ((words >= 4) & (words < 4 + number)).int()
    turned = words.roll(1, dims=1) == NOT
    balance = torch.where(turned, -opinion, opinion).sum(1)
    return torch.where(balance == 0, -1, (balance > 0).int())


def test_synthetic_reviews_say_what_they_are_but_for_a_tenth_of_the_labels(synthetic: Sequences) -> None:
    texts = synthetic
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


def test_synthetic_reviews_begin_end_and_are_padded(synthetic: Sequences) -> None:
    texts = synthetic
    assert texts.lengths is not None
    rows = torch.arange(len(texts))
    assert (texts.tokens[:, 0] == START).all()
    assert (texts.tokens[rows, texts.lengths - 1] == END).all()
    assert ((texts.tokens == PADDING) == (torch.arange(32) >= texts.lengths[:, None])).all()
    assert 0 <= texts.tokens.min() <= texts.tokens.max() < VOCABULARY
    assert texts.lengths.min() >= 8
    assert 0.02 < (texts.lengths == 32).double().mean() < 0.2
    assert 0.4 < 1 - texts.lengths.double().mean() / 32 < 0.6
