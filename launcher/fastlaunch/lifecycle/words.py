"""Hide the words typed after `--` in shared files, since they may be secrets and paths."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fastlaunch.jobs.job import Script
from fastlaunch.lifecycle.export import plain_name
from fastlaunch.measure.summary import WORDS
from fastlaunch_train.records.records import FROM_CACHE, open_unpacked

#: Fields with text of a program, which may repeat its arguments.
_TEXTS = ("reason", "problems", "warnings", "message", "detail")
#: Shorter parts of words, and numbers, stay in the text.
_LEAST = 4
_PART = re.compile(r"[^\s=]+")
#: A message may quote a word escaped, or only a piece of it, such as the password in a URL.
_PIECE = re.compile(r"\w+")
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a script's command, to be replaced by a digest of them."""

    name: str  # of the script: its path in the repository
    digest: str
    parts: tuple[str, ...]  # of the words, and pieces of those, the longest first

    @classmethod
    def of(cls, name: str, script: Script) -> Self:
        """Return the words that started the script of this name."""
        words = " ".join((*script.command, *script.argv))
        pieces = {*_PART.findall(words), *_PIECE.findall(words)}
        shown = {name, name.rpartition("/")[2], *(text for _, text in script.variant)}
        parts = {piece for piece in pieces - shown if len(piece) >= _LEAST and not _NUMBER.fullmatch(piece)}
        return cls(
            name=name,
            digest=script.digest_under(name),
            parts=tuple(sorted(parts, key=lambda part: (-len(part), part))),
        )

    def hidden_in_run(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a run file without the words."""
        hidden: dict[str, Any] = self._hidden(dict(data))
        hidden["spec"] = {**data["spec"], "script": {**data["spec"]["script"], "command": [self.name]}}
        setup = hidden["summary"]["setup"]
        setup["fingerprint"] = {**setup.get("fingerprint", {}), WORDS: self.digest}
        return hidden

    def hidden_in_line(self, line: bytes) -> bytes:
        """Return a line of a record without the words; empty if it cannot be read."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return b""
        hidden = self._hidden(data)
        if isinstance(data, dict) and isinstance(data.get("script"), dict):
            hidden["script"] = {**data["script"], "command": [self.name], WORDS: self.digest}
        return line if hidden == data else json.dumps(hidden, separators=(",", ":")).encode() + b"\n"

    def _hidden(self, data: Any, *, is_text: bool = False) -> Any:
        if isinstance(data, dict):
            return {key: self._hidden(value, is_text=key in _TEXTS) for key, value in data.items()}
        if isinstance(data, list):
            return [self._hidden(value, is_text=is_text) for value in data]
        if is_text and isinstance(data, str) and self.parts and data != FROM_CACHE:
            return re.sub("|".join(map(re.escape, self.parts)), "...", data, flags=re.IGNORECASE)
        return data


@contextmanager
def without_words(files: Sequence[Path], words: Words | None) -> Iterator[Sequence[Path]]:
    """Give copies of the record files without the words, or the files themselves if there are no words."""
    if words is None:
        yield files
        return
    with tempfile.TemporaryDirectory(prefix="fastlaunch-") as temporary:
        copies = []
        for file in files:
            copies.append(Path(temporary, plain_name(file)))
            with open_unpacked(file) as source, copies[-1].open("wb") as target:
                target.writelines(words.hidden_in_line(line) for line in source)
        yield copies
