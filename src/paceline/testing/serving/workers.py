"""Workers of the simulation: those that do leases, and a crew that does steps together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.control.lease_set import LeaseSet
from paceline.control.leases import Hand, LeaseGrant
from paceline.server.errand import Errand
from paceline.server.keeper import Outcome
from paceline.server.messages import Apply, Commit, Load, Need, Refusal, Stage

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld

RETRY_S = 0.02


class Trip:
    """An errand with its messages: asks until it is done, or `is_over`."""

    def __init__(
        self,
        world: ServingWorld,
        errand: Errand,
        parcel: Any,
        then: Callable[[dict[int, Any]], None],
        is_over: Callable[[], bool],
    ) -> None:
        self._world = world
        self._errand = errand
        self._parcel = parcel
        self._then = then
        self._is_over = is_over
        self._pulled: dict[int, Any] = {}
        self._ended = False
        self._ask()

    def _has_ended(self) -> bool:
        self._ended = self._ended or self._is_over()
        return self._ended

    def _ask(self) -> None:
        if self._has_ended():
            return
        for server, request in self._errand.requests(self._world.placement).items():
            self._world.request(server, request, self._parcel, self._take, self._lose)
        self._world.after(RETRY_S, self._ask)

    def _take(self, server: str, outcome: Outcome) -> None:
        if self._has_ended():
            return
        self._pulled.update(outcome.parcel or {})
        self._errand.answered(server, outcome.answer)
        if Refusal.STALE in outcome.answer.pushed.values():
            self._ended = True
        elif self._errand.is_done:
            self._ended = True
            self._then(self._pulled)
        self._load_what_is_empty()

    def _load_what_is_empty(self) -> None:
        empty = [number for number, refusal in self._errand.refusals.items() if refusal is Refusal.EMPTY]
        if empty:
            self._world.load(empty)

    def _lose(self, server: str) -> None:
        if not self._ended:
            self._errand.lost(server)


class LeaseWorker:
    """Pulls, computes, pushes: one lease after the other."""

    def __init__(self, world: ServingWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.is_through = False
        self.hand = Hand(name)
        self.slowness = world.random.choice([1.0, 1.0, 4.0])
        self._epoch = -1
        self._open(world.chief.epoch)
        world.after(world.random.random() * 0.1, self._beat)

    def _open(self, epoch: int) -> None:
        self._epoch = epoch
        self.hand.open(epoch, self.world.num_leases, LeaseSet())
        self._next()

    def _beat(self) -> None:
        if self.alive and not self.is_through:
            self._report()
            self.world.after(0.1, self._beat)

    def _report(self) -> None:
        report = self.hand.report()
        self.world.to_chief(lambda: self.world.chief.hear_worker(report))

    def hear(self, grant: LeaseGrant) -> None:
        if not self.alive:
            return
        self.hand.hear(grant)
        if self.hand.is_finished and self.hand.epoch == self._epoch:
            if self._epoch + 1 < self.world.num_epochs:
                self._open(self._epoch + 1)
            else:
                self.is_through = True
        elif self.hand.start() >= 0:
            self._next()

    _at = (-1, -1)

    def _next(self) -> None:
        lease = self.hand.start()
        if not self.alive or lease < 0 or self._at == (self._epoch, lease):
            return
        self._at = (self._epoch, lease)
        self._pull(lease)

    def _pull(self, lease: int) -> None:
        settled = self.hand.settled
        prefix = max(0, lease - self.world.bound) if self.world.bound >= 0 else 0
        Trip(
            self.world,
            Errand(range(self.world.num_ranges), pull=Need(0, self._epoch, prefix, settled)),
            None,
            lambda seen: self._compute(lease, seen),
            lambda: self._gives_way(lease, settled),
        )

    def _gives_way(self, lease: int, settled: int) -> bool:
        """Whether this is no longer what this worker waits for: a lower lease has come, or more is known to be done."""
        if not self.alive or self._at != (self._epoch, lease):
            return True
        if self.hand.has_lower():
            self.hand.put_back()
            self._next()
            return True
        if self.hand.settled > settled and self.world.has_lost:
            self._pull(lease)
            return True
        return False

    def _compute(self, lease: int, seen: dict[int, Any]) -> None:
        epoch = self._epoch
        self.world.check_seen(epoch, lease, seen)
        self.world.after(self.slowness * 0.05 * self.world.random.random(), lambda: self._push(epoch, lease))

    def _push(self, epoch: int, lease: int) -> None:
        if epoch != self._epoch:
            return  # another did it too, and all went on
        Trip(
            self.world,
            Errand(range(self.world.num_ranges), push=Apply(epoch, lease)),
            None,
            lambda _: self._pushed(epoch, lease),
            lambda: not self.alive or self._epoch != epoch,
        )

    def _pushed(self, epoch: int, lease: int) -> None:
        self.world.acknowledged.add((epoch, lease))
        self.hand.finish(lease)
        self._report()
        self._next()

    def die(self) -> None:
        self.alive = False


class Stepper:
    """A worker of the crew: what it has applied, and how far it is in the step under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.applied = 0
        self.settling: Commit | None = None
        self.generation = 0
        self.has_staged = False


