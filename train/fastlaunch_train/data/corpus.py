"""Text to predict: a made-up language whose entropy is known, or a file cut into sequences."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from fastlaunch_train.data.order import seed_of
from fastlaunch_train.data.text import ReadText, Sequences, Splits, batch_of
from fastlaunch_train.data.tokens import ByteTokens, Tokenizer, bytes_as_tokens
from fastlaunch_train.records.data_identity import DataIdentity, digest_of
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Batch, DataRequest

#: The made-up language has words of this many tokens, at most so many of them, and after each word one of so
#: many others, the likelier the nearer (Zipf's law). It is the same for every seed: seeds draw other texts.
WORD_LENGTH = 4
MOST_WORDS = 2048
NUM_FOLLOWERS = 16
LANGUAGE_SEED = 20230315
#: Of the made-up language: sequences that are held out.
NUM_HELD_OUT = 64
#: Another version for every change of what is written: runs on other text are no repeats of each other.
MADE_UP = DataIdentity(generator="corpus", generator_version=1, seeded_by="seed, rank, step")
#: Of a file: the share that is held out, its beginning, as Hugging Face's run_clm.py has it.
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Language:
    """A Markov chain of words. lexicon: (words, WORD_LENGTH), the tokens of each, no two alike.

    followers: the probability that word number w is followed by w + k (modulo the words), for each k.
    """

    lexicon: torch.Tensor
    followers: torch.Tensor

    def write(self, num_sequences: int, length: int, generator: torch.Generator) -> Sequences:
        """Texts of `length` tokens, each from a word drawn evenly; the generator is the CPU's."""
        num_words = len(self.lexicon)
        shape = (num_sequences, -(-length // WORD_LENGTH))
        steps = torch.multinomial(self.followers, math.prod(shape), replacement=True, generator=generator)
        steps = steps.reshape(shape)
        steps[:, 0] = torch.randint(num_words, (num_sequences,), generator=generator)
        words = steps.cumsum(1) % num_words
        return Sequences(tokens=self.lexicon[words].flatten(1)[:, :length])

    def entropy(self, length: int) -> float:
        """The least mean loss, in nats per predicted token, on texts of `length`, a multiple of WORD_LENGTH.

        Of a text's tokens all but the first are predicted. Texts and chains of words are one to one.
        """
        assert length % WORD_LENGTH == 0
        first = torch.bincount(self.lexicon[:, 0].long()).double() / len(self.lexicon)
        whole = math.log(len(self.lexicon)) + (length // WORD_LENGTH - 1) * _entropy(self.followers.double())
        return (whole - _entropy(first)) / (length - 1)


@lru_cache(maxsize=4)
def language(vocabulary: int) -> Language:
    """The made-up language of so many tokens."""
    num_words = max(2, min(MOST_WORDS, vocabulary // 8))
    generator = torch.Generator().manual_seed(seed_of("language", LANGUAGE_SEED, vocabulary))
    # Twice as many as needed, so that those that are alike can be left out.
    drawn = torch.randint(vocabulary, (2 * num_words, WORD_LENGTH), generator=generator, dtype=torch.int32)
    lexicon = torch.tensor(list(dict.fromkeys(map(tuple, drawn.tolist())))[:num_words], dtype=torch.int32)
    weights = 1 / torch.arange(1, min(NUM_FOLLOWERS, num_words) + 1)
    return Language(lexicon=lexicon, followers=weights / weights.sum())


def written_batches(vocabulary: int, length: int, request: DataRequest) -> Iterator[Batch]:
    """Endless batches of new text in the made-up language."""
    made_up = language(vocabulary)
    generator = torch.Generator()
    for step in itertools.count(request.first_step):
        generator.manual_seed(seed_of("corpus", request.seed, request.rank, step))
        yield batch_of(made_up.write(request.batch_size, length, generator), request.device)


def written_splits(vocabulary: int, length: int) -> Splits:
    """Texts in the made-up language for validation, the same for every seed, none of which trains on them."""
    generator = torch.Generator().manual_seed(seed_of("held-out corpus", LANGUAGE_SEED))
    return {"validation": language(vocabulary).write(NUM_HELD_OUT, length, generator)}


def read_text(path_text: str, tokenizer: Tokenizer, length: int) -> ReadText:
    """The text of a file, line after line, cut into sequences of `length` tokens.

    What is left over at the end is dropped. The beginning is held out.

    Raises WorkloadError for a file that is missing, empty, not UTF-8 or shorter than one sequence.
    """
    path = Path(path_text).expanduser()
    data = _bytes_of(path)
    tokens = _tokens_of(data, path, tokenizer)
    num_sequences = len(tokens) // length
    if num_sequences == 0:
        raise WorkloadError(
            f"text file {path} has {len(tokens)} tokens, fewer than one sequence of {length}",
            "give a longer text, or a smaller --sequence-length",
        )
    sequences = Sequences(tokens=tokens[: num_sequences * length].reshape(num_sequences, length))
    num_held_out = math.ceil(HELD_OUT_SHARE * num_sequences) if num_sequences > 1 else 0
    numbers = torch.arange(num_sequences)
    splits = {
        "train": sequences.part(numbers[num_held_out:]),
        "validation": sequences.part(numbers[:num_held_out]),
    }
    return ReadText(splits=splits, digest=digest_of([data]), tokenizer=tokenizer.identity)


def _bytes_of(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise WorkloadError(f"there is no text file {path}", "give --data file:PATH") from None
    except OSError as error:
        raise WorkloadError(
            f"text file {path} cannot be read: {error.strerror}", "give --data file:PATH of one text file"
        ) from None
    if not data.strip():
        raise WorkloadError(f"text file {path} is empty", "give a file that holds text")
    return data


def _tokens_of(data: bytes, path: Path, tokenizer: Tokenizer) -> torch.Tensor:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"text file {path} is not UTF-8: byte {error.start}", "convert it, as with iconv"
        ) from None
    # Of bytes, too, after it is known that they are text: an archive given by mistake would train as well.
    if isinstance(tokenizer, ByteTokens):
        return bytes_as_tokens(data)
    return torch.cat(tokenizer.encode(text.splitlines(keepends=True)))


def _entropy(probabilities: torch.Tensor) -> float:
    """In nats, of probabilities that add up to 1."""
    return float(torch.special.entr(probabilities).sum())
