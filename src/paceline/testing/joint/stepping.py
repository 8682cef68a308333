"""Steps whose gradients are staged on servers, and made there when the header says that they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from paceline.control.machines.member_events import DoOperation
from paceline.server.messages import CommitStep, Fence, Need, StageStep
from paceline.testing.joint.trips import Logs, Trip

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World


class Stepping:
    def __init__(self, world: World, worker: SimulatedWorker) -> None:
        self._world = world
        self._worker = worker
        self._generation = 0  # that the servers were told of
        self.making: CommitStep | None = None  # the step that counts, and that servers may not have made yet
        self.makes_since = 0.0

    def prepare(self, work: DoOperation, then: Callable[[DoOperation], None]) -> None:
        """A group is bound: what earlier generations left half done is completed, and nothing more comes of them."""
        world, worker, generation = self._world, self._worker, work.plan.generation
        if self._generation == generation:
            then(work)
            return
        numbers = range(world.num_ranges)
        settling = worker.state.settling
        if settling is not None:
            settling = msgspec.structs.replace(settling, by=generation)
        errand = world.mutation.errand(numbers, commit=settling, push=Fence(generation, worker.state.steps + 1))

        def is_over() -> bool:
            return not worker.is_current(work)

        def bound(_: Logs) -> None:
            self._generation = generation
            then(work)

        def fenced(_: Logs) -> None:
            if errand.counted is None:
                bound({})
                return
            counted = msgspec.structs.replace(errand.counted, by=generation)
            Trip(world, worker, world.mutation.errand(numbers, commit=counted), None, bound, is_over)

        Trip(world, worker, errand, None, fenced, is_over)

    def stage(self, work: DoOperation, step: int, then: Callable[[DoOperation], None]) -> None:
        world, worker = self._world, self._worker
        plan = work.plan
        errand = world.mutation.errand(
            range(world.num_ranges), push=StageStep(plan.generation, step, plan.rank_of(worker.name))
        )
        parcel = (plan.generation, worker.name)
        Trip(world, worker, errand, parcel, lambda _: then(work), lambda: not worker.is_current(work))

    def commit(self, commit: CommitStep, then: Callable[[], None]) -> None:
        """What is agreed is committed, also when the generation is over meanwhile."""
        world, worker = self._world, self._worker

        self.making, self.makes_since = commit, world.now

        def pulled(logs: Logs) -> None:
            self.making = None
            world.checks.seen_after_step(commit.step, logs)
            then()

        errand = world.mutation.errand(range(world.num_ranges), commit=commit, pull=Need(step=commit.step))
        Trip(world, worker, errand, None, pulled)
        world.faults.agreed(worker)
