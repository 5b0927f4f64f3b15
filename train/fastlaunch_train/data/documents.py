"""Documents and chats in JSON Lines, packed into sequences in which none sees another.

Chats are written by the tokenizer's template. All tokens are predicted but those of a prompt.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from fastlaunch_train.data.corpus import HELD_OUT_SHARE
from fastlaunch_train.data.text import LoadedText, Sequences
from fastlaunch_train.data.tokens import Tokenizer
from fastlaunch_train.records.data_identity import digest_of
from fastlaunch_train.records.rows import FORMATS, Row, RowError, read_bytes, read_rows
from fastlaunch_train.workloads.contract import NO_LABEL
from fastlaunch_train.workloads.registry import WorkloadError

log = logging.getLogger("fastlaunch_train")

#: Tokens of a document, and the label of each.
Document = tuple[torch.Tensor, torch.Tensor]


def read_documents(path_text: str, tokenizer: Tokenizer, length: int) -> LoadedText:
    """Read a file of JSON Lines and pack its documents into sequences of `length` tokens.

    The first documents are held out. What a document has beyond `length` tokens is cut off, as TRL does.
    Raises WorkloadError for a file that cannot be read, or a line of another form, with its number.
    """
    path = Path(path_text).expanduser()
    try:
        data = read_bytes(path)
        rows = list(read_rows(path, data))
    except OSError as error:
        raise WorkloadError(
            f"data file {path} cannot be read: {error.strerror}", "give --data file:PATH of one file"
        ) from None
    except RowError as error:
        raise WorkloadError(error.message, error.hint) from None
    documents = [_document(row, tokenizer, length) for row in rows]
    texts = [document for document in documents if (document[1][1:] != NO_LABEL).any()]
    if num_unused := len(rows) - len(texts):
        log.warning("warning: %d of %d documents have nothing to predict", num_unused, len(rows))
    if num_cut := sum(len(document[0]) == length for document in texts):
        log.warning(
            "warning: %d of %d documents reach --sequence-length %d: what is longer is cut off",
            num_cut,
            len(rows),
            length,
        )
    if not texts:
        hint = FORMATS
        if any(len(tokens) == length for tokens, _ in documents):
            hint = f"give a longer --sequence-length: {length} tokens end within the prompts"
        raise WorkloadError(f"data file {path} has nothing to predict", hint)
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


def _document(row: Row, tokenizer: Tokenizer, length: int) -> Document:
    tokens, num_prompt = _tokens(row, tokenizer), 0
    if row.prompt is not None:
        # A token may hold the end of the prompt and the start of the completion, and is predicted.
        prompt = _prompt_tokens(row, tokenizer)
        num_common = min(len(prompt), len(tokens))
        num_prompt = int((prompt[:num_common] == tokens[:num_common]).cumprod(0).sum())
    # A chat template writes its own ending, and so do some tokenizers.
    is_open = isinstance(row.completion, str) and (not len(tokens) or int(tokens[-1]) != tokenizer.end)
    if is_open and tokenizer.end is not None:
        tokens = torch.cat([tokens, torch.tensor([tokenizer.end], dtype=torch.int32)])
    labels = tokens.clone()
    labels[:num_prompt] = NO_LABEL
    return tokens[:length], labels[:length]


def _tokens(row: Row, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the tokens of the whole row: tokenized at once, it has one beginning."""
    if isinstance(row.completion, str):
        assert not isinstance(row.prompt, list)
        return tokenizer.encode([(row.prompt or "") + row.completion])[0]
    assert not isinstance(row.prompt, str)
    return tokenizer.chat([*(row.prompt or ()), *row.completion], row.place, tools=row.tools)


def _prompt_tokens(row: Row, tokenizer: Tokenizer) -> torch.Tensor:
    if isinstance(row.prompt, list):
        return tokenizer.chat(row.prompt, row.place, tools=row.tools, is_prompt=True)
    return tokenizer.encode([row.prompt or ""])[0]
