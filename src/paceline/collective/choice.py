"""Which all-reduce is fastest for a size: a pure function of what a probe measured.

A model holds, for each algorithm, seconds at a few sizes. Between two of them time grows linearly with bytes (a
latency and a bandwidth of its own on each stretch); beyond the last, at the bandwidth of the last stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from paceline.wire.card import Card

Points = tuple[tuple[int, float], ...]


class CostModel(msgspec.Struct, frozen=True):
    """`points[algorithm]` are (bytes, seconds), bytes ascending. Equal on all members of a group."""

    points: dict[str, Points]

    def predict_s(self, algorithm: str, num_bytes: int) -> float:
        points = self.points[algorithm]
        if len(points) == 1 or num_bytes <= points[0][0]:
            return points[0][1]
        for (low, low_s), (high, high_s) in itertools.pairwise(points):
            if num_bytes <= high:
                return low_s + (high_s - low_s) * (num_bytes - low) / (high - low)
        # Noise can make the larger size look faster; time never shrinks with size.
        (low, low_s), (high, high_s) = points[-2:]
        return high_s + max(0.0, high_s - low_s) / (high - low) * (num_bytes - high)

    def choose(self, num_bytes: int) -> str:
        """The fastest, by name where two are equal."""
        return min(self.points, key=lambda algorithm: (self.predict_s(algorithm, num_bytes), algorithm))


def hosts_of(cards: Sequence[Card]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts by their first rank."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def candidates(hosts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The algorithms worth measuring for this layout of ranks on hosts."""
    if len(hosts) == 1:
        return ("direct",)
    if all(len(host) == 1 for host in hosts):
        return ("ring", "tree")
    return ("hierarchical", "ring", "tree")


def possible(hosts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The algorithms that work for this layout."""
    return ("direct", "ring", "tree", "hierarchical") if len(hosts) == 1 else ("ring", "tree", "hierarchical")


class ModelShelf:
    """The models of a member's groups so far, one for each set of algorithms: a run that shrank to one host and grows
    again need not measure again."""

    def __init__(self) -> None:
        self._models: dict[frozenset[str], CostModel] = {}

    def put(self, model: CostModel) -> None:
        self._models[frozenset(model.points)] = model

    def get(self, hosts: Sequence[Sequence[int]]) -> CostModel | None:
        """The latest model that fits this layout of ranks on hosts."""
        return self._models.get(frozenset(candidates(hosts)))
