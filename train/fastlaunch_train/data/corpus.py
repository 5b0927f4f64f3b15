"""Text to predict: a synthetic language of known entropy, or a file cut into sequences."""

import codecs
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from fastlaunch_train.data.batches import seed_of
from fastlaunch_train.data.text import LoadedText, Sequences, Splits, batch_of
from fastlaunch_train.data.tokens import ByteTokens, Tokenizer, bytes_as_tokens
from fastlaunch_train.records.data_identity import DataIdentity, digest_of
from fastlaunch_train.workloads.contract import Batch, DataRequest
from fastlaunch_train.workloads.registry import WorkloadError

#: The language has up to MAX_WORDS words of WORD_LENGTH tokens. Each is followed by one of NUM_FOLLOWERS
#: others, by Zipf's law. The language is the same for every seed; seeds draw different texts.
WORD_LENGTH = 4
MAX_WORDS = 2048
NUM_FOLLOWERS = 16
LANGUAGE_SEED = 20230315
#: Number of held-out sequences of the language.
NUM_HELD_OUT = 64
#: Every change of the text needs a new version: runs on different text are no repeats of each other.
SYNTHETIC = DataIdentity(generator="corpus", generator_version=1, seeded_by="seed, rank, step")
#: The share of a file, at its beginning, that is held out, as in Hugging Face's run_clm.py.
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Language:
    """A Markov chain of words."""

    lexicon: torch.Tensor  #: (words, WORD_LENGTH), the tokens of each word, no two alike
    followers: torch.Tensor  #: the probability that word w + k (modulo the words) follows word w, for each k

    def write(self, num_sequences: int, length: int, generator: torch.Generator) -> Sequences:
        """Return texts of `length` tokens that start with any word. generator: a CPU's."""
        num_words = len(self.lexicon)
        shape = (num_sequences, -(-length // WORD_LENGTH))
        steps = torch.multinomial(self.followers, math.prod(shape), replacement=True, generator=generator)
        steps = steps.reshape(shape)
        steps[:, 0] = torch.randint(num_words, (num_sequences,), generator=generator)
        words = steps.cumsum(1) % num_words
        return Sequences(tokens=self.lexicon[words].flatten(1)[:, :length])

    def entropy(self, length: int) -> float:
        """Return the least mean loss, in nats per predicted token, on texts of `length` tokens.

        All tokens but the first are predicted. Each text stands for exactly one chain of words.
        """
        assert length % WORD_LENGTH == 0
        first = torch.bincount(self.lexicon[:, 0].long()).double() / len(self.lexicon)
        whole = math.log(len(self.lexicon)) + (length // WORD_LENGTH - 1) * _entropy(self.followers.double())
        return (whole - _entropy(first)) / (length - 1)


@lru_cache(maxsize=4)
def language(vocabulary: int) -> Language:
    """Return the synthetic language with a vocabulary of so many tokens."""
    num_words = max(2, min(MAX_WORDS, vocabulary // 8))
    generator = torch.Generator().manual_seed(seed_of("language", LANGUAGE_SEED, vocabulary))
    # Draw twice as many words as needed, and drop duplicates.
    drawn = torch.randint(vocabulary, (2 * num_words, WORD_LENGTH), generator=generator, dtype=torch.int32)
    lexicon = torch.tensor(list(dict.fromkeys(map(tuple, drawn.tolist())))[:num_words], dtype=torch.int32)
    weights = 1 / torch.arange(1, min(NUM_FOLLOWERS, num_words) + 1)
    return Language(lexicon=lexicon, followers=weights / weights.sum())


def synthetic_batches(vocabulary: int, length: int, request: DataRequest) -> Iterator[Batch]:
    """Yield endless batches of new text in the synthetic language."""
    synthetic = language(vocabulary)
    generator = torch.Generator()
    for step in itertools.count(request.first_step):
        generator.manual_seed(seed_of("corpus", request.seed, request.rank, step))
        yield batch_of(synthetic.write(request.batch_size, length, generator), request.device)


def synthetic_splits(vocabulary: int, length: int) -> Splits:
    """Return validation texts in the synthetic language, the same for every seed."""
    generator = torch.Generator().manual_seed(seed_of("held-out corpus", LANGUAGE_SEED))
    return {"validation": language(vocabulary).write(NUM_HELD_OUT, length, generator)}


def read_text(path_text: str, tokenizer: Tokenizer, length: int) -> LoadedText:
    """Read a file, tokenize it line by line and cut it into sequences of `length` tokens.

    The beginning is held out; an incomplete sequence at the end is dropped. Raises WorkloadError for a file
    that is missing, empty, not UTF-8 or shorter than one sequence.
    """
    path = Path(path_text).expanduser()
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        text = data.decode()
    except OSError as error:
        raise WorkloadError(
            f"text file {path} cannot be read: {error.strerror}", "give --data file:PATH of one text file"
        ) from None
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"text file {path} is not UTF-8: byte {error.start}", "convert it, as with iconv"
        ) from None
    if not text.strip():
        raise WorkloadError(f"text file {path} is empty", "give a file that holds text")
    # Tokens that are bytes have to be text, too: otherwise an archive given by mistake would train.
    if isinstance(tokenizer, ByteTokens):
        tokens = bytes_as_tokens(data)
    else:
        tokens = torch.cat(tokenizer.encode(text.splitlines(keepends=True)))
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
    return LoadedText(splits=splits, digest=digest_of([data]), tokenizer=tokenizer.identity)


def _entropy(probabilities: torch.Tensor) -> float:
    """Return the entropy, in nats, of probabilities that add up to 1."""
    return float(torch.special.entr(probabilities).sum())
