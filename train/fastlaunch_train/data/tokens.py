"""Tokenizers: bytes, words counted in the training text, or one of Hugging Face's."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from fastlaunch_train.data.hub import import_transformers, load_from_hub
from fastlaunch_train.records.data_identity import digest_of
from fastlaunch_train.workloads.registry import WorkloadError

log = logging.getLogger("fastlaunch_train")

#: Texts per call of a Hugging Face tokenizer.
_CHUNK = 1000
#: Text that tokenizers with one vocabulary may treat differently: case, accents, spaces, numbers, scripts.
_PROBE = "Überall  didn't 3,141.59\tNAÏVE naïve antidisestablishmentarianism 日本語のテキスト 🙂\n¿qué?"
#: Number of words of the vocabulary to probe, too: evenly spread, also in upper case and joined to the next.
_PROBED_WORDS = 1000
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]")


class Tokenizer(Protocol):
    """Turns text into token ids below `vocabulary`."""

    vocabulary: int
    padding: int  #: the token id of padding
    end: int | None  #: the token id that ends a text; None: there is none

    @property
    def identity(self) -> str:
        """A digest that is equal for tokenizers that produce the same tokens; not a name or path."""

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        """Return the tokens of each text, int32, at most `longest` of them."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str,
        *,
        tools: list[Any] | None = None,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """Return the tokens of a chat, int32. is_prompt: it ends where the assistant begins to speak.

        Raises WorkloadError, with its place, if there is no template or it refuses the chat.
        """


class ByteTokens:
    """A token for each byte of the text in UTF-8."""

    vocabulary = 256
    padding = 0
    end: int | None = 0
    identity = "bytes"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        return [bytes_as_tokens(text.encode())[:longest] for text in texts]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str,
        *,
        tools: list[Any] | None = None,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """Return the bytes of the chat in ChatML, as Qwen's models have it."""
        turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages]
        return self.encode(["".join([*turns, "<|im_start|>assistant\n" if is_prompt else ""])])[0]


class WordTokens:
    """A token for each of the most frequent words of `texts`, in lower case; other signs count as words.

    The first four tokens stand for padding, an unknown word, and the start and the end of a text.
    """

    padding, unknown, start, _end = range(4)
    end: int | None = _end

    def __init__(self, texts: Iterable[str], vocabulary: int) -> None:
        counts = Counter(word for text in texts for word in _words(text))
        # Ties are in alphabetical order, so that the order of the texts does not matter.
        ranked = sorted(counts, key=lambda word: (-counts[word], word))[: max(0, vocabulary - 4)]
        self._numbers = {word: number for number, word in enumerate(ranked, start=4)}
        self.vocabulary = 4 + len(ranked)
        self.identity = f"words {digest_of(word.encode() for word in ranked)}"

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        most = None if longest is None else max(0, longest - 2)
        return [
            torch.tensor(
                [
                    self.start,
                    *(self._numbers.get(word, self.unknown) for word in _words(text)[:most]),
                    self._end,
                ],
                dtype=torch.int32,
            )
            for text in texts
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str,
        *,
        tools: list[Any] | None = None,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        raise _no_template(place)


class HubTokens:
    """A Hugging Face tokenizer, with the special tokens that it adds to a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        self.padding = tokenizer.pad_token_id or 0
        self.end: int | None = tokenizer.eos_token_id

    @property
    def identity(self) -> str:
        """A digest of the vocabulary, the padding, and the tokens of a probe and of known words.

        It leaves out the files, which differ by the release that wrote them. Two tokenizers with one
        vocabulary that split only rare words differently may count as the same.
        """
        words = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        known = [word for word, _ in words[:: -(-len(words) // _PROBED_WORDS) or 1]]
        probed = self.encode(
            [_PROBE, *known, *(word.upper() for word in known), *map("".join, pairwise(known))]
        )
        numbered = (f"{number} {word}".encode(errors="surrogatepass") for word, number in words)
        made = ",".join(str(number) for text in probed for number in (*text.tolist(), -1))
        return f"hub {digest_of([*numbered, f'{self.padding} {made}'.encode()])}"

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files as Transformers reads them."""
        self._tokenizer.save_pretrained(str(folder))

    def encode(self, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
        encoded: list[torch.Tensor] = []
        for first in range(0, len(texts), _CHUNK):
            input_ids = self._tokenizer(
                list(texts[first : first + _CHUNK]),
                truncation=longest is not None,
                max_length=longest,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
            encoded += [torch.tensor(token_ids, dtype=torch.int32) for token_ids in input_ids]
        return encoded

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        place: str,
        *,
        tools: list[Any] | None = None,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        if not getattr(self._tokenizer, "chat_template", None):
            raise _no_template(place)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=is_prompt, tokenize=False
            )
        except Exception as error:  # a template may refuse roles and their order
            raise WorkloadError(
                f"{place}: the chat template refuses it: {error}", "mend the messages"
            ) from error
        tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(tokens, dtype=torch.int32)


def _no_template(place: str) -> WorkloadError:
    return WorkloadError(
        f"{place}: it is a chat, and the tokenizer has no chat template",
        "give --tokenizer of a model for chats, or text in place of messages",
    )


def load_tokenizer(name: str, workload: str) -> HubTokens:
    """Load a tokenizer from a folder or the Hugging Face hub. Raises WorkloadError if that fails."""
    load = import_transformers(workload).AutoTokenizer.from_pretrained
    return HubTokens(load_from_hub(load, name, workload, "tokenizer"))


def tokenizer_of_model(model: str | None, workload: str) -> HubTokens | None:
    """Return the tokenizer beside the weights of `model`; None, with a warning, if there is none."""
    if model is None:
        return None
    if has_tokenizer(model):
        return load_tokenizer(model, workload)
    log.warning(
        "warning: model %s has no tokenizer and no --tokenizer is given: "
        "its weights were trained on other tokens",
        model,
    )
    return None


def bytes_as_tokens(data: bytes) -> torch.Tensor:
    """Return the bytes of `data`, int32."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).int() if data else torch.empty(0).int()


def has_tokenizer(name: str) -> bool:
    """Return whether folder `name` holds a Hugging Face tokenizer; True if it is not a folder."""
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
    """Return the tokenizer given, else the one beside the model's weights, else what `otherwise` makes.

    Raises WorkloadError if it has more tokens than the model, which has num_tokens.
    """
    tokenizer = given or tokenizer_of_model(model, workload) or otherwise()
    if tokenizer.vocabulary > num_tokens:
        raise WorkloadError(
            f"workload {workload!r}: the tokenizer has {tokenizer.vocabulary} tokens, the model {num_tokens}",
            "give --tokenizer the model's own, or a --model with as many tokens",
        )
    return tokenizer


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
