"""The coordinator's part: places ranges, hands out leases. What it remembers outlives its crash."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.control.leases import Desk, LeaseReport
from paceline.control.messages import Introduction, Phase, Report, Serving
from paceline.control.roster import Record
from paceline.control.serving import Aim, ServerManager
from paceline.placement.placement import Placement
from paceline.wire.card import Card

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld


class Memory:
    """What a coordinator leaves to the next one."""

    def __init__(self) -> None:
        self.placement = Placement()
        self.aim = Aim()
        self.leases = (-1, 0)
        self.servers: set[str] = set()
        self.buried: set[str] = set()
        self.term = 0


class Chief:
    def __init__(self, world: ServingWorld, memory: Memory) -> None:
        self.alive = True
        self._world = world
        self._memory = memory
        self._manager: ServerManager = world.mutation.manager(world.num_replicas, memory.placement, memory.aim)
        self._desk: Desk = world.mutation.desk(memory.leases)
        self._records = {name: _record_of(name) for name in sorted(memory.servers)}
        memory.term += 1

    def hear_server(self, name: str, serving: Serving, is_leaving: bool) -> None:
        if name in self._memory.buried:
            return
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _record_of(name)
            self._memory.servers.add(name)
        is_news = record.take(Report(name, record.number + 1, 1, Phase.READY, serving=serving, leaving=is_leaving))
        if is_news or serving.costs:
            self._decide()

    def hear_worker(self, report: LeaseReport) -> None:
        if report.member not in self._memory.buried:
            self._desk.take(report)
            self._grant((report.member,))

    def _grant(self, asked: Sequence[str] = ()) -> None:
        world = self._world
        for grant in self._desk.grants(self._memory.term, asked):
            worker = world.workers.get(grant.member)
            if worker is not None:
                world.after(world.delay(), functools.partial(worker.hear, grant))
        now = self._desk.to_remember()
        if now is not None and world.random.random() < 0.3:
            self._desk.remembered = self._memory.leases = now

    def bury(self, name: str) -> None:
        """A member is dead, or is taken for dead; it is never let in again."""
        self._records.pop(name, None)
        self._memory.servers.discard(name)
        self._memory.buried.add(name)
        self._desk.bury(name)
        self._decide()
        self._grant()

    def _decide(self) -> None:
        servers = list(self._records.values())
        weights = [1] * self._world.num_ranges
        before = self._manager.placement
        change = None
        if self._manager.placement.ranges:
            change = self._manager.update(servers, weights)
        elif len(servers) >= self._world.first_servers:
            change = self._manager.found(1, servers, weights)
        if self._manager.aim is not self._memory.aim and self._world.mutation.remembers:
            self._world.checks.aimed(self._memory.aim, self._manager.aim, before)
            self._memory.aim = self._manager.aim
        if change is not None:
            if self._world.mutation.remembers:
                self._memory.placement = change.placement
            self._world.publish(change.placement)
        for record in servers:
            if record.is_going and not self._manager.holds(record.member):
                self._release(record.member)

    def _release(self, name: str) -> None:
        """It may exit."""
        self._records.pop(name)
        self._memory.servers.discard(name)
        self._memory.buried.add(name)
        self._world.servers[name].die()


def _record_of(name: str) -> Record:
    card = Card(name, "server", name, ("", 0), name, b"", False, ())
    return Record(Introduction(card, 1, name, ""), 0.0)
