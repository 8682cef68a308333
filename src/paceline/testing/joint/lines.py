"""Connections to the coordinator: in order, until they break; what is on its way then is lost.

What waits for a member is the newest of each kind (`control.outbox`), as on a real line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.control.machines.coordinator_events import Connected, Disconnected, Event
from paceline.control.shell.outbox import Outbox

if TYPE_CHECKING:
    from paceline.testing.joint.processes import SimulatedProcess
    from paceline.testing.joint.world import World

AGAIN_S = 0.1  # until a lost connection is tried again
LATEST_S = 0.3  # a heartbeat that takes longer is a fault of its own
SILENT_LINE_S = 1.5  # a member that hears nothing for so long connects anew


class SimulatedConnection:
    """`process.hear(kind, body)` gets what the coordinator says."""

    def __init__(self, world: World, process: SimulatedProcess, *, is_member: bool = True) -> None:
        self._world = world
        self._process = process
        self._is_member = is_member
        self.number = 0  # of the connection; 0 before the first
        self.is_up = False
        self.heard = world.now
        self.told = world.now  # when something was said on it; a connection alone says nothing
        self._outbox = Outbox()
        self._flushes = False
        self._forth = self._back = 0.0  # when what was sent last in each direction arrives
        self._lag_s = world.random.choice(world.lags)  # of what this process hears

    # -- connecting --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """By the process; again and again until it works."""
        world, process = self._world, self._process
        if not process.alive or self.is_up:
            return
        if process.is_stopped or not world.head.is_listening or world.is_cut(process.name, "coordinator"):
            world.after(AGAIN_S, self.connect)
            return
        self.number += 1
        self.is_up = True
        self.heard = world.now
        self._outbox = Outbox()
        self._forth = self._back = 0.0
        if self._is_member:
            self._post(Connected(process.name))
        process.connected()

    def drop(self, *, is_heard: bool = True) -> None:
        """It broke; the coordinator learns of it soon, or, if `is_heard` is false, not before it misses something."""
        if self.is_up:
            self.is_up = False
            if is_heard and self._is_member:
                self._world.after(self._world.delay(), self._world.head.post, Disconnected(self._process.name))
            self._world.after(AGAIN_S * self._world.random.random(), self.connect)

    def look(self) -> None:
        """By the process, now and then: a line on which nothing comes is taken for dead."""
        if self.is_up and self._world.now - self.heard > SILENT_LINE_S:
            self.drop(is_heard=self._world.random.random() < 0.5)

    # -- to the coordinator ------------------------------------------------------------------------------------------

    def say(self, event: Event) -> None:
        if self.is_up:
            if self._world.is_lossy and self._world.random.random() < self._world.loss:
                self.drop()
            else:
                self._post(event)

    def _post(self, event: Event) -> None:
        world = self._world
        self._forth = max(world.now + min(world.delay(), LATEST_S), self._forth + 1e-6)
        world.at(self._forth, self._arrive, event, self.number)

    def _arrive(self, event: Event, number: int) -> None:
        if self.is_up and number == self.number and not self._world.is_cut(self._process.name, "coordinator"):
            self._world.head.post(event)

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def put(self, kind: str, body: Any) -> None:
        if self.is_up:
            self._outbox.put(kind, body)
            if not self._flushes:
                self._flushes = True
                self._world.after(self._world.random.random() * 0.001, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        world = self._world
        while self._outbox:
            kind, body = self._outbox.take()
            if not self.is_up:
                continue
            if world.is_lossy and world.random.random() < world.loss:
                self.drop()
                continue
            self._back = max(world.now + self._lag_s + min(world.delay(), LATEST_S), self._back + 1e-6)
            world.at(self._back, self._deliver, kind, body, self.number)

    def _deliver(self, kind: str, body: Any, number: int) -> None:
        process = self._process
        if number != self.number or not self.is_up or self._world.is_cut(process.name, "coordinator"):
            return
        self.heard = self.told = self._world.now
        process.receive(process.hear, kind, body)
