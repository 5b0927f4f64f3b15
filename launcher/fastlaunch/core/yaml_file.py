"""YAML whose every value knows its line, so that a fault can be pointed at."""

import datetime
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlaunch.catalog.prices import parse_date
from fastlaunch.core.errors import BadFile, UserError

#: A price file is kilobytes long; more is some other file, and would take long to read.
MAX_BYTES = 4 * 2**20
MAX_DEPTH = 20
_STRING, _INTEGER, _FLOAT, _BOOLEAN, _TIMESTAMP = (
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp")
)
_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A value as it is written, with the YAML tag that it resolves to."""

    written: str
    tag: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a mapping, with its line."""

    text: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Located:
    """A value of a YAML file: a scalar, a list or a mapping, with its line (1 is the first).

    Its methods return the value as the type asked for, and raise BadFile with the line otherwise.
    """

    file: Path
    line: int
    value: "Scalar | tuple[Located, ...] | dict[Key, Located]"

    def wrong(self, problem: str, hint: str | None = None) -> BadFile:
        """The error that this value is wrong, with its line."""
        return BadFile(self.file, problem, line=self.line, hint=hint)

    def mapping(self, what: str) -> dict[Key, "Located"]:
        """Keys and values, whatever the keys are."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"{what} is {self._kind()}; it takes `name: value` pairs")
        return self.value

    def fields(
        self, what: str, *, required: Collection[str], optional: Collection[str] = ()
    ) -> Mapping[str, "Located"]:
        """Values by field name: every required one is there, and no other than the optional ones."""
        from difflib import get_close_matches

        entries = self.mapping(what)
        known = [*required, *optional]
        for key in entries:
            if key.text not in known:
                near = get_close_matches(key.text, known, n=1, cutoff=0.5)
                kind = "unit" if "_per_" in key.text and any("_per_" in name for name in known) else "field"
                raise BadFile(
                    self.file,
                    f"{what} has an unknown {kind} `{key.text}`",
                    line=key.line,
                    hint=f"did you mean `{near[0]}`?" if near else f"known: {', '.join(known)}",
                )
        fields = {key.text: value for key, value in entries.items()}
        missing = [name for name in required if name not in fields]
        if missing:
            raise self.wrong(f"{what} has no {' and no '.join(f'`{name}`' for name in missing)}")
        return fields

    def items(self, what: str) -> tuple["Located", ...]:
        """The members of a list."""
        if not isinstance(self.value, tuple):
            raise self.wrong(f"{what} is {self._kind()}; it is a list")
        return self.value

    def text(self, what: str) -> str:
        """Text that is not empty, without the spaces around it."""
        if not isinstance(self.value, Scalar) or self.value.tag != _STRING:
            raise self.wrong(f"{what} is {self._kind()}; it is text", "put quotes around it")
        if not self.value.written.strip():
            raise self.wrong(f"{what} is empty")
        return self.value.written.strip()

    def choice(self, what: str, choices: Collection[str]) -> str:
        """One of `choices`."""
        text = self.text(what)
        if text not in choices:
            raise self.wrong(f"{what} is {text!r}", f"it is one of {', '.join(choices)}")
        return text

    def choices(self, what: str, choices: Collection[str]) -> tuple[str, ...]:
        """Members of `choices`, in the order of the file."""
        return tuple(item.choice(f"a member of {what}", choices) for item in self.items(what))

    def texts(self, what: str) -> tuple[str, ...]:
        """Texts, none of them empty."""
        return tuple(item.text(f"a member of {what}") for item in self.items(what))

    def number(self, what: str, *, zero_allowed: bool = False) -> float:
        """A finite number above 0, or also 0."""
        if not isinstance(self.value, Scalar) or self.value.tag not in (_INTEGER, _FLOAT):
            raise self.wrong(f"{what} is {self._kind()}; it is a number such as 55.04")
        # YAML 1.1 also reads 1:30 and 0x1F as numbers. No price is meant so.
        if not _DECIMAL.fullmatch(self.value.written):
            raise self.wrong(f"{what} is {self._kind()}; it is a finite decimal number")
        number = float(self.value.written.replace("_", ""))
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero_allowed):
            raise self.wrong(
                f"{what} is {self._kind()}; it is {'0 or more' if zero_allowed else 'above 0'} and finite",
                "leave an entry out whose value is unknown",
            )
        return number

    def whole(self, what: str, *, zero_allowed: bool = False) -> int:
        """A whole number above 0, or also 0."""
        number = self.number(what, zero_allowed=zero_allowed)
        if not number.is_integer():
            raise self.wrong(f"{what} is {self._kind()}; it is a whole number")
        return int(number)

    def flag(self, what: str) -> bool:
        """True or false."""
        if isinstance(self.value, Scalar) and self.value.tag == _BOOLEAN:
            return self.value.written.lower() in ("true", "yes", "on")
        raise self.wrong(f"{what} is {self._kind()}; it is true or false")

    def date(self, what: str) -> datetime.date:
        """A date, written YYYY-MM-DD."""
        if isinstance(self.value, Scalar) and self.value.tag in (_TIMESTAMP, _STRING):
            try:
                return parse_date(self.value.written)
            except UserError as error:
                raise self.wrong(f"{what}: {error.message}", error.hint) from None
        raise self.wrong(f"{what} is {self._kind()}; it is a date written YYYY-MM-DD")

    def _kind(self) -> str:
        if isinstance(self.value, Scalar):
            written = self.value.written
            return repr(written if len(written) <= 40 else f"{written[:37]}...") if written else "empty"
        return "a list" if isinstance(self.value, tuple) else "a mapping"


def read_yaml(path: Path) -> Located:
    """The one document of a YAML file. Raises BadFile, with the line where there is one.

    Refused are repeated keys, which YAML readers commonly swallow, and aliases, with which a few lines
    can stand for gigabytes.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = _read_text(path)
    unprintable = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if unprintable:
        line = text.count("\n", 0, unprintable.start()) + 1
        raise BadFile(path, f"holds the character {unprintable[0]!r}, which YAML does not allow", line=line)
    try:
        _refuse_aliases_and_depth(path, text, loader)
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        # Only YAML's marked errors have a mark, and not all of those a mark of the problem.
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise BadFile(path, f"is not YAML: {problem}", line=mark.line + 1 if mark else None) from None
    if root is None:
        raise BadFile(path, "is empty", hint="a price file starts with `schema: 1`")
    return _locate(path, root)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadFile(path, "does not exist") from None
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise BadFile(path, f"is larger than {MAX_BYTES >> 20} MiB, so it is no price file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadFile(path, "is not UTF-8 text", line=line) from None


def _refuse_aliases_and_depth(path: Path, text: str, loader: Any) -> None:
    # Before composing, which recurses: in C, where too much depth ends the process.
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1 if event.start_mark else None
        if isinstance(event, yaml.AliasEvent):
            raise BadFile(path, "uses an alias (`*name`)", line=line, hint="write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise BadFile(path, "is nested too deeply to be a price file", line=line)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _locate(file: Path, node: Any) -> Located:
    line = node.start_mark.line + 1
    if node.id == "scalar":
        return Located(file=file, line=line, value=Scalar(written=node.value, tag=node.tag))
    if node.id == "sequence":
        return Located(file=file, line=line, value=tuple(_locate(file, member) for member in node.value))
    entries: dict[Key, Located] = {}
    first_lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line_of_key = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise BadFile(file, "a key is text, not a list or a mapping", line=line_of_key)
        text = key_node.value
        if text in first_lines:
            problem = f"`{text}` stands here again; it is on line {first_lines[text]} already"
            raise BadFile(file, problem, line=line_of_key)
        first_lines[text] = line_of_key
        entries[Key(text=text, line=line_of_key)] = _locate(file, value_node)
    return Located(file=file, line=line, value=entries)
