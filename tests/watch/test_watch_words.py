"""Numbers, times and names as people read them."""

from __future__ import annotations

import math
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.watch import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (3.21, "3.2 s"),
        (59, "59 s"),
        (61, "1:01"),
        (7445, "2:04:05"),
        (3 * 86400 + 7445, "3 d 02:04:05"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "not a number"), (math.nan, "not a number"), (0.12345678, "0.1235"), (12345.6, "12,346"), (1e12, "1e+12")],
)
def test_numbers(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (99_999, "99,999"), (340_400, "340 k"), (1_234_567, "1.2 M"), (3_400_000_000, "3.4 G")],
)
def test_amounts(number: int, text: str) -> None:
    assert words.amount(number) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (340_000_000, "340 MB"), (2_500_000_000_000, "2,500 GB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert words.size(num_bytes) == text


def test_ids_in_a_text_are_short_or_labels() -> None:
    text = "ranges move to 00000000000000aa, 00000000000000bb"
    assert words.with_short_ids(text, {"00000000000000bb": "s1"}) == "ranges move to 00000000, s1"


@pytest.mark.parametrize(
    ("per_s", "text"), [(0, "-"), (math.nan, "-"), (math.inf, "-"), (1.234, "1.23"), (1e4, "10,000")]
)
def test_rates(per_s: float, text: str) -> None:
    assert words.rate(per_s) == text


def test_counts_and_names() -> None:
    assert words.count(1, "step") == "1 step"
    assert words.count(1797, "sample") == "1,797 samples"
    assert words.with_short_ids("generation 2: 0123456789abcdef, 1") == "generation 2: 01234567, 1"


@settings(deadline=None)
@given(st.text(), st.integers(4, 50))
def test_a_line_is_one_harmless_line_of_at_most_so_many_letters(text: str, most: int) -> None:
    line = words.one_line(text, most)
    assert len(line) <= most
    assert line.isprintable()
    assert words.clean(text).replace("\n", "").isprintable()


def test_of_a_traceback_in_one_line_the_error_is_what_counts() -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        text = "".join(traceback.format_exception(error))
    assert words.one_line(f"failed worker 5238f383: {text}", 300) == "failed worker 5238f383: ValueError: boom"
    assert words.one_line("Traceback (most recent call last):", 300) == "Traceback (most recent call last):"
