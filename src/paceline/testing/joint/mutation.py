"""What a test may replace in a simulated run, to see that the simulator finds it (`tests/control/mutations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.collective.agreement import Agreed, agreed
from paceline.control.leases.holder import LeaseHolder
from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.lost_head import OrphanMove, Sight, decide
from paceline.control.machines.member import Member
from paceline.control.machines.server_member import ServerMember
from paceline.server.errand import Errand
from paceline.server.keeper import RangeKeeper


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
    keeper: Callable[..., RangeKeeper] = RangeKeeper
    errand: Callable[..., Errand] = Errand
    holder: Callable[[str], LeaseHolder] = LeaseHolder
    halts: Callable[[Sight, float], OrphanMove] = decide
    agrees: Callable[[Sequence[int], int], Agreed] = agreed
    is_about_load: bool = False


SOUND = Mutation("sound", fewest_faults=0)
