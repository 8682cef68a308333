"""Time, messages and who is there, all from one seed."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from paceline.placement.placement import Placement
from paceline.server.keeper import Outcome
from paceline.server.messages import Request
from paceline.testing.serving.checks import Checks
from paceline.testing.serving.chief import Chief, Memory
from paceline.testing.serving.faults import Faults
from paceline.testing.serving.loads import Loads
from paceline.testing.serving.mutations import SOUND, Mutation
from paceline.testing.serving.parts import Server
from paceline.testing.serving.workers import Crew, LeaseWorker, View
from paceline.testing.simulation.truth import Violation

LONGEST_S = 40.0  # the run must end within this time
REST_S = 10.0  # and what moves must come to rest within this time
LOOK_S = 0.2
DELAYS_S = (0.001, 0.005, 0.005, 0.05)


class Caller(Protocol):
    alive: bool


class ServingWorld:
    def __init__(self, seed: int, mutation: Mutation = SOUND) -> None:
        self.seed = seed
        self.mutation = mutation
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        draw = self.random
        self.mode = draw.choice(["steps", "leases", "bounded"] if not mutation.mode else [mutation.mode])
        self.bound = draw.randint(0, 4) if self.mode == "bounded" else -1
        self.num_ranges = draw.randint(1, 6)
        self.num_replicas = mutation.num_replicas or draw.choice([1, 2, 2, 2, 3])
        self.first_servers = max(self.num_replicas, draw.randint(1, 4))
        self.num_leases = draw.randint(4, 12)
        self.num_epochs = 2
        self.num_steps = draw.randint(4, 12)
        self._noise = draw.choice([0.0, 0.01, 0.04])  # of requests that come twice, and of answers that do not come
        self.memory = Memory()
        self.newest = Placement()  # that was published
        self.views: list[View] = []
        self.servers: dict[str, Server] = {}
        self.workers: dict[str, LeaseWorker] = {}
        self._channels: dict[tuple[str, str, str], float] = {}
        self._breaks: Counter[frozenset[str]] = Counter()
        self._broken: set[frozenset[str]] = set()
        self.loads = Loads(self)
        self.checks = Checks(self)
        self.chief = Chief(self, self.memory)
        for _ in range(self.first_servers):
            self.add_server()
        self.crew = Crew(self) if self.mode == "steps" else None
        for _ in range(draw.randint(1, 4)):
            self.add_worker()
        self.faults = Faults(self)

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._run_until(self._is_through, LONGEST_S, "the run stands still")
            self._run_until(self.checks.is_at_rest, REST_S, "the ranges never come to rest")
            self.checks.check_end()
        except Violation as violation:
            violation.add_note(f"replay: python -m paceline.testing.simulate --part servers --seed {self.seed}")
            raise

    def _run_until(self, is_there: Callable[[], bool], patience_s: float, otherwise: str) -> None:
        ends = self.now + patience_s
        looks = self.now
        while self.now < looks or not is_there():
            looks = max(looks, self.now + LOOK_S)
            while self._events and self._events[0][0] < looks:
                self.now, _, action = heapq.heappop(self._events)
                action()
            self.now = looks
            self.checks.check(self.now < ends, otherwise)

    def _is_through(self) -> bool:
        if not self.faults.are_over:
            return False
        if self.crew is not None:
            return self.crew.is_through
        return all(worker.is_through for worker in self.workers.values() if worker.alive)

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._ids), action))

    def delay(self) -> float:
        random = self.random.random
        return DELAYS_S[int(random() * len(DELAYS_S))] * random()

    # -- messages ----------------------------------------------------------------------------------------------------

    def to_chief(self, sender: str, say: Callable[[], None]) -> None:
        chief = self.chief
        self.after(self._order((sender, "chief", "")), lambda: say() if chief.alive else None)

    def _order(self, channel: tuple[str, str, str]) -> float:
        """A delay after which what was sent there before has arrived."""
        when = max(self.now + self.delay(), self._channels.get(channel, 0.0) + 1e-6)
        self._channels[channel] = when
        return when - self.now

    def request(
        self,
        caller: Caller,
        name: str,
        request: Request,
        parcel: Any,
        take: Callable[[str, Outcome], None],
        lose: Callable[[str], None],
    ) -> None:
        """Either `take` or `lose` is called, once. What a dead worker sent may arrive, later than others, or not."""
        server = self.servers[name]
        is_sent_whole = self.random.random() < 0.5

        def lost() -> None:
            if server.callers.pop(lost, 0) is None:
                lose(name)

        def answer(outcome: Outcome) -> None:
            if server.callers.pop(lost, 0) is None:
                take(name, outcome)

        def reply(outcome: Outcome) -> None:
            self.after(self.delay(), lambda: answer(outcome))

        def serve(then: Callable[[Outcome], None]) -> None:
            server.receive(lambda: server.serve(request, parcel, then))

        def arrive() -> None:
            if caller.alive:
                serve(reply)
            elif is_sent_whole:
                self.after(self.random.random() * 0.2, lambda: serve(_ignore))

        server.callers[lost] = None
        self.after(self.delay(), arrive if server.alive else lost)
        if self.random.random() < self._noise:  # a connection breaks, or bytes were on their way for long
            self.after(self.delay(), lost)
        if self.random.random() < self._noise:
            self.after(self.random.random(), lambda: serve(_ignore))

    def send_in_order(self, sender: str, receiver: str, way: str, action: Callable[[], None]) -> None:
        """Between two servers; what is on its way when their connection breaks is lost."""
        pair, server = frozenset((sender, receiver)), self.servers[receiver]
        count = self._breaks[pair]
        delay = self._order((sender, receiver, way))
        self.after(delay, lambda: server.receive(action) if self._breaks[pair] == count else None)

    def is_broken(self, one: str, other: str) -> bool:
        return bool(self._broken) and frozenset((one, other)) in self._broken

    def connection_of(self, one: str, other: str) -> int:
        """Its number: another one whenever it broke."""
        return self._breaks[frozenset((one, other))]

    def break_connection(self, one: Server, other: Server, seconds: float) -> None:
        pair = frozenset((one.name, other.name))
        if pair in self._broken:
            return
        self._breaks[pair] += 1
        self._broken.add(pair)
        self.after(seconds, lambda: self._connect(one, other))

    def _connect(self, one: Server, other: Server) -> None:
        self._broken.discard(frozenset((one.name, other.name)))
        one.receive(one.connected)
        other.receive(other.connected)

    def lose_some_of(self, name: str) -> None:
        """A server died: what it was sending to some of the others does not arrive."""
        for other in self.servers:
            if self.random.random() < 0.5:
                self._breaks[frozenset((name, other))] += 1

    # -- what the coordinator says -----------------------------------------------------------------------------------

    def publish(self, placement: Placement) -> None:
        """Told to all, who hear of it at different times."""
        self.newest = placement
        self.checks.published(placement)
        for server in self.servers.values():
            self.tell(server, placement)
        for view in self.views:
            self.after(self.delay() + view.lag_s * self.random.random(), functools.partial(view.adopt, placement))
        self.faults.published(placement)

    def tell(self, server: Server, placement: Placement) -> None:
        if placement.version and not server.is_cut_off:
            adopt = functools.partial(server.adopt, placement)
            self.after(self.delay(), lambda: None if server.is_cut_off else server.receive(adopt))

    def restart_chief(self) -> None:
        self.chief = Chief(self, self.memory)
        if self.memory.placement.version:
            self.publish(self.memory.placement)

    # -- who is there ------------------------------------------------------------------------------------------------

    def add_server(self) -> None:
        name = f"s{len(self.servers)}"
        server = self.servers[name] = Server(self, name)
        self.tell(server, self.memory.placement)

    def add_worker(self) -> None:
        if self.crew is not None:
            self.crew.join(f"w{next(self._ids)}")
        else:
            name = f"w{len(self.workers)}"
            self.workers[name] = LeaseWorker(self, name)

    def members(self) -> list[Server]:
        """The servers that live and are not taken for dead."""
        return [server for server in self.servers.values() if self.is_member(server.name)]

    def is_member(self, name: str) -> bool:
        return self.servers[name].alive and not self.servers[name].is_given_up


def _ignore(outcome: Outcome) -> None:
    """Nobody waits for it."""
