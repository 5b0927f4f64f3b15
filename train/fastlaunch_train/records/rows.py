"""Rows of text to fine-tune on, in JSON Lines: read and checked, before a tokenizer is there.

The formats are those of Transformers and TRL, a JSON object a line:

* `{"text": "..."}`
* `{"messages": [{"role": "user", "content": "..."}, ...]}`, with `tools` if there are any
* `{"prompt": "...", "completion": "..."}`, both text or both messages
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = 'give {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...} in each line'
_KEYS = ("text", "messages", "prompt")
_GZIP, _ENDINGS = b"\x1f\x8b", (".jsonl", ".json")

#: Text, or the messages of a chat.
Part = str | list[dict[str, Any]]


class RowError(ValueError):
    """A file or a line that cannot be trained on; `hint` says what to do instead."""

    def __init__(self, message: str, hint: str = FORMATS) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Row:
    """A document: what is to be predicted, after a prompt that is not."""

    place: str  #: the file and the line
    prompt: Part | None
    completion: Part
    tools: list[Any] | None = None  #: what a chat may call, for its template

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to predict."""
        return self.completion == ""


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if gzip packed it. Raises OSError, and RowError if damaged."""
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
    except (OSError, EOFError, zlib.error) as error:
        raise RowError(f"data file {path} cannot be unpacked: {error}", "pack it again by gzip") from None
    return data.removeprefix(codecs.BOM_UTF8)


def is_rows_file(path: Path) -> bool:
    """Return whether a file is JSON Lines: by its name, or by its first line."""
    if path.name.removesuffix(".gz").endswith(_ENDINGS):
        return True
    try:
        with path.open("rb") as file:
            start = file.read(2)
            file.seek(0)
            line = gzip.GzipFile(fileobj=file).readline() if start == _GZIP else file.readline()
        row = json.loads(line)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and not row.keys().isdisjoint(_KEYS)


def read_rows(path: Path, data: bytes) -> Iterator[Row]:
    """Yield the rows of a file; empty lines are none. Raises RowError, with the line's number, for others."""
    if data[:1000].lstrip().startswith(b"["):
        raise RowError(
            f"data file {path} is a JSON array, not an object a line", f"jq -c '.[]' {path} > rows.jsonl"
        )
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            yield _row(line, f"{path}, line {number}")


def _row(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise RowError(f"{place}: it is not UTF-8", "convert the file, as with iconv") from None
    except json.JSONDecodeError as error:
        raise RowError(f"{place}: it is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"{place}: it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise RowError(f"{place}: it is no JSON object")
    try:
        # Only an escape can stand for half a character.
        _ = b"\\u" in line and json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = json.dumps(error.object[error.start])
        raise RowError(f"{place}: it has half a character, {half}", "write the whole character") from None
    tools = row.get("tools") if isinstance(row.get("tools"), list) else None
    if "text" in row:
        return Row(place=place, prompt=None, completion=_text(row["text"], place))
    if "messages" in row:
        return Row(
            place=place, prompt=None, completion=_chat(row["messages"], "messages", place), tools=tools
        )
    if "prompt" in row and "completion" in row:
        if not isinstance(row["prompt"], str) and not isinstance(row["completion"], str):
            prompt, completion = (_chat(row[key], key, place) for key in ("prompt", "completion"))
            return Row(place=place, prompt=prompt, completion=completion, tools=tools)
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            return Row(place=place, prompt=row["prompt"], completion=row["completion"])
        raise RowError(f"{place}: one of prompt and completion is text, the other is not")
    names = ", ".join(repr(name) for name in list(row)[:5])
    raise RowError(f"{place}: it has none of these, but {names}" if row else f"{place}: it is empty")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{place}: its text is no string")
    return value


def _chat(value: Any, key: str, place: str) -> list[dict[str, Any]]:
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in value
    )
    if not is_chat or not value:
        raise RowError(
            f"{place}: its {key} are no list of messages" if value else f"{place}: its {key} are empty",
            'give messages as in [{"role": "user", "content": "..."}, ...]',
        )
    return list(value)
