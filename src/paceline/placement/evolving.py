"""The next placement: one safe step from where the ranges are towards where they should be.

Every change of a range goes through the same few moves, each of which loses nothing that was acknowledged:

    bring up     somebody is joining; the primary feeds it
    admit        who has everything becomes a backup
    hand over    the primary takes nothing more; when nothing is under way, it and a backup change places
    let go       a backup that is not wanted, when enough others are there
    promote      the primary is dead: a backup takes its place; all others are brought up anew, because what the dead
                 one had sent to them may differ
    start anew   nobody that lives has the range: empty, to be loaded by a worker

A death in the middle of any of these is an ordinary event: the next call sees who is left.

A server that has said nothing yet, because the coordinator has just come back, may be dead. What it holds is left with
it, but nobody gives anything up in its favour: it gets no range handed over, and no copy beside its own is let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.placement.placement import Replica, Replicas
from paceline.placement.placing import Homes

MAX_BROUGHT_UP = 8  # at a time by one primary: what it feeds costs it time for its workers


class Heard(NamedTuple):
    """What a server says of itself: the version it goes by, the ranges it has all of, and those it has handed over."""

    version: int = 0
    synced: frozenset[int] = frozenset()
    handed: frozenset[int] = frozenset()


def start(wanted: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
    """All ranges, empty."""
    return tuple(_anew(homes, version) for homes in wanted)


def evolve(
    ranges: Sequence[Replicas],
    heard: Mapping[str, Heard],
    wanted: Sequence[Homes],
    version: int,
) -> tuple[Replicas, ...]:
    """The ranges of the next `version`; the same ones if there is nothing to do. `heard` has an entry for each server
    that lives."""
    room = dict.fromkeys(heard, MAX_BROUGHT_UP)
    for replicas in ranges:
        if replicas.primary.server in room:
            room[replicas.primary.server] -= sum(one.server in heard for one in replicas.joining)
    return tuple(
        _Range(number, replicas, heard, wanted[number], version, room).next() for number, replicas in enumerate(ranges)
    )


def _anew(homes: Homes, version: int) -> Replicas:
    primary, *backups = (Replica(home, version) for home in homes)
    return Replicas(primary, tuple(backups), origin=version)


class _Range:
    """One range on its way. `room` says how many more each primary may bring up."""

    def __init__(
        self,
        number: int,
        now: Replicas,
        heard: Mapping[str, Heard],
        wanted: Homes,
        version: int,
        room: dict[str, int],
    ) -> None:
        self._number = number
        self._now = now
        self._heard = heard
        self._wanted = wanted
        self._version = version
        self._room = room
        self._backups = [one for one in now.backups if one.server in heard]
        self._joining = [one for one in now.joining if one.server in heard]

    def next(self) -> Replicas:
        if self._now.primary.server not in self._heard:
            return self._without_primary()
        self._admit()
        if self._is_handed_over():
            return self._handed_over()
        handing, since = self._handing()
        self._bring_up()
        if not handing:
            self._let_go()
        return Replicas(self._now.primary, tuple(self._backups), tuple(self._joining), self._now.origin, handing, since)

    def _without_primary(self) -> Replicas:
        if not self._backups:
            return _anew(self._wanted, self._version)
        # One that has spoken; among these the one that is wanted there, else the first.
        heir = min(self._backups, key=lambda one: (not self._has_spoken(one), one.server != self._wanted[0]))
        others = [one.server for one in (*self._backups, *self._joining) if one is not heir]
        return Replicas(heir, (), self._brought_up_anew(others), self._now.origin)

    def _brought_up_anew(self, servers: Sequence[str]) -> tuple[Replica, ...]:
        return tuple(Replica(server, self._version) for server in servers)

    def _admit(self) -> None:
        for one in list(self._joining):
            heard = self._heard[one.server]
            if heard.version >= one.since and self._number in heard.synced:
                self._joining.remove(one)
                self._backups.append(one)

    def _is_handed_over(self) -> bool:
        now = self._now
        heard = self._heard[now.primary.server]
        is_said = heard.version >= now.handing_since and self._number in heard.handed
        return bool(now.handing) and is_said and self._is_there(now.handing)

    def _has_spoken(self, one: Replica) -> bool:
        return self._heard[one.server].version > 0

    def _is_there(self, server: str) -> bool:
        """Whether it is a backup that lives, by its own word."""
        return any(one.server == server and self._has_spoken(one) for one in self._backups)

    def _handed_over(self) -> Replicas:
        now = self._now
        heir = next(one for one in self._backups if one.server == now.handing)
        # The old primary has what its heir has: it backs it up until enough others do.
        backups = (now.primary, *(one for one in self._backups if one is not heir))
        joining = [one.server for one in self._joining]
        return Replicas(heir, backups, self._brought_up_anew(joining), now.origin)

    def _handing(self) -> tuple[str, int]:
        """To whom the primary hands over, and since when."""
        now, goal = self._now, self._wanted[0]
        there = {one.server for one in self._backups}
        if now.handing in there:
            return now.handing, now.handing_since
        if goal != now.primary.server and self._is_there(goal):
            return goal, self._version
        return "", 0

    def _bring_up(self) -> None:
        """Whoever is wanted here and is not; while it hands over, the primary starts nothing new."""
        there = {self._now.primary.server, *(one.server for one in (*self._backups, *self._joining))}
        primary = self._now.primary.server
        for server in self._wanted:
            if server not in there and not self._now.handing and self._room[primary] > 0:
                self._room[primary] -= 1
                self._joining.append(Replica(server, self._version))

    def _let_go(self) -> None:
        """Backups that are not wanted, as soon as those that are have everything."""
        if self._now.primary.server != self._wanted[0] or not self._has_spoken(self._now.primary):
            return
        wanted = [one for one in self._backups if one.server in self._wanted and self._has_spoken(one)]
        if len(wanted) == len(self._wanted) - 1:
            self._backups = wanted
            self._joining = [one for one in self._joining if one.server in self._wanted]
