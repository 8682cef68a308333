"""Servers of the simulation: a keeper with a store that keeps lists, and links to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.control.messages import Serving
from paceline.placement.placement import Placement
from paceline.server.keeper import Keeper, Outcome
from paceline.server.messages import Apply, Commit, Forward, Request, Stage

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld

Entry = tuple[Any, ...]


class ListStore:
    """The state of a range is what was applied to it, in order."""

    def __init__(self) -> None:
        self.logs: dict[int, list[Entry]] = {}
        self.staged: dict[int, dict[tuple[int, int, int], str]] = {}

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
            self.logs[number].append(("step", *key, tuple(sorted(given.items()))))
            self.unstage(number, *key)

    def apply(self, ranges: Sequence[int], push: Apply, parcel: Any) -> None:
        for number in ranges:
            self.logs[number].append(("lease", push.epoch, push.lease))

    def pull(self, ranges: Sequence[int], parcel: Any) -> dict[int, tuple[Entry, ...]]:
        return {number: tuple(self.logs[number]) for number in ranges}

    def snapshot(self, number: int) -> Any:
        return list(self.logs.get(number, ())), dict(self.staged.get(number, {}))

    def restore(self, number: int, parcel: Any) -> None:
        self.logs[number], self.staged[number] = list(parcel[0]), dict(parcel[1])

    def forget(self, number: int) -> None:
        self.logs.pop(number, None)
        self.staged.pop(number, None)


class Server:
    def __init__(self, world: ServingWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.store = ListStore()
        self.keeper: Keeper = world.mutation.keeper(name, self.store)
        self.alive = True
        self.leaving = False
        self._waiting: list[tuple[Outcome, Callable[[Outcome], None]]] = []
        self._held: list[tuple[str, Forward, Any]] = []
        self._sent: dict[str, int] = {}
        world.after(world.random.random() * 0.1, self._beat)

    def _beat(self) -> None:
        if not self.alive:
            return
        heard = self.keeper.heard()
        serving = Serving(heard.version, tuple(sorted(heard.synced)), tuple(sorted(heard.handed)))
        self.world.to_chief(lambda: self.world.chief.hear_server(self.name, serving, self.leaving))
        self.world.after(0.1, self._beat)

    def adopt(self, placement: Placement) -> None:
        if self.alive:
            self.keeper.adopt(placement)
            held, self._held = self._held, []
            for sender, forward, parcel in held:
                self.take(sender, forward, parcel)
            self._look()

    def serve(self, request: Request, parcel: Any, reply: Callable[[Outcome], None]) -> None:
        if self.alive:
            self._waiting.append((self.keeper.serve(request, parcel), reply))
            self._look()

    def _look(self) -> None:
        """Send what is new in the links, and give the answers that are free to go."""
        for server, link in self.keeper.links.items():
            for forward, parcel in link.queue:
                if forward.number > self._sent.get(server, 0):
                    self._sent[server] = forward.number
                    self.world.send_in_order(self.name, server, forward, parcel)
        free = [one for one in self._waiting if self.keeper.is_released(one[0].waits)]
        self._waiting = [one for one in self._waiting if one not in free]
        for outcome, reply in free:
            reply(outcome._replace(answer=self.keeper.finish(outcome)))

    def take(self, sender: str, forward: Forward, parcel: Any) -> None:
        if not self.alive:
            return
        is_blocked = any(other == sender for other, _, _ in self._held)
        if forward.version > self.keeper.placement.version or is_blocked:
            self._held.append((sender, forward, parcel))
            return
        message = self.keeper.take(sender, forward, parcel)
        self.world.send_back_in_order(self.name, sender, message)

    def acknowledged(self, server: str, message: Any) -> None:
        if self.alive:
            self.keeper.acknowledged(server, message)
            self._look()
