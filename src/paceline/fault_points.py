"""Places in the code where a test may let something go wrong; `paceline.testing.faults` arms them. In a run nothing is.

A point is declared beside the code that reaches it. It stands where something happens rarely (a connection is made, a
state changes hands, a checkpoint gets its name), never inside a step of training, and costs a look at one attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class FaultPoint(Generic[P, R]):
    """What is armed here is called with what the code says of the moment. It may raise, wait or end the process. What
    it returns takes the place of what the code would have used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.action: Callable[P, R | None] | None = None

    def reach(self, *arguments: P.args, **named: P.kwargs) -> R | None:
        return None if self.action is None else self.action(*arguments, **named)


# Declared here because it is armed before anything heavy is imported.
SERVER_CLOSING: FaultPoint[[Any], None] = FaultPoint("the service of a server is about to close")
