"""What a schedule may cost, by what the docs promise. Pure.

Bounds of outages are from the fault until the survivors step again. They are generous: a machine that has less
processor time than the run asks for stretches them (`stretch`), a product that waits for a deadline it should not wait
for does not fit into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.testing.chaos.drawing import SILENCE_S
from paceline.testing.chaos.schedule import Fault, FaultKind, Schedule

STALL_S = 2.5  # between two steps of a worker, without any fault
RETURN_S = 30.0  # until as many workers step as should
END_S = 30.0  # from the last step to the end of the commands
START_S = 60.0  # of everything
SETTLE_S = 20.0  # for ranges to be on as many servers as they should
AFTERMATH_S = 12.0  # in which a replacement starts and joins
_RECOVERY_S = 3.0  # what a death may cost the survivors
_PARTITION_S = 4.0  # beyond the silence deadline
HALT_S = 75.0  # until hosts that do not hear the coordinator any more have ended: its patience, and that for servers

INTERRUPTED = 128 + 15

# After these, a command that was about to join the run does not find it, or not for long.
SHUTS_THE_DOOR = frozenset(
    {
        FaultKind.CUT,
        FaultKind.ONEWAY,
        FaultKind.PARTIAL,
        FaultKind.AGENT,
        FaultKind.HEAD,
        FaultKind.RESUME,
        FaultKind.TERM,
    }
)


@dataclass(frozen=True)
class Injury:
    """A fault as it was acted: when, to whom. `victims` are processes of workers that may end, or stand still;
    `takes_all` says that a kill left nobody, so that all begin again from a checkpoint."""

    fault: Fault
    began: float
    ended: float
    victims: frozenset[int] = frozenset()
    takes_all: bool = False

    @property
    def outage_s(self) -> float:
        """How long nobody may step because of it."""
        return START_S if self.takes_all else outage_s(self.fault)


def evicts(fault: Fault) -> bool:
    """Whether the product may evict whom the fault silences."""
    return fault.length_s > SILENCE_S / 2


def may_lose(schedule: Schedule) -> bool:
    """Whether the last copy of a range can go with a server: then losses are legal, if they are stated."""
    return any(_servers_lost(schedule, fault) >= schedule.replicas for fault in schedule.faults)


def takes_servers(schedule: Schedule, fault: Fault) -> bool:
    return _servers_lost(schedule, fault) > 0


def _servers_lost(schedule: Schedule, fault: Fault) -> int:
    match fault.kind:
        case FaultKind.SERVER:
            return min(1, schedule.servers)
        case FaultKind.AGENT:
            host = fault.target % schedule.hosts
            return schedule.servers_on(host) if host else 0  # all of a run that is resumed comes from its checkpoint
        case FaultKind.CUT | FaultKind.ONEWAY | FaultKind.PARTIAL if evicts(fault):
            # Of two hosts that do not reach each other either may go.
            return max(schedule.servers_on(host) for host in hosts_of(schedule, fault))
        case _:
            return 0


def hosts_of(schedule: Schedule, fault: Fault) -> tuple[int, ...]:
    """Whose members a fault of the network concerns."""
    if fault.kind is FaultKind.PARTIAL:
        pairs = [(one, other) for one in range(schedule.hosts) for other in range(one + 1, schedule.hosts)]
        return pairs[fault.target % len(pairs)]
    return (fault.target % schedule.hosts,)


def outage_s(fault: Fault) -> float:
    """How long nobody may step because of it."""
    match fault.kind:
        case FaultKind.RESUME | FaultKind.TERM | FaultKind.ALL:
            return START_S
        case FaultKind.HEAD:
            return HALT_S + START_S
        case FaultKind.AGENT:
            return START_S if fault.target == 0 else _RECOVERY_S
        case FaultKind.STOP | FaultKind.CUT | FaultKind.ONEWAY | FaultKind.PARTIAL:
            return min(fault.length_s, SILENCE_S) + _PARTITION_S
        case FaultKind.PAUSE:
            # A death meanwhile waits for the coordinator.
            return fault.length_s + _RECOVERY_S
        case _:
            return _RECOVERY_S


def allowed_gap_s(injuries: Sequence[Injury], since: float, until: float) -> float:
    """How long a worker that is no victim may take from one step to the next, given what happened meanwhile."""
    near = [one for one in injuries if one.began <= until and since <= one.ended + AFTERMATH_S]
    return STALL_S + sum(one.outage_s for one in near)


def stretch(runnable: Sequence[float], cores: int) -> float:
    """By how much a machine with so many runnable processes was slower than an idle one."""
    mean = sum(runnable) / len(runnable) if runnable else 0.0
    return max(1.0, mean / cores)
