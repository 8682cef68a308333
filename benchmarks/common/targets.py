"""What a figure of a benchmark must come to. A target is stated once, beside the benchmark, and judged at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """`figure` takes it from the record; None where this run did not measure it, such as a peer that is not installed.
    `beside` says what it is compared with."""

    what: str
    beside: str
    figure: Callable[[Record], float | None]
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"the target {self.what!r} needs at_least or at_most, and not both")

    @property
    def statement(self) -> str:
        bound = f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"
        return f"{self.what}: {bound} ({self.beside})"

    def is_met(self, figure: float) -> bool:
        return figure >= self.at_least if self.at_least is not None else figure <= (self.at_most or 0.0)


def judge(targets: Sequence[Target], record: Record) -> list[Record]:
    """Each target with what was found, for the JSON; `met` is None where nothing was."""
    judged = []
    for target in targets:
        figure = target.figure(record)
        met = None if figure is None else target.is_met(figure)
        judged.append({"target": target.statement, "found": figure, "met": met})
    return judged


def verdicts(judged: Sequence[Record], *, quick: bool) -> list[str]:
    """A line for each target."""
    if not judged:
        return ["no target"]
    words = {True: "met", False: "missed", None: "not measured"}
    note = "; a quick run says little" if quick else ""
    return [
        f"target {words[one['met']]}: {one['target']}"
        + ("" if one["found"] is None else f"; found {one['found']:.4g}{note}")
        for one in judged
    ]
