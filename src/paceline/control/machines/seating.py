"""Who sits where in a plan, and who gives the state to whom: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.control.machines.roster import MemberRecord
from paceline.control.messages.plan import Plan, Seat


def seats_for(records: Iterable[MemberRecord], latest: Plan | None, shares: Sequence[int] = ()) -> tuple[Seat, ...]:
    """In the order of the ranks that members have in the latest plan, newcomers after them by slot. Of fixed shares a
    member keeps its own; newcomers take those that are free, in their order. While some hand over to others there may
    be more members than shares: the smallest one is then given once more."""
    known = {member: rank for rank, member in enumerate(latest.members)} if latest is not None else {}
    ordered = sorted(records, key=lambda one: (known.get(one.member, len(known)), one.introduction.slot))
    if len(shares) < 2:
        return tuple(_seat(record, shares[0] if shares else 0) for record in ordered)
    had = {seat.member: seat.share for seat in latest.seats} if latest is not None else {}
    free, kept = list(shares), {}
    for record in ordered:
        if had.get(record.member) in free:
            kept[record.member] = had[record.member]
            free.remove(had[record.member])
    least = min(shares)
    return tuple(_seat(record, kept.get(record.member) or (free.pop(0) if free else least)) for record in ordered)


def _seat(record: MemberRecord, share: int) -> Seat:
    """What a member says of its own speed is believed if it can be one."""
    introduction = record.introduction
    capacity, tried = introduction.capacity, introduction.tried
    if not (math.isfinite(capacity) and capacity > 0):
        capacity = 0.0
    if tried is not None and not (all(map(math.isfinite, tried)) and tried[0] >= 0 and tried[1] > 0):
        tried = None
    return Seat(introduction.card, share, capacity, tried)


def gifts_for(receivers: Iterable[MemberRecord], donors: Sequence[MemberRecord]) -> dict[str, str]:
    """The donor of each receiver: one on its host if there is one."""
    return {receiver.member: _nearest(donors, receiver).member for receiver in receivers}


def _nearest(donors: Sequence[MemberRecord], receiver: MemberRecord) -> MemberRecord:
    host = receiver.introduction.card.host
    return next((donor for donor in donors if donor.introduction.card.host == host), donors[0])
