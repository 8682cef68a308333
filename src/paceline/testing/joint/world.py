"""Time, messages, hosts and who is there, all from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from paceline.control.machines.coordinator_events import Note, RunOver, RunSettings
from paceline.control.messages.plan import Phase, Plan
from paceline.placement.placement import Placement
from paceline.server.keeper import PendingAnswer
from paceline.server.messages import ServerRequest
from paceline.testing.joint.checks import Checks
from paceline.testing.joint.faults import Faults
from paceline.testing.joint.groups import SimulatedGroup
from paceline.testing.joint.halting import SimulatedHalting
from paceline.testing.joint.head import Head
from paceline.testing.joint.lines import SimulatedConnection
from paceline.testing.joint.loads import Loads
from paceline.testing.joint.mutation import SOUND, Mutation
from paceline.testing.joint.processes import SimulatedAgent, SimulatedProcess
from paceline.testing.joint.servers import SimulatedServer
from paceline.testing.joint.truth import Truth, Violation
from paceline.testing.joint.workers import SimulatedWorker

MOST_EVENTS = 100_000
QUIET_S = 120.0  # after the faults end, the run must end within this time; the slowest needs 95 for all of its steps
AGAIN_S = 0.1  # until TCP tries again over a cable that is cut
REST_S = 20.0  # and what moves between servers must come to rest within this time
MOST_EPOCHS = 12
MODES = ("allreduce", "sync", "async", "bounded")


class World:
    """`calm` leaves the faults out, and trains for longer: for schedules that a test writes itself."""

    def __init__(self, seed: int, mutation: Mutation = SOUND, *, calm: bool = False, mode: str = "") -> None:
        self.seed = seed
        self.mutation = mutation
        draw = self.random = random.Random(seed)
        self.now = 0.0
        drawn = draw.choice(mutation.modes)
        self.mode = mode or drawn
        self.is_served = self.mode != "allreduce"
        self.is_leased = self.mode in ("async", "bounded")
        self.bound = draw.randint(0, 4) if self.mode == "bounded" else -1
        self.batch = 4
        self.epochs = draw.randint(1, 2) + (40 if calm and self.is_leased else 0)
        self.length = 200 if calm else draw.randint(6, 30)
        self.num_ranges = draw.randint(1, 6) if self.is_served else 0
        self.num_replicas = (mutation.num_replicas or draw.choice([1, 2, 2, 2, 3])) if self.is_served else 1
        self.num_leases = draw.randint(4, 10)
        self._is_last: dict[int, bool] = {}  # whether the training ends with an epoch, as all workers decide it
        self.truth = Truth(self.length)
        self.processes: dict[str, SimulatedWorker | SimulatedServer] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.servers: dict[str, SimulatedServer] = {}
        self.is_finished = False
        self.halted = False
        self.may_fail = False
        self._over = False
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._pids = itertools.count(100)
        self._groups: dict[int, SimulatedGroup] = {}
        self._cuts: Counter[frozenset[str]] = Counter()
        self._parted: set[frozenset[str]] = set()
        self._channels: dict[tuple[str, str, str], float] = {}
        self._held_up: dict[tuple[str, str, str], list[tuple[int, Callable[..., None], tuple[Any, ...]]]] = {}
        self._breaks: Counter[frozenset[str]] = Counter()
        self._broken: set[frozenset[str]] = set()
        self.loss = 0.0 if calm else draw.choice([0.0, 0.0, 0.01, 0.05])
        self.is_lossy = self.loss > 0
        self._noise = draw.choice([0.0, 0.01, 0.04])  # of requests that come twice, and of answers that do not come
        self._slowness = draw.choice([0.002, 0.005, 0.01, 0.05] if not self.is_served else [0.001, 0.005, 0.005, 0.03])
        self.lags = (0.0, 0.0, 0.05, 0.3) if self.is_served and not calm else (0.0,)
        count = draw.randint(1, 5) if not self.is_served else draw.randint(1, 4)
        self.first_servers = max(self.num_replicas, draw.randint(1, 4)) if self.is_served else 0
        self.checks = Checks(self)
        self.loads = Loads(self)
        self.halting = SimulatedHalting(self)
        num_hosts = draw.choice([1, 2, 2, 3, 4])
        self.hosts = "abcd"[: mutation.num_hosts or num_hosts]
        self.head = Head(self, self._settings(count))
        self.agents = {host: SimulatedAgent(self, host) for host in self.hosts}
        self.lingers = self.is_served and draw.random() < 0.7
        for _ in range(self.first_servers):
            self.agent().start_server()
        for _ in range(count):
            self.agent().start()
        self.faults = Faults(self, calm=calm)

    def _settings(self, num_workers: int) -> RunSettings:
        return RunSettings(
            wanted=num_workers,
            grace_s=1.0,
            silence_s=1.0,
            stuck_s=3.0,
            all_silent_s=9.0,
            stall_s=0.25,
            listen_s=0.85,
            drop_stragglers=not self.is_leased,
            servers=self.first_servers,
            replicas=self.num_replicas,
        )

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        queue, pop = self._queue, heapq.heappop
        ends_at = self.faults.end_at + QUIET_S
        try:
            for _ in range(MOST_EVENTS):
                if self.is_finished:
                    return
                self.now, _, function, arguments = pop(queue)
                if self.now > ends_at:
                    raise Violation(f"the run does not end: {self.describe()}")
                function(*arguments)
            raise Violation(f"the run goes round in circles: {self.describe()}")
        except Violation as violation:
            which = "" if self.mutation is SOUND else f"  (with the fault: {self.mutation.name})"
            violation.add_note(f"replay: python -m paceline.testing.simulate --seed {self.seed}{which}")
            raise

    def at(self, when: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (when, next(self._sequence), function, arguments))

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._sequence), function, arguments))

    def delay(self) -> float:
        """Mostly short, sometimes not."""
        seconds = self.random.expovariate(1 / self._slowness)
        return seconds * 20 if self.random.random() < 0.03 else seconds

    # -- the network -------------------------------------------------------------------------------------------------

    def is_cut(self, one: str, other: str) -> bool:
        cuts = self._cuts
        if not cuts:
            return False
        return cuts[frozenset((one, other))] > 0 or cuts[frozenset((self.host_of(one), self.host_of(other)))] > 0

    def can_dial(self, one: str, other: str) -> bool:
        return self.processes[other].alive and not self.is_cut(one, other)

    def host_of(self, name: str) -> str:
        """As the end of a cable; the coordinator is on the first one."""
        if name == "coordinator":
            return "host a"
        if name.startswith("agent "):
            return f"host {name[6:]}"
        return f"host {self.processes[name].host}"

    def cut(self, seconds: float, *pairs: tuple[str, str]) -> None:
        """Names of members, or of hosts ("host b")."""
        for pair in pairs:
            key = frozenset(pair)
            self._cuts[key] += 1
            self.after(seconds, self._mend, key)

    def part(self, one: str, other: str) -> None:
        """For good."""
        self._parted.add(frozenset((one, other)))
        self._cuts[frozenset((one, other))] += 1

    def is_parted(self, host: str) -> bool:
        """From another one, for good."""
        return any(f"host {host}" in pair for pair in self._parted)

    def mend_all(self) -> None:
        self._cuts = Counter(self._parted)

    def _mend(self, key: frozenset[str]) -> None:
        if key in self._cuts:
            self._cuts[key] -= 1
            if self._cuts[key] <= 0:
                del self._cuts[key]
        if key in self._parted:
            self._cuts[key] = max(1, self._cuts[key])

    def _order(self, channel: tuple[str, str, str]) -> float:
        """When what is sent there now arrives: after whatever was sent before."""
        when = max(self.now + self.delay(), self._channels.get(channel, 0.0) + 1e-6)
        self._channels[channel] = when
        return when

    def request(
        self,
        caller: SimulatedWorker,
        name: str,
        request: ServerRequest,
        parcel: Any,
        take: Callable[[str, PendingAnswer], None],
        lose: Callable[[str], None],
    ) -> None:
        """Either `take` or `lose` is called, once. What a dead worker sent may arrive, later than others, or not."""
        server = self.servers[name]
        draw = self.random.random
        is_sent_whole = draw() < 0.5

        def lost() -> None:
            if server.callers.pop(lost, 0) is None:
                caller.receive(lose, name)

        def answer(outcome: PendingAnswer) -> None:
            if server.callers.pop(lost, 0) is None:
                caller.receive(take, name, outcome)

        def reply(outcome: PendingAnswer) -> None:
            if self.is_cut(caller.name, name):
                self.after(self.delay(), lost)
            else:
                self.after(self.delay(), answer, outcome)

        def serve(then: Callable[[PendingAnswer], None]) -> None:
            server.receive(server.serve, request, parcel, then)

        def arrive() -> None:
            if caller.alive:
                serve(reply)
            elif is_sent_whole:
                self.after(draw() * 0.2, serve, _ignore)

        server.callers[lost] = None
        is_there = server.alive and not self.is_cut(caller.name, name)
        self.after(self.delay(), arrive if is_there else lost)
        if self._noise:
            # A connection breaks, or bytes were on their way for long.
            if draw() < self._noise and self.halting.may_break(caller.name, name):
                self.after(self.delay(), lost)
            if draw() < self._noise:
                self.after(draw(), serve, _ignore)

    def send_in_order(self, sender: str, receiver: str, way: str, action: Callable[..., None], *arguments: Any) -> None:
        """Between two servers; what is on its way when their connection breaks is lost."""
        channel = (sender, receiver, way)
        count = self.connection_of(sender, receiver)
        self.at(self._order(channel), self._arrive, channel, count, action, arguments)

    def _arrive(
        self, channel: tuple[str, str, str], count: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """While a cable is cut TCP tries again; what was sent later waits for what was sent before."""
        sender, receiver, _ = channel
        if channel in self._held_up:
            self._held_up[channel].append((count, action, arguments))
        elif self._cuts and self.is_cut(sender, receiver):
            self._held_up[channel] = [(count, action, arguments)]
            self.after(AGAIN_S, self._arrive_again, channel)
        elif self.connection_of(sender, receiver) == count:
            action.__self__.receive(action, *arguments)  # type: ignore[attr-defined]

    def _arrive_again(self, channel: tuple[str, str, str]) -> None:
        if self._cuts and self.is_cut(channel[0], channel[1]):
            self.after(AGAIN_S, self._arrive_again, channel)
            return
        for count, action, arguments in self._held_up.pop(channel):
            self._arrive(channel, count, action, arguments)

    def is_broken(self, one: str, other: str) -> bool:
        return bool(self._broken) and frozenset((one, other)) in self._broken

    def connection_of(self, one: str, other: str) -> int:
        """Its number: another one whenever it broke."""
        return self._breaks[frozenset((one, other))]

    def break_connection(self, one: str, other: str, seconds: float) -> None:
        pair = frozenset((one, other))
        if pair not in self._broken:
            self._breaks[pair] += 1
            self._broken.add(pair)
            self.after(seconds, self._connect, one, other)

    def _connect(self, one: str, other: str) -> None:
        self._broken.discard(frozenset((one, other)))
        for name in (one, other):
            self.servers[name].receive(self.servers[name].reconnected)

    def lose_some_of(self, name: str) -> None:
        """A server died: what it was sending to some of the others does not arrive."""
        for other in self.servers:
            if self.random.random() < 0.5:
                self._breaks[frozenset((name, other))] += 1

    def lines(self) -> Iterator[SimulatedConnection]:
        yield from [agent.line for agent in self.agents.values()]
        yield from [process.line for process in self.processes.values()]

    # -- what the coordinator does -----------------------------------------------------------------------------------

    def noted(self, note: Note) -> None:
        if note.kind in ("evicted", "dead", "released"):
            self.checks.ended(note)
        elif note.kind == "plan":
            self.checks.planned(note)

    def placed(self, placement: Placement) -> None:
        self.checks.published(placement)
        self.faults.published(placement)

    def finished(self, over: RunOver) -> None:
        self._over = True
        self.checks.over(over)
        self.is_finished = not any(one.alive for one in self.processes.values())

    def is_last(self, epoch: int) -> bool:
        """Whether the training ends with this epoch: not before the faults are over, if it lingers."""
        if epoch not in self._is_last:
            is_filled = not self.lingers or self.faults.are_over
            self._is_last[epoch] = epoch + 1 >= self.epochs and (is_filled or epoch + 1 >= MOST_EPOCHS)
        return self._is_last[epoch]

    @property
    def num_epochs(self) -> int:
        """Those that the training came to."""
        return next((epoch + 1 for epoch, is_last in sorted(self._is_last.items()) if is_last), self.epochs)

    # -- who is there ------------------------------------------------------------------------------------------------

    def agent(self) -> SimulatedAgent:
        return self.random.choice(list(self.agents.values()))

    def make_worker(self, host: str) -> SimulatedWorker:
        pid = next(self._pids)
        worker = self.workers[f"w{pid}"] = SimulatedWorker(self, f"w{pid}", host, pid)
        self.processes[worker.name] = worker
        return worker

    def make_server(self, host: str) -> SimulatedServer:
        pid = next(self._pids)
        server = self.servers[f"s{pid}"] = SimulatedServer(self, f"s{pid}", host, pid)
        self.processes[server.name] = server
        return server

    def living(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def kill(self, process: SimulatedProcess, how: str) -> None:
        if not process.alive:
            return
        process.alive = False
        process.line.drop()
        if isinstance(process, SimulatedWorker):
            for group in list(self._groups.values()):
                group.leave(process.name, died=True)
        process.died()
        agent = self.agents[process.host]
        agent.child_died(process, how)
        if process.is_server:
            if not self._over and "released" not in how:
                self.after(0.5 * self.random.random(), agent.start_server)
        elif not self.living() or self.random.random() < 0.5:
            self.after(0.3, agent.start)
        if self._over and not any(one.alive for one in self.processes.values()):
            self.is_finished = True

    def group_of(self, plan: Plan) -> SimulatedGroup:
        if plan.generation not in self._groups:
            self._groups[plan.generation] = SimulatedGroup(self, plan)
        return self._groups[plan.generation]

    def drop_groups(self, worker: SimulatedWorker, below: int) -> None:
        for generation, group in list(self._groups.items()):
            if generation < below:
                group.leave(worker.name, died=False)

    def leaves_at_end(self, worker: SimulatedWorker) -> None:
        """Nobody exits before all have acknowledged the end."""
        plan = worker.machine.plan
        for member in plan.members if plan is not None else ():
            other = self.workers[member]
            if other.alive and self.head.counts(member):
                self.truth.check(
                    other.machine.phase is Phase.ENDED, f"{worker.name} left at the end, {member} is not there yet"
                )

    def describe(self) -> str:
        machine = self.head.machine
        lines = [f"mode {self.mode} coordinator {machine.standing if machine else None}"]
        for worker in self.living():
            member = worker.machine
            lines.append(
                f"{worker.name}: {member.phase.value} generation {member.generation} applied {member.applied} "
                f"fenced {member.fenced} next {member.next and member.next.generation} stopped {worker.is_stopped} "
                f"up {worker.line.is_up} placement {worker.placement.version} "
                f"{worker.leasing.holder.report() if worker.leasing else ''}"
            )
        lines += [
            f"{server.name}: placement {server.keeper.placement.version} up {server.line.is_up} {server.is_stopped=}"
            for server in self.servers.values()
            if server.alive
        ]
        if machine is not None and self.is_served:
            lines += [str(one) for one in machine.placement.ranges]
        return "\n".join(lines)


def _ignore(outcome: PendingAnswer) -> None:
    """Nobody waits for it."""
