"""What all processes of a simulated run are: on a host, stopped or not, dead or alive, with a line to the coordinator;
and the agents that start them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.control.messages.agents import AgentDirective, AgentReport, ProcessVitals
from paceline.control.ordering import Newest
from paceline.testing.joint.lines import SimulatedConnection

if TYPE_CHECKING:
    from paceline.testing.joint.world import World

AGENT_S = 0.3


class SimulatedProcess:
    """`receive` is its only ear: what comes while it is stopped is heard when it goes on."""

    is_server = False

    def __init__(self, world: World, name: str, host: str, pid: int, *, is_member: bool = True) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.pid = pid
        self.alive = True
        self.is_stopped = False
        self.line = SimulatedConnection(world, self, is_member=is_member)
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def receive(self, action: Callable[..., None], *arguments: Any) -> None:
        if not self.alive:
            return
        if self.is_stopped:
            self._inbox.append((action, arguments))
        else:
            action(*arguments)

    def later(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Something that this process does itself."""
        self.world.after(seconds, self.receive, action, *arguments)

    def stop(self, seconds: float) -> None:
        self.is_stopped = True
        self.world.after(seconds, self.go_on)

    def go_on(self) -> None:
        self.is_stopped = False
        inbox, self._inbox = self._inbox, []
        for action, arguments in inbox:
            self.receive(action, *arguments)

    def hear(self, kind: str, body: Any) -> None:
        raise NotImplementedError

    def connected(self) -> None:
        """The line is there, or there again."""

    def died(self) -> None:
        """Called when it is dead."""


class SimulatedAgent(SimulatedProcess):
    """Starts processes on a host, knows which of them live, kills whom it is told to."""

    def __init__(self, world: World, host: str) -> None:
        super().__init__(world, f"agent {host}", host, 0, is_member=False)
        self.children: list[SimulatedProcess] = []
        self.exits: dict[int, str] = {}
        self.over = False
        self._number = 0
        self._newest = Newest()
        world.after(0.0, self.line.connect)
        world.after(0.0, self._beat)

    def start(self) -> None:
        """One more worker."""
        if not self.over:
            self.children.append(self.world.make_worker(self.host))

    def start_server(self) -> None:
        """One more server; on a host that all others reach."""
        if self.world.is_parted(self.host):
            self.world.agents["a"].start_server()
        elif not self.over:
            self.children.append(self.world.make_server(self.host))

    def _beat(self) -> None:
        if not self.world.is_finished:
            self.line.look()
            self.report()
            self.later(AGENT_S, self._beat)

    def report(self) -> None:
        self._number += 1
        living = {
            one.pid: ProcessVitals("T" if one.is_stopped else "R", not one.is_stopped)
            for one in self.children
            if one.alive
        }
        servers = tuple(one.pid for one in self.children if one.alive and one.is_server)
        self.line.say(AgentReport(self.host, self._number, living, dict(self.exits), servers=servers))

    def child_died(self, child: SimulatedProcess, how: str) -> None:
        self.exits[child.pid] = how
        self.later(self.world.delay(), self.report)

    def hear(self, kind: str, body: Any) -> None:
        directive: AgentDirective = body
        if not self._newest.passes(directive):
            return
        self.over = self.over or directive.over
        for child in self.children:
            if child.alive and child.pid in directive.kill:
                self.world.kill(child, "was killed as told")
