"""Consistent hashing with virtual nodes.

Each server has points on a circle, the more the stronger it is; a range has one. The servers in the order in which
their points follow that of a range are its *walk*. When a server comes or goes, only the walks change in which it has
a place, and there only its own place: so few ranges have to move.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping

POINTS = 64  # of a server of average strength


class Ring:
    """`capacities` say how strong each server is beside the others."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        mean = sum(capacities.values()) / len(capacities) if capacities else 1.0
        points = [
            (_hash(f"{server}/{number}"), server)
            for server, capacity in capacities.items()
            for number in range(max(1, round(POINTS * capacity / mean)))
        ]
        self._points = sorted(points)
        self._num_servers = len(capacities)

    def walk(self, number: int) -> list[str]:
        """All servers, in the order in which they would take the range of this number."""
        start = bisect.bisect(self._points, (_hash(f"range {number}"), ""))
        order: dict[str, None] = {}
        for offset in range(len(self._points)):
            order.setdefault(self._points[(start + offset) % len(self._points)][1])
            if len(order) == self._num_servers:
                break
        return list(order)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
