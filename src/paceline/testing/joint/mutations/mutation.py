"""What a mutation replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.collective.agreement import Agreed, agreed
from paceline.control.choices import Choices
from paceline.control.coordinator import Coordinator
from paceline.control.leases import Hand
from paceline.control.lost_head import Move, Sight, decide
from paceline.control.member import Member
from paceline.control.serving_member import ServerMember
from paceline.server.errand import Errand
from paceline.server.keeper import Keeper


class Mutation(NamedTuple):
    """`modes`, `num_replicas`, `num_hosts`, `fewest_faults` and `theme` are those in which it shows soonest; elsewhere
    it would only cost time."""

    name: str
    modes: tuple[str, ...] = ("allreduce", "allreduce", "sync", "async", "bounded")
    num_replicas: int = 0
    num_hosts: int = 0
    fewest_faults: int = 4
    theme: str = ""
    member: Callable[[str], Member] = Member
    server_member: Callable[[str], ServerMember] = ServerMember
    coordinator: Callable[..., Coordinator] = Coordinator
    choices: Callable[[float], Choices] = Choices
    keeper: Callable[..., Keeper] = Keeper
    errand: Callable[..., Errand] = Errand
    hand: Callable[[str], Hand] = Hand
    halts: Callable[[Sight, float], Move] = decide
    agrees: Callable[[Sequence[int], int], Agreed] = agreed
    is_about_load: bool = False


SOUND = Mutation("sound", fewest_faults=0)
