"""The coordinator's side of the server group: where the ranges of the parameters are, and where they go next.

It keeps the placement, which is remembered before anybody hears of it, and makes the next version whenever a server
came, died, wants to leave, or has done what the last version asked of it; or when one has much more to do than the
others. What moves how is decided in `paceline.placement`; here is only who lives, how strong each is and what it said.

Where the ranges should be (`Aim`) is remembered too: else a coordinator that came back would place them by their size
again, and what was given away because it is hot would come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from paceline.control.machines.roster import MemberRecord
from paceline.control.messages.plan import Phase
from paceline.placement import evolving
from paceline.placement.evolving import Heard
from paceline.placement.gauge import LoadWindow
from paceline.placement.placement import Placement, Replicas
from paceline.placement.placing import Homes, Site, place
from paceline.placement.relief import RangeMove
from paceline.placement.relieving import CannotRelieve, Relieving


class Change(NamedTuple):
    """A new placement, and what a person should know of it: the ranges that nobody has any more."""

    placement: Placement
    lost: tuple[int, ...] = ()


class Aim(msgspec.Struct, frozen=True):
    """Where the ranges should be, for these servers and these bytes of each range; what ranges have to do, and how
    often they were moved because of it."""

    homes: tuple[Homes, ...] = ()
    sites: dict[str, Site] = {}
    num_bytes: tuple[int, ...] = ()
    work: tuple[float, ...] = ()
    num_moves: dict[int, int] = {}


class ServerManager:
    """With `by_load` servers that have much more to do than others are relieved of ranges. `aim` is to be remembered
    with the placement."""

    def __init__(
        self,
        num_replicas: int,
        placement: Placement = Placement(),
        aim: Aim = Aim(),
        held: Placement = Placement(),
        *,
        by_load: bool = True,
    ) -> None:
        """`held` is the newest placement that a member goes by whom this coordinator, or the last one, did not know."""
        self.placement = placement
        self.aim = aim
        self._news: list[str] = []
        self._num_replicas = num_replicas
        self._by_load = by_load
        self._relieving = Relieving(aim.num_moves, aim.work)
        self.held = held

    def hear(self, held: Placement | None) -> bool:
        """Whether that is news, which must be remembered: who is known does not say it again."""
        if held is None or self.placement.ranges or held.version <= self.held.version:
            return False
        self.held = held
        return True

    def adopt(self, servers: Sequence[MemberRecord], num_bytes: Sequence[int], known: int) -> Change | None:
        """The journal is lost: go on with what members go by. None if that cannot be right: one of them has heard of
        the version `known`, and nobody says what that was; or if nobody that lives has all of some range."""
        if self.held.version < known or len(self.held.ranges) != len(num_bytes):
            return None
        living = {record.member for record in servers}
        holders = ({one.primary.server, *(backup.server for backup in one.backups)} for one in self.held.ranges)
        if not all(living & there for there in holders):
            return None
        version = max(self.placement.version, known) + 1
        self.placement = msgspec.structs.replace(self.held, version=version)
        return Change(self.placement)

    def found(self, founding: int, servers: Sequence[MemberRecord], num_bytes: Sequence[int]) -> Change:
        """The run is founded, or founded again: all ranges are empty, and are loaded by who founds it."""
        version = self.placement.version + 1
        self.aim, self._relieving = Aim(), Relieving()
        self._find_aim(_sites_of(servers), num_bytes, ())
        cards = tuple(record.introduction.card for record in servers)
        self.placement = Placement(version, founding, version, cards, evolving.start(self.aim.homes, version))
        return Change(self.placement)

    def update(self, servers: Sequence[MemberRecord], num_bytes: Sequence[int]) -> Change | None:
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
        self._find_aim(sites, num_bytes, present)
        if self._by_load:
            self._relieve({record.member: _window_of(record) for record in there if record.member in sites})
        heard = {record.member: _heard(record) for record in there}
        version = self.placement.version + 1
        ranges = self._evolve(heard, self.aim.homes, version)
        if ranges == self.placement.ranges:
            return None
        named = {one.server for replicas in ranges for one in replicas.everybody()}
        cards = tuple(record.introduction.card for record in there if record.member in named)
        self.placement = Placement(version, self.placement.founding, self.placement.began, cards, ranges)
        lost = tuple(number for number, replicas in enumerate(ranges) if replicas.origin == version)
        return Change(self.placement, lost)

    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        return evolving.evolve(self.placement.ranges, heard, goal, version)

    # -- where the ranges should be ------------------------------------------------------------------------------------

    def _find_aim(self, sites: dict[str, Site], num_bytes: Sequence[int], present: Sequence[Homes]) -> None:
        """It stands until other servers are there: what is on its way arrives first."""
        if (self.aim.sites, self.aim.num_bytes) != (sites, tuple(num_bytes)):
            weights = self._relieving.weights(num_bytes)
            self._keep_aim(place(weights, sites, self._num_replicas, self.aim.homes or present), sites, num_bytes)

    def _keep_aim(self, homes: Sequence[Homes], sites: dict[str, Site], num_bytes: Sequence[int]) -> None:
        relieving = self._relieving
        self.aim = Aim(tuple(homes), sites, tuple(num_bytes), relieving.work, relieving.num_moves)

    def _relieve(self, windows: Mapping[str, LoadWindow]) -> None:
        """Ranges of one server get another home, if it is hot and nothing else is on its way."""
        aim = self.aim
        if not self._is_in_place():
            self._relieving.disturb(windows)
            return
        found = self._relieving.look(windows, aim.homes, aim.sites, aim.num_bytes)
        if isinstance(found, RangeMove):
            homes = [found.homes.get(number, present) for number, present in enumerate(aim.homes)]
            self._keep_aim(homes, aim.sites, aim.num_bytes)
            self._news.append(_moving(found))
        elif found is not None:
            self._news.append(_stuck(found))

    def _is_in_place(self) -> bool:
        return all(
            not replicas.joining
            and not replicas.handing
            and (replicas.primary.server, {one.server for one in replicas.backups}) == (homes[0], set(homes[1:]))
            for replicas, homes in zip(self.placement.ranges, self.aim.homes, strict=True)
        )

    def take_news(self) -> list[str]:
        """What a person should know of hot servers."""
        news, self._news = self._news, []
        return news

    def holds(self, server: str) -> bool:
        """Whether anything is, or should be, on this server; also by what members say while this is forgotten here."""
        ranges = self.placement.ranges or self.held.ranges
        return any(replicas.of(server) is not None for replicas in ranges)


def idle_in(aim: Aim) -> frozenset[str]:
    """The servers that get nothing to hold."""
    return frozenset(aim.sites) - {home for homes in aim.homes for home in homes}


def say_idle(server: str, aim: Aim) -> str:
    ranges = "1 range of parameters" if len(aim.homes) == 1 else f"{len(aim.homes)} ranges of parameters"
    return f"server {server} holds nothing: the run has {ranges}, and other servers have all; fewer --servers would do"


def _sites_of(servers: Sequence[MemberRecord]) -> dict[str, Site]:
    return {
        record.member: Site(record.introduction.capacity or 1.0, record.introduction.card.host) for record in servers
    }


def _heard(record: MemberRecord) -> Heard:
    serving = record.report.serving
    return Heard() if serving is None else Heard(serving.version, frozenset(serving.synced), frozenset(serving.handed))


def _window_of(record: MemberRecord) -> LoadWindow:
    serving = record.report.serving
    return LoadWindow() if serving is None else LoadWindow(serving.window, serving.costs)


def _moving(move: RangeMove) -> str:
    return (
        f"{move.giver} has {move.before:.2f} times the mean load of a server: {_named(sorted(move.homes))} to "
        f"{move.taker}, and neither has more than {move.after:.2f} then"
    )


def _named(numbers: Sequence[int]) -> str:
    return f"range {numbers[0]} goes" if len(numbers) == 1 else f"{len(numbers)} ranges, from {numbers[0]} on, go"


def _stuck(found: CannotRelieve) -> str:
    is_one = found.cost > found.load / 2
    why = f"range {found.number} alone is {found.cost:.2f} of that" if is_one else "the others have copies, or no room"
    remedy = "only a faster machine would help" if is_one else "one more server, or a faster machine, would help"
    return (
        f"{found.server} has {found.load:.2f} times the mean load of a server, and nothing that could move would "
        f"relieve it: {why}; {remedy}"
    )
