"""A worker's loop over leases: pulls, computes, pushes, one lease after the other, with the real `Hand`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseGrant
from paceline.control.machines.member_events import DoOperation, Looping
from paceline.server.applied import AppliedLeases
from paceline.server.messages import ApplyLease, Load, Need
from paceline.testing.joint.trips import Logs, Trip
from paceline.testing.joint.truth import Log

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World

COMPUTE_S = 0.05


class Leasing:
    def __init__(self, world: World, worker: SimulatedWorker) -> None:
        self._world = world
        self._worker = worker
        self.holder = world.mutation.holder(worker.name)
        self.is_open = False
        self.is_stopped = False
        self.is_busy = False  # a lease is computed or pushed
        self._applied = AppliedLeases()
        self.asks_since = -1.0  # when the errand to the servers began that it waits for; negative in none
        self._at = (-1, -1)  # the epoch and lease that it does, or pulls for
        self._slowness = world.random.choice([1.0, 1.0, 4.0])

    @property
    def epoch(self) -> int:
        return self.holder.epoch

    def begin(self) -> None:
        worker, world = self._worker, self._world
        epoch = worker.state.epoch
        worker.post(Looping())
        self.holder.open(epoch, world.num_leases, self._begun(epoch), 1, world.num_leases)
        self.is_open = True
        self._at, self.asks_since = (-1, -1), -1.0
        worker.speak()

    def _begun(self, epoch: int) -> LeaseSet:
        """The leases of an epoch that every range has in the checkpoint that the run began with."""
        records = [done for _, done in self._worker.state.leases]
        if not records:
            return LeaseSet(epoch)
        begun = records[0].copy()
        for done in records[1:]:
            begun = begun.meet(done)
        return begun if begun.epoch == epoch else LeaseSet(epoch)

    def speak(self) -> None:
        if self.holder.epoch >= 0:
            self._worker.line.say(self.holder.report())

    def hear(self, grant: LeaseGrant) -> None:
        self.holder.hear(grant)
        self._look()

    # -- one lease after the other -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Between two leases."""
        worker, holder = self._worker, self.holder
        if not self.is_open or self.is_busy or worker.leave_if_told():
            return
        if worker.machine.leaving and not holder.is_leaving:
            holder.is_leaving = True
            self.speak()
        if holder.is_finished or holder.is_stopped:
            self.is_open = False
            self.is_stopped = not holder.is_finished
            self._at, self.asks_since = (-1, -1), -1.0
            self._world.after(0.0, worker.receive, worker.advance)
            return
        if self.asks_since >= 0:
            return  # it waits for a pull, and does nothing else meanwhile
        self._save_if_due()
        lease = holder.start()
        if lease >= 0 and self._at != (holder.epoch, lease):
            self._at = (holder.epoch, lease)
            self._pull(lease)

    def _pull(self, lease: int) -> None:
        world, holder = self._world, self.holder
        prefix = max(0, lease - world.bound) if world.bound >= 0 else 0
        need = Need(0, holder.epoch, prefix, holder.settled)
        errand = world.mutation.errand(range(world.num_ranges), pull=need, notes=True)
        self.asks_since = world.now

        def pulled(seen: Logs) -> None:
            self._applied.took(errand.records)
            self._applied.rely_on(need)
            self._compute(lease, seen)

        def gives_way() -> bool:
            errand.settle(holder.settled)
            if self._at != (holder.epoch, lease) or self.is_busy:
                return True
            if holder.gives_way():
                self._at = (-1, -1)
                self.asks_since = -1.0
                world.after(0.0, self._worker.receive, self._look)
                return True
            return False

        Trip(world, self._worker, errand, None, pulled, gives_way)

    def _compute(self, lease: int, seen: Logs) -> None:
        epoch = self.holder.epoch
        self.is_busy = True
        self.asks_since = -1.0
        self._world.checks.seen_before_lease(epoch, lease, seen)
        seconds = self._slowness * COMPUTE_S * self._world.random.random()
        self._worker.later(seconds, self._push, epoch, lease)

    def _push(self, epoch: int, lease: int) -> None:
        world = self._world
        errand = world.mutation.errand(range(world.num_ranges), push=ApplyLease(epoch, lease), pull=Need(), notes=True)
        self.asks_since = world.now

        def pushed(seen: Logs) -> None:
            world.checks.seen(seen)
            self._applied.took(errand.records)
            self._pushed(lease)

        Trip(world, self._worker, errand, None, pushed, self._is_broken_off, is_lease=True)

    def _is_broken_off(self) -> bool:
        """Whether it is told to go while servers do not answer."""
        worker = self._worker
        if worker.machine.is_dismissed:
            self.is_busy = False
            self._world.after(0.0, worker.receive, worker.leave_if_told)
            return True
        return False

    def _pushed(self, lease: int) -> None:
        self._at = (-1, -1)
        self.is_busy = False
        self.asks_since = -1.0
        self.holder.finish(lease)
        self.speak()
        self._look()

    def refresh(self, work: DoOperation, then: Callable[[DoOperation], None]) -> None:
        """Have the newest parameters, after all leases of the epoch."""
        world, worker = self._world, self._worker
        epoch, count = worker.state.epoch, world.num_leases
        self.asks_since = world.now

        def seen(logs: Logs) -> None:
            self.asks_since = -1.0
            world.checks.seen_after_epoch(epoch, logs)
            then(work)

        def is_over() -> bool:
            if not worker.is_current(work):
                self.asks_since = -1.0
                return True
            return False

        errand = world.mutation.errand(range(world.num_ranges), pull=Need(0, epoch, count, count))
        Trip(world, worker, errand, None, seen, is_over)

    # -- checkpoints, and what was lost ------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        """All of a range from one answer of its server: what is applied to it, and the record of that."""
        world, worker = self._world, self._worker
        if not worker.is_main or world.random.random() > 0.1:
            return
        state, epoch = worker.state, self.holder.epoch
        errand = world.mutation.errand(
            range(world.num_ranges), pull=Need(0, epoch, 0, self.holder.settled), exports=True
        )

        def saved(logs: Logs) -> None:
            found = []
            for number in range(world.num_ranges):
                record = errand.records[number]
                found.append((logs[number], LeaseSet(record.epoch, record.prefix, set(record.beyond))))
            world.truth.checkpoints.append(state._replace(leases=tuple(found), epoch=epoch))

        Trip(world, worker, errand, None, saved, lambda: self.holder.epoch != epoch)

    def load_of_lost(self, number: int, origin: int) -> tuple[Load, Log]:
        done = self._applied.to(number)
        load = Load(origin, True, epoch=done.epoch, prefix=done.prefix, beyond=tuple(sorted(done.beyond)))
        return load, (("since", origin, -1),)
