"""Read YAML files into dataclasses. Every fault is a BadFile with its line.

Scalars are read as text: `1:30` is not 90, `010` is not 8, `2.10` is not 2.1, and `no` is a word. Only the
type of the field turns it into a number or a date.
"""

import datetime
import functools
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text
from fastlaunch.core.terminal import printable
from fastlaunch.core.units import parse_date

T = TypeVar("T")
#: Cached, since working out a class's types takes as long as reading one of its many records.
_types_of = functools.cache(get_type_hints)
#: What a value of a type looks like, for messages.
_EXPECTED = {
    str: "text",
    int: "a whole number",
    float: "a number such as 55.04",
    Path: "the name of a file",
    bool: "true or false",
    datetime.date: "a date written YYYY-MM-DD",
}
#: Plain decimals. Other readers of YAML take numbers with a leading zero as octal.
_INTEGER = r"[+-]?(?:0|[1-9][0-9]{0,17})"
_NUMBERS = {int: re.compile(_INTEGER), float: re.compile(rf"{_INTEGER}(?:\.[0-9]*)?|[+-]?\.[0-9]+")}
#: The spellings of YAML 1.1.
_TRUTH = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
#: The most that a file may hold with its aliases expanded. Our largest has 3,000 values in 44 KB.
_MOST_VALUES, _MOST_LEVELS = 300_000, 50
_EXCESS = f"has more than {_MOST_VALUES:,} values or {_MOST_LEVELS} levels, with its aliases expanded"
_TAG = "tag:yaml.org,2002:"
_NULL, _MERGE = f"{_TAG}null", f"{_TAG}merge"
#: The tags of each kind of node. Others, such as !!int, are refused; `<<` as a value is text.
_TAGS = {"scalar": (f"{_TAG}str", _NULL, _MERGE), "sequence": (f"{_TAG}seq",), "mapping": (f"{_TAG}map",)}


