"""Documents and chats in JSON Lines, packed into sequences in which none sees another.

The formats are those of Transformers and TRL, a JSON object a line:

* `{"text": "..."}`: all tokens are predicted.
* `{"messages": [{"role": "user", "content": "..."}, ...]}`: by the tokenizer's chat template; likewise.
* `{"prompt": "...", "completion": "..."}`, text or messages: the completion's tokens are predicted.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastlaunch_train.data.corpus import HELD_OUT_SHARE
from fastlaunch_train.data.text import LoadedText, Sequences
from fastlaunch_train.data.tokens import Tokenizer
from fastlaunch_train.records.data_identity import digest_of
from fastlaunch_train.workloads.contract import NO_LABEL
from fastlaunch_train.workloads.registry import WorkloadError

#: Tokens of a document, and the label of each.
Document = tuple[torch.Tensor, torch.Tensor]
_FORMATS = 'give {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...} in each line'


def read_documents(path_text: str, tokenizer: Tokenizer, length: int) -> LoadedText:
    """Read a file of JSON Lines and pack its documents into sequences of `length` tokens.

    The first documents are held out. What a document has beyond `length` tokens is cut off, as TRL does.
    Raises WorkloadError for a file that cannot be read, or a line of another form, with its number.
    """
    path = Path(path_text).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorkloadError(
            f"data file {path} cannot be read: {error.strerror}", "give --data file:PATH of one file"
        ) from None
    texts = [
        document
        for number, line in enumerate(data.splitlines(), start=1)
        if line.strip()
        for document in [_document(line, tokenizer, length, f"{path}, line {number}")]
        if (document[1] != NO_LABEL).any()
    ]
    if not texts:
        raise WorkloadError(f"data file {path} has nothing to predict", _FORMATS)
    num_held_out = math.ceil(HELD_OUT_SHARE * len(texts)) if len(texts) > 1 else 0
    splits = {"train": pack(texts[num_held_out:], length, tokenizer.padding)}
    if num_held_out:
        splits["validation"] = pack(texts[:num_held_out], length, tokenizer.padding)
    return LoadedText(splits=splits, digest=digest_of([data]), tokenizer=tokenizer.identity)


def pack(texts: Sequence[Document], length: int, padding: int) -> Sequences:
    """Return sequences of `length` tokens that hold all documents, each whole, in few sequences.

    Best fit: a document, the longest first, goes into the fullest sequence that has room for it. The first
    token of a document is not predicted, since it follows another document. What is left is padding, which
    counts as a document of its own and has no labels.
    """
    room: dict[int, list[int]] = {}
    packs: list[list[Document]] = []
    for document in sorted(texts, key=lambda document: -len(document[0])):
        size = len(document[0])
        left = min((space for space, waiting in room.items() if waiting and space >= size), default=None)
        if left is None:
            index, left = len(packs), length
            packs.append([])
        else:
            index = room[left].pop()
        packs[index].append(document)
        room.setdefault(left - size, []).append(index)
    shape = (len(packs), length)
    tokens = torch.full(shape, padding, dtype=torch.int32)
    labels = torch.full(shape, NO_LABEL, dtype=torch.int32)
    positions = torch.zeros(shape, dtype=torch.int32)
    lengths = torch.zeros(len(packs), dtype=torch.int64)
    for index, held in enumerate(packs):
        start = 0
        for document_tokens, document_labels in held:
            end = start + len(document_tokens)
            tokens[index, start:end] = document_tokens
            labels[index, start:end] = document_labels
            labels[index, start] = NO_LABEL
            positions[index, start:end] = torch.arange(end - start)
            start = end
        positions[index, start:] = torch.arange(length - start)
        lengths[index] = start
    return Sequences(tokens=tokens, labels=labels, positions=positions, lengths=lengths)


def _document(line: bytes, tokenizer: Tokenizer, length: int, place: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{place}: this is no JSON: {error}", _FORMATS) from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{place}: this is no JSON object", _FORMATS)
    parts = list(_parts(row, place))
    encoded = [
        (tokenizer.chat(part, place) if isinstance(part, list) else tokenizer.encode([part])[0], is_label)
        for part, is_label in parts
    ]
    ending = torch.tensor([] if tokenizer.end is None else [tokenizer.end], dtype=torch.int32)
    # A chat template writes its own ending.
    if not isinstance(parts[-1][0], list):
        encoded.append((ending, True))
    tokens = torch.cat([part for part, _ in encoded])[:length]
    labels = torch.cat([part if is_label else torch.full_like(part, NO_LABEL) for part, is_label in encoded])[
        :length
    ]
    return tokens, labels


def _parts(row: dict[str, Any], place: str) -> Iterator[tuple[str | list[Any], bool]]:
    """Yield the parts of a document, text or messages, and whether their tokens are to be predicted."""
    if isinstance(row.get("text"), str):
        yield row["text"], True
    elif _is_chat(row.get("messages")):
        yield row["messages"], True
    elif all(isinstance(row.get(key), str) or _is_chat(row.get(key)) for key in ("prompt", "completion")):
        yield row["prompt"], False
        yield row["completion"], True
    else:
        raise WorkloadError(f"{place}: it has {', '.join(row) or 'nothing'}", _FORMATS)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in value
    )
