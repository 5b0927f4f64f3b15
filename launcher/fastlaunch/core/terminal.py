"""Text that is safe to print: output of jobs, nodes and AWS must not control the user's terminal.

Names from elsewhere, such as a recipe's or a machine's owner, become `printable` where they are read, so that
they cannot break a line. `plain` is for whole texts, such as logs.
"""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

#: Colours and other renditions in logs, which can be dropped without loss.
_RENDITION = re.compile(r"\x1b\[[0-9:;]*m")
#: The control characters of C0 and C1 except tab and newline, other line ends, and marks that change the
#: direction of text.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
#: As `less` shows them: `^[`, `<U+009B>`.
_VISIBLE = {code: f"^{chr(code ^ 64)}" if code < 128 else f"<U+{code:04X}>" for code in _CONTROLS}


def plain(text: str) -> str:
    """Return the text without colours, and with every other control character made visible."""
    return _RENDITION.sub("", text).translate(_VISIBLE)


def printable(text: str) -> str:
    """Return the text in one line, with invisible characters escaped as in Python: `\\n`, `\\u202e`."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def printable_message(text: str) -> str:
    """Return an error's text with each line `printable`. Continuation lines begin with two blanks."""
    return "\n  ".join(map(printable, text.split("\n  ")))


def printable_data(data: Any) -> Any:
    """Return plain data with all texts in it, including keys, `printable`."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {printable_data(name): printable_data(value) for name, value in data.items()}
    return [printable_data(item) for item in data] if isinstance(data, list | tuple) else data


def printable_json(text: str) -> Any:
    """Return the data of a JSON text, its texts `printable`."""
    data = json.loads(text)
    # Printable JSON without escapes holds only printable texts.
    return data if text.isprintable() and "\\" not in text else printable_data(data)


class WarningLine(str):
    """A line at warning level, made by `as_warning`."""


def as_warning(text: str) -> WarningLine:
    return WarningLine(f"warning: {text}")


def report_line(line: str, stream: TextIO | None = None) -> None:
    """Write a line for the user, to stderr by default.

    On a terminal a `WarningLine` is broken at blanks; other lines stay whole, as they may be typed.
    """
    stream = stream or sys.stderr
    shown = plain(line)
    # The terminal may be gone, but the run goes on.
    with suppress(OSError):
        if isinstance(line, WarningLine) and stream.isatty():
            width = shutil.get_terminal_size().columns
            shown = "\n".join(filled(line, width, indent="  ") for line in shown.split("\n"))
        # One write, since several threads may report. rich shows the line above its bar.
        print(f"{shown}\n", end="", file=stream, flush=True)


#: What belongs together in a line: `(class A)`.
_TOGETHER = re.compile(r"(?<=\(class) (?=\w+\))")


def filled(text: str, width: int, *, indent: str = "") -> str:
    """Return sentences in lines of `width`, which do not break words or `(class A)`.

    indent: before all lines but the first.
    """
    lines = textwrap.fill(
        _TOGETHER.sub("\N{NO-BREAK SPACE}", text),
        width,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ")


#: A word of a command with its quotes, and an option with its values.
_WORD = r"""(?:'[^']*'|"[^"]*"|\\.|[^\s'"\\])+"""
_OPTION = re.compile(rf"{_WORD}(?: (?!-){_WORD})*")


def command_lines(command: str, width: int, name: str = "") -> str:
    """Return `NAME: COMMAND`, which continues after backslashes if it is longer than `width`."""
    lead = f"{name}: " if name else ""
    parts = _OPTION.findall(command)
    if len(lead) + len(command) <= width or " ".join(parts) != command:
        return f"{lead}{command}"
    lines = [f"{lead}{parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len("  \\") <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return " \\\n".join(lines)


def error_lines(message: str, hint: str, width: int | None) -> str:
    """Return an error and its hint, broken at blanks to `width`; a command that is the hint can be copied."""
    lines = [f"error: {line}" if number == 0 else line for number, line in enumerate(message.split("\n"))]
    lines += [f"  {line.strip()}" for line in hint.split("\n")] if hint else []
    if width is None:
        return "\n".join(lines)
    return "\n".join(
        textwrap.indent(command_lines(line.strip(), width - 2), "  ")
        if line.startswith("  fastlaunch ")
        else filled(line, width, indent="  ")
        for line in lines
    )


class PlainOutput:
    """A text stream that writes `plain` text and escapes characters that its encoding lacks."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(plain(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        # Through these, click would bypass this object.
        if name in ("buffer", "writelines"):
            raise AttributeError(name)
        return getattr(self.stream, name)


def plain_output(stream: TextIO | None) -> TextIO | None:
    """Return a stream that makes its text safe to print; None for None, Python's value for a closed one."""
    return stream and cast(TextIO, PlainOutput(stream))


def raw_output(stream: TextIO) -> TextIO:
    """Return the stream under a `plain_output`; any other stream unchanged."""
    return stream.stream if isinstance(stream, PlainOutput) else stream
