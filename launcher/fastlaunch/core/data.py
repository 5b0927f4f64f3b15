"""Convert dataclasses to plain data, such as JSON holds, and back."""

import datetime
import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from fastlaunch.core.errors import UserError

T = TypeVar("T")


def read(kind: type[T], data: Any, where: str) -> T:
    """Return the dataclass from which `to_data` made `data`.

    where: the name of the data in messages. Raises UserError, with the place, for a value of the wrong type,
    a missing or unknown field, and a value that the dataclass itself refuses.
    """
    # Imported late: `--help` reads nothing.
    import msgspec

    try:
        value = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}") from None
    if unknown := _complete(value, data):
        raise UserError(f"{where}: unknown field `${unknown[0]}`")
    return value


def to_data(value: Any) -> Any:
    """Return plain data from which `read` makes an equal value, without fields that have their default."""
    if is_dataclass(value):
        data = {of.name: to_data(getattr(value, of.name)) for of in fields(value)}
        for of in fields(value):
            # Compare the data, since fields without comparison must be kept too.
            default = of.default if of.default_factory is MISSING else of.default_factory()
            if data[of.name] == to_data(default):
                del data[of.name]
        return data
    if isinstance(value, Mapping):
        return {name: to_data(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


def _complete(value: Any, data: Any) -> list[str]:
    """Set every field of the dataclasses in `value`; return the paths in `data` that match no field.

    Thousands of runs are read at once, so only the dicts and lists in `data` are visited.
    """
    unknown: list[str] = []
    kind: Any = type(value)
    names = _names_of(kind)
    parts: Any = value
    if names:
        # msgspec leaves defaults on the class, where `vars` does not see them.
        parts = vars(value)
        if len(parts) < len(names):
            for name in names:
                if name not in parts:
                    parts[name] = getattr(value, name)
        if not data.keys() <= parts.keys():
            unknown = [f".{name}" for name in data if name not in parts]
    for key, item in enumerate(data) if isinstance(data, list) else data.items():
        if (type(item) is dict or type(item) is list) and (not names or key in parts):
            at = f".{key}" if names else f"[{key!r}]"
            unknown += [at + path for path in _complete(parts[key], item)]
    return unknown


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(of.name for of in fields(kind)) if is_dataclass(kind) else ()
