"""Tokenizers: bytes, words counted in the training text, or one of Hugging Face's."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from fastlaunch_train.records.data_identity import digest_of
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.language_models import of_the_hub, transformers_for

log = logging.getLogger("fastlaunch_train")

#: Texts that a tokenizer is given at a time.
_CHUNK = 1000
#: What tokenizers of one vocabulary may cut up differently: letter case, accents, spaces, numbers, scripts.
_PROBE = "Überall  didn't 3,141.59\tNAÏVE naïve antidisestablishmentarianism 日本語のテキスト 🙂\n¿qué?"
#: Words of a vocabulary that are looked up too, evenly spread, in upper case and joined to the next as well.
_PROBED_WORDS = 1000
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]")


class Tokenizer(Protocol):
    """Turns text into token numbers below `vocabulary`; `padding` is the number of what means nothing.

    identity: the same of tokenizers that turn the same text into the same tokens, in a few words.
    """

    vocabulary: int
    padding: int

    @property
    def identity(self) -> str:
        """Without a name or path."""

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        """The tokens of each text, int32, no more than `longest` of them."""


class ByteTokens:
    """A token for each byte of the text in UTF-8."""

    vocabulary = 256
    padding = 0
    identity = "bytes"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        """The bytes of each text."""
        return [bytes_as_tokens(text.encode())[:longest] for text in texts]


class WordTokens:
    """A token for each of the most frequent words of `texts`, in lower case, and for each other sign.

    The first four numbers are of padding, an unknown word, and the start and the end of a text.
    """

    padding, unknown, start, end = range(4)

    def __init__(self, texts: Iterable[str], vocabulary: int) -> None:
        counts = Counter(word for text in texts for word in _words(text))
        # Ties by the alphabet, so that the order of the texts does not matter.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: max(0, vocabulary - 4)]
        self._numbers = {word: number for number, word in enumerate(ranked, start=4)}
        self.vocabulary = 4 + len(ranked)
        self.identity = f"words {digest_of(word.encode() for word in ranked)}"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        """The words of each text between its start and its end."""
        most = None if longest is None else max(0, longest - 2)
        return [
            torch.tensor(
                [
                    self.start,
                    *(self._numbers.get(word, self.unknown) for word in _words(text)[:most]),
                    self.end,
                ],
                dtype=torch.int32,
            )
            for text in texts
        ]


class HubTokens:
    """A tokenizer of Hugging Face's, with the special tokens that it adds to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.padding = tokenizer.pad_token_id or 0

    @property
    def identity(self) -> str:
        """Of the vocabulary, the number of padding, and the tokens of a probing text and of words it knows.

        Not of the files: their wording changes with the release that wrote them. Two tokenizers of one
        vocabulary that cut only rare words differently may be taken for the same.
        """
        words = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        known = [word for word, _ in words[:: -(-len(words) // _PROBED_WORDS) or 1]]
        probed = self.encode(
            [_PROBE, *known, *(word.upper() for word in known), *map("".join, pairwise(known))]
        )
        told = (f"{number} {word}".encode(errors="surrogatepass") for word, number in words)
        made = ",".join(str(number) for text in probed for number in (*text.tolist(), -1))
        return f"hub {digest_of([*told, f'{self.padding} {made}'.encode()])}"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        """The tokens of each text, cut off at `longest`."""
        encoded: list[torch.Tensor] = []
        for first in range(0, len(texts), _CHUNK):
            numbers = self._tokenizer(
                list(texts[first : first + _CHUNK]),
                truncation=longest is not None,
                max_length=longest,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            encoded += [torch.tensor(each, dtype=torch.int32) for each in numbers]
        return encoded


def load_tokenizer(name: str, workload: str) -> HubTokens:
    """The tokenizer of a folder or of the Hugging Face hub. Raises WorkloadError if it cannot be had."""
    load = transformers_for(workload).AutoTokenizer.from_pretrained
    return HubTokens(of_the_hub(load, name, workload, "tokenizer"))


def tokenizer_of_model(model: str | None, workload: str) -> HubTokens | None:
    """The tokenizer that lies beside the weights of `model`; None, with a warning, if there is none."""
    if model is None:
        return None
    if has_tokenizer(model):
        return load_tokenizer(model, workload)
    log.warning(
        "warning: model %s has no tokenizer and no --tokenizer is given: "
        "its weights were trained on other tokens than it is given now",
        model,
    )
    return None


def bytes_as_tokens(data: bytes) -> torch.Tensor:
    """The bytes of `data`, int32."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).int() if data else torch.empty(0).int()


def has_tokenizer(name: str) -> bool:
    """Whether folder `name` holds a tokenizer of Hugging Face's; True of what is no folder."""
    folder = Path(name).expanduser()
    return not folder.is_dir() or any(
        (folder / file).is_file()
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model")
    )


def chosen_tokenizer(
    given: HubTokens | None,
    model: str | None,
    num_tokens: int,
    workload: str,
    *,
    otherwise: Callable[[], Tokenizer],
) -> Tokenizer:
    """The tokenizer that was given, else that of the weights to start from, else what `otherwise` makes.

    Raises WorkloadError if it knows more tokens than the model, which knows num_tokens.
    """
    tokenizer = given or tokenizer_of_model(model, workload) or otherwise()
    if tokenizer.vocabulary > num_tokens:
        raise WorkloadError(
            f"workload {workload!r}: the tokenizer has {tokenizer.vocabulary} tokens, the model {num_tokens}",
            "give --tokenizer the model's own, or --model the folder of a model that knows as many",
        )
    return tokenizer


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
