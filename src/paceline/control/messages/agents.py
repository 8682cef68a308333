"""What agents and the coordinator say to each other."""

from __future__ import annotations

import msgspec


class ProcessVitals(msgspec.Struct, frozen=True):
    """What an agent sees of a process: its state (R, S, D, T, Z), and whether it has computed since the last look."""

    state: str
    busy: bool


class AgentReport(msgspec.Struct, frozen=True):
    """All that an agent knows of its children, by process id: those that live, and how the others ended; `servers` are
    those of the living that are no workers. An agent that is `exhausted` will start no more workers.
    `num_expected` are the workers that live there or may be started yet; -1 if that is not known."""

    agent: str
    number: int
    living: dict[int, ProcessVitals] = {}
    exits: dict[int, str] = {}
    exhausted: bool = False
    servers: tuple[int, ...] = ()
    servers_exhausted: bool = False
    num_expected: int = -1

    @property
    def num_workers(self) -> int:
        """That live."""
        return len(self.living.keys() - set(self.servers))


class AgentDirective(msgspec.Struct, frozen=True):
    """What an agent is to do: kill these processes, start no others in place of those that were `refused` (with what
    differs), start no more when the run is over; whether it failed, and why it is over. `lost` are processes whose
    members were given up: one that ended as if all were well did not."""

    term: int
    number: int
    agent: str
    kill: tuple[int, ...] = ()
    over: bool = False
    verdict: str = ""
    failed: bool = False
    refused: dict[int, str] = {}
    lost: tuple[int, ...] = ()
