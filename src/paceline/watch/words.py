"""Numbers, times and names as people read them; text from elsewhere made safe for a terminal."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

from paceline.control.tracebacks import without_frames

SHORT_ID = 8
NOT_KNOWN = "-"
_ID = re.compile(r"\b[0-9a-f]{16}\b")  # as the wire makes them


def clock(at: float) -> str:
    """The time of day, here."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def duration(seconds: float) -> str:
    """3.2 s, 4:05, 2:04:05, 3 d 02:04:05."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def rate(per_s: float) -> str:
    if not per_s > 0 or math.isinf(per_s):
        return NOT_KNOWN
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def number(value: float | None) -> str:
    """A loss or a metric."""
    if value is None or math.isnan(value):
        return "not a number"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.4g}"


def count(amount: int, one: str) -> str:
    """1 step, 1,797 steps."""
    return f"{amount:,} {one if amount == 1 else one + 's'}"


def amount(number: int) -> str:
    """950, 12,400, 1.2 M, 3.4 G"""
    if number < 100_000:
        return f"{number:,}"
    for unit, factor in (("G", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number / 1e3:.0f} k"


def size(num_bytes: int) -> str:
    """340 MB; a kB has 1000 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{num_bytes} B"


def short(member: str) -> str:
    """A member's id, as far as people need it; the whole one is in the JSON."""
    return member[:SHORT_ID]


def with_short_ids(text: str, labels: Mapping[str, str] | None = None) -> str:
    """A text that names members; those that have a label by that."""
    known = labels or {}
    return _ID.sub(lambda found: known.get(found[0]) or short(found[0]), text)


def clean(text: str) -> str:
    """Without what a terminal would obey; lines stay lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").expandtabs(4)
    # Not printable are also the characters that change the direction of the text around them.
    return "".join(letter for letter in text if letter.isprintable() or letter == "\n")


def one_line(text: str, most: int = 0) -> str:
    """As one line, of at most so many letters; of a traceback what comes before it, and the error."""
    line = " ".join(clean(without_frames(text)).split())
    return line[: most - 3] + "..." if most and len(line) > most else line
