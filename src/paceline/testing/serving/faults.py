"""What goes wrong, and when.

Nothing may be lost while at most one server dies at a time, so with replicas the next one dies only after all that the
last one held has come to others. Moves that nobody's death asked for are no excuse: servers die in the middle of them.
Where fewer servers stay than there should be replicas, because others were asked to leave, that is as if one had died.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.placement.placement import Placement
from paceline.testing.serving.parts import Server

if TYPE_CHECKING:
    from paceline.testing.serving.workers import Stepper
    from paceline.testing.serving.world import ServingWorld

FIRST_S = 0.3
MOST_FAULTS = 7


class Faults:
    def __init__(self, world: ServingWorld) -> None:
        self._world = world
        self._left = world.random.randint(0, MOST_FAULTS)
        self._aims = 0  # how many are to die as soon as something moves
        self._waits_for_agreement = False  # who sees a step agreed is to die while it tells the servers
        self._is_mourning = False  # what a dead server held is not yet on enough others
        self._num_under_way = 0
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self._kill_server, 4),
            (self._kill_when_something_moves, 4),
            (self._evict_server, 3),
            (self._kill_server_and_worker, 2),
            (self._kill_who_agreed, 3),
            (self._crash_chief_and_kill_worker, 1),
            (self._stop_server, 2),
            (self._break_connection, 3),
            (world.add_server, 3),
            (self._leave, 3),
            (self._kill_worker, 2),
            (world.add_worker, 2),
            (self._crash_chief, 2),
            (world.loads.change, 2),
        ]
        world.after(FIRST_S, self._next)

    @property
    def are_over(self) -> bool:
        return self._left <= 0

    @property
    def are_under_way(self) -> bool:
        """Whether something is yet to be found dead, to go on, or to be replaced."""
        return self._num_under_way > 0

    def _next(self) -> None:
        if self._left <= 0:
            self._aims, self._waits_for_agreement = 0, False
            return
        self._left -= 1
        functions, weights = zip(*self._kinds, strict=True)
        self._world.random.choices(functions, weights)[0]()
        self._world.after(self._world.random.random() * 0.6, self._next)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """What belongs to a fault, and is waited for at the end."""
        self._num_under_way += 1

        def act() -> None:
            self._num_under_way -= 1
            action()

        self._world.after(seconds, act)

    # -- servers -----------------------------------------------------------------------------------------------------

    def _may_die(self) -> bool:
        world = self._world
        if not world.newest.ranges or not world.members():
            return False
        if world.num_replicas == 1:
            return world.random.random() < 0.5
        if self._is_mourning:
            are_known = all(world.is_member(name) or name in world.memory.buried for name in world.servers)
            self._is_mourning = not are_known or any(
                sum(world.is_member(one.server) for one in (replicas.primary, *replicas.backups)) < 2
                for replicas in world.newest.ranges
            )
        return not self._is_mourning and self._do_enough_stay()

    def _do_enough_stay(self) -> bool:
        known = [server for server in self._world.members() if server.name in self._world.memory.servers]
        return sum(not server.is_leaving for server in known) >= self._world.num_replicas

    def _kill(self, victim: Server) -> None:
        self._is_mourning = True
        victim.die()
        self._later(self._world.random.random() * 0.1, lambda: self._find_dead(victim.name))
        self._later(self._world.random.random() * 0.5, self._world.add_server)

    def _find_dead(self, name: str) -> None:
        if self._world.chief.alive:
            self._world.chief.bury(name)
        else:
            self._later(0.1, lambda: self._find_dead(name))

    def _kill_server(self) -> None:
        if self._may_die():
            self._kill(self._world.random.choice(self._world.members()))

    def _kill_when_something_moves(self) -> None:
        self._aims += 1
        if self._world.random.random() < 0.5:
            self._world.add_server()
        else:
            self._leave()

    def published(self, placement: Placement) -> None:
        """A placement was made in which something may be on its way: that is a moment for connections to break, and a
        moment to die."""
        world = self._world
        self._is_mourning = self._is_mourning or not self._do_enough_stay()
        for replicas in placement.ranges:
            if replicas.handing and not self.are_over and world.random.random() < 0.2:
                self._break(replicas.primary.server, replicas.handing)
        if not self._aims:
            return
        moving = [one for one in placement.ranges if one.joining or one.handing]
        if moving and self._world.random.random() < 0.5:
            self._aims -= 1
            replicas = self._world.random.choice(moving)
            name = self._world.random.choice([one.server for one in replicas.everybody()] + [replicas.primary.server])
            self._later(self._world.delay() * 4, lambda: self._kill_aimed_at(name))

    def _kill_aimed_at(self, name: str) -> None:
        if self._world.is_member(name) and self._may_die():
            self._kill(self._world.servers[name])

    def _evict_server(self) -> None:
        """It is taken for dead, but lives, and serves for a while whoever goes by an old placement."""
        world = self._world
        if not self._may_die() or not world.chief.alive:
            return
        victim = world.random.choice(world.members())
        self._is_mourning = True
        victim.is_cut_off = victim.is_given_up = True
        self._later(world.random.random() * 0.1, lambda: self._find_dead(victim.name))
        self._later(world.random.random() * 0.5, world.add_server)
        self._later(0.1 + world.random.random(), lambda: self._wake(victim))
        for other in world.members():
            if world.random.random() < 0.5:
                self._later(world.random.random() * 0.3, functools.partial(self._break, victim.name, other.name))
        if world.random.random() < 0.4:  # that is why
            victim.stop()
            self._later(world.random.random(), victim.go_on)

    def _wake(self, victim: Server) -> None:
        """It hears of what happened, of all or of a part, and exits soon."""
        victim.is_cut_off = False
        if self._world.random.random() < 0.5:
            self._world.tell(victim, self._world.newest)
        self._later(self._world.random.random() * 0.2, victim.die)

    def _stop_server(self) -> None:
        members = self._world.members()
        if members:
            victim = self._world.random.choice(members)
            victim.stop()
            self._later(self._world.random.random(), victim.go_on)

    def _break_connection(self) -> None:
        draw = self._world.random
        servers = [server.name for server in self._world.servers.values() if server.alive]
        for _ in range(draw.randint(1, 3)):
            if len(servers) > 1:
                self._break(*draw.sample(servers, 2))

    def _break(self, one: str, other: str) -> None:
        draw, servers = self._world.random, self._world.servers
        seconds = draw.choice([0.001, 0.05, 0.3]) * draw.random()
        self._world.break_connection(servers[one], servers[other], seconds)

    def refused(self, one: str, other: str) -> None:
        """A server says that it does not follow another, which may never hear it."""
        if not self.are_over and self._world.random.random() < 0.3:
            self._break(one, other)

    def _leave(self) -> None:
        members = [server for server in self._world.members() if not server.is_leaving]
        if len(members) > max(1, self._world.num_replicas):
            self._world.random.choice(members).is_leaving = True

    # -- others ------------------------------------------------------------------------------------------------------

    def _kill_server_and_worker(self) -> None:
        self._kill_worker()
        self._kill_server()

    def _kill_worker(self) -> None:
        world = self._world
        if world.crew is not None:
            if len(world.crew.living) > 1:
                world.crew.kill(world.random.choice(world.crew.living))
            return
        living = [worker for worker in world.workers.values() if worker.alive]
        if len(living) > 1:
            victim = world.random.choice(living)
            victim.alive = False
            self._later(world.random.random() * 0.1, lambda: self._find_dead(victim.name))

    def _kill_who_agreed(self) -> None:
        self._waits_for_agreement = True

    def agreed(self, one: Stepper) -> None:
        """A worker has seen that all have staged a step, and tells the servers."""
        if self._waits_for_agreement and len(self._world.crew.living if self._world.crew is not None else ()) > 1:
            self._waits_for_agreement = False
            self._world.after(self._world.delay() / 4, lambda: self._kill_stepper(one))

    def _kill_stepper(self, one: Stepper) -> None:
        crew = self._world.crew
        if crew is not None and one in crew.living and len(crew.living) > 1:
            crew.kill(one)

    def _crash_chief_and_kill_worker(self) -> None:
        self._crash_chief()
        self._kill_worker()

    def _crash_chief(self) -> None:
        if self._world.chief.alive:
            self._world.chief.alive = False
            self._later(0.3, self._world.restart_chief)
