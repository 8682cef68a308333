"""Servers of the simulation: a keeper with a store that keeps lists, and links to the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.control.messages import Serving
from paceline.placement.placement import Placement
from paceline.server.keeper import Keeper, Outcome
from paceline.server.messages import Acknowledged, Apply, Commit, Forward, Request, Stage
from paceline.testing.simulation.truth import Violation

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld

BEAT_S = 0.1

Entry = tuple[Any, ...]


class ListStore:
    """The state of a range is what was applied to it, in order; first of all, when it began."""

    def __init__(self) -> None:
        self.logs: dict[int, list[Entry]] = {}
        self.staged: dict[int, dict[tuple[int, int, int], Any]] = {}

    def _there(self, number: int) -> list[Entry]:
        if number not in self.logs:
            raise Violation(f"range {number} is used where it is not")
        return self.logs[number]

    def load(self, ranges: Sequence[int], parcel: Any) -> None:
        for number in ranges:
            self.logs[number] = list(parcel)
            self.staged[number] = {}

    def stage(self, ranges: Sequence[int], push: Stage, parcel: Any) -> None:
        for number in ranges:
            self.staged[number][(push.generation, push.step, push.rank)] = parcel

    def unstage(self, number: int, generation: int, step: int) -> None:
        for key in [key for key in self.staged[number] if key[:2] == (generation, step)]:
            del self.staged[number][key]

    def commit(self, ranges: Sequence[int], commit: Commit) -> None:
        for number in ranges:
            key = (commit.generation, commit.step)
            given = {rank: value for (*where, rank), value in self.staged[number].items() if tuple(where) == key}
            self._there(number).append(("step", commit.step, tuple(sorted(given.items()))))
            self.unstage(number, *key)

    def apply(self, ranges: Sequence[int], push: Apply, parcel: Any) -> None:
        for number in ranges:
            self._there(number).append(("lease", push.epoch, push.lease))

    def pull(self, ranges: Sequence[int], parcel: Any) -> dict[int, tuple[Entry, ...]]:
        return {number: tuple(self._there(number)) for number in ranges}

    def snapshot(self, number: int) -> Any:
        return list(self.logs.get(number, ())), dict(self.staged.get(number, {}))

    def restore(self, number: int, parcel: Any) -> None:
        self.logs[number], self.staged[number] = list(parcel[0]), dict(parcel[1])

    def forget(self, number: int) -> None:
        self.logs.pop(number, None)
        self.staged.pop(number, None)


class Server:
    """A process: it may die, stop for a while, and be cut off from the coordinator.

    `receive` is its only ear: what comes while it is stopped is heard when it goes on.
    """

    def __init__(self, world: ServingWorld, name: str) -> None:
        self.name = name
        self.store = ListStore()
        self.keeper: Keeper = world.mutation.keeper(name, self.store)
        self.alive = True
        self.is_leaving = False
        self.is_cut_off = False  # from the coordinator
        self.is_given_up = False  # it is taken for dead, or soon will be
        self.is_stopped = False
        self.callers: dict[Callable[[], None], None] = {}  # whom to tell when the connection breaks
        self._world = world
        self._inbox: list[Callable[[], None]] = []
        self._waiting: list[tuple[Outcome, Callable[[Outcome], None]]] = []
        self._held: list[tuple[str, Forward, Any]] = []
        self._window = 0
        self._sent: dict[tuple[str, int], int] = {}  # the last forward to each other, on the connection of that number
        world.after(world.random.random() * BEAT_S, self._beat)

    def receive(self, action: Callable[[], None]) -> None:
        if self.alive and self.is_stopped:
            self._inbox.append(action)
        elif self.alive:
            action()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            self.receive(action)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self._world.checks.died()
            self._world.lose_some_of(self.name)
            for tell in self.callers:
                self._world.after(self._world.delay(), tell)

    def _beat(self) -> None:
        if not self.alive:
            return
        if not self.is_stopped and not self.is_cut_off:
            heard = self.keeper.heard()
            self._window += 1
            costs = self._world.loads.costs_on(self.name, self.keeper.placement)
            synced, handed = tuple(sorted(heard.synced)), tuple(sorted(heard.handed))
            serving = Serving(heard.version, synced, handed, window=self._window, costs=costs)
            report = functools.partial(self._world.chief.hear_server, self.name, serving, self.is_leaving)
            self._world.to_chief(self.name, report)
        self._world.after(BEAT_S, self._beat)

    def adopt(self, placement: Placement) -> None:
        self.keeper.adopt(placement)
        held, self._held = self._held, []
        for sender, forward, parcel in held:
            self.take(sender, forward, parcel)
        self._look()

    def serve(self, request: Request, parcel: Any, reply: Callable[[Outcome], None]) -> None:
        self._waiting.append((self.keeper.serve(request, parcel), reply))
        self._look()

    def take(self, sender: str, forward: Forward, parcel: Any) -> None:
        is_blocked = any(other == sender for other, _, _ in self._held)
        if forward.version > self.keeper.placement.version or is_blocked:
            self._held.append((sender, forward, parcel))
            return
        message = self.keeper.take(sender, forward, parcel)
        peer = self._world.servers[sender]
        self._world.send_in_order(self.name, sender, "back", functools.partial(peer.acknowledged, self.name, message))
        if message.refused:
            self._world.faults.refused(self.name, sender)

    def acknowledged(self, server: str, message: Acknowledged) -> None:
        self.keeper.acknowledged(server, message)
        self._look()

    def connected(self) -> None:
        """The connection to another is there again."""
        self._look()

    def _look(self) -> None:
        """Send what is new in the links, and give the answers that are free to go. On a new connection all that was not
        acknowledged is sent again, before anything else: forwards never overtake each other."""
        for server, link in self.keeper.links.items():
            if not link.queue or self._world.is_broken(self.name, server):
                continue
            key = (server, self._world.connection_of(self.name, server))
            peer = self._world.servers[server]
            for forward, parcel in link.queue:
                if forward.number > self._sent.get(key, 0):
                    self._sent[key] = forward.number
                    take = functools.partial(peer.take, self.name, forward, parcel)
                    self._world.send_in_order(self.name, server, "forth", take)
        waiting, self._waiting = self._waiting, []
        for outcome, reply in waiting:
            if self.keeper.is_released(outcome.waits):
                reply(outcome._replace(answer=self.keeper.finish(outcome)))
            else:
                self._waiting.append((outcome, reply))
