"""What the workers tell each other in the header of every operation, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.control.machines.member_events import OperationKind
from paceline.errors import Disagreement
from paceline.strategy import Flag, Notice
from paceline.strategy.header import HeaderRows, Row, exchange, exchange_text
from paceline.train.joining import Joined
from paceline.train.membership import ALIKE, Attempt, Place

_KINDS = list(OperationKind)
_KIND_BIT = 8  # in the flags of a header, of which the session owns those below 16


class Headers:
    """`join` makes this worker a member of the run, if it is none yet. `stopping_agreed`: in the last operation some
    worker said that the run is to stop."""

    def __init__(self, join: Callable[[], Joined]) -> None:
        self._join = join
        self.stopping_agreed = False

    def notice(self, place: Place) -> Notice:
        """What this worker has to say."""
        joined = self._join()
        asked = joined.client.look(lambda machine: machine.stop_asked)
        flags = (int(Flag.STOP) if asked else 0) | _KINDS.index(place.kind) << _KIND_BIT
        return Notice(place.operation, joined.membership.offer(), flags)

    def exchange(self, place: Place, weight: float = 0.0) -> HeaderRows:
        """Everybody's header, of an operation that has nothing else to exchange but a number."""
        notice = self.notice(place)
        return exchange(place.group, Row(notice.operation, notice.held, notice.flags, weight=weight))

    def outcome(self, place: Place, rows: HeaderRows, commit: Callable[[], Any]) -> Attempt:
        kinds = [_KINDS[row.flags >> _KIND_BIT & 7].value for row in rows]
        if len(set(kinds)) > 1:  # the headers of some kinds look alike
            each = ", ".join(f"{kind} on {rows.name_of(rank)}" for rank, kind in enumerate(kinds))
            raise Disagreement(f"{place} is {each}; {ALIKE}")
        self.stopping_agreed = rows.any(Flag.STOP)
        return Attempt(tuple(row.held for row in rows), self.stopping_agreed, commit)


def all_texts(place: Place, text: bytes) -> list[bytes]:
    """What every worker says, by rank."""
    return exchange_text(place.group, text) if place.group is not None else [text]
