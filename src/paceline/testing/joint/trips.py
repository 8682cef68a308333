"""A worker's requests to the servers: real errands, with their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from paceline.server.errand import Errand
from paceline.server.keeper import PendingAnswer
from paceline.server.messages import Refusal

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World

RETRY_S = 0.05
OTHERS_S = 0.3  # for the main worker to load what was lost

Logs = dict[int, Any]


def never() -> bool:
    return False


class Trip:
    """An errand on its way: asks until it is done, or `is_over`. It has loaded what is empty, if that is its worker's
    to do. `parcel` is what comes along."""

    def __init__(
        self,
        world: World,
        worker: SimulatedWorker,
        errand: Errand,
        parcel: Any,
        then: Callable[[Logs], None],
        is_over: Callable[[], bool] = never,
        *,
        is_lease: bool = False,
    ) -> None:
        self._world = world
        self._worker = worker
        self.errand = errand
        self._parcel = parcel
        self._then = then
        self._is_over = is_over
        self._is_lease = is_lease
        self._pulled: Logs = {}
        self._ended = False
        self._timed = False
        worker.receive(self._ask)

    def _has_ended(self) -> bool:
        is_gone = not self._worker.alive or self._worker.is_orphaned
        self._ended = self._ended or is_gone or self._is_over()
        return self._ended

    def _ask_again(self) -> None:
        self._timed = False
        self._worker.receive(self._ask)

    def _ask(self) -> None:
        if self._has_ended():
            return
        worker = self._worker
        if worker.placement.founding >= worker.lineage:  # else the servers were not told yet that it was founded anew
            for server, request in self.errand.requests(worker.placement).items():
                self._world.request(worker, server, request, self._parcel, self._take, self._lose)
        if not self._timed:
            self._timed = True
            self._world.after(RETRY_S, self._ask_again)

    def _take(self, server: str, outcome: PendingAnswer) -> None:
        if self._has_ended():
            return
        answer = outcome.answer
        for number, log in (outcome.parcel or {}).items():
            if number not in answer.pulled and number not in answer.pushed:
                self._pulled[number] = log
        self.errand.answered(server, answer)
        if Refusal.STALE in answer.pushed.values():
            self._ended = True
        elif self.errand.is_done:
            self._ended = True
            self._then(self._pulled)
            return
        if self._is_lease and not answer.pushed:
            self._world.faults.taken(server)
        empty = [number for number, refusal in answer.pushed.items() if refusal is Refusal.EMPTY]
        empty += [number for number, refusal in answer.pulled.items() if refusal is Refusal.EMPTY]
        if empty:
            self._worker.load_empty(dict.fromkeys(empty))

    def _lose(self, server: str) -> None:
        self.errand.lost(server)


class Loading:
    """Who loads which ranges that are empty: the main worker; what was lost, in the end anybody."""

    def __init__(self, world: World, worker: SimulatedWorker) -> None:
        self._world = world
        self._worker = worker
        self._since: dict[int, float] = {}  # when something was first found lost, by the version of that
        self._under_way: set[tuple[int, int]] = set()

    def load(self, empty: Iterable[int]) -> None:
        world, worker = self._world, self._worker
        placement = worker.placement
        for number in empty:
            if number >= len(placement.ranges):
                continue
            origin = placement.ranges[number].origin
            is_lost = origin > placement.began
            since = self._since.setdefault(origin, world.now)
            if (number, origin) in self._under_way:
                continue
            if worker.is_main or (is_lost and world.now - since > OTHERS_S):
                self._under_way.add((number, origin))
                self._bring(number, origin, is_lost)

    def _bring(self, number: int, origin: int, is_lost: bool) -> None:
        world, worker = self._world, self._worker
        push, log = worker.load_of(number, origin, is_lost)

        def done(_: Logs) -> None:
            self._under_way.discard((number, origin))

        def is_over() -> bool:
            ranges = worker.placement.ranges
            is_another = number >= len(ranges) or ranges[number].origin != origin
            if is_another:
                self._under_way.discard((number, origin))
            return is_another

        Trip(world, worker, world.mutation.errand([number], push=push), log, done, is_over)
