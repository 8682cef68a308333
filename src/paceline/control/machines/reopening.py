"""What a coordinator must remember so that a run which is over, or was interrupted, goes on: pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.control.machines.coordinator_events import CoordinatorState
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.placement.placement import Placement
from paceline.wire.decoding import decode

_REASON = "its run ended before it, and was resumed without it"


def reopened(remembered: Mapping[str, bytes], applied: int) -> dict[str, bytes]:
    """What changes: the former members are gone for good, the history stays, generations go on counting. What all
    members must have in common is asked anew: versions may have changed since."""
    if "standing" not in remembered:
        return {}
    changes: dict[str, bytes] = {}
    for key, value in remembered.items():
        if key.startswith("member/"):
            record = MemberRecord.restore(value, 0.0)
            if record.fate is None:
                record.fate, record.reason = Fate.DEAD, _REASON
                changes[key] = record.durable()
    standing = decode(remembered["standing"], CoordinatorState)
    if standing.over == "ended":
        applied -= 1  # the end was an operation, too, and nothing of it is done again
    standing = msgspec.structs.replace(
        standing,
        current=None,
        pending=None,
        facts=None,
        parameters=(),
        ranges=(),
        over="",
        reason="",
        halting="",
        fence=max(standing.fence, standing.newest + 1),
        reached=max(standing.reached, applied),
    )
    if "placement" in remembered:  # its servers are gone too; versions go on counting
        placement = decode(remembered["placement"], Placement)
        placement = msgspec.structs.replace(placement, cards=(), ranges=())
        changes["placement"] = msgspec.msgpack.encode(placement)
    return {**changes, "standing": msgspec.msgpack.encode(standing)}
