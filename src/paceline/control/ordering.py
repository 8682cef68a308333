"""What the coordinator says comes in any order: only what is newer than all before counts."""

from __future__ import annotations

from typing import Protocol


class Ordered(Protocol):
    @property
    def term(self) -> int: ...
    @property
    def number(self) -> int: ...


class Newest:
    """The term and number of the newest message so far. Terms count coordinators, so a new one counts from 1 again."""

    def __init__(self) -> None:
        self.term = 0
        self.number = 0

    def passes(self, message: Ordered) -> bool:
        """Whether this message is newer than all before; then it is the newest."""
        if (message.term, message.number) <= (self.term, self.number):
            return False
        self.term, self.number = message.term, message.number
        return True
