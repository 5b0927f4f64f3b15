"""Count the samples of a batch from shapes and lengths alone, so that nothing waits for a GPU."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


class SampleCounter:
    """Counts the samples of batch after batch of one loader.

    Samples are the rows of the batch's first tensor or array; without one, the items of its first column, or
    of the batch itself. The first batch in which a tensor, the column or the batch has `nominal` items
    decides which of them counts from then on. Several tensors of one form in a list are samples if their rows
    differ; otherwise they may be columns as well, and the count is unknown unless `nominal` settles it.
    """

    def __init__(self, nominal: int | None = None) -> None:
        self._nominal = nominal
        self._way: int | str | None = None  # the index of a tensor, "column" or "batch"
        self._is_ambiguous = False

    def count(self, batch: Any) -> int | None:
        """Return the number of samples in `batch`; None if it cannot be determined."""
        shapes = list(_shapes(batch))
        groups = list(_groups(batch)) if self._way is None else []
        ways: dict[int | str, int | None] = {at: shape[0] for at, shape in enumerate(shapes)}
        lengths = [
            ("column", _items_of_column(batch)),
            ("batch", len(batch) if _is_sequence(batch) else None),
        ]
        ways.update(reversed(lengths) if groups and groups[-1] is batch else lengths)
        number = self._undecided(batch, groups, ways) if self._way is None else ways.get(self._way)
        if number is None or self._nominal is None:
            return number
        # Time steps may be the rows of a sequence-first batch.
        is_second = self._way is None and bool(shapes) and shapes[0][1:2] == (self._nominal,)
        return None if number > self._nominal or is_second else number

    def _undecided(self, batch: Any, groups: list[Any], ways: dict[int | str, int | None]) -> int | None:
        """Count the samples of a batch while no tensor is chosen to count by; choose one if possible."""
        full = [way for way, number in ways.items() if number is not None and number == self._nominal]
        group = groups[-1] if groups else ()
        is_pair = isinstance(group, tuple) and len(group) == 2  # such as (x, y)
        # A nested group holds samples of several tensors each, or columns of samples.
        differ = len({next(_shapes(part))[0] for part in group}) > 1
        are_samples = differ and not is_pair and len(groups) == 1
        if group and not (is_pair and group is batch):
            length = "batch" if group is batch else "column"
            is_tied = any(isinstance(way, int) for way in full) and len(group) == self._nominal
            if are_samples and ways[length] == len(group) and self._nominal in (None, len(group)):
                full = [length]
            elif not are_samples and (self._nominal is None or is_tied):
                self._is_ambiguous = True
        if self._is_ambiguous:
            return None
        if full:
            self._way = full[0]
            return ways[self._way]
        if group and (differ or not is_pair or group is not batch):
            return len(group) if are_samples else None
        if isinstance(batch, tuple):
            # A pair of texts may as well be one sample.
            del ways["batch"]
        return next((number for number in ways.values() if number is not None), None)


def rows_of(batch: Any) -> int | None:
    """Return the rows of a stacked batch's first tensor; None without one."""
    return next((shape[0] for shape in _shapes(batch)), None)


def _shape(value: Any) -> tuple[Any, ...]:
    """Return the shape of a tensor or array; () for other values and for unknown shapes."""
    try:
        shape = tuple(getattr(value, "shape", ()))
    except (RuntimeError, TypeError, ValueError):  # nested tensors and unknown shapes raise
        return ()
    return shape if shape and isinstance(shape[0], int) else ()


def _shapes(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the shapes of the tensors and arrays in `value` that have rows, in order."""
    if shape := _shape(value):
        yield shape
    elif hasattr(value, "batch_sizes") and hasattr(value, "_fields"):
        # In a PackedSequence the first step, on the CPU, has one item for each sample.
        yield (int(value.batch_sizes[0]),)
    else:
        for part in _parts(value):
            yield from _shapes(part)


def _groups(value: Any) -> Iterator[Any]:
    """Yield the lists around the first tensor that have several items of one form, outermost first."""
    parts = [] if _shape(value) else list(_parts(value))
    first = next((part for part in parts if next(_shapes(part), None)), None)
    if first is not None:
        if _is_sequence(value) and len(parts) > 1 and len({_form(part) for part in parts}) == 1:
            yield value
        yield from _groups(first)


def _form(value: Any) -> Any:
    """Return what samples of one data set have in common: types, and a tensor's dimensions."""
    if shape := _shape(value):
        return getattr(value, "dtype", None), len(shape)
    return type(value), frozenset(_form(part) for part in _parts(value))


def _items_of_column(batch: Any) -> int | None:
    """Return the length of a batch's first list, such as of texts; None if it has none, or uneven ones."""
    columns = [len(part) for part in _parts(batch) if _is_sequence(part)]
    is_even = isinstance(batch, Mapping) or len(set(columns)) == 1
    return columns[0] if columns and is_even else None


def _parts(value: Any) -> Iterable[Any]:
    """Return the items of a container; nothing for numbers, text and opaque objects."""
    if isinstance(value, Mapping):  # also a BatchEncoding of Transformers
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
    """Return whether `value` is a sequence other than text and named tuples."""
    is_text = isinstance(value, str | bytes)
    return isinstance(value, Sequence) and not is_text and not hasattr(value, "_fields")
