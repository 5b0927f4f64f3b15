"""Quantities as people write them: `100M` samples, `48h`, `2GiB`."""

import math
import re

from fastlaunch.errors import UserError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)(e[0-9]+)?\s*([a-z]*)", re.IGNORECASE)


def parse_count(text: str) -> int:
    """A whole number: `200`, `10k`, `1.5M`, `1e6`, `1_000`."""
    value = _parse(text, _COUNTS, "a count such as 200, 10k or 1.5M")
    if value != int(value):
        raise UserError(f"{text!r} is not a whole number", "give a count such as 200, 10k or 1.5M")
    return int(value)


def parse_duration_s(text: str) -> float:
    """Seconds: `90s`, `30min` or `30m`, `48h`, `2d`; `1h30m` adds up. The unit is required."""
    parts = re.findall(r"[0-9._,]+\s*[a-z]+", text.strip(), re.IGNORECASE)
    if not parts or "".join(parts).replace(" ", "") != text.strip().replace(" ", ""):
        raise UserError(f"{text!r} is not a duration", "give one such as 90s, 30min, 48h or 1h30m")
    return sum(_parse(part, _SECONDS, "a duration such as 90s, 30min, 48h or 1h30m") for part in parts)


def parse_bytes(text: str) -> int:
    """Bytes: `2GiB`, `512MB`, `1e9`."""
    return int(_parse(text, _BYTES, "a size such as 2GiB or 512MB"))


def _parse(text: str, units: dict[str, int], expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[3].lower() not in units:
        raise UserError(f"{text!r} is not {expected.partition(' such')[0]}", f"give {expected}")
    value = float(match[1].replace("_", "").replace(",", "") + (match[2] or "")) * units[match[3].lower()]
    if not math.isfinite(value):
        raise UserError(f"{text!r} is too large", f"give {expected}")
    # 1.1M is 1100000, though the product of the floats is a hair more.
    return round(value, 6)
