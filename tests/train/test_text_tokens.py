"""Tokenizers without a library, and what is said of those that cannot be used."""

import pytest

from fastlaunch_train.data.tokens import ByteTokens, WordTokens, chosen_tokenizer
from fastlaunch_train.workloads.registry import WorkloadError


def test_bytes_are_tokens() -> None:
    assert [text.tolist() for text in ByteTokens().encode(["aä", ""])] == [[97, 195, 164], []]
    assert ByteTokens().encode(["abc"], longest=2)[0].tolist() == [97, 98]


def test_the_most_frequent_words_have_tokens() -> None:
    words = WordTokens(["Don't stop, don't", "stop. Zebra"], vocabulary=7)
    assert words.vocabulary == 7
    known = {"don't", "stop", ","}
    found = {word: int(words.encode([word])[0][1]) for word in ("don't", "STOP", ",", ".", "zebra", "other")}
    assert {word.lower() for word, number in found.items() if number != words.unknown} == known
    assert sorted(number for number in found.values() if number != words.unknown) == [4, 5, 6]
    (text,) = words.encode(["Stop, zebra!"])
    assert text.tolist() == [
        words.start,
        found["STOP"],
        found[","],
        words.unknown,
        words.unknown,
        words.end,
    ]
    assert words.encode(["stop stop stop"], longest=4)[0].tolist() == [
        words.start,
        found["STOP"],
        found["STOP"],
        words.end,
    ]


def test_the_order_of_texts_does_not_matter() -> None:
    texts = ["b a", "c b", "d"]
    orders = [
        WordTokens(order, vocabulary=6).encode(["a b c d"])[0].tolist() for order in (texts, texts[::-1])
    ]
    assert orders[0] == orders[1]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    chosen_tokenizer(None, None, 256, "toy", otherwise=ByteTokens)
    with pytest.raises(WorkloadError, match="has 256 tokens, the model 255") as caught:
        chosen_tokenizer(None, None, 255, "toy", otherwise=ByteTokens)
    assert "--tokenizer" in (caught.value.hint or "")
