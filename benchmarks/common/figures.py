"""Contenders in turns, and what is made of their figures.

Whatever else the machine does changes within minutes. So contenders take turns in each round, and two of them are
compared within rounds: a ratio is the median of the ratios of each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")
Measured = TypeVar("Measured")

median = statistics.median


def turns(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: another one begins each time."""
    first = number % len(contenders) if contenders else 0
    return [*contenders[first:], *contenders[:first]]


def interleave(
    contenders: Mapping[str, Callable[[], Measured]],
    num_rounds: int,
    on_turn: Callable[[int, str], None] = lambda number, name: None,
) -> dict[str, list[Measured]]:
    """Every contender once in every round; what each measured, by round. `on_turn` is told before each."""
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        for name in turns(list(contenders), number):
            on_turn(number, name)
            found[name].append(contenders[name]())
    return found


def tell(number: int, name: str) -> None:
    """For `on_turn`: a line for each turn, so that whoever waits sees that something happens."""
    print(f"round {number + 1}: {name}", flush=True)


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """How many times the other's figures are the own ones, in the same rounds."""
    return median(a / b for a, b in zip(own, other, strict=True))


def spread(values: Sequence[float], form: str = ".2f", factor: float = 1.0) -> str:
    """The median, the lowest and the highest."""
    shown = [f"{value * factor:{form}}" for value in (median(values), min(values), max(values))]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"


def with_worst(values: Sequence[float], form: str = ".1f", factor: float = 1.0) -> str:
    """The median and the highest."""
    return f"{median(values) * factor:{form}} ({max(values) * factor:{form}})" if values else "none"
