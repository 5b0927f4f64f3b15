"""Quantities as people write them: known answers, and no number guessed from a text that is none."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastlaunch.core.errors import UserError
from fastlaunch.core.units import parse_bytes, parse_count, parse_duration_s


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("200", 200),
        (" 200 ", 200),
        ("10k", 10_000),
        ("10 K", 10_000),
        ("1.5M", 1_500_000),
        ("1.1M", 1_100_000),
        ("100M", 100_000_000),
        (".5k", 500),
        ("2b", 2_000_000_000),
        ("2G", 2_000_000_000),
        ("1T", 10**12),
        ("1e6", 1_000_000),
        ("1.5e3", 1500),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        ("9007199254740993", 2**53 + 1),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_count(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", " ", "k", "-1", "+1", "1.5", "1.2345k", "ten", "10x", "1e", "1e-3", "nan", "inf", "0x10", "1 000",
     "1,5", "1,5M", "1,00", "1,000,00", "1_", "_1", "1__0", "1..5", "1.", "1e999", "1e99",
     "9223372036854775808", "9" * 5000, "10k10k", "١٠"],
)  # fmt: skip
def test_not_a_count(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_count(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "give a count such as 200, 10k or 1.5M"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("90 sec", 90),
        ("1.5s", 1.5),
        ("30m", 1800),
        ("30min", 1800),
        ("48h", 172_800),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1h 30 m", 5400),
        ("1d2h3m4s", 93_784),
        ("0.5H", 1800),
    ],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "h", "-1h", "1h30", "1w", "1h-30m", "1h,30m", "1:30", "1,5h", "1e99s"]
)
def test_not_a_duration(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_duration_s(text)
    assert caught.value.hint == "give a duration such as 90s, 30min, 48h or 1h30m"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1024", 1024),
        ("512B", 512),
        ("2GiB", 2 * 1024**3),
        ("2gib", 2 * 1024**3),
        ("1.5 MiB", 1_572_864),
        ("512MB", 512_000_000),
        ("2 TB", 2 * 10**12),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("1e9", 10**9),
        ("0.3KiB", 307),
    ],
)
def test_a_size(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2G", "2Gib2", "-2GiB", "two GiB", "2PiB", "9999999999TiB"])
def test_not_a_size(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_bytes(text)
    assert caught.value.hint == "give a size such as 2GiB or 512MB"


@given(st.integers(0, 2**63 - 1))
@example(2**53 + 1)
def test_every_whole_number_is_read_exactly(count: int) -> None:
    assert parse_count(str(count)) == parse_count(f"{count:,}") == parse_count(f"{count:_}") == count
    assert parse_bytes(f"{count}B") == count


@given(st.text(max_size=30) | st.text("0123456789.,_eEkmbgtisdhnB -", max_size=12))
def test_any_text_is_a_quantity_or_the_users_error(text: str) -> None:
    for parse in (parse_count, parse_duration_s, parse_bytes):
        try:
            value = parse(text)
        except UserError:
            continue
        assert 0 <= value < float("inf")
