"""Workers of the simulation: those that do leases, and a crew that does steps together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline.control.lease_set import LeaseSet
from paceline.control.leases import Hand, LeaseGrant
from paceline.placement.placement import Placement
from paceline.server.errand import Errand
from paceline.server.keeper import Outcome
from paceline.server.messages import Apply, Commit, Fence, Load, Need, Refusal, Stage

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld

RETRY_S = 0.03
BEAT_S = 0.1
COMPUTE_S = 0.05

Logs = dict[int, Any]


class View:
    """The placement that one worker goes by; what is new it hears with a `lag_s` of its own."""

    def __init__(self, world: ServingWorld) -> None:
        self.placement = world.newest
        self.lag_s = world.random.choice([0.0, 0.0, 0.05, 0.4])
        world.views.append(self)

    def adopt(self, placement: Placement) -> None:
        if placement.version > self.placement.version:
            self.placement = placement


class Worker(Protocol):
    alive: bool
    view: View

    def load_of(self, origin: int) -> Load:
        """What it loads a range with that is empty since that version."""


class Trip:
    """An errand with its messages: asks until it is done, or `is_over`. It loads what is empty."""

    def __init__(
        self,
        world: ServingWorld,
        worker: Worker,
        errand: Errand,
        parcel: Any,
        then: Callable[[Logs], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._world = world
        self._worker = worker
        self._errand = errand
        self._parcel = parcel
        self._then = then
        self._is_over = is_over
        self._pulled: Logs = {}
        self._ended = False
        self._ask()

    def _has_ended(self) -> bool:
        self._ended = self._ended or not self._worker.alive or self._is_over()
        return self._ended

    def _ask(self) -> None:
        if self._has_ended():
            return
        for server, request in self._errand.requests(self._worker.view.placement).items():
            self._world.request(self._worker, server, request, self._parcel, self._take, self._lose)
        self._world.after(RETRY_S, self._ask)

    def _take(self, server: str, outcome: Outcome) -> None:
        if self._has_ended():
            return
        answer = outcome.answer
        for number, log in (outcome.parcel or {}).items():
            if number not in answer.pulled and number not in answer.pushed:
                self._pulled[number] = log
        self._errand.answered(server, answer)
        if Refusal.STALE in answer.pushed.values():
            self._ended = True
        elif self._errand.is_done:
            self._ended = True
            self._then(self._pulled)
        self._load([number for number, refusal in answer.pushed.items() if refusal is Refusal.EMPTY])

    def _lose(self, server: str) -> None:
        self._errand.lost(server)

    def _load(self, empty: Iterable[int]) -> None:
        worker, world = self._worker, self._world
        since: dict[int, list[int]] = {}
        for number in empty:
            since.setdefault(worker.view.placement.ranges[number].origin, []).append(number)
        for origin, numbers in since.items():
            errand = world.mutation.errand(numbers, push=worker.load_of(origin))
            is_over = functools.partial(self._is_another, numbers, origin)
            Trip(world, worker, errand, [("since", origin, 0)], lambda _: None, is_over)

    def _is_another(self, numbers: Iterable[int], origin: int) -> bool:
        ranges = self._worker.view.placement.ranges
        return all(ranges[number].origin != origin for number in numbers)


class LeaseWorker:
    """Pulls, computes, pushes: one lease after the other."""

    def __init__(self, world: ServingWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.is_through = False
        self.view = View(world)
        self.hand = Hand(name)
        self.epoch = -1
        self._at = (-1, -1)  # the epoch and lease that it does
        self._slowness = world.random.choice([1.0, 1.0, 4.0])
        self._open(max(world.memory.leases[0], 0))
        world.after(world.random.random() * BEAT_S, self._beat)

    def _open(self, epoch: int) -> None:
        self.epoch = epoch
        self.hand.open(epoch, self.world.num_leases, LeaseSet())
        self._next()

    def _beat(self) -> None:
        if self.alive and not self.is_through:
            self._report()
            self.world.after(BEAT_S, self._beat)

    def _report(self) -> None:
        report = self.hand.report()
        self.world.to_chief(self.name, functools.partial(self.world.chief.hear_worker, report))

    def hear(self, grant: LeaseGrant) -> None:
        if not self.alive:
            return
        self.hand.hear(grant)
        if self.hand.is_finished:
            if self.epoch + 1 < self.world.num_epochs:
                self._open(self.epoch + 1)
            else:
                self.is_through = True
        elif self.hand.start() >= 0:
            self._next()

    def _next(self) -> None:
        lease = self.hand.start()
        if not self.alive or lease < 0 or self._at == (self.epoch, lease):
            return
        self._at = (self.epoch, lease)
        self._pull(lease)

    def _pull(self, lease: int) -> None:
        settled = self.hand.settled
        prefix = max(0, lease - self.world.bound) if self.world.bound >= 0 else 0
        Trip(
            self.world,
            self,
            self.world.mutation.errand(range(self.world.num_ranges), pull=Need(0, self.epoch, prefix, settled)),
            None,
            lambda seen: self._compute(lease, seen),
            lambda: self._gives_way(lease, settled),
        )

    def _gives_way(self, lease: int, settled: int) -> bool:
        """Whether this is no longer what this worker waits for: a lower lease has come, or more is known to be done."""
        if self._at != (self.epoch, lease):
            return True
        if self.hand.has_lower():
            self.hand.put_back()
            self._next()
            return True
        if self.hand.settled > settled and any(one.origin > 1 for one in self.view.placement.ranges):
            self._pull(lease)
            return True
        return False

    def _compute(self, lease: int, seen: Logs) -> None:
        epoch = self.epoch
        self.world.checks.seen_before_lease(epoch, lease, seen)
        seconds = self._slowness * COMPUTE_S * self.world.random.random()
        self.world.after(seconds, lambda: self._push(epoch, lease))

    def _push(self, epoch: int, lease: int) -> None:
        if epoch != self.epoch:
            return  # another did it too, and all went on
        Trip(
            self.world,
            self,
            self.world.mutation.errand(range(self.world.num_ranges), push=Apply(epoch, lease)),
            None,
            lambda _: self._pushed(lease),
            lambda: self.epoch != epoch,
        )

    def _pushed(self, lease: int) -> None:
        self._at = (-1, -1)
        self.hand.finish(lease)
        self._report()
        self._next()

    def load_of(self, origin: int) -> Load:
        return Load(origin, origin > 1, epoch=self.epoch, prefix=self.hand.settled)


class Stepper:
    """A worker of the crew: what it has applied, and the commit of that."""

    def __init__(self, world: ServingWorld, name: str) -> None:
        self.name = name
        self.alive = True
        self.view = View(world)
        self.applied = 0
        self.settling: Commit | None = None
        self.is_through = False  # and has seen the last step

    def load_of(self, origin: int) -> Load:
        return Load(origin, origin > 1, step=self.applied)


class Crew:
    """Steps together, as the plans of `control` let workers step: all stage, all meet in the header; who saw it
    complete applies, commits and pulls. After a death, whoever lives goes on from the one that is ahead."""

    def __init__(self, world: ServingWorld) -> None:
        self.world = world
        self.generation = 0
        self.sizes: dict[int, int] = {}  # how many workers each generation has
        self.members: list[Stepper] = []
        self._waiting: list[Stepper] = []
        self._met: dict[int, int] = {}  # how many have staged each step
        self._is_fenced = True
        world.after(0.1, self._regroup)

    @property
    def living(self) -> list[Stepper]:
        return [one for one in self.members if one.alive]

    @property
    def is_through(self) -> bool:
        return bool(self.living) and not self._waiting and all(one.is_through for one in self.living)

    def join(self, name: str) -> None:
        self._waiting.append(Stepper(self.world, name))
        self._fence()

    def kill(self, one: Stepper) -> None:
        one.alive = False
        self._fence()

    def _fence(self) -> None:
        """Somebody died or comes: it takes a moment until all know."""
        if not self._is_fenced:
            self._is_fenced = True
            self.generation += 1
            self.world.after(COMPUTE_S * self.world.random.random(), self._regroup)

    def _regroup(self) -> None:
        self._is_fenced = False
        self.generation += 1
        survivors = self.living
        ahead = max(survivors, key=lambda one: one.applied, default=None)
        self.members = [*survivors, *self._waiting]
        self.sizes[self.generation] = len(self.members)
        self._waiting, self._met = [], {}
        for one in self.members:
            if ahead is not None and one.applied < ahead.applied:
                one.applied, one.settling = ahead.applied, ahead.settling
        for rank in range(len(self.members)):
            self._take_leave(rank)

    def _take_leave(self, rank: int) -> None:
        """Of the generations before: what they left half done is completed, and nothing more comes of them."""
        one, generation = self.members[rank], self.generation
        numbers = range(self.world.num_ranges)
        settling = msgspec.structs.replace(one.settling, by=generation) if one.settling is not None else None
        errand = self.world.mutation.errand(numbers, commit=settling, push=Fence(generation, one.applied + 1))

        def fenced(_: Logs) -> None:
            if errand.counted is None:
                self._begin(rank)
                return
            counted = msgspec.structs.replace(errand.counted, by=generation)
            completing = self.world.mutation.errand(numbers, commit=counted)
            Trip(self.world, one, completing, None, lambda _: self._begin(rank), is_over)

        def is_over() -> bool:
            return generation != self.generation

        Trip(self.world, one, errand, None, fenced, is_over)

    def _begin(self, rank: int) -> None:
        """Compute and stage the next step."""
        one, generation = self.members[rank], self.generation
        if not one.alive:
            return
        if one.applied >= self.world.num_steps:
            self._end(one)
            return
        step = one.applied + 1

        def stage() -> None:
            if one.alive and generation == self.generation:
                push = Stage(generation, step, rank)
                errand = self.world.mutation.errand(range(self.world.num_ranges), push=push)
                parcel = (generation, one.name)
                Trip(self.world, one, errand, parcel, staged, lambda: generation != self.generation)

        def staged(_: Logs) -> None:
            self._met[step] = self._met.get(step, 0) + 1
            if self._met[step] == len(self.members):
                for other in range(len(self.members)):  # the header is complete; not all see that at once
                    seconds = 0.03 * self.world.random.random()
                    self.world.after(seconds, functools.partial(self._agreed, other, generation, step))

        self.world.after(COMPUTE_S * self.world.random.random(), stage)

    def _end(self, one: Stepper) -> None:
        def seen(logs: Logs) -> None:
            self.world.checks.seen_after_step(one.applied, logs)
            one.is_through = True

        need = Need(step=one.applied)
        errand = self.world.mutation.errand(range(self.world.num_ranges), commit=one.settling, pull=need)
        Trip(self.world, one, errand, None, seen, lambda: False)

    def _agreed(self, rank: int, generation: int, step: int) -> None:
        if generation != self.generation or not self.members[rank].alive:
            return  # fenced: it has promised to apply nothing more here
        one = self.members[rank]
        one.applied = step
        one.settling = Commit(generation, step, len(self.members), 1.0)

        def pulled(seen: Logs) -> None:
            self.world.checks.seen_after_step(step, seen)
            if generation == self.generation:
                self._begin(rank)

        # What is agreed is committed, also when the generation is over meanwhile.
        errand = self.world.mutation.errand(range(self.world.num_ranges), commit=one.settling, pull=Need(step=step))
        Trip(self.world, one, errand, None, pulled, lambda: False)
        self.world.faults.agreed(one)
