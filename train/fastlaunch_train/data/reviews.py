"""Reviews and whether they are good: those of IMDB, from a folder or a CSV file, or made-up ones."""

import csv
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastlaunch_train.data.text import Sequences
from fastlaunch_train.data.tokens import Tokenizer
from fastlaunch_train.records.data_identity import digest_of
from fastlaunch_train.workloads import WorkloadError

log = logging.getLogger("fastlaunch_train")

#: Of 50,000 reviews 5,000 for validation and 10,000 to test, as in the experiment; of others the same shares.
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2
SPLIT_SEED = 20230201
#: Reviews of which less than one would be for validation are no data.
LEAST_REVIEWS = 10
#: What stands for bad and good, class 0 and 1: in a folder, and in a column of a CSV file.
FOLDERS = ("neg", "pos")
LABELS = {"negative": 0, "positive": 1, "neg": 0, "pos": 1, "0": 0, "1": 1}
#: Columns of text and of label: of the IMDB file that Kaggle has, and of the experiment's.
COLUMNS = (("review", "sentiment"), ("text", "label"))


@dataclass(frozen=True, kw_only=True)
class Reviews:
    """Texts, and the class of each."""

    texts: Sequence[str]
    classes: Sequence[int]

    @property
    def digest(self) -> str:
        """Of all texts and classes in their order; the names of files are not in it."""
        labelled = zip(self.texts, self.classes, strict=True)
        return digest_of(part for text, label in labelled for part in (text.encode(), bytes([label])))


def read_folder(path_text: str) -> Reviews:
    """The reviews of PATH/train/pos/*.txt and so on, as aclImdb has them, or of PATH/pos and PATH/neg.

    Raises WorkloadError for a folder that is missing or has not both, or a file that is not UTF-8.
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
    missing = [name for label, name in enumerate(FOLDERS) if all(each != label for _, each in files)]
    if missing:
        raise WorkloadError(
            f"data folder {path} has no review in {' and '.join(missing)}",
            "reviews lie in PATH/train/pos, PATH/train/neg, PATH/test/pos and PATH/test/neg, as in aclImdb",
        )
    return Reviews(texts=[_text_of(file) for file, _ in files], classes=[label for _, label in files])


def read_csv(path_text: str) -> Reviews:
    """The reviews of a CSV file with the columns review and sentiment, or text and label.

    Raises WorkloadError for a file that is missing, empty, not CSV or UTF-8, or without these columns, and
    for a label that is neither positive nor negative; for reviews all of one class, or all without a text.
    """
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise WorkloadError(f"there is no CSV file {path}", "give --data file:PATH.csv or folder:PATH")
    texts, classes = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            text_column, label_column = _columns(path, rows.fieldnames or ())
            for row in rows:
                if None in row:
                    # Else a text that comes last would be cut off at its first comma.
                    raise WorkloadError(
                        f"CSV file {path}, line {rows.line_num} has more values than columns",
                        "put texts that hold commas into quotation marks",
                    )
                label = (row[label_column] or "").strip().lower()
                if label not in LABELS:
                    raise WorkloadError(
                        f"CSV file {path}, line {rows.line_num}: {label_column} is {label[:40]!r}",
                        f"it is one of {', '.join(LABELS)}",
                    )
                texts.append(row[text_column] or "")
                classes.append(LABELS[label])
    except csv.Error as error:
        raise WorkloadError(
            f"CSV file {path}, line {rows.line_num} cannot be read: {error}",
            "look for a quotation mark that is not closed",
        ) from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"CSV file {path} cannot be read: {error}", "save it as CSV in UTF-8") from None
    except OSError as error:
        raise WorkloadError(
            f"CSV file {path} cannot be read: {error.strerror}", "give --data file:PATH.csv or folder:PATH"
        ) from None
    if not texts:
        raise WorkloadError(f"CSV file {path} holds no review", f"give at least {LEAST_REVIEWS}")
    if len(set(classes)) == 1:
        # Any model would be right about all of them.
        raise WorkloadError(
            f"CSV file {path} has {'good' if classes[0] else 'bad'} reviews alone",
            "give reviews of both kinds",
        )
    if not any(text.strip() for text in texts):
        raise WorkloadError(f"CSV file {path}: {text_column} is empty in every line", "give it the reviews")
    return Reviews(texts=texts, classes=classes)


def split_reviews(reviews: Reviews) -> dict[str, Reviews]:
    """`train`, `validation` and `test`: 70%, 10% and 20%, shuffled once for all runs and seeds.

    Raises WorkloadError for fewer than LEAST_REVIEWS.
    """
    number = len(reviews.texts)
    if number < LEAST_REVIEWS:
        raise WorkloadError(
            f"{number} reviews are too few to hold some out", f"give at least {LEAST_REVIEWS}"
        )
    order = torch.randperm(number, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    num_validation, num_test = int(VALIDATION_SHARE * number), int(TEST_SHARE * number)
    num_train = number - num_validation - num_test
    log.info("reviews: %d to train, %d for validation, %d to test", num_train, num_validation, num_test)
    bounds = {
        "train": (0, num_train),
        "validation": (num_train, num_train + num_validation),
        "test": (num_train + num_validation, number),
    }
    return {
        name: Reviews(
            texts=[reviews.texts[i] for i in order[first:last]],
            classes=[reviews.classes[i] for i in order[first:last]],
        )
        for name, (first, last) in bounds.items()
    }


def as_sequences(reviews: Reviews, tokenizer: Tokenizer, length: int) -> Sequences:
    """The reviews as tokens, cut off or padded to `length`.

    One without a token keeps its first padding, as if that meant something: attention over nothing at all is
    no number, for the whole of the model from then on.
    """
    texts = tokenizer.encode(reviews.texts, longest=length)
    tokens = torch.full((len(texts), length), tokenizer.padding, dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = torch.tensor([len(text) for text in texts])
    if num_empty := int((lengths == 0).sum()):
        log.warning("warning: %d of %d reviews have no token", num_empty, len(texts))
    return Sequences(
        tokens=tokens,
        lengths=lengths.clamp(min=1),
        classes=torch.tensor(reviews.classes),
    )


def _columns(path: Path, found: Iterable[str]) -> tuple[str, str]:
    names = list(found)
    for columns in COLUMNS:
        if set(columns) <= set(names):
            return columns
    raise WorkloadError(
        f"CSV file {path} has the columns {', '.join(names)}" if names else f"CSV file {path} is empty",
        "its first line names the columns: " + ", or ".join(" and ".join(columns) for columns in COLUMNS),
    )


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start}"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise WorkloadError(f"review {file} {reason}", "repair or remove it")
