"""Who sits where in a plan, and who gives the state to whom: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.control.messages import Plan, Seat
from paceline.control.roster import Record


def seats_for(records: Iterable[Record], latest: Plan | None) -> tuple[Seat, ...]:
    """In the order of the ranks that members have in the latest plan, newcomers after them."""
    known = {member: rank for rank, member in enumerate(latest.members)} if latest is not None else {}
    ordered = sorted(records, key=lambda record: known.get(record.member, len(known)))
    return tuple(Seat(record.introduction.card) for record in ordered)


def gifts_for(receivers: Iterable[Record], donors: Sequence[Record]) -> dict[str, str]:
    """The donor of each receiver: one on its host if there is one."""
    return {receiver.member: _nearest(donors, receiver).member for receiver in receivers}


def _nearest(donors: Sequence[Record], receiver: Record) -> Record:
    host = receiver.introduction.card.host
    return next((donor for donor in donors if donor.introduction.card.host == host), donors[0])
