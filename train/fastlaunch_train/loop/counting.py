"""How many samples are in the batch that came. Shapes and lengths alone are read: nothing waits for a GPU."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


class SampleCounter:
    """Counts the samples of batch after batch of one loader.

    They are the rows of the batch's first tensor or array; without one, the items of its first column or of
    itself. Where the batch is a list of samples, such as images (3, height, width), those rows are none of
    them: the first batch that has `nominal` samples by one of these ways decides which one counts.
    """

    def __init__(self, nominal: int | None = None) -> None:
        self._nominal = nominal
        self._way: int | None = None

    def count(self, batch: Any) -> int | None:
        """Return the samples of `batch`; None if nothing says how many."""
        ways = [_rows(batch), _items_of_column(batch), len(batch) if _is_sequence(batch) else None]
        if self._way is None and self._nominal in ways and self._nominal is not None:
            self._way = ways.index(self._nominal)
        if self._way is not None:
            return ways[self._way]
        if isinstance(batch, tuple):
            # A pair of texts is as likely one sample.
            ways.pop()
        return next((number for number in ways if number is not None), None)


def _rows(batch: Any) -> int | None:
    """Return the leading dimension of the first tensor or array in `batch` that has one; None without."""
    try:
        shape: Any = getattr(batch, "shape", ())
        if len(shape) and isinstance(shape[0], int):
            return shape[0]
    except (RuntimeError, TypeError, ValueError):  # nested tensors refuse, and shapes that are not known
        pass
    return next((rows for part in _parts(batch) if (rows := _rows(part)) is not None), None)


def _items_of_column(batch: Any) -> int | None:
    """Return the length of a batch's first list, such as of texts; None if it has none, or uneven ones."""
    columns = [len(part) for part in _parts(batch) if _is_sequence(part)]
    is_even = isinstance(batch, Mapping) or len(set(columns)) == 1
    return columns[0] if columns and is_even else None


def _parts(value: Any) -> Iterable[Any]:
    """Return what a container holds; nothing for numbers, text and objects that do not say."""
    if isinstance(value, Mapping):  # a BatchEncoding of Transformers, too
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Sequence):
        # A list of numbers or text may be long, and has no tensor in it.
        sample = [value[at] for at in (0, len(value) // 2, -1)] if len(value) else []
        return () if all(isinstance(item, int | float | str | bytes) for item in sample) else value
    pytree = sys.modules.get("torch.utils._pytree")
    leaves = pytree.tree_leaves(value) if pytree else [value]
    return () if any(leaf is value for leaf in leaves) else leaves


def _is_sequence(value: Any) -> bool:
    """Whether `value` is a list of whatever, and neither text nor a named tuple."""
    is_text = isinstance(value, str | bytes)
    return isinstance(value, Sequence) and not is_text and not hasattr(value, "_fields")
