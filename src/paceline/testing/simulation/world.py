"""Time, the network, hosts with their agents, the coordinator with its journal, and the faults, all from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from paceline.control.coordinator import Coordinator
from paceline.control.coordinator_events import (
    Disconnected,
    Drain,
    Event,
    Halt,
    Over,
    Remember,
    Settings,
    Tell,
    TellAgent,
    Tick,
)
from paceline.control.messages import AgentDirective, AgentReport, Directive, Phase, Plan, Report, Vitals
from paceline.control.roster import Fate
from paceline.testing.simulation.groups import SimulatedGroup
from paceline.testing.simulation.mutations import SOUND, Mutation
from paceline.testing.simulation.truth import Truth, Violation
from paceline.testing.simulation.worker import Worker

TICK_S = 0.1
AGENT_S = 0.3
MOST_PLANS = 300  # no schedule needs as many
QUIET_S = 90.0  # after the faults end, the run must end within this time


class Agent:
    """Starts workers on a host, knows which of them live, kills whom it is told to."""

    def __init__(self, world: World, host: str) -> None:
        self.world = world
        self.host = host
        self.workers: list[Worker] = []
        self.exits: dict[int, str] = {}
        self.over = False
        self._number = 0
        world.after(0.0, self._beat)

    def start(self) -> None:
        if not self.over:
            self.workers.append(self.world.make_worker(self.host))

    def _beat(self) -> None:
        self.report()
        self.world.after(AGENT_S, self._beat)

    def report(self) -> None:
        self._number += 1
        living = {
            worker.pid: Vitals("T" if worker.stopped else "R", not worker.stopped)
            for worker in self.workers
            if worker.alive
        }
        report = AgentReport(self.host, self._number, living, dict(self.exits), exhausted=False)
        self.world.send(f"agent {self.host}", "coordinator", lambda: self.world.tell_coordinator(report))

    def obey(self, directive: AgentDirective) -> None:
        self.over = self.over or directive.over
        for worker in self.workers:
            if worker.alive and worker.pid in directive.kill:
                self.world.kill(worker, "was killed as told")


class World:
    """`calm` leaves the faults out, and trains for longer: for schedules that a test writes itself."""

    def __init__(self, seed: int, mutation: Mutation = SOUND, *, calm: bool = False) -> None:
        self.seed = seed
        self.mutation = mutation
        self.random = random.Random(seed)
        self.now = 0.0
        self.batch = 4
        self.epochs = self.random.randint(1, 2)
        self.length = self.random.randint(6, 30)
        self.truth = Truth(self.length)
        self.workers: dict[str, Worker] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        self._pids = itertools.count(100)
        self._groups: dict[int, SimulatedGroup] = {}
        self._cuts: set[frozenset[str]] = set()
        self._parted: dict[tuple[str, str], bool] = {}  # hosts of which one cannot reach the other; whether it stays so
        self._journal: dict[str, bytes] = {}
        self._over = False
        self.kill_when_complete = False
        self._kill_when_joining = False
        self.halted = False
        self.may_fail = False
        count = self.random.randint(1, 5)
        self._settings = Settings(
            wanted=count,
            grace_s=1.0,
            silence_s=1.0,
            stuck_s=3.0,
            all_silent_s=9.0,
            stall_s=0.25,
            listen_s=0.8,
            drop_stragglers=True,
        )
        self._loss = self.random.choice([0.0, 0.0, 0.02, 0.1])
        self._slowness = self.random.choice([0.002, 0.01, 0.05])
        self._chaos_s = self.random.uniform(1.0, 6.0)
        self.coordinator: Coordinator | None = None
        self._zombie: Coordinator | None = None
        self._start_coordinator()
        self.agents = {host: Agent(self, host) for host in "abcd"[: self.random.choice([1, 2, 2, 3, 4])]}
        for _ in range(count):
            self._agent().start()
        if calm:
            self._loss, self.length = 0.0, 200
            self.truth = Truth(self.length)
        for _ in range(0 if calm else self.random.randint(0, 7)):
            self.after(self.random.uniform(0.2, self._chaos_s), self._fault)
        self.after(self._chaos_s, self._heal)
        self.after(0.0, self._tick)

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._is_finished():
                at, _, function, arguments = heapq.heappop(self._queue)
                self.now = at
                if self.now > self._chaos_s + QUIET_S:
                    raise Violation(f"the run does not end: {self._describe()}")
                function(*arguments)
        except Violation as violation:
            violation.add_note(f"replay: python -m paceline.testing.simulate --part control --seed {self.seed}")
            raise

    def _is_finished(self) -> bool:
        return self._over and not any(worker.alive for worker in self.workers.values())

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._sequence), function, arguments))

    def delay(self) -> float:
        """Mostly short, sometimes not."""
        seconds = self.random.expovariate(1 / self._slowness)
        return seconds * 20 if self.random.random() < 0.03 else seconds

    # -- the network -------------------------------------------------------------------------------------------------

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets through between two of: members, agents, the coordinator."""
        if self._cuts and frozenset((one, other)) in self._cuts:
            return True
        if not self._parted or one not in self.workers or other not in self.workers:
            return False
        hosts = (self.workers[one].host, self.workers[other].host)
        return hosts in self._parted or hosts[::-1] in self._parted

    def can_dial(self, worker: Worker, name: str) -> bool:
        """Of hosts that are parted in one direction, only those of one complain."""
        other = self.workers[name]
        is_cut = frozenset((worker.name, name)) in self._cuts or (worker.host, other.host) in self._parted
        return other.alive and not is_cut

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver late, twice or never; later messages may overtake."""
        if self.is_cut(source, target) or self.random.random() < self._loss:
            return
        copies = 2 if self.random.random() < self._loss else 1
        for _ in range(copies):
            self.after(self.delay(), deliver)

    def send_report(self, worker: Worker, report: Report) -> None:
        self.send(worker.name, "coordinator", lambda: self.tell_coordinator(report))

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        if self.coordinator is None:
            self.coordinator = self.mutation.coordinator(self._settings, self.now, dict(self._journal), "a")

    def tell_coordinator(self, event: Event) -> None:
        if self._zombie is not None and self.random.random() < 0.5:
            for action in self._zombie.handle(event, self.now):
                if isinstance(action, Remember):  # it has lost the lock: it cannot decide anything any more
                    self._zombie = None
                    break
                if isinstance(action, Tell):
                    self._deliver(action.directive)
        if self.coordinator is None:
            return
        for action in self.coordinator.handle(event, self.now):
            if isinstance(action, Remember):
                if action.value is None:
                    self._journal.pop(action.key, None)
                else:
                    self._journal[action.key] = action.value
            elif isinstance(action, Tell):
                self._deliver(action.directive)
            elif isinstance(action, TellAgent):
                directive = action.directive
                agent = self.agents[directive.agent]
                self.send("coordinator", f"agent {agent.host}", lambda a=agent, d=directive: a.obey(d))  # type: ignore[misc]
            elif isinstance(action, Over):
                self._finish(action)

    def _deliver(self, directive: Directive) -> None:
        worker = self.workers[directive.member]
        self.send("coordinator", worker.name, lambda: worker.post(directive))

    def _finish(self, over: Over) -> None:
        self._over = True
        if over.failed:
            self.truth.check(self.may_fail, f"the run failed: {over.reason}")
            return
        assert self.coordinator is not None
        current = self.coordinator.standing.current
        if current is not None and not self.halted:
            # As it was told: a script may raise after it has come to the end.
            reports = [record.report for record in self.coordinator.records.values()]
            ended = [report.applied for report in reports if report.phase is Phase.ENDED]
            self.truth.ended(self.truth.lineage_of(current.generation), max(ended))

    def _tick(self) -> None:
        self.tell_coordinator(Tick())
        self.after(TICK_S, self._tick)

    def counts(self, name: str) -> bool:
        """Whether a member is in the run, as far as the coordinator would remember."""
        machine = self.coordinator or Coordinator(self._settings, self.now, dict(self._journal))
        record = machine.records.get(name)
        return record is not None and record.fate in (None, Fate.RELEASED)

    # -- processes and groups ----------------------------------------------------------------------------------------

    def _agent(self) -> Agent:
        return self.random.choice(list(self.agents.values()))

    def make_worker(self, host: str) -> Worker:
        pid = next(self._pids)
        worker = self.workers[f"w{pid}"] = Worker(self, f"w{pid}", host, pid)
        return worker

    def kill(self, worker: Worker, how: str) -> None:
        if not worker.alive:
            return
        worker.alive = False
        for group in list(self._groups.values()):
            group.leave(worker.name, died=True)
        agent = self.agents[worker.host]
        agent.exits[worker.pid] = how
        self.after(self.delay(), agent.report)
        self.send(worker.name, "coordinator", lambda: self.tell_coordinator(Disconnected(worker.name)))
        if not any(other.alive for other in self.workers.values()) or self.random.random() < 0.5:
            self.after(0.3, agent.start)

    def group_of(self, plan: Plan) -> SimulatedGroup:
        if plan.generation > MOST_PLANS:
            raise Violation(f"plan after plan is made in vain: {self._describe()}")
        if plan.generation not in self._groups:
            self._groups[plan.generation] = SimulatedGroup(self, plan)
        return self._groups[plan.generation]

    def drop_groups(self, worker: Worker, below: int) -> None:
        for generation, group in list(self._groups.items()):
            if generation < below:
                group.leave(worker.name, died=False)

    def leaves_at_end(self, worker: Worker) -> None:
        """Nobody exits before all have acknowledged the end."""
        plan = worker.machine.plan
        for member in plan.members if plan is not None else ():
            other = self.workers[member]
            if other.alive and self.counts(member):
                self.truth.check(
                    other.machine.phase is Phase.ENDED, f"{worker.name} left at the end, {member} is not there yet"
                )

    # -- faults ------------------------------------------------------------------------------------------------------

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def _fault(self) -> None:
        if self._over or not self._living():
            return
        faults = [
            (self._kill_one, 6),
            (self._kill_two, 2),
            (self._kill_at_the_end_of_an_operation, 6),
            (self._kill_all, 1),
            (self._raise_one, 2),
            (self._raise_all, 1),
            (self._stop_one, 3),
            (self._join, 4),
            (self._join_two_and_kill_one, 4),
            (self._leave, 3),
            (self._drain, 2),
            (self._call_a_burden, 2),
            (self._cut_from_coordinator, 2),
            (self._cut_pair, 2),
            (self._part_hosts, 3),
            (self._blink, 2),
            (self._crash_coordinator, 4),
            (self._halt, 1),
        ]
        functions, weights = zip(*faults, strict=True)
        self.random.choices(functions, weights)[0]()

    def _kill_one(self) -> None:
        self.kill(self.random.choice(self._living()), "was killed")

    def _kill_two(self) -> None:
        for worker in self.random.sample(self._living(), min(2, len(self._living()))):
            self.kill(worker, "was killed")

    def _kill_at_the_end_of_an_operation(self) -> None:
        """When some may have seen it complete, and others not."""
        self.kill_when_complete = True

    def operation_completes(self) -> None:
        """All members of a group have entered an operation; none has been told that it is complete."""
        if self.kill_when_complete:
            self.kill_when_complete = False
            self.after(self.delay() / 2, self._kill_one_if_any)

    def _kill_one_if_any(self) -> None:
        if self._living():
            self._kill_one()

    def _kill_all(self) -> None:
        for worker in self._living():
            self.kill(worker, "was killed")

    def _raise_one(self) -> None:
        """A fault of the script: the run fails if all members of a plan come to it."""
        self.may_fail = True
        self.random.choice(self._living()).fail()

    def _raise_all(self) -> None:
        self.may_fail = True
        for worker in self._living():
            worker.fail()

    def _stop_one(self) -> None:
        worker = self.random.choice(self._living())
        worker.stopped = True
        self.after(self.random.uniform(0.1, 4.0), worker.resume)

    def _join(self) -> None:
        for _ in range(self.random.randint(1, 2)):
            self._agent().start()

    def _join_two_and_kill_one(self) -> None:
        """When some may have prepared the switch to a plan with it, and others not."""
        self._kill_when_joining = True
        for _ in range(2):
            self._agent().start()

    def joins(self, worker: Worker) -> None:
        """A newcomer comes to the group of its first plan."""
        if self._kill_when_joining and self.random.random() < 0.7:
            self._kill_when_joining = False
            self.after(self.delay() * 2, self.kill, worker, "was killed")

    def _leave(self) -> None:
        self.random.choice(self._living()).leave()

    def _drain(self) -> None:
        self.tell_coordinator(Drain(self.random.choice(self._living()).name))

    def _call_a_burden(self) -> None:
        """Somebody finds somebody too slow; whether it may say so is for the coordinator to judge."""
        one, other = self.random.choice(self._living()), self.random.choice(self._living())
        one.find_burden(other.name)

    def _cut(self, *pairs: tuple[str, str]) -> None:
        cuts = {frozenset(pair) for pair in pairs}
        self._cuts |= cuts
        self.after(self.random.uniform(0.2, 5.0), self._mend, cuts)

    def _mend(self, cuts: set[frozenset[str]]) -> None:
        self._cuts -= cuts

    def _cut_from_coordinator(self) -> None:
        count = self.random.randint(1, len(self._living()))
        self._cut(*((worker.name, "coordinator") for worker in self.random.sample(self._living(), count)))

    def _cut_pair(self) -> None:
        if len(self._living()) >= 2:
            one, other = self.random.sample(self._living(), 2)
            self._cut((one.name, other.name))

    def _part_hosts(self) -> None:
        """Some hosts cannot reach each other, while all reach the coordinator; for a while, or for good."""
        pairs = list(itertools.combinations(self.agents, 2))
        for one, other in self.random.sample(pairs, min(len(pairs), self.random.randint(1, 2))):
            ways = self.random.choice([((one, other),), ((other, one),), ((one, other), (other, one))])
            self.part(*ways, lasting=self.random.random() < 0.3)

    def part(self, *ways: tuple[str, str], lasting: bool) -> None:
        """`ways` are pairs of hosts; what the first sends does not come to the second."""
        self._parted |= dict.fromkeys(ways, lasting)
        if not lasting:
            self.after(self.random.uniform(0.2, 5.0), self.unite, ways)

    def unite(self, ways: tuple[tuple[str, str], ...]) -> None:
        for way in ways:
            self._parted.pop(way, None)

    def _blink(self) -> None:
        """A connection to the coordinator breaks and is made again."""
        self.tell_coordinator(Disconnected(self.random.choice(self._living()).name))

    def _crash_coordinator(self) -> None:
        if self.random.random() < 0.3:
            self._zombie = self.coordinator  # taken for dead, but only slow: it goes on speaking for a while
            self.after(self.random.uniform(0.1, 4.0), self._bury_zombie)
        self.coordinator = None
        self.after(self.random.uniform(0.1, 3.0), self._start_coordinator)

    def _bury_zombie(self) -> None:
        self._zombie = None

    def _halt(self) -> None:
        if self.coordinator is not None:
            self.halted = True
            self.tell_coordinator(Halt("asked to stop"))

    def _heal(self) -> None:
        """The end of all faults but hosts that stay parted; from here on the run must come to its end."""
        self.kill_when_complete = self._kill_when_joining = False
        self._loss = 0.0
        self._zombie = None
        self._cuts.clear()
        self._parted = {way: True for way, lasting in self._parted.items() if lasting}
        for worker in self._living():
            if worker.stopped:
                worker.resume()
        if not self._living() and not self._over:
            self._agent().start()

    def _describe(self) -> str:
        lines = [f"coordinator {self.coordinator.standing if self.coordinator else None}"]
        for worker in self._living():
            machine = worker.machine
            lines.append(
                f"{worker.name}: {machine.phase.value} generation {machine.generation} applied {machine.applied} "
                f"fenced {machine.fenced} next {machine.next and machine.next.generation} stopped {worker.stopped}"
            )
        return "\n".join(lines)
