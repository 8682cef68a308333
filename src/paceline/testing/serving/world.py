"""Time, messages, the coordinator's part, and the faults, all from one seed; and what must hold."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from paceline.control.leases import Desk, LeaseReport
from paceline.control.messages import Introduction, Phase, Report, Serving
from paceline.control.roster import Record
from paceline.control.serving import ServerManager
from paceline.placement.placement import Placement
from paceline.server.errand import Errand
from paceline.server.keeper import Outcome
from paceline.server.messages import Forward, Request
from paceline.testing.serving.mutations import SOUND, Mutation
from paceline.testing.serving.parts import Entry, Server
from paceline.testing.serving.workers import Crew, LeaseWorker, Trip, load_of
from paceline.testing.simulation.truth import Violation
from paceline.wire.card import Card

QUIET_S = 60.0  # after the faults end, the run must end within this time


class Chief:
    """The coordinator's part: places ranges, hands out leases. What it remembers outlives its crash."""

    def __init__(self, world: ServingWorld, placement: Placement = Placement(), remembered: Any = (-1, 0)) -> None:
        self.world = world
        self.alive = True
        self.manager: ServerManager = world.mutation.manager(world.num_replicas, placement)
        self.desk: Desk = world.mutation.desk(remembered)
        self.records = {name: _record_of(name) for name in world.known_servers}
        self.term = world.terms = world.terms + 1
        self.epoch = max(remembered[0], 0)

    def hear_server(self, name: str, serving: Serving, leaving: bool) -> None:
        record = self.records.get(name)
        if record is None:
            server = self.world.servers[name]
            if not server.alive:
                return
            record = self.records[name] = _record_of(name)
            self.world.known_servers.add(name)
        record.report = Report(name, record.number + 1, 1, Phase.READY, serving=serving, leaving=leaving)
        self.decide()

    def hear_worker(self, report: LeaseReport) -> None:
        if report.member in self.world.buried:
            return
        self.epoch = max(self.epoch, report.epoch)
        self.desk.take(report)
        self._grant((report.member,))

    def _grant(self, asked: Sequence[str] = ()) -> None:
        for grant in self.desk.grants(self.term, asked):
            worker = self.world.workers.get(grant.member)
            if worker is not None:
                self.world.after(self.world.delay(), lambda worker=worker, grant=grant: worker.hear(grant))
        now = self.desk.to_remember()
        if now is not None and self.world.random.random() < 0.3:
            self.desk.remembered = self.world.remembered_leases = now

    def gone(self, name: str) -> None:
        self.records.pop(name, None)
        self.world.known_servers.discard(name)
        self.world.buried.add(name)
        self.desk.bury(name)
        self.decide()
        self._grant()

    def decide(self) -> None:
        servers = [record for name, record in self.records.items()]
        weights = [1] * self.world.num_ranges
        change = None
        if self.manager.placement.ranges:
            change = self.manager.update(servers, weights)
        elif len(servers) >= self.world.first_servers:
            change = self.manager.found(1, servers, weights)
        if change is not None:
            self.world.publish(change.placement)
        for record in servers:
            if record.is_going and not self.manager.holds(record.member):
                self.world.release(record.member)


def _record_of(name: str) -> Record:
    card = Card(name, "server", name, ("", 0), name, b"", False, ())
    return Record(Introduction(card, 1, name, ""), 0.0)


