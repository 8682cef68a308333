"""How a mutation is made."""

from __future__ import annotations

from typing import Any

from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.founding import Founding
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.planner import Planner
from paceline.control.machines.server_manager import ServerManager
from paceline.testing.joint.mutation import Mutation


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
