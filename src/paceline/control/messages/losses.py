"""Updates that are lost for good: with the last copy of a range of parameters. How they are named in the run's log.

Updates are numbered from 1, as steps are, and leases as if they were done one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

KIND = "lost updates"  # of the events that name them
NOT_SAVED = "not saved"  # of the event of a run whose last state is in no checkpoint

_NAMED = re.compile(r"updates ([0-9, -]+):")


def named(numbers: Collection[int], why: str) -> str:
    """The text of such an event."""
    spans = (str(first) if first == last else f"{first}-{last}" for first, last in spans_of(numbers))
    return f"updates {', '.join(spans)}: {why}" if numbers else f"no update, but {why}"


def numbers_in(text: str) -> set[int]:
    """Those that an event names."""
    found = _NAMED.match(text)
    if found is None:
        return set()
    numbers: set[int] = set()
    for span in found[1].split(","):
        first, _, last = span.strip().partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def num_samples(numbers: Collection[int], length: int, batch: int) -> int:
    """How many samples these updates had, of a data set of this length."""
    per_epoch = -(-length // batch)
    return sum(min(batch, length - (number - 1) % per_epoch * batch) for number in numbers)


def spans_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The same numbers, as the first and the last of each row without a gap."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return tuple((first, last) for first, last in spans)


def numbers_of(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {number for first, last in spans for number in range(first, last + 1)}
