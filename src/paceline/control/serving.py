"""The coordinator's side of the server group: where the ranges of the parameters are, and where they go next.

It keeps the placement, which is remembered before anybody hears of it, and makes the next version whenever a server
came, died, wants to leave, or has done what the last version asked of it. What moves how is decided in
`paceline.placement`; here is only who lives, how strong each is and what it said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.control.messages import Phase
from paceline.control.roster import Record
from paceline.placement import evolving
from paceline.placement.evolving import Heard
from paceline.placement.placement import Placement, Replicas
from paceline.placement.placing import Homes, Site, place


class Change(NamedTuple):
    """A new placement, and what a person should know of it: the ranges that nobody has any more."""

    placement: Placement
    lost: tuple[int, ...] = ()


class ServerManager:
    def __init__(self, num_replicas: int, placement: Placement = Placement()) -> None:
        self.placement = placement
        self._num_replicas = num_replicas
        self._goal: list[Homes] = []
        self._goal_for: object = None

    def found(self, founding: int, servers: Sequence[Record], weights: Sequence[int]) -> Change:
        """The run is founded, or founded again: all ranges are empty, and are loaded by who founds it."""
        version = self.placement.version + 1
        self._goal, self._goal_for = [], None
        sites = _sites_of(servers)
        goal = self._find_goal(sites, weights, ())
        cards = tuple(record.introduction.card for record in servers)
        self.placement = Placement(version, founding, version, cards, evolving.start(goal, version))
        return Change(self.placement)

    def update(self, servers: Sequence[Record], weights: Sequence[int]) -> Change | None:
        """What follows from who lives now and what they said; None if nothing does."""
        if not self.placement.ranges:
            return None
        # Who is not heard of since the coordinator came back lives all the same.
        there = [record for record in servers if record.report.phase is Phase.READY or self.holds(record.member)]
        sites = _sites_of([record for record in there if not record.is_going])
        # Those that want to go have to stay until others come: one at least, and as many as there should be replicas
        # while there are some who can be waited for.
        if len(sites) < (self._num_replicas if len(there) < len(servers) else 1):
            sites = _sites_of(there)
        if not sites:
            return None
        present = [tuple(one.server for one in replicas.everybody()) for replicas in self.placement.ranges]
        goal = self._find_goal(sites, weights, present)
        heard = {record.member: _heard(record) for record in there}
        version = self.placement.version + 1
        ranges = self._evolve(heard, goal, version)
        if ranges == self.placement.ranges:
            return None
        named = {one.server for replicas in ranges for one in replicas.everybody()}
        cards = tuple(record.introduction.card for record in there if record.member in named)
        self.placement = Placement(version, self.placement.founding, self.placement.began, cards, ranges)
        lost = tuple(number for number, replicas in enumerate(ranges) if replicas.origin == version)
        return Change(self.placement, lost)

    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        return evolving.evolve(self.placement.ranges, heard, goal, version)

    def _find_goal(self, sites: Mapping[str, Site], weights: Sequence[int], present: Sequence[Homes]) -> list[Homes]:
        """Where the ranges should be. It stands until other servers are there: what is on its way arrives first."""
        if self._goal_for != (sites, weights):
            self._goal = place(weights, sites, self._num_replicas, self._goal or present)
            self._goal_for = (sites, weights)
        return self._goal

    def holds(self, server: str) -> bool:
        """Whether anything is, or should be, on this server."""
        return any(replicas.of(server) is not None for replicas in self.placement.ranges)


def _sites_of(servers: Sequence[Record]) -> dict[str, Site]:
    return {
        record.member: Site(record.introduction.capacity or 1.0, record.introduction.card.host) for record in servers
    }


def _heard(record: Record) -> Heard:
    serving = record.report.serving
    return Heard() if serving is None else Heard(serving.version, frozenset(serving.synced), frozenset(serving.handed))