@functools.cache
def _loader() -> Any:
    """Return a PyYAML loader that resolves null and merge keys (`<<`), and reads all else as text."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    resolvers = {
        first: [(tag, pattern) for tag, pattern in candidates if tag in (_NULL, _MERGE)]
        for first, candidates in base.yaml_implicit_resolvers.items()
    }
    return type("TextLoader", (base,), {"yaml_implicit_resolvers": resolvers})


def load_yaml(text: str) -> Any:
    """Return the one document in `text` as data, None if there is none. Raises BadFile."""
    return YamlFile(Path("the text"), text).data


class YamlFile:
    """The single document of a YAML file, as plain data. A path is the keys and indices from the top down."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        """Read the file. text: its content, if that is known."""
        import yaml

        self.path = path
        #: The line of every value, by its path as text; and the nodes of scalars.
        self._lines: dict[tuple[str, ...], int] = {}
        self._scalars: dict[tuple[str, ...], Any] = {}
        self._num_values = 0
        if text is None and not path.exists():
            raise BadFile(path, "does not exist")
        text = read_text(path) if text is None else text
        try:
            # Read the stream of events first, because composing crashes on deep nesting.
            level = 0
            for number, event in enumerate(yaml.parse(text, Loader=_loader())):
                level += isinstance(event, yaml.CollectionStartEvent)
                level -= isinstance(event, yaml.CollectionEndEvent)
                if number > _MOST_VALUES or level > _MOST_LEVELS:
                    assert event.start_mark is not None
                    raise BadFile(path, _EXCESS, line=event.start_mark.line + 1)
            root = yaml.compose(text, Loader=_loader())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = f"is not YAML: {error.problem or error}"
            raise BadFile(path, problem, line=mark.line + 1 if mark else None) from None
        # PyYAML lets the other errors through for an empty tag.
        except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:
            raise BadFile(path, f"is not YAML: {error}") from None
        self.data: Any = None if root is None else self._data_of(root, ())

    def _data_of(self, node: Any, at: tuple[str, ...], level: int = 1) -> Any:
        """Return a node as data, and note the lines of all its values, with what its aliases stand for."""
        line = node.start_mark.line + 1
        self._lines.setdefault(at, line)
        self._num_values += 1
        if self._num_values > _MOST_VALUES or level > _MOST_LEVELS:
            raise BadFile(self.path, _EXCESS, line=line)
        if node.tag not in _TAGS[node.id]:
            raise BadFile(self.path, f"is not YAML: it has a tag {node.tag}", line=line)
        if node.id == "scalar":
            self._scalars[at] = node
            return None if node.tag == _NULL else node.value
        if node.id == "sequence":
            return [
                self._data_of(item, (*at, str(index)), level + 1) for index, item in enumerate(node.value)
            ]
        values: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        for key, value in node.value:
            inner, line = (*at, str(key.value)), key.start_mark.line + 1
            # YAML would silently use the last value.
            if inner in self._lines:
                problem = f"`{key.value}` is given twice; line {self._lines[inner]} has it already"
                raise BadFile(self.path, problem, line=line)
            self._lines[inner] = line
            if key.tag == _MERGE:
                for index, part in enumerate(value.value if value.id == "sequence" else [value]):
                    if part.id != "mapping":
                        raise BadFile(self.path, "is not YAML: `<<` takes mappings", line=line)
                    merged = self._data_of(part, (*inner, str(index)), level + 1) | merged
            elif key.id != "scalar":
                raise BadFile(self.path, "is not YAML: a name is a list or a mapping", line=line)
            else:
                name = None if key.tag == _NULL else key.value
                values[name] = self._data_of(value, inner, level + 1)
        return merged | values

    def fault(self, problem: str, *at: str | int, hint: str | None = None) -> BadFile:
        """Return the error for the value at this path, with its line."""
        return BadFile(self.path, problem, line=self._line(*at), hint=hint)

    def mapping(self, *at: str | int) -> dict[str, Any]:
        """Return the mapping at this path, empty if nothing is there; its keys are text."""
        value = self._value(*at)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fault(f"{_name(at)} is {_shown(value)}, not `name: value` pairs", *at)
        for key in value:
            if not isinstance(key, str) or not key.strip() or not key.isprintable():
                raise self.fault(f"{_name(at)} has {_shown(key)} for a name, not text", *at, key or "")
        return value

    def items(self, *at: str | int) -> list[Any]:
        """Return the list at this path, empty if nothing is there."""
        value = self._value(*at)
        if value is not None and not isinstance(value, list):
            raise self.fault(f"{_name(at)} is {_shown(value)}, not a list", *at)
        return value or []

    def record(self, cls: type[T], *at: str | int, without: tuple[str, ...] = (), **given: Any) -> T:
        """Return a dataclass with the mapping at this path for fields, checked by their types.

        given: fields that the file does not hold. without: keys that are read elsewhere.
        """
        types_by_name = _types_of(cls)  # type: ignore[arg-type]
        known = {field.name: field for field in fields(cls) if field.name not in given}  # type: ignore[arg-type]
        entry = self.mapping(*at)
        self.refuse_unknown(*at, known=[*known, *without])
        values = {name: self.value(types_by_name[name], *at, name) for name in entry if name not in without}
        missing = [
            name
            for name, field in known.items()
            if name not in entry and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise self.fault(f"{_name(at)} has no {' and no '.join(f'`{name}`' for name in missing)}", *at)
        try:
            return cls(**values, **given)
        except UserError as error:
            # Point to the line of the field that the message names.
            named = sorted((name for name in entry if name in error.message), key=len)[-1:]
            raise self.fault(error.message, *at, *named, hint=error.hint) from None

    def refuse_unknown(self, *at: str | int, known: list[str]) -> None:
        """Raise BadFile if the mapping at this path has an unknown key."""
        for key in self.mapping(*at):
            if key not in known:
                near = get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}"
                raise self.fault(f"{_name(at)} has an unknown field `{key}`", *at, key, hint=hint)

    def value(self, expected: Any, *at: str | int) -> Any:
        """Return the value at this path as the type `expected`. Raises BadFile if it has another."""
        value = self._value(*at)
        if isinstance(expected, types.UnionType) or get_origin(expected) is Union:
            (expected,) = (one for one in get_args(expected) if one is not type(None))
        origin, arguments = get_origin(expected), get_args(expected)
        if origin in (tuple, frozenset):
            return origin(self.value(arguments[0], *at, index) for index in range(len(self.items(*at))))
        if origin is Mapping:
            return {key: self.value(arguments[1], *at, key) for key in self.mapping(*at)}
        text = value.strip() if isinstance(value, str) else ""
        node = self._scalars.get(tuple(map(str, at)))
        is_plain = node is None or not node.style
        if text and expected is datetime.date:
            try:
                return parse_date(text)
            except UserError as error:
                raise self.fault(f"{_name(at)}: {error.message}", *at, hint=error.hint) from None
        if is_plain and expected is bool and text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        is_number = is_plain and expected in _NUMBERS and _NUMBERS[expected].fullmatch(text)
        if is_number or (text and expected in (str, Path)):
            return printable(text) if expected is str else expected(text)
        raise self.fault(f"{_name(at)} is {_shown(value)}, not {_EXPECTED[expected]}", *at)

    def text(self, *at: str | int) -> str:
        """Return the scalar's text at this path, also of `null` and `~`. Raises BadFile if there is none."""
        value, node = self._value(*at), self._scalars.get(tuple(map(str, at)))
        text = value if isinstance(value, str) else node.value if node else ""
        if isinstance(value, dict | list) or not (text or value == ""):
            hint = "put quotes around it, if it is text"
            raise self.fault(f"{_name(at)} is {_shown(value)}, not text or a number", *at, hint=hint)
        return text

    def _value(self, *at: str | int) -> Any:
        value = self.data
        for step in at:
            if isinstance(step, str) and (not isinstance(value, dict) or step not in value):
                return None
            value = value[step]
        return value

    def _line(self, *at: str | int) -> int | None:
        """Return the line of the value at this path, or of the nearest one above it."""
        path = tuple(map(str, at))
        prefixes = (path[:length] for length in range(len(path), -1, -1))
        return next((self._lines[prefix] for prefix in prefixes if prefix in self._lines), None)


def _name(at: tuple[str | int, ...]) -> str:
    """Return `aws.us-east-1`, `prices[2].as_of`."""
    text = "".join(f"[{step + 1}]" if isinstance(step, int) else f".{step}" for step in at)
    return text.removeprefix(".") or "the file"


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = "empty" if value in (None, "") else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
