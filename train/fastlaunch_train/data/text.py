"""Batches of text: token sequences that are read once, kept in memory and dealt into batches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fastlaunch_train.data.batches import share, shuffled
from fastlaunch_train.records.data_identity import CONTENTS, DataIdentity
from fastlaunch_train.workloads.contract import NO_LABEL, Batch, DataRequest
from fastlaunch_train.workloads.registry import WorkloadError


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Samples of text, on the CPU. Without classes and labels all tokens are to be predicted."""

    tokens: torch.Tensor  #: (samples, length), int32
    classes: torch.Tensor | None = None  #: (samples,), int64
    lengths: torch.Tensor | None = None  #: (samples,), number of tokens that are not padding; None: all
    labels: torch.Tensor | None = None  #: (samples, length), int32: tokens to predict, or `NO_LABEL`
    positions: torch.Tensor | None = None  #: (samples, length), int32, counted from 0 in each document

    def __post_init__(self) -> None:
        assert self.tokens.dim() == 2
        assert self.classes is None or self.lengths is not None

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, indices: torch.Tensor) -> "Sequences":
        """Return the samples at `indices`, in this order."""
        held = {name: value[indices] for name, value in vars(self).items() if value is not None}
        return Sequences(**held)


#: The part to train on (`train`) and the held-out ones (`validation`, and `test` if there is one).
Splits = Mapping[str, Sequences]


@dataclass(frozen=True, kw_only=True)
class LoadedText:
    """Text that was read from files."""

    splits: Splits
    digest: str  #: the whole text's, before it was tokenized and split
    tokenizer: str  #: `Tokenizer.identity`


@dataclass(kw_only=True)
class TextSource:
    """Where a workload's text comes from: synthetic, or read once, when it is first needed."""

    workload: str
    synthetic_batches: Callable[[DataRequest], Iterator[Batch]]  #: endless
    synthetic_splits: Callable[[], Splits]  #: held out
    synthetic_identity: DataIdentity
    readers: Mapping[str, Callable[[str], LoadedText]]  #: `file` and `folder`, each a function of its path
    _held_out: Splits | None = None
    _texts: dict[str, LoadedText] = field(default_factory=dict)

    def batches(self, request: DataRequest) -> Iterator[Batch]:
        """Return endless batches to train on, dealt as `batches.shuffled` says."""
        if request.source == "synthetic":
            return self.synthetic_batches(request)
        sequences = self._text(request.source).splits["train"]
        return (
            batch_of(sequences.part(torch.tensor([index for _, index in keys])), request.device)
            for keys in shuffled(len(sequences), request)
        )

    def held_out(self, request: DataRequest, split: str) -> Iterator[Batch]:
        """Return this rank's batches of `validation` or `test`; none if there is no such split."""
        if request.source == "synthetic":
            self._held_out = splits = self._held_out or self.synthetic_splits()
        else:
            splits = self._text(request.source).splits
        sequences = splits.get(split)
        return iter(()) if sequences is None else scoring_batches(sequences, request)

    def samples_per_epoch(self, source: str) -> int | None:
        """Return the number of training samples; None for synthetic text, which has no end."""
        return None if source == "synthetic" else len(self._text(source).splits["train"])

    def identity(self, source: str) -> DataIdentity:
        """Return the identity of the text: its digest, since every rank has all of it in memory anyway."""
        if source == "synthetic":
            return self.synthetic_identity
        text = self._text(source)
        return DataIdentity(
            digest=text.digest,
            covers=CONTENTS,
            num_samples=len(text.splits["train"]),
            tokenizer=text.tokenizer,
        )

    def _text(self, source: str) -> LoadedText:
        if source not in self._texts:
            kind, _, path = source.partition(":")
            if not path or kind not in self.readers:
                known = ["synthetic", *(f"{word}:PATH" for word in self.readers)]
                raise WorkloadError(
                    f"workload {self.workload!r}: unknown data source {source!r}",
                    f"known: {', '.join(known)}",
                )
            self._texts[source] = self.readers[kind](path)
        return self._texts[source]


def scoring_batches(sequences: Sequences, request: DataRequest) -> Iterator[Batch]:
    """Yield this rank's batches of `sequences`, dealt as `batches.share` says."""
    for indices in share(len(sequences), request):
        filled = torch.tensor([0 if index is None else index for index in indices])
        is_filler = torch.tensor([index is None for index in indices])
        yield batch_of(sequences.part(filled), request.device, is_filler)


def batch_of(
    sequences: Sequences, device: torch.device, is_filler: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return a batch of all `sequences`, on `device`; those that is_filler (samples,) marks have no labels.

    tokens: (batch, length), int64. labels: each sample's class, or its tokens, or `NO_LABEL`. mask, with
    lengths only: (batch, length), 1 where a token is not padding. positions, of packed documents: likewise.
    """
    tokens = sequences.tokens.long()
    labels = tokens if sequences.classes is None else sequences.classes
    if sequences.labels is not None:
        labels = sequences.labels.long()
    if is_filler is not None:
        labels = labels.masked_fill(is_filler if labels.dim() == 1 else is_filler[:, None], NO_LABEL)
    batch = {"tokens": _to(tokens, device), "labels": _to(labels, device)}
    if sequences.lengths is not None:
        mask = torch.arange(tokens.shape[1]) < sequences.lengths[:, None]
        batch["mask"] = _to(mask.long(), device)
    if sequences.positions is not None:
        batch["positions"] = _to(sequences.positions.long(), device)
    return batch


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        # A copy from pageable memory would wait for the queued steps.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
