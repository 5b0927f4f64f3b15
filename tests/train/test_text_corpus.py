"""Text to predict: a language with a known entropy, and files cut into sequences."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from data_requests import request

from fastlaunch_train.data import corpus
from fastlaunch_train.data.text import TextSource
from fastlaunch_train.data.tokens import ByteTokens, WordTokens
from fastlaunch_train.workloads.registry import WorkloadError

LENGTH = 16


def text_source(length: int = LENGTH) -> TextSource:
    return TextSource(
        workload="toy",
        synthetic_batches=lambda request: corpus.synthetic_batches(256, length, request),
        synthetic_splits=lambda: corpus.synthetic_splits(256, length),
        synthetic_identity=corpus.SYNTHETIC,
        readers={"file": lambda path: corpus.read_text(path, ByteTokens(), LENGTH)},
    )


def tokens(batches: object, number: int) -> list[list[list[int]]]:
    return [batch["tokens"].tolist() for batch in itertools.islice(batches, number)]  # type: ignore[call-overload]


def test_synthetic_texts_depend_on_seed_rank_and_step_alone() -> None:
    found = tokens(text_source().batches(request()), 6)
    assert tokens(text_source().batches(request(first_step=4)), 3) == found[3:]
    assert found[0] != found[1]
    for other in ({"seed": 1}, {"rank": 1}):
        assert tokens(text_source().batches(request(**other)), 1)[0] != found[0]


def test_synthetic_texts_that_are_held_out_are_the_same_for_every_seed_and_never_trained_on() -> None:
    text = text_source(64)
    whole = list(itertools.chain(*tokens(text.held_out(request(batch_size=64), "validation"), 9)))
    assert len(whole) == corpus.NUM_HELD_OUT
    again = tokens(text.held_out(request(batch_size=8, seed=5), "validation"), 99)
    assert list(itertools.chain(*again)) == whole
    trained = itertools.chain(*tokens(text.batches(request(batch_size=64)), 20))
    assert not {tuple(text) for text in whole} & {tuple(text) for text in trained}
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
    path = tmp_path / "text.txt"
    # 45 sequences and a half: three, a twentieth rounded up, are held out.
    data = " ".join(map(str, range(1000))).encode()
    path.write_bytes(data[: 45 * LENGTH + 8])
    text = text_source()
    source = f"file:{path}"
    assert text.samples_per_epoch(source) == 42
    assert text.samples_per_epoch("synthetic") is None
    held_out = list(itertools.chain(*tokens(text.held_out(request(source, batch_size=3), "validation"), 9)))
    trained = list(itertools.chain(*tokens(text.batches(request(source, batch_size=6)), 7)))
    assert bytes(itertools.chain(*held_out)) == data[: 3 * LENGTH]
    assert sorted(trained) == sorted(
        list(data[start : start + LENGTH]) for start in range(3 * LENGTH, 45 * LENGTH, LENGTH)
    )


def test_what_fills_up_a_batch_has_no_labels(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(128)) * 2)
    (batch,) = text_source().held_out(request(f"file:{path}"), "validation")
    assert (batch["labels"][0] == batch["tokens"][0]).all()
    assert (batch["labels"][1:] == -100).all()
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64


def test_a_file_of_one_sequence_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * LENGTH)
    assert text_source().samples_per_epoch(f"file:{path}") == 1
    assert list(text_source().held_out(request(f"file:{path}"), "validation")) == []


def test_lines_are_given_to_the_tokenizer_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two\nthree\n")
    words = WordTokens(["one two three"], vocabulary=10)
    found = corpus.read_text(str(path), words, 7).splits["train"].tokens
    one, two, three = (int(word[1]) for word in words.encode(["one", "two", "three"]))
    assert found.tolist() == [[words.start, one, two, words.end, words.start, three, words.end]]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for name, data in (("empty", b" \n"), ("short", b"abc"), ("latin", "ä".encode("latin-1") * 99)):
        (tmp_path / name).write_bytes(data)
    for name, words in (
        ("nowhere", "no text file"),
        ("", "Is a directory"),
        ("empty", "is empty"),
        ("short", "3 tokens"),
        ("latin", "not UTF-8"),
    ):
        with pytest.raises(WorkloadError, match=words):
            corpus.read_text(str(tmp_path / name), ByteTokens(), LENGTH)
    with pytest.raises(WorkloadError, match="unknown data source 'loader'"):
        text_source().batches(request("loader"))


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * 99)
    text = text_source()
    source = f"file:{path}"
    assert text.samples_per_epoch(source) == 5
    path.unlink()
    assert len(next(text.batches(request(source)))["tokens"]) == 4
