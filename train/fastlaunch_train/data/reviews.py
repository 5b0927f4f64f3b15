"""Reviews, good or bad: from a folder or a CSV file, such as IMDB's, or synthetic ones."""

import csv
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastlaunch_train.data.batches import seed_of
from fastlaunch_train.data.text import Sequences, Splits, batch_of
from fastlaunch_train.data.tokens import Tokenizer
from fastlaunch_train.records.data_identity import DataIdentity, digest_of
from fastlaunch_train.workloads.contract import Batch, DataRequest
from fastlaunch_train.workloads.registry import WorkloadError

#: The first tokens: padding, the start and the end of a review, and the word that negates the next.
PADDING, START, END, NOT = range(4)
#: After them come this many words of blame, as many of praise, and neutral words.
NUM_OPINION_WORDS = 16
#: Shares of words with an opinion, of those that agree with the review, and of NOT, before an opinion.
OPINIONS, AGREEING, NEGATIONS = 0.3, 0.8, 0.05
#: The share of wrong labels, so that the loss has a floor above zero and accuracy a ceiling below one.
WRONG_LABELS = 0.1
#: Lengths are log-normal, about as IMDB's reviews at 512 tokens: some are cut off, most padded.
MEDIAN_LENGTH, LENGTH_SIGMA, MIN_LENGTH = 0.44, 0.65, 8
HELD_OUT_SEED = 20230202
NUM_VALIDATION, NUM_TEST = 1000, 2000
#: Every change of the reviews needs a new version: runs on different reviews are no repeats of each other.
SYNTHETIC = DataIdentity(generator="reviews", generator_version=1, seeded_by="seed, rank, step")

log = logging.getLogger("fastlaunch_train")

#: 5,000 of 50,000 reviews are for validation and 10,000 for testing, as in the experiment.
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2
SPLIT_SEED = 20230201
#: With fewer reviews there would be none to validate on.
MIN_REVIEWS = 10
#: Names of class 0 (bad) and class 1 (good): folders, and values in a CSV file.
FOLDERS = ("neg", "pos")
LABELS = {"negative": 0, "positive": 1, "neg": 0, "pos": 1, "0": 0, "1": 1}
#: Columns of text and label: of Kaggle's IMDB file, and of the experiment's.
COLUMNS = (("review", "sentiment"), ("text", "label"))


@dataclass(frozen=True, kw_only=True)
class Reviews:
    """Texts, and the class of each."""

    texts: Sequence[str]
    classes: Sequence[int]

    @property
    def digest(self) -> str:
        """The digest of all texts and classes in their order, without names of files."""
        labelled = zip(self.texts, self.classes, strict=True)
        return digest_of(part for text, label in labelled for part in (text.encode(), bytes([label])))


def read_folder(path_text: str) -> Reviews:
    """Read PATH/train/pos/*.txt and so on, as in aclImdb, or PATH/pos and PATH/neg.

    Raises WorkloadError for a folder that is missing or lacks one of the classes, and a file that is not
    UTF-8.
    """
    path = Path(path_text).expanduser()
    if not path.is_dir():
        raise WorkloadError(
            f"data folder {path} " + ("is a file" if path.exists() else "does not exist"),
            "give the folder aclImdb, unpacked: train/pos, train/neg; a CSV file is --data file:PATH",
        )
    parts = [part for part in (path / "train", path / "test") if part.is_dir()] or [path]
    files = [
        (file, label)
        for part in parts
        for label, name in enumerate(FOLDERS)
        for file in sorted((part / name).glob("*.txt"))
    ]
    missing = [
        name for label, name in enumerate(FOLDERS) if all(file_label != label for _, file_label in files)
    ]
    if missing:
        raise WorkloadError(
            f"data folder {path} has no review in {' and '.join(missing)}",
            "reviews lie in PATH/train/pos, PATH/train/neg, PATH/test/pos and PATH/test/neg, as in aclImdb",
        )
    return Reviews(texts=[_text_of(file) for file, _ in files], classes=[label for _, label in files])


def read_csv(path_text: str) -> Reviews:
    """Read a CSV file with the columns review and sentiment, or text and label.

    Raises WorkloadError for a file that cannot be read, is not CSV in UTF-8 or lacks these columns, for an
    unknown label, and if there is no good or no bad review.
    """
    path = Path(path_text).expanduser()
    texts, classes = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            text_column, label_column = _columns(path, rows.fieldnames or ())
            for row in rows:
                if None in row:
                    # A text in the last column would be cut off at its first comma.
                    raise WorkloadError(
                        f"CSV file {path}, line {rows.line_num} has more values than columns",
                        "put texts that hold commas into quotation marks",
                    )
                label = (row[label_column] or "").strip().lower()
                if label not in LABELS:
                    raise WorkloadError(
                        f"CSV file {path}, line {rows.line_num}: {label_column} is {label[:40]!r}",
                        f"use one of {', '.join(LABELS)}",
                    )
                texts.append(row[text_column] or "")
                classes.append(LABELS[label])
    except csv.Error as error:
        raise WorkloadError(
            f"CSV file {path}, line {rows.line_num} cannot be read: {error}",
            "look for a quotation mark that is not closed",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"CSV file {path} cannot be read: {error}",
            "give --data file:PATH of a CSV file in UTF-8, or folder:PATH",
        ) from None
    # If all reviews were of one class, any model would get all of them right.
    for label, kind in enumerate(("bad", "good")):
        if label not in classes:
            raise WorkloadError(f"CSV file {path} has no {kind} review", "give reviews of both kinds")
    return Reviews(texts=texts, classes=classes)


