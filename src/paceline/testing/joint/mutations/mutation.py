"""What a mutation replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.collective.agreement import Agreed, agreed
from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.leases.holder import LeaseHolder
from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.founding import Founding
from paceline.control.machines.lost_head import OrphanMove, Sight, decide
from paceline.control.machines.member import Member
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.planner import Planner
from paceline.control.machines.server_manager import ServerManager
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


def mutated(
    name: str,
    theme: str,
    modes: tuple[str, ...],
    *,
    manager: type[ServerManager] = ServerManager,
    dispatcher: type[LeaseDispatcher] = LeaseDispatcher,
    memory: type[CoordinatorMemory] = CoordinatorMemory,
    planner: type[Planner] = Planner,
    founding: type[Founding] = Founding,
    coordinator: type[Coordinator] = Coordinator,
    **others: Any,
) -> Mutation:
    """A mutation that may be one of the coordinator's parts; `others` are fields of `Mutation`."""
    kept = type("MutatedMemory", (memory,), {"manager_type": manager, "dispatcher_type": dispatcher})
    parts = {"memory_type": kept, "planner_type": planner, "founding_type": founding}
    return Mutation(name, modes, theme=theme, coordinator=type("Mutated", (coordinator,), parts), **others)


SOUND = Mutation("sound", fewest_faults=0)
