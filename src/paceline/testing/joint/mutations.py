"""Faults put into what production runs, on purpose: the simulator must see each of them.

Each replaces a class of `paceline.control` or `paceline.server`; none changes what the simulator itself reads. Those
that the simulators of the two halves look for, and that show soon when all machines run together, are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.control.choices import Choices
from paceline.control.coordinator import Coordinator
from paceline.control.coordinator_events import Event, Remember
from paceline.control.leases import Hand
from paceline.control.member import Member
from paceline.control.member_events import Exit, Leave
from paceline.control.messages import Directive, Verdict
from paceline.control.serving import Change
from paceline.control.serving_member import ServerMember
from paceline.server.errand import Errand
from paceline.server.keeper import Keeper
from paceline.testing.serving import mutations as of_servers
from paceline.testing.simulation import mutations as of_control


class Mutation(NamedTuple):
    """`mode`, `num_replicas` and the seed `shows_from` are those in which it shows soonest; elsewhere it would only
    cost time."""

    name: str
    mode: str = ""
    num_replicas: int = 0
    member: Callable[[str], Member] = Member
    server_member: Callable[[str], ServerMember] = ServerMember
    coordinator: Callable[..., Coordinator] = Coordinator
    choices: Callable[[float], Choices] = Choices
    keeper: Callable[..., Keeper] = Keeper
    errand: Callable[..., Errand] = Errand
    hand: Callable[[str], Hand] = Hand
    is_about_load: bool = False
    shows_from: int = 0


class _RemembersNoPlacement(Coordinator):
    def _place(self, change: Change) -> None:
        super()._place(change)
        self._actions = [
            action for action in self._actions if not (isinstance(action, Remember) and action.key == "placement")
        ]


class _GoesByTheClock(Coordinator):
    """A pause of its own counts as silence of the others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock._stall_s = 1e9


class _SendsAPlanOnce(Choices):
    """Also where the connection that it went by is lost."""

    def lighten(self, directive: Directive, now: float) -> Directive:
        return super().lighten(directive, 0.0)

    def merge(self, events: Sequence[Event], has_line: Callable[[str], bool]) -> list[Event]:
        kept = dict(self._on_the_way)
        chosen = super().merge(events, has_line)
        self._on_the_way = kept
        return chosen


class _GoesAtOnce(ServerMember):
    """A server that is asked to leave does not wait until others have what it holds."""

    def _on_leave(self, event: Leave) -> None:
        super()._on_leave(event)
        self._actions.append(Exit(Verdict.RELEASED, "it was asked to leave"))


_RARE = (  # these show too rarely here
    "counts the holders of a next plan, not what their slots name",
    "goes on with hosts that cannot reach each other",
)
# Of those of the server group, the ones that show within some dozens of schedules here.
_SHOWN = (
    "counts a lease as often as it comes",
    "loads a range that is there",
    "takes a broken connection for an answer",
    "makes a step of pushes of several generations",
    "ignores the bound",
)
_MODES = {"": "", "steps": "sync", "leases": "async", "bounded": "bounded"}

SOUND = Mutation("sound")
MUTATIONS = [
    *(
        Mutation(one.name, mode="allreduce", member=one.member, coordinator=one.coordinator)
        for one in of_control.MUTATIONS
        if one.name not in _RARE
    ),
    Mutation("forgets where the ranges are", coordinator=_RemembersNoPlacement, shows_from=27),
    Mutation("takes its own pause for silence of the others", coordinator=_GoesByTheClock, shows_from=34),
    Mutation("sends a plan once, whatever becomes of the connection", choices=_SendsAPlanOnce, shows_from=96),
    Mutation(
        "ends a server before others have what it holds", num_replicas=2, server_member=_GoesAtOnce, shows_from=116
    ),
    *(
        Mutation(one.name, mode=_MODES[one.mode], num_replicas=one.num_replicas, keeper=one.keeper, errand=one.errand)
        for one in of_servers.MUTATIONS
        if one.name in _SHOWN
    ),
]