def split_reviews(reviews: Reviews) -> dict[str, Reviews]:
    """Return `train`, `validation` and `test`: 70%, 10% and 20%, shuffled once for all runs and seeds.

    Raises WorkloadError for fewer than MIN_REVIEWS.
    """
    number = len(reviews.texts)
    if number < MIN_REVIEWS:
        raise WorkloadError(f"{number} reviews are too few to hold some out", f"give at least {MIN_REVIEWS}")
    order = torch.randperm(number, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    num_validation, num_test = int(VALIDATION_SHARE * number), int(TEST_SHARE * number)
    num_train = number - num_validation - num_test
    log.info("reviews: %d to train, %d for validation, %d to test", num_train, num_validation, num_test)
    parts = {
        "train": order[:num_train],
        "validation": order[num_train : number - num_test],
        "test": order[number - num_test :],
    }
    return {
        name: Reviews(texts=[reviews.texts[i] for i in part], classes=[reviews.classes[i] for i in part])
        for name, part in parts.items()
    }


def as_sequences(reviews: Reviews, tokenizer: Tokenizer, length: int) -> Sequences:
    """Return the reviews as tokens, cut off or padded to `length`.

    A review without tokens keeps one of padding: attention over nothing is NaN, and so would be the model's
    weights from then on.
    """
    texts = tokenizer.encode(reviews.texts, longest=length)
    tokens = torch.full((len(texts), length), tokenizer.padding, dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = torch.tensor([len(text) for text in texts])
    if num_empty := int((lengths == 0).sum()):
        log.warning("warning: %d of %d reviews have no token", num_empty, len(texts))
    return Sequences(tokens=tokens, lengths=lengths.clamp(min=1), classes=torch.tensor(reviews.classes))


def _columns(path: Path, names: Sequence[str]) -> tuple[str, str]:
    for columns in COLUMNS:
        if set(columns) <= set(names):
            return columns
    raise WorkloadError(
        f"CSV file {path} has the columns {', '.join(names)}" if names else f"CSV file {path} is empty",
        "its first line names the columns: " + ", or ".join(" and ".join(columns) for columns in COLUMNS),
    )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"review {file} cannot be read: {error}", "repair or remove it") from None


def write_reviews(num_reviews: int, vocabulary: int, length: int, generator: torch.Generator) -> Sequences:
    """Return reviews of at most `length` tokens below `vocabulary`, half of them good. generator: a CPU's."""
    shape = (num_reviews, length)

    def chance(probability: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) < probability

    good = chance(0.5, num_reviews)
    is_not = chance(NEGATIONS, *shape)
    after_not = is_not.roll(1, dims=1)
    praises = (good[:, None] == chance(AGREEING, *shape)) ^ after_not
    num_opinion = num_opinion_words(vocabulary)
    opinions = 4 + torch.randint(num_opinion, shape, generator=generator) + num_opinion * praises
    neutral = torch.randint(4 + 2 * num_opinion, vocabulary, shape, generator=generator)
    words = torch.where(chance(OPINIONS, *shape) | after_not, opinions, neutral)
    words[is_not] = NOT

    spread = torch.exp(LENGTH_SIGMA * torch.randn(num_reviews, generator=generator))
    lengths = (MEDIAN_LENGTH * length * spread).long().clamp(min(MIN_LENGTH, length), length)
    words[:, 0] = START
    words[torch.arange(num_reviews), lengths - 1] = END
    words[torch.arange(length) >= lengths[:, None]] = PADDING
    classes = (good ^ chance(WRONG_LABELS, num_reviews)).long()
    return Sequences(tokens=words.int(), lengths=lengths, classes=classes)


def num_opinion_words(vocabulary: int) -> int:
    """Return how many words of praise a vocabulary has; it has as many of blame."""
    return min(NUM_OPINION_WORDS, (vocabulary - 4) // 4)


def synthetic_batches(vocabulary: int, length: int, request: DataRequest) -> Iterator[Batch]:
    """Yield endless batches of new reviews."""
    generator = torch.Generator()
    for step in itertools.count(request.first_step):
        generator.manual_seed(seed_of("reviews", request.seed, request.rank, step))
        reviews = write_reviews(request.batch_size, vocabulary, length, generator)
        yield batch_of(reviews, request.device)


def synthetic_splits(vocabulary: int, length: int) -> Splits:
    """Return reviews for validation and for testing, the same for every seed."""
    generator = torch.Generator().manual_seed(seed_of("held-out reviews", HELD_OUT_SEED))
    numbers = {"validation": NUM_VALIDATION, "test": NUM_TEST}
    return {name: write_reviews(number, vocabulary, length, generator) for name, number in numbers.items()}
