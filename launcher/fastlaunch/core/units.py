"""Read quantities as people write them (`100M` samples, `48h`, `2GiB`), dates and regions."""

import datetime
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    from fractions import Fraction

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

#: The region of prices and instances unless another is given.
DEFAULT_REGION = "us-east-1"

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# A comma groups thousands; `1,5` may be meant as one and a half, so it is refused.
_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+"
_QUANTITY = re.compile(rf"({_NUMBER})(e[0-9]{{1,2}})?\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_PARTS = re.compile(rf"(?:{_NUMBER})\s*[a-z]+", re.IGNORECASE | re.ASCII)
#: SQLite's largest integer, which is above every sensible quantity.
_LARGEST = 2**63 - 1
#: Python raises another error for integers with thousands of digits.
_MAX_LENGTH = 100


def parse_count(text: str) -> int:
    """Return a whole number: `200`, `10k`, `1.5M`, `1e6`, `1_000`."""
    value = _parse(text, _COUNTS, "a count such as 200, 10k or 1.5M")
    if value != int(value):
        raise UserError(f"{text!r} is not a whole number", "give a count such as 200, 10k or 1.5M")
    return int(value)


def parse_bytes(text: str) -> int:
    """Return bytes, rounded down: `2GiB`, `512MiB`, `1.5GB`. The unit is required."""
    return int(_parse(text, _BYTES, "a size such as 2GiB or 512MiB"))


def parse_duration_s(text: str) -> float:
    """Return seconds: `90s`, `30min` or `30m`, `48h`, `2d`; `1h30m` adds up. The unit is required."""
    expected = "a duration such as 90s, 30min, 48h or 1h30m"
    parts = _PARTS.findall(text)
    if not parts or "".join("".join(parts).split()) != "".join(text.split()):
        raise UserError(f"{text!r} is not a duration", f"give {expected}")
    return float(sum(_parse(part, _SECONDS, expected) for part in parts))


def parse_hours(text: str) -> int:
    """Return whole minutes of `2` (hours), `1.5`, `90min` or `1h30m`."""
    seconds = _parse_time_s(text, unit_s=3600, expected="hours such as 2, or 90min")
    # 4.1 hours are 246 minutes, though not in floating point.
    return int(round(seconds, 3) // 60)


def parse_seconds(text: str) -> float:
    """Return `90` (seconds), `10min` or `1h`."""
    return _parse_time_s(text, unit_s=1, expected="seconds such as 90, or 10min")


def _parse_time_s(text: str, *, unit_s: int, expected: str) -> float:
    """Return seconds from a number in this unit, or from a duration with its own unit."""
    try:
        seconds = float(text) * unit_s
    except ValueError:
        seconds = parse_duration_s(text)
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a time", f"give {expected}")
    return seconds


def above_zero(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the parser, restricted to values above 0."""

    def parse_above_zero(text: str) -> Any:
        quantity = parse(text)
        if quantity <= 0:
            raise UserError(f"{text!r} is not above 0", "give more than 0")
        return quantity

    return parse_above_zero


def _parse(text: str, units: dict[str, int], expected: str) -> "Fraction":
    """Return the quantity, exactly: 1.1M is 1100000, and 2**53 + 1 is not 2**53."""
    # Its import takes a sixth of the time of `--help`.
    from fractions import Fraction

    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[3].lower() not in units or len(match[0]) > _MAX_LENGTH:
        raise UserError(f"{text!r} is not {expected.partition(' such')[0]}", f"give {expected}")
    number = match[1].replace("_", "").replace(",", "") + (match[2] or "")
    value = Fraction(number) * units[match[3].lower()]
    if value > _LARGEST:
        raise UserError(f"{text!r} is too large", f"give {expected}")
    return value


def parse_date(text: str) -> datetime.date:
    """Return the day written as YYYY-MM-DD. Raises UserError for other text or an impossible date."""
    try:
        if _DATE.fullmatch(text):
            return datetime.date.fromisoformat(text)
    except ValueError:
        pass
    raise UserError(f"{text!r} is not a date", "give one as YYYY-MM-DD, such as 2023-11-15")


def utc_minute(moment: datetime.datetime) -> str:
    """Return `2026-11-21 11:30 UTC`. moment: with a time zone."""
    return f"{moment.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def utc_day(moment: datetime.datetime) -> datetime.date:
    """Return the day in UTC, which prices use. moment: with a time zone."""
    assert moment.tzinfo is not None
    return moment.astimezone(datetime.UTC).date()


def parse_usd(text: str) -> float:
    """Return the amount in `25.50` or `$25.50`. Raises UserError for other text."""
    try:
        value = float(text.strip().removeprefix("$"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r} is not an amount of USD", "give a number such as 25.50")
    return value


def by_reason(skipped: Iterable[tuple[str, str]], most: int | None = None) -> list[str]:
    """Return lines such as `us-east-1a, us-east-1b: no answer`, from pairs of name and reason.

    most: see `first_names`. A reason without names is a line by itself.
    """
    names: dict[str, list[str]] = {}
    for name, reason in skipped:
        names.setdefault(reason, []).extend([name] if name else [])
    return [f"{first_names(group, most)}: {reason}" if group else reason for reason, group in names.items()]


def first_names(names: Sequence[str], most: int | None) -> str:
    """Return `a, b and 3 more`; all names if at most one would be left out."""
    if most is None or len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rounded(value: float) -> str:
    """Format a number to three digits: `1.23`, `12.3`, `123`, `12,300`."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def in_ms(seconds: float) -> str:
    """Format a step time, always in milliseconds: `12.3 ms`, `1,250 ms`."""
    return f"{rounded(seconds * 1000)} ms"


def duration_text(seconds: float) -> str:
    """Format a span of time: `45 s`, `12 min`, `9.84 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{rounded(seconds / 3600)} h"


def enumerated(names: Iterable[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def size_text(num_bytes: int) -> str:
    """Return `1.5 GiB`, `340 KiB`, `12 B`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
    return f"{num_bytes} B"


def is_region(name: str) -> bool:
    """Return whether the text has the form of a region's name."""
    return re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+", name) is not None


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in `a, b`."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def split_list(text: str) -> tuple[str, ...]:
    r"""Return the texts of `a,b`. A comma within brackets, or written `\,`, does not separate.

    Raises UserError if a bracket or a quote with a comma in it is not closed.
    """
    texts = _divided(text)
    if texts is None:
        problem = f"{text!r} has a comma in a bracket or a quote that is not closed"
        raise UserError(problem, r"write \, for a comma that belongs to a value")
    return texts


def join_list(texts: Iterable[str]) -> str:
    """Return the text that `split_list` splits into these texts. Raises UserError if there is none."""
    several = tuple(texts)
    text = ",".join(part.replace(",", r"\,") for part in several)
    if several and _divided(text) != several:
        problem = f"{' and '.join(map(repr, several))} cannot be told apart with commas between them"
        raise UserError(problem, "have the script take names for them instead")
    return text


def _divided(text: str) -> tuple[str, ...] | None:
    texts, depth, is_held = [""], 0, False
    for mark in re.findall(r"\\,|.", text, re.DOTALL):
        depth = max(0, depth + (mark in "([{") - (mark in ")]}"))
        is_held = depth > 0 and (is_held or mark == ",")
        if mark == "," and not depth:
            texts.append("")
        else:
            texts[-1] += mark.removeprefix("\\") if mark == r"\," else mark
    quotes = [part[:1] for part in texts if part.startswith(("'", '"')) and part.count(part[0]) % 2]
    is_cut = is_held or (len(texts) > 1 and any(part.endswith(tuple(quotes)) for part in texts))
    return None if is_cut else tuple(texts)


def parse_nproc(text: str) -> int | str:
    """Return a number of processes, or `gpu` for one per GPU."""
    return text if text == "gpu" else parse_count(text)


def parse_batch_size(text: str) -> int | str:
    """Return a count, `auto` or `auto-each`."""
    if text.startswith("a") and text not in ("auto", "auto-each"):
        raise UserError(f"{text!r} is not a batch size", "give a count such as 64, or auto, or auto-each")
    return text if text in ("auto", "auto-each") else parse_count(text)
