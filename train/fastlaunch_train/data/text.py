"""Batches of text: sequences of tokens, held in memory, that are read once and then dealt out."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from fastlaunch_train.data.order import NO_LABEL, share, shuffled
from fastlaunch_train.records.data_identity import CONTENTS, DataIdentity
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Batch, DataRequest


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Samples of text, on the CPU. tokens: (samples, length), int32.

    classes: (samples,), int64, and lengths: (samples,), the tokens of each that are no padding. Without them
    every sequence is full, and its own tokens are what is predicted.
    """

    tokens: torch.Tensor
    classes: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens.dim() == 2
        assert (self.classes is None) == (self.lengths is None)

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, indices: torch.Tensor) -> "Sequences":
        """The samples of these numbers, in this order."""
        return Sequences(
            tokens=self.tokens[indices],
            classes=None if self.classes is None else self.classes[indices],
            lengths=None if self.lengths is None else self.lengths[indices],
        )


#: What to train on (`train`) and what is held out (`validation`, and `test` if there is one).
Splits = Mapping[str, Sequences]


@dataclass(frozen=True, kw_only=True)
class ReadText:
    """Text that was read. digest: of the whole of it, before it was cut into tokens and split.

    tokenizer: what cut it, as `Tokenizer.identity`.
    """

    splits: Splits
    digest: str
    tokenizer: str


@dataclass(kw_only=True)
class TextSource:
    """Where a workload's text comes from: made up, or read once, when it is first asked for.

    write: endless batches of made-up text. written: made-up text that is held out. made_up: what those are.
    read: the text of a file or folder, by the words for it on the command line, each a function of the path.
    """

    workload: str
    write: Callable[[DataRequest], Iterator[Batch]]
    written: Callable[[], Splits]
    made_up: DataIdentity
    read: Mapping[str, Callable[[str], ReadText]]
    _written: Splits | None = None
    _texts: dict[str, ReadText] = field(default_factory=dict)

    def batches(self, request: DataRequest) -> Iterator[Batch]:
        """Endless batches to train on."""
        if request.arm == "synthetic":
            return self.write(request)
        return training_batches(self._text(request.arm).splits["train"], request)

    def held_out(self, request: DataRequest, split: str) -> Iterator[Batch]:
        """This rank's batches of `validation` or `test`; none of what there is not."""
        if request.arm == "synthetic":
            self._written = splits = self._written or self.written()
        else:
            splits = self._text(request.arm).splits
        sequences = splits.get(split)
        return iter(()) if sequences is None else scoring_batches(sequences, request)

    def samples_per_epoch(self, arm: str) -> int | None:
        """Samples to train on; None of made-up text, which has no end."""
        return None if arm == "synthetic" else len(self._text(arm).splits["train"])

    def identity(self, arm: str) -> DataIdentity:
        """What the text is. The whole of it was read and hashed by every rank: it is in memory anyway."""
        if arm == "synthetic":
            return self.made_up
        text = self._text(arm)
        return DataIdentity(
            digest=text.digest,
            covers=CONTENTS,
            num_samples=len(text.splits["train"]),
            tokenizer=text.tokenizer,
        )

    def _text(self, arm: str) -> ReadText:
        if arm not in self._texts:
            source, _, path = arm.partition(":")
            if not path or source not in self.read:
                known = ["synthetic", *(f"{word}:PATH" for word in self.read)]
                raise WorkloadError(
                    f"workload {self.workload!r}: unknown data source {arm!r}", f"known: {', '.join(known)}"
                )
            self._texts[arm] = self.read[source](path)
        return self._texts[arm]


def training_batches(sequences: Sequences, request: DataRequest) -> Iterator[Batch]:
    """Endless batches, as `batch_of` makes them and `order.shuffled` deals them."""
    for keys in shuffled(len(sequences), request):
        yield batch_of(sequences.part(torch.tensor([index for _, index in keys])), request.device)


def scoring_batches(sequences: Sequences, request: DataRequest) -> Iterator[Batch]:
    """This rank's batches of `sequences`, each once over all ranks, as `order.share` deals them."""
    for indices in share(len(sequences), request):
        filled = torch.tensor([0 if index is None else index for index in indices])
        is_filler = torch.tensor([index is None for index in indices])
        yield batch_of(sequences.part(filled), request.device, is_filler)


def batch_of(
    sequences: Sequences, device: torch.device, is_filler: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """A batch of all `sequences`, on `device`; what is_filler (samples,) marks has no labels.

    tokens: (batch, length), int64. labels: the class of each sample, or its tokens; `NO_LABEL` where there
    is none. With classes also mask: as tokens, 1 where one means something.
    """
    tokens = sequences.tokens.long()
    labels = tokens if sequences.classes is None else sequences.classes
    if is_filler is not None:
        labels = labels.masked_fill(is_filler if labels.dim() == 1 else is_filler[:, None], NO_LABEL)
    batch = {"tokens": _to(tokens, device), "labels": _to(labels, device)}
    if sequences.lengths is not None:
        mask = torch.arange(tokens.shape[1]) < sequences.lengths[:, None]
        batch["mask"] = _to(mask.long(), device)
    return batch


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        # From pageable memory the copy would wait for the steps that are queued.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