class ServingWorld:
    def __init__(self, seed: int, mutation: Mutation = SOUND) -> None:
        self.seed = seed
        self.mutation = mutation
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        draw = self.random
        self.mode = draw.choice(["steps", "leases", "bounded"])
        self.bound = draw.randint(0, 4) if self.mode == "bounded" else -1
        self.num_ranges = draw.randint(1, 6)
        self.num_replicas = draw.choice([1, 2, 2, 2, 3])
        self.first_servers = max(self.num_replicas, draw.randint(1, 4))
        self.num_leases = draw.randint(5, 25)
        self.num_epochs = 2
        self.num_steps = draw.randint(5, 20)
        self.terms = 0
        self.known_servers: set[str] = set()
        self.buried: set[str] = set()
        self.remembered_leases: Any = (-1, 0)
        self.placement = Placement()
        self.acknowledged: set[tuple[int, int]] = set()
        self.has_lost = False
        self.servers: dict[str, Server] = {}
        self.workers: dict[str, LeaseWorker] = {}
        self._channels: dict[tuple[str, str], float] = {}
        self.chief = Chief(self)
        for _ in range(self.first_servers):
            self.add_server()
        self.crew = Crew(self) if self.mode == "steps" else None
        for _ in range(draw.randint(1, 4)):
            self.add_worker()
        self._faults = draw.randint(0, 6)
        self.after(0.3, self._fault)

    # -- time and messages -------------------------------------------------------------------------------------------

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._ids), action))

    def delay(self) -> float:
        return self.random.choice([0.001, 0.005, 0.005, 0.05]) * self.random.random()

    def to_chief(self, say: Callable[[], None]) -> None:
        self.after(self.delay(), lambda: say() if self.chief.alive else None)

    def request(
        self,
        name: str,
        request: Request,
        parcel: Any,
        take: Callable[[str, Outcome], None],
        lose: Callable[[str], None],
    ) -> None:
        server = self.servers[name]
        is_open = True  # until the answer is there, or the connection broke

        def reply(outcome: Outcome) -> None:
            self.after(self.delay(), lambda: answer(outcome))

        def answer(outcome: Outcome) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                take(name, outcome)

        def arrive() -> None:
            if server.alive:
                server.serve(request, parcel, reply)

        def look() -> None:
            nonlocal is_open
            if is_open and not server.alive:
                is_open = False
                lose(name)
            elif is_open:
                self.after(0.05, look)

        self.after(self.delay(), arrive)
        self.after(0.05, look)

    def send_in_order(self, sender: str, receiver: str, forward: Forward, parcel: Any) -> None:
        self._in_order((sender, receiver), lambda: self.servers[receiver].take(sender, forward, parcel))

    def send_back_in_order(self, sender: str, receiver: str, message: Any) -> None:
        self._in_order((sender, f"{receiver} back"), lambda: self.servers[receiver].acknowledged(sender, message))

    def _in_order(self, channel: tuple[str, str], action: Callable[[], None]) -> None:
        when = max(self.now + self.delay(), self._channels.get(channel, 0.0) + 1e-6)
        self._channels[channel] = when
        self.after(when - self.now, action)

    # -- what the coordinator does -----------------------------------------------------------------------------------

    def publish(self, placement: Placement) -> None:
        """Told to all, who hear of it at different times; workers look at the newest."""
        lost = [one.origin for one in placement.ranges if one.origin == placement.version]
        self.has_lost = self.has_lost or (bool(lost) and placement.version > 1)
        self.remembered_placement = placement
        for server in self.servers.values():
            self.after(self.delay(), lambda server=server: server.adopt(placement))
        self.after(self.delay(), lambda: self._adopt(placement))

    remembered_placement = Placement()

    def _adopt(self, placement: Placement) -> None:
        if placement.version > self.placement.version:
            self.placement = placement
            if placement.version == 1:
                self.load(range(self.num_ranges))

    def release(self, name: str) -> None:
        server = self.servers[name]
        if server.alive:
            server.alive = False
            self.chief.gone(name)

    def load(self, ranges: Sequence[int]) -> None:
        """A worker loads ranges that nobody has."""
        for origin in {self.placement.ranges[number].origin for number in ranges}:
            numbers = [number for number in ranges if self.placement.ranges[number].origin == origin]
            errand = Errand(numbers, push=load_of(self, origin))
            log = [("lost",)] if origin > 1 else []
            Trip(self, errand, log, lambda _: None, lambda origin=origin: not self._is_empty_since(numbers, origin))

    def _is_empty_since(self, numbers: Sequence[int], origin: int) -> bool:
        return any(self.placement.ranges[number].origin == origin for number in numbers)

    # -- who is there ------------------------------------------------------------------------------------------------

    def add_server(self) -> None:
        name = f"s{len(self.servers)}"
        self.servers[name] = Server(self, name)
        if self.remembered_placement.version:
            self.after(self.delay(), lambda: self.servers[name].adopt(self.remembered_placement))

    def add_worker(self) -> None:
        if self.crew is not None:
            self.crew.join(f"w{next(self._ids)}")
        else:
            name = f"w{len(self.workers)}"
            self.workers[name] = LeaseWorker(self, name)

    def living_servers(self) -> list[Server]:
        return [server for server in self.servers.values() if server.alive]

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if self._faults <= 0:
            return
        self._faults -= 1
        kind = self.random.choice(
            ["kill server", "kill server", "add server", "leave", "worker", "chief", "add worker"]
        )
        if kind == "kill server":
            self._kill_server()
        elif kind == "add server":
            self.add_server()
        elif kind == "leave" and len(self.living_servers()) > max(1, self.num_replicas):
            self.random.choice(self.living_servers()).leaving = True
        elif kind == "worker":
            self._kill_worker()
        elif kind == "add worker":
            self.add_worker()
        elif kind == "chief" and self.chief.alive:
            self.chief.alive = False
            self.after(0.3, self._restart_chief)
        self.after(self.random.random() * 0.6, self._fault)

    def _restart_chief(self) -> None:
        self.chief = Chief(self, self.remembered_placement, self.remembered_leases)
        if self.remembered_placement.version:
            self.publish(self.remembered_placement)

    def _kill_server(self) -> None:
        """With replicas, only where another has everything: two at once may lose something, and that is no fault."""
        living = self.living_servers()
        ranges = self.remembered_placement.ranges
        is_whole = all(
            sum(self.servers[one.server].alive for one in (replicas.primary, *replicas.backups)) > 1
            for replicas in ranges
        )
        may_lose = self.num_replicas == 1 and self.random.random() < 0.5
        if not living or not (may_lose or (is_whole and ranges)):
            return
        victim = self.random.choice(living)
        victim.alive = False
        self.after(self.random.random() * 0.1, lambda: self._find_dead(victim.name))
        self.after(self.random.random() * 0.5, self.add_server)

    def _find_dead(self, name: str) -> None:
        if self.chief.alive:
            self.chief.gone(name)
        else:
            self.after(0.1, lambda: self._find_dead(name))

    def _kill_worker(self) -> None:
        if self.crew is not None:
            if len(self.crew.alive) > 1:
                self.crew.kill(self.random.choice(self.crew.alive))
            return
        living = [worker for worker in self.workers.values() if worker.alive]
        if len(living) > 1:
            victim = self.random.choice(living)
            victim.die()
            self._find_dead_worker(victim)

    def _find_dead_worker(self, worker: LeaseWorker) -> None:
        if self.chief.alive:
            self.chief.gone(worker.name)
        else:
            self.after(0.1, lambda: self._find_dead_worker(worker))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def settled_step(self) -> int:
        return max((one.applied for one in self.crew.alive), default=0) if self.crew is not None else 0

    def check_seen(self, epoch: int, lease: int, seen: dict[int, tuple[Entry, ...]]) -> None:
        if self.bound < 0 or self.has_lost:
            return
        for number, log in seen.items():
            for earlier in range(max(0, lease - self.bound)):
                if ("lease", epoch, earlier) not in log:
                    self._violated(f"lease {lease} started without {earlier} in range {number}, bound {self.bound}")

    def check_stepped(self, step: int, seen: dict[int, tuple[Entry, ...]]) -> None:
        for number, log in seen.items():
            steps = [entry[2] for entry in log if entry[0] == "step"]
            if not self.has_lost and steps[:step] != list(range(1, step + 1)):
                self._violated(f"a worker at step {step} saw steps {steps} in range {number}")

    def run(self) -> None:
        while not self._is_through():
            if not self._events or self.now > QUIET_S + 10:
                self._violated("the run stands still")
            self.now, _, action = heapq.heappop(self._events)
            action()
        ends_at = self.now + 5.0  # what moves comes to rest
        while self._events and self.now < ends_at:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self._check_end()

    def _is_through(self) -> bool:
        if self._faults > 0:
            return False
        if self.crew is not None:
            return self.crew.is_through and not self.crew.waiting
        living = [worker for worker in self.workers.values() if worker.alive]
        return all(worker.is_through for worker in living)

    def _check_end(self) -> None:
        placement = self.remembered_placement
        logs: list[list[Entry]] = []
        for number, replicas in enumerate(placement.ranges):
            if replicas.joining or replicas.handing:
                self._violated(f"range {number} never came to rest: {replicas}")
            if len(replicas.backups) < min(self.num_replicas, len(self.living_servers())) - 1:
                self._violated(f"range {number} has too few backups: {replicas}")
            found = self.servers[replicas.primary.server].store.logs.get(number)
            if found is None and self.has_lost:
                continue  # lost at the end, when nobody asks for it any more
            log = found or []
            for backup in replicas.backups:
                if self.servers[backup.server].store.logs.get(number) != log:
                    self._violated(f"the backup {backup.server} of range {number} has another state than its primary")
            logs.append(log)
            self._check_counts(number, log)
        if self.crew is not None and not self.has_lost and len({tuple(log) for log in logs}) != 1:
            self._violated("ranges were updated by different attempts at the same step")

    def _check_counts(self, number: int, log: list[Entry]) -> None:
        twice = [entry for entry, count in Counter(entry[:3] for entry in log).items() if count > 1]
        if twice:
            self._violated(f"range {number} counted {twice} twice")
        if self.has_lost:
            return
        if self.crew is not None:
            wanted = list(range(1, self.num_steps + 1))
            if [entry[2] for entry in log] != wanted:
                self._violated(f"range {number} has steps {[entry[2] for entry in log]}")
            return
        wanted_leases = {
            ("lease", epoch, lease) for epoch in range(self.num_epochs) for lease in range(self.num_leases)
        }
        if missing := sorted(wanted_leases - set(log)):
            self._violated(f"range {number} lacks {missing}")

    def _violated(self, what: str) -> None:
        violation = Violation(what)
        violation.add_note(f"replay: python -m paceline.testing.simulate --servers --seed {self.seed}")
        raise violation
