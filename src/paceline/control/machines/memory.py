"""What the coordinator knows, and what of it the next one must know too.

Every change to what must not be forgotten goes through here, and becomes a `Remember` among the actions: the shell has
that on disk before anybody hears of the change. `actions` is what follows from the events at hand, in order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.machines.agents import Agents
from paceline.control.machines.census import Census
from paceline.control.machines.coordinator_events import Action, CoordinatorState, Note, Remember, RunSettings
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.machines.server_manager import Aim, Change, ServerManager, idle_in, say_idle
from paceline.placement.placement import Placement
from paceline.wire.decoding import decode


class CoordinatorMemory:
    """`now` is in seconds that the coordinator was awake, not those of the clock."""

    manager_type, dispatcher_type = ServerManager, LeaseDispatcher  # a simulator puts others in their place

    def __init__(self, settings: RunSettings, remembered: Mapping[str, bytes], now: float, used: int = 0) -> None:
        """`used` is a term and a generation that an earlier coordinator did not go beyond, if nothing tells which."""
        self.settings = settings
        self.now = now
        self.census = Census()
        self.agents = Agents()
        self.actions: list[Action] = []
        self.standing, leases = CoordinatorState(term=used, newest=used), (-1, 0)
        placement, held, self._aim = Placement(), Placement(), Aim()
        for key, value in remembered.items():
            if key == "standing":
                self.standing = decode(value, CoordinatorState)
            elif key == "placement":
                placement = decode(value, Placement)
            elif key == "held":
                held = decode(value, Placement)
            elif key == "aim":
                self._aim = decode(value, Aim)
            elif key == "leases":
                leases = decode(value, tuple[int, int])
            elif key.startswith("member/"):
                record = MemberRecord.restore(value, now)
                self.census.records[record.member] = record
        if not placement.version:
            placement = Placement(version=self.standing.newest)  # which is remembered: the next one begins there too
        self.manager = self.manager_type(settings.replicas, placement, self._aim, held, by_load=settings.by_load)
        self.dispatcher = self.dispatcher_type(leases)
        if self.standing.halting:
            self.dispatcher.stop_again(self.standing.whole)

    # -- the run -----------------------------------------------------------------------------------------------------

    def keep(self, **changes: object) -> None:
        self.standing = msgspec.structs.replace(self.standing, **changes)
        self.remember("standing", self.standing)

    def fail(self, reason: str) -> None:
        """Nothing will come of this run any more."""
        if not self.standing.over:
            self.keep(over="failed", reason=reason)
            self.note("failed", None, reason)

    def root_cause(self) -> str:
        return self.census.root_cause(self.agents.last_exit(), set(self.agents))

    def halt(self, reason: str) -> None:
        """The run is to end after the step under way, unless it is ending already."""
        if not self.standing.halting and not self.standing.over:
            self.wind_down(reason)
            self.note("halting", None, reason)

    def wind_down(self, reason: str) -> None:
        """No more leases; a coordinator that comes back after this one says the same of the epoch that it ends in."""
        self.dispatcher.stop()
        self.keep(halting=reason, whole=self.dispatcher.whole)
        self.keep_leases()

    # -- members -----------------------------------------------------------------------------------------------------

    def save(self, record: MemberRecord) -> None:
        self.actions.append(Remember(f"member/{record.member}", record.durable()))

    def end(self, record: MemberRecord, fate: Fate, reason: str) -> None:
        record.fate = fate
        record.reason = reason
        self.dispatcher.bury(record.member)
        self.save(record)
        self.note(fate.value, record, reason)

    def drain(self, record: MemberRecord, reason: str) -> None:
        """It is to leave when others have what it holds."""
        record.draining = True
        self.save(record)
        self.note("draining", record, reason)

    # -- servers and leases ------------------------------------------------------------------------------------------

    def place(self, change: Change) -> None:
        self.remember("placement", change.placement)
        if change.lost:
            text = f"{len(change.lost)} of {len(change.placement.ranges)} ranges: no server that lives has them"
            self.note("lost ranges", None, text)

    def keep_aim(self) -> None:
        if self.manager.aim is not self._aim:
            for server in sorted(idle_in(self.manager.aim) - idle_in(self._aim)):
                self.note("warning", None, say_idle(server, self.manager.aim))
            self._aim = self.manager.aim
            self.remember("aim", self._aim)
        for text in self.manager.take_news():
            self.note("hot server", None, text)

    def keep_leases(self) -> None:
        if (reached := self.dispatcher.to_remember()) is not None:
            self.dispatcher.remembered = reached
            self.remember("leases", reached)

    def forget_leases(self) -> None:
        self.dispatcher.forget()
        self.actions.append(Remember("leases", None))

    # -- actions -----------------------------------------------------------------------------------------------------

    def remember(self, key: str, value: object) -> None:
        self.actions.append(Remember(key, msgspec.msgpack.encode(value)))

    def note(self, kind: str, record: MemberRecord | None, text: str) -> None:
        self.actions.append(Note(kind, record.member if record else "", text))