class Crew:
    """Steps together, as the plans of `control` let workers step: all stage, all meet in the header; who saw it
    complete applies, commits and pulls. After a death, whoever lives goes on from the one that is ahead."""

    def __init__(self, world: ServingWorld) -> None:
        self.world = world
        self.generation = 0
        self.members: list[Stepper] = []
        self.waiting: list[Stepper] = []
        self._is_fenced = True
        world.after(0.1, self._regroup)

    @property
    def alive(self) -> list[Stepper]:
        return [one for one in self.members if one.alive]

    @property
    def is_through(self) -> bool:
        return bool(self.alive) and all(one.applied >= self.world.num_steps for one in self.alive)

    def join(self, name: str) -> None:
        self.waiting.append(Stepper(name))
        self._fence()

    def kill(self, one: Stepper) -> None:
        one.alive = False
        self._fence()

    def _fence(self) -> None:
        """Somebody died or comes: it takes a moment until all know."""
        if not self._is_fenced:
            self._is_fenced = True
            self.generation += 1
            self.world.after(0.05 * self.world.random.random(), self._regroup)

    def _regroup(self) -> None:
        self._is_fenced = False
        self.generation += 1
        survivors = self.alive
        ahead = max(survivors, key=lambda one: one.applied, default=None)
        self.members = [*survivors, *self.waiting]
        self.waiting = []
        for one in self.members:
            if ahead is not None and one.applied < ahead.applied:
                one.applied, one.settling = ahead.applied, ahead.settling
            one.generation, one.has_staged = self.generation, False
        self._met: dict[int, int] = {}
        for rank in range(len(self.members)):
            self._begin(rank)

    def _is_over(self, one: Stepper, generation: int) -> bool:
        return not one.alive or generation != self.generation

    def _begin(self, rank: int) -> None:
        """Compute and stage the next step."""
        one, generation = self.members[rank], self.generation
        if not one.alive or one.applied >= self.world.num_steps:
            return
        step = one.applied + 1
        size = len(self.members)

        def staged(_: dict[int, Any]) -> None:
            self._met[step] = self._met.get(step, 0) + 1
            if self._met[step] == size:
                for other in range(size):  # the header is complete; not all see that at once
                    delay = 0.03 * self.world.random.random()
                    self.world.after(delay, lambda rank=other: self._agreed(rank, generation, step, size))

        def stage() -> None:
            if not self._is_over(one, generation):
                push = Stage(generation, step, rank)
                errand = Errand(range(self.world.num_ranges), commit=one.settling, push=push)
                Trip(self.world, errand, f"{one.name}@{step}", staged, lambda: self._is_over(one, generation))

        self.world.after(0.05 * self.world.random.random(), stage)

    def _agreed(self, rank: int, generation: int, step: int, size: int) -> None:
        if generation != self.generation or not self.members[rank].alive:
            return  # fenced: it has promised to apply nothing more here
        one = self.members[rank]
        one.applied = step
        one.settling = Commit(generation, step, size, 1.0)
        self.world.acknowledged.add((generation, step))

        def pulled(seen: dict[int, Any]) -> None:
            self.world.check_stepped(step, seen)
            if generation == self.generation:
                self._begin(rank)

        # What is agreed is committed, also when the generation is over meanwhile.
        Trip(
            self.world,
            Errand(range(self.world.num_ranges), commit=one.settling, pull=Need(step=step)),
            None,
            pulled,
            lambda: not one.alive,
        )


def load_of(world: ServingWorld, origin: int) -> Load:
    """What a worker loads an empty range with: what is known to count."""
    done = world.chief.desk.done
    beyond = tuple(sorted(done.beyond))
    return Load(
        origin, origin > 1, step=world.settled_step(), epoch=max(done.epoch, 0), prefix=done.prefix, beyond=beyond
    )
