"""What goes wrong, and when; and what of it was tried where, for the table of coverage.

With replicas nothing may be lost while at most one server dies at a time, so the next one dies only after all that the
last one held has come to others. Moves that nobody's death asked for are no excuse: servers die in the middle of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.control.machines.coordinator_events import Drain, Halt
from paceline.control.messages.plan import PlanStart
from paceline.placement.placement import Placement
from paceline.server.messages import ServerRequest
from paceline.testing.joint.head import phase_of
from paceline.testing.joint.processes import SimulatedProcess
from paceline.testing.joint.themes import Theme, everything, themes_of

if TYPE_CHECKING:
    from paceline.testing.joint.servers import SimulatedServer
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World

SILENCE_S = 1.0  # as in the settings of the world


class Faults:
    def __init__(self, world: World, *, calm: bool) -> None:
        self._world = world
        draw = world.random
        self.are_over = calm
        self.tried: Counter[tuple[str, str, str]] = Counter()  # by fault, mode and phase of the run
        self._kill_when_complete = False
        self._kill_when_joining = False
        self._lose_when_joined = False
        self._kill_when_agreed = False
        self._kill_when_answered = self._kill_when_shown = self._kill_when_taken = False
        self._kill_when_moving = 0
        self._is_mourning = False  # what a dead server held is not yet on enough others
        self._doomed: set[str] = set()  # servers that live, and will be dead in a moment
        self._to_evict: set[str] = set()
        self._deaf: dict[str, float] = {}  # until when somebody may be silent through no fault of its own
        self.theme = self._draw_theme()
        self._kinds = self.theme.faults
        begin_at = draw.choice([0.2, 0.8, 0.8, 0.8])  # before the run is founded, or when it is
        self.end_at = begin_at + draw.uniform(*self.theme.lasts_s)
        if not calm:
            for _ in range(draw.randint(world.mutation.fewest_faults, 7)):
                world.after(draw.uniform(begin_at, self.end_at), self._next)
        world.after(self.end_at, self._heal)

    def _draw_theme(self) -> Theme:
        """Half of all schedules are about everything, the others about a part of it."""
        world, draw = self._world, self._world.random
        themes = themes_of(world.mode)
        is_wide = draw.random() < 0.5
        name = draw.choice(list(themes))
        if world.mutation.theme:
            assert world.mutation.theme in themes, f"{world.mutation.name}: no such theme where {world.mode} is"
            return themes[world.mutation.theme]
        return everything(world.mode) if is_wide else themes[name]

    def _next(self) -> None:
        world = self._world
        if world.head.over is not None or not world.living() or self.are_over:
            return
        (name,) = world.random.choices(list(self._kinds), list(self._kinds.values()))
        self.tried[(name, world.mode, phase_of(world.head.machine))] += 1
        getattr(self, f"_{name}")()

    def _heal(self) -> None:
        """The end of all faults; from here on the run must come to its end."""
        world = self._world
        self.are_over = True
        self._kill_when_complete = self._kill_when_joining = self._kill_when_agreed = False
        self._lose_when_joined = False
        self._kill_when_answered = self._kill_when_shown = self._kill_when_taken = False
        self._kill_when_moving = 0
        world.is_lossy = False
        world.mend_all()
        for process in list(world.processes.values()):
            if process.alive and process.is_stopped:
                process.go_on()
        if world.head.over is None:
            if not world.living():
                world.agent().start()
            num_servers = sum(server.alive for server in world.servers.values())
            for _ in range(world.first_servers - num_servers):
                world.agent().start_server()

    def _pick(self) -> SimulatedWorker:
        return self._world.random.choice(self._world.living())

    # -- who may be missed -------------------------------------------------------------------------------------------

    def may_be_silent(self, process: SimulatedProcess) -> bool:
        """Whether this process was dead, stopped, cut off or without a line in the time after which it is missed."""
        world = self._world
        if not process.alive or process.is_stopped or not process.line.is_up:
            return True
        return world.now - self._deaf.get(process.name, -99.0) < 2 * SILENCE_S or self._is_any_cut(process)

    def _is_any_cut(self, process: SimulatedProcess) -> bool:
        return self._world.is_cut(process.name, "coordinator")

    def _deafen(self, process: SimulatedProcess, seconds: float) -> None:
        """It is not heard until then, for a reason."""
        until = self._world.now + seconds
        self._deaf[process.name] = max(self._deaf.get(process.name, 0.0), until)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _kill_one(self) -> None:
        if self._world.living():
            self._world.kill(self._pick(), "was killed")

    def _kill_two(self) -> None:
        living = self._world.living()
        for worker in self._world.random.sample(living, min(2, len(living))):
            self._world.kill(worker, "was killed")

    def _kill_at_the_end_of_an_operation(self) -> None:
        """When some may have seen it complete, and others not."""
        self._kill_when_complete = True

    def operation_completes(self) -> None:
        """All members of a group have entered an operation; none has been told that it is complete."""
        if self._kill_when_complete:
            self._kill_when_complete = False
            self._world.after(self._world.delay() / 2, self._kill_one)

    def _kill_all(self) -> None:
        for worker in self._world.living():
            self._world.kill(worker, "was killed")

    def _raise_one(self) -> None:
        """A fault of the script: the run fails if all members of a plan come to it."""
        self._world.may_fail = True
        self._pick().fail()

    def _raise_all(self) -> None:
        self._world.may_fail = True
        for worker in self._world.living():
            worker.fail()

    def _stop(self, process: SimulatedProcess, seconds: float) -> None:
        self._deafen(process, seconds)
        process.stop(seconds)

    def _stop_one(self) -> None:
        self._stop(self._pick(), self._world.random.uniform(0.1, 4.0))

    def _join(self) -> None:
        for _ in range(self._world.random.randint(1, 2)):
            self._world.agent().start()

    def _join_two_and_kill_one(self) -> None:
        """When some may have prepared the switch to a plan with it, and others not."""
        self._kill_when_joining = True
        for _ in range(2):
            self._world.agent().start()

    def joins(self, worker: SimulatedWorker) -> None:
        """A newcomer comes to the group of its first plan."""
        if self._kill_when_joining and self._world.random.random() < 0.7:
            self._kill_when_joining = False
            self._world.after(self._world.delay() * 2, self._world.kill, worker, "was killed")

    def _join_and_lose_the_others(self) -> None:
        """When a newcomer has the state, and has not said so to anybody: it is the only one that knows of it."""
        self._lose_when_joined = True
        self._join()

    def joined(self, worker: SimulatedWorker) -> None:
        """A newcomer has got the state."""
        plan = worker.machine.plan
        if self._lose_when_joined and plan is not None and plan.start is PlanStart.SWITCH:
            self._lose_when_joined = False
            self._crash_coordinator()
            for other in [other for other in self._world.living() if other is not worker]:
                self._world.kill(other, "was killed")

    def _leave(self) -> None:
        self._pick().leave()

    def _drain(self) -> None:
        self._world.head.post(Drain(self._pick().name))

    def _call_a_burden(self) -> None:
        """Somebody finds somebody too slow; whether it may say so is for the coordinator to judge."""
        self._pick().find_burden(self._pick().name)

    def _cut_from_coordinator(self) -> None:
        world = self._world
        seconds = world.random.uniform(0.2, 5.0)
        for worker in world.random.sample(world.living(), world.random.randint(1, len(world.living()))):
            self._deafen(worker, seconds)
            world.cut(seconds, (worker.name, "coordinator"))

    def _cut_pair(self) -> None:
        if len(self._world.living()) >= 2:
            one, other = self._world.random.sample(self._world.living(), 2)
            self._world.cut(self._world.random.uniform(0.2, 5.0), (one.name, other.name))

    def _cut_hosts(self) -> None:
        """A partial partition: two hosts do not reach each other, both reach the coordinator's."""
        world = self._world
        others = [f"host {host}" for host in world.hosts if host != "a"]
        if len(others) >= 2:
            one, other = world.random.sample(others, 2)
            world.cut(world.random.uniform(0.2, 4.0), (one, other))

    def _part_hosts(self) -> None:
        """The same for good: the run goes on with those who reach each other. A worker needs all servers, and these
        need each other, so hosts that have one are not parted: no choice of workers would help."""
        world = self._world
        serving = {server.host for server in world.servers.values() if server.alive}
        others = [f"host {host}" for host in world.hosts if host != "a" and host not in serving]
        if len(others) >= 2:
            world.part(*world.random.sample(others, 2))

    def _blink(self) -> None:
        """A connection to the coordinator breaks and is made again."""
        self._pick().line.drop(is_heard=self._world.random.random() < 0.8)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _crash_coordinator(self) -> None:
        self._world.head.crash()
        self.coordinator_crashed()

    def coordinator_crashed(self) -> None:
        self._world.after(self._world.random.uniform(0.1, 3.0), self._world.head.start)

    def _lose_journal(self) -> None:
        if self._world.head.machine is not None and self._world.head.over is None:
            self._world.head.lose_journal()
            self.coordinator_crashed()

    def _lose_journal_and_kill_one(self) -> None:
        self._lose_journal()
        self._kill_one()

    def _crash_coordinator_and_kill_one(self) -> None:
        """Who died meanwhile is not known when it comes back."""
        self._crash_coordinator()
        self._kill_one()

    def _crash_coordinator_between(self) -> None:
        """When it has remembered something, and has told nobody."""
        self._world.head.crashes_soon = True

    def _stop_coordinator(self) -> None:
        self._world.head.stop(self._world.random.uniform(0.1, 4.0))

    def _stop_coordinator_between(self) -> None:
        """When it has decided something, and has told nobody."""
        self._world.head.stops_soon = self._world.random.uniform(0.5, 3.0)

    def _stop_coordinator_and_worker(self) -> None:
        """As when their host swaps; the worker wakes a little before or after."""
        seconds = self._world.random.uniform(0.5, 4.0)
        is_there = self._world.head.machine is not None and not self._world.head.is_stopped
        self._world.head.stop(seconds)
        worker = self._pick()
        if not is_there:  # only the worker sleeps, and a coordinator that comes back meanwhile misses it
            self._deafen(worker, seconds + 0.3)
        worker.stop(max(0.0, seconds + self._world.random.uniform(-0.3, 0.3)))

    def _halt(self) -> None:
        if self._world.head.machine is not None and not self._world.head.is_stopped:
            self._world.halted = True
            self._world.head.post(Halt("asked to stop"))

    # -- servers -----------------------------------------------------------------------------------------------------

    def _members(self) -> list[SimulatedServer]:
        """The servers that live, will live, and are not taken for dead."""
        world = self._world
        records = world.head.remembered().records
        found = [server for server in world.servers.values() if server.alive and server.name not in self._doomed]
        return [one for one in found if (record := records.get(one.name)) is None or record.fate is None]

    def _may_die(self) -> bool:
        world = self._world
        placement = world.head.placement
        if not placement.ranges or not self._members():
            return False
        if world.num_replicas == 1:
            return world.random.random() < 0.5
        names = {server.name for server in self._members() if not self.may_be_silent(server)}
        if self._is_mourning:
            records = world.head.remembered().records
            # Who is about to be killed or evicted is as good as dead, and its fate is not known yet either.
            are_known = all(
                name not in records
                or records[name].fate is not None
                or (
                    server.alive
                    and name not in self._doomed
                    and not (name in self._to_evict and self.may_be_silent(server))
                )
                for name, server in world.servers.items()
            )
            self._is_mourning = not are_known or any(
                sum(one.server in names for one in (replicas.primary, *replicas.backups)) < 2
                for replicas in placement.ranges
            )
        return not self._is_mourning and self._do_enough_stay()

    def _do_enough_stay(self) -> bool:
        records = self._world.head.remembered().records
        known = [server for server in self._members() if server.name in records]
        return sum(not server.is_leaving for server in known) >= self._world.num_replicas

    def _kill_it(self, victim: SimulatedServer) -> None:
        self._is_mourning = True
        self._world.kill(victim, "was killed")

    def _kill_server(self) -> None:
        if self._may_die():
            self._kill_it(self._world.random.choice(self._members()))

    def _kill_server_that_answers(self) -> None:
        self._kill_when_answered = True

    def _kill_server_that_shows(self) -> None:
        self._kill_when_shown = True

    def answered(self, server: SimulatedServer, request: ServerRequest) -> None:
        """A server tells a worker something, while its backups have yet to take what it did: what it tells must not
        need that."""
        is_shown = request.push is None and request.commit is None
        is_meant = self._kill_when_shown if is_shown else self._kill_when_answered
        is_ahead = is_meant and any(link.queue for link in server.keeper.links.values())
        if is_ahead and not self.are_over and self._may_die():
            self._kill_when_answered = self._kill_when_shown = False
            self._is_mourning = True
            self._doomed.add(server.name)
            self._world.after(self._world.delay() / 4, self._world.kill, server, "was killed")

    def _kill_server_that_took_its_part(self) -> None:
        self._kill_when_taken = True

    def taken(self, name: str) -> None:
        """A worker hears that a server has its part of a lease, and others have not theirs yet."""
        victim = self._world.servers[name]
        if self._kill_when_taken and not self.are_over and victim in self._members() and self._may_die():
            self._kill_when_taken = False
            self._kill_it(victim)

    def _kill_server_and_worker(self) -> None:
        self._kill_one()
        self._kill_server()

    def _kill_when_something_moves(self) -> None:
        self._kill_when_moving += 1
        if self._world.random.random() < 0.5:
            self._join_server()
        else:
            self._leave_server()

    def published(self, placement: Placement) -> None:
        """A placement was made in which something may be on its way: that is a moment for connections to break, and a
        moment to die."""
        world = self._world
        if self.are_over:
            return
        self._is_mourning = self._is_mourning or not self._do_enough_stay()
        for replicas in placement.ranges:
            if replicas.handing and world.random.random() < 0.2:
                self._break(replicas.primary.server, replicas.handing)
        moving = [one for one in placement.ranges if one.joining or one.handing]
        if self._kill_when_moving and moving and world.random.random() < 0.5:
            self._kill_when_moving -= 1
            replicas = world.random.choice(moving)
            name = world.random.choice([one.server for one in replicas.everybody()] + [replicas.primary.server])
            world.after(world.delay() * 4, self._kill_aimed_at, name)

    def _kill_aimed_at(self, name: str) -> None:
        victim = self._world.servers[name]
        if victim in self._members() and not self.are_over and self._may_die():
            self._kill_it(victim)

    def _kill_who_agreed(self) -> None:
        self._kill_when_agreed = True

    def agreed(self, worker: SimulatedWorker) -> None:
        """A worker has seen that all have staged a step, and tells the servers."""
        if self._kill_when_agreed and len(self._world.living()) > 1:
            self._kill_when_agreed = False
            self._world.after(self._world.delay() / 4, self._world.kill, worker, "was killed")

    def _evict_server(self) -> None:
        """It is taken for dead, but lives, and serves for a while whoever goes by an old placement."""
        world = self._world
        if not self._may_die() or world.head.machine is None:
            return
        victim = world.random.choice(self._members())
        self._is_mourning = True
        self._to_evict.add(victim.name)
        seconds = world.random.uniform(1.2, 2.5)
        self._deafen(victim, seconds)
        # Its agent is not heard either: it would say that the process is busy, and kill it when it is told to.
        world.cut(seconds, (victim.name, "coordinator"), (f"agent {victim.host}", "coordinator"))
        for other in self._members():
            if other is not victim and world.random.random() < 0.5:
                world.after(world.random.random() * seconds, self._break, victim.name, other.name)
        if world.random.random() < 0.4:  # that is why
            self._stop(victim, world.random.random() * seconds)

    def _stop_server(self) -> None:
        if self._members():
            self._world.random.choice(self._members()).stop(0.4 * self._world.random.random())

    def _break_connection(self) -> None:
        draw = self._world.random
        names = [server.name for server in self._world.servers.values() if server.alive]
        for _ in range(draw.randint(1, 3)):
            if len(names) > 1:
                self._break(*draw.sample(names, 2))

    def _break(self, one: str, other: str) -> None:
        draw = self._world.random
        if not self.are_over:
            self._world.break_connection(one, other, draw.choice([0.001, 0.05, 0.3]) * draw.random())

    def refused(self, one: str, other: str) -> None:
        """A server says that it does not follow another, which may never hear it."""
        if not self.are_over and self._world.random.random() < 0.3:
            self._break(one, other)

    def _join_server(self) -> None:
        self._world.agent().start_server()

    def _leave_server(self) -> None:
        members = [server for server in self._members() if not server.is_leaving]
        if len(members) > max(1, self._world.num_replicas):
            victim = self._world.random.choice(members)
            victim.receive(victim.leave)

    def _change_load(self) -> None:
        self._world.loads.change()
