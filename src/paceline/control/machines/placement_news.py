"""What a person is told of the placements of a run: a line where something begins or ends, not one for each range.

    version 1: 16 ranges on s0, s1, each on 2 servers             the run is founded
    version 7: ranges move to s2                                  it came, or others are gone or leave
    version 8: s1 goes on with 8 ranges, of which it has copies   their server is gone
    version 19: all 16 ranges are in place: s0 6, s1 5, s2 5      nothing is on its way any more

Ranges that nobody has any more are told by the coordinator itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.placement.placement import Placement, Replicas

MAX_NAMED = 6  # servers in one line


class PlacementNews:
    """`news` is given every placement, in order."""

    def __init__(self, placement: Placement = Placement()) -> None:
        self._last = placement
        self._told = _arriving(placement.ranges).keys()  # the servers that ranges are on the way to, as was said

    def news(self, placement: Placement) -> list[str]:
        """What is to be said of this placement; nothing of one that was given before."""
        before, self._last = self._last, placement
        if placement.version == before.version:
            return []
        arriving = _arriving(placement.ranges)
        told, self._told = self._told, arriving.keys()
        if placement.began != before.began:
            return [_say(placement, _founded(placement))]
        lines = [
            _say(placement, f"{server} goes on with {_ranges(number)}, of which it has copies")
            for server, number in _promoted(before.ranges, placement.ranges).items()
        ]
        if new := [server for server in arriving if server not in told]:
            lines.append(_say(placement, f"ranges move to {_named(new)}"))
        if told and not arriving:
            held = Counter(replicas.primary.server for replicas in placement.ranges)
            lines.append(_say(placement, f"all {_ranges(len(placement.ranges))} are in place: {_counted(held)}"))
        return lines


def num_arriving(placement: Placement) -> Mapping[str, int]:
    """How many ranges are on their way to each server."""
    return _arriving(placement.ranges)


def _arriving(ranges: Sequence[Replicas]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for replicas in ranges:
        found.update(one.server for one in replicas.joining)
        if replicas.handing:
            found[replicas.handing] += 1
    return dict(found)


def _promoted(before: Sequence[Replicas], after: Sequence[Replicas]) -> dict[str, int]:
    """Ranges whose primary is another one that was not handed over to, and has their state."""
    found: Counter[str] = Counter()
    for old, new in zip(before, after, strict=True):
        is_same = new.primary.server in (old.primary.server, old.handing)
        if not is_same and new.origin == old.origin:
            found[new.primary.server] += 1
    return dict(found)


def _founded(placement: Placement) -> str:
    servers = sorted(card.member for card in placement.cards)
    copies = min((1 + len(replicas.backups) for replicas in placement.ranges), default=1)
    each = f", each on {copies} servers" if copies > 1 else ""
    return f"{_ranges(len(placement.ranges))} on {_named(servers)}{each}"


def _say(placement: Placement, text: str) -> str:
    return f"version {placement.version}: {text}"


def _ranges(number: int) -> str:
    return "1 range" if number == 1 else f"{number:,} ranges"


def _named(servers: Sequence[str]) -> str:
    return ", ".join(servers) if len(servers) <= MAX_NAMED else f"{len(servers)} servers"


def _counted(held: Mapping[str, int]) -> str:
    if len(held) > MAX_NAMED:
        return f"{min(held.values())} to {max(held.values())} on each of {len(held)} servers"
    return ", ".join(f"{server} {number:,}" for server, number in sorted(held.items()))
