"""Made-up reviews: praise and blame among other words, some turned round, and a tenth of the labels wrong."""

import itertools
from collections.abc import Iterator

import torch

from fastlaunch_train.data.order import seed_of
from fastlaunch_train.data.text import Sequences, Splits, batch_of
from fastlaunch_train.records.data_identity import DataIdentity
from fastlaunch_train.workloads.contract import Batch, DataRequest

#: The first tokens: padding, the start and the end of a review, and the word that turns the next one round.
PADDING, START, END, NOT = range(4)
#: After them as many words of blame, as many of praise, and then those that say nothing.
NUM_OPINION_WORDS = 16
#: The share of words with an opinion, how many of them are the review's own, and the share of NOT, which is
#: followed by an opinion.
OPINIONS, AGREEING, NEGATIONS = 0.3, 0.8, 0.05
#: Labels that are wrong, so that loss has a floor above zero and accuracy a ceiling below one.
WRONG_LABELS = 0.1
#: Lengths are log-normal, about as those of IMDB's reviews at 512 tokens: some are cut off, most padded.
MEDIAN_LENGTH, LENGTH_SIGMA, LEAST_LENGTH = 0.44, 0.65, 8
HELD_OUT_SEED = 20230202
NUM_VALIDATION, NUM_TEST = 1000, 2000
#: Another version for every change of what is written: runs on other reviews are no repeats of each other.
MADE_UP = DataIdentity(generator="reviews", generator_version=1, seeded_by="seed, rank, step")


def write_reviews(num_reviews: int, vocabulary: int, length: int, generator: torch.Generator) -> Sequences:
    """Reviews of at most `length` tokens below `vocabulary`, half of them good; of the CPU's generator."""
    shape = (num_reviews, length)

    def chance(probability: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < probability

    good = chance(0.5, num_reviews)
    is_not = chance(NEGATIONS, *shape)
    after_not = is_not.roll(1, dims=1)
    praises = (good[:, None] == chance(AGREEING, *shape)) ^ after_not
    num_opinion = opinion_words(vocabulary)
    opinions = 4 + torch.randint(num_opinion, shape, generator=generator) + num_opinion * praises
    neutral = torch.randint(4 + 2 * num_opinion, vocabulary, shape, generator=generator)
    words = torch.where(chance(OPINIONS, *shape) | after_not, opinions, neutral)
    words[is_not] = NOT

    spread = torch.exp(LENGTH_SIGMA * torch.randn(num_reviews, generator=generator))
    lengths = (MEDIAN_LENGTH * length * spread).long().clamp(min(LEAST_LENGTH, length), length)
    words[:, 0] = START
    words[torch.arange(num_reviews), lengths - 1] = END
    words[torch.arange(length) >= lengths[:, None]] = PADDING
    classes = (good ^ chance(WRONG_LABELS, num_reviews)).long()
    return Sequences(tokens=words.int(), lengths=lengths, classes=classes)


def opinion_words(vocabulary: int) -> int:
    """How many of so many tokens are words of praise; as many are words of blame."""
    return min(NUM_OPINION_WORDS, (vocabulary - 4) // 4)


def written_batches(vocabulary: int, length: int, request: DataRequest) -> Iterator[Batch]:
    """Endless batches of new reviews."""
    generator = torch.Generator()
    for step in itertools.count(request.first_step):
        generator.manual_seed(seed_of("reviews", request.seed, request.rank, step))
        reviews = write_reviews(request.batch_size, vocabulary, length, generator)
        yield batch_of(reviews, request.device)


def written_splits(vocabulary: int, length: int) -> Splits:
    """Reviews for validation and to test, the same for every seed, none of which trains on them."""
    generator = torch.Generator().manual_seed(seed_of("held-out reviews", HELD_OUT_SEED))
    numbers = {"validation": NUM_VALIDATION, "test": NUM_TEST}
    return {name: write_reviews(number, vocabulary, length, generator) for name, number in numbers.items()}
