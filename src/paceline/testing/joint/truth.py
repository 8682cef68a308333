"""What must hold in every schedule, checked after every event that could break it."""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.messages.plan import Plan, PlanStart
from paceline.server.messages import CommitStep

__all__ = ["Log", "OperationResult", "SimulatedBatch", "SimulatedState", "Truth", "Violation", "after"]

Log = tuple[tuple[Any, ...], ...]


class Violation(AssertionError):
    """Something that must hold does not."""


class SimulatedBatch(NamedTuple):
    epoch: int
    position: int
    num_samples: int


class SimulatedState(NamedTuple):
    """A member's training state. `body` stands for what loop bodies do: schedules, counters, the user's own values.
    Where servers have the parameters, `steps` were made there, `settling` is the commit of the last one, and `leases`
    is what a checkpoint has of each range: what is applied to it, and the record of that."""

    lineage: int
    applied: int
    epoch: int
    position: int
    digest: int
    body: int
    steps: int = 0
    settling: CommitStep | None = None
    leases: tuple[tuple[Log, LeaseSet], ...] = ()


class OperationResult(NamedTuple):
    """What an operation came to: enough to apply it."""

    operation: int
    generation: int
    batch: SimulatedBatch | None
    stopping: bool
    commit: CommitStep | None = None


class Whole(NamedTuple):
    """What a newcomer gets: a state, and what the last operation came to, so that it can give that to one behind. None
    where the run was founded with this state."""

    state: SimulatedState
    last: OperationResult | None


def after(state: SimulatedState, result: OperationResult) -> SimulatedState:
    """The state when a result is applied to it; the loop body has not run yet."""
    digest = hash((state.digest, result.operation, result.generation, *(result.batch or ())))
    position = state.position + (result.batch.num_samples if result.batch else 0)
    steps = state.steps + (result.batch is not None)
    settling = result.commit or state.settling
    return state._replace(applied=result.operation, digest=digest, position=position, steps=steps, settling=settling)


class Truth:
    def __init__(self, length: int) -> None:
        self.length = length
        self.plans: dict[int, Plan] = {}
        self._digests: dict[tuple[int, int], int] = {}
        self._bodies: dict[tuple[int, int], int] = {}
        self._settled: dict[int, int] = {}
        self._batches: dict[tuple[int, int], SimulatedBatch] = {}
        self._bases: dict[int, tuple[int, int]] = {}  # the lineage that a lineage goes on from, and where
        self._agreements: dict[tuple[int, int], int] = {}
        self.checkpoints: list[SimulatedState] = []

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    def issued(self, plan: Plan) -> None:
        """A member takes a plan for good."""
        if plan.generation in self.plans:
            known = self.plans[plan.generation]
            self.check(known == plan, f"generation {plan.generation} was used for two plans")
            return
        self.plans[plan.generation] = plan
        if plan.start is not PlanStart.RECOVER:
            return
        lineage = self.lineage_of(plan.generation)
        settled = self._settled.get(lineage, -1)
        self.check(plan.base >= settled, f"plan {plan.generation} starts after {plan.base}, but {settled} was settled")
        for key in [key for key in self._digests if key[0] == lineage and key[1] > plan.base]:
            del self._digests[key]  # applied by members that are gone, counted by nobody
            self._batches.pop(key, None)

    def lineage_of(self, generation: int) -> int:
        """The generation that founded it."""
        return max(
            number for number, plan in self.plans.items() if plan.start is PlanStart.FOUND and number <= generation
        )

    def founded(self, lineage: int, state: SimulatedState) -> None:
        if state.lineage:
            self._bases[lineage] = (state.lineage, state.applied)

    def applied(self, who: str, state: SimulatedState, result: OperationResult) -> None:
        """A member that counts has applied an operation."""
        key = (state.lineage, state.applied)
        known = self._digests.setdefault(key, state.digest)
        self.check(known == state.digest, f"{who} differs from the others after operation {state.applied}")
        if result.batch is not None:
            self._batches[key] = result.batch

    def applied_apart(self, state: SimulatedState, result: OperationResult) -> None:
        """One that was given up, and has not heard of it, has applied an operation. It counts if a checkpoint of it is
        what the run goes on from: its coordinator may be dead, and the others may have left."""
        if result.batch is not None:
            self._batches.setdefault((state.lineage, state.applied), result.batch)

    def settled(self, who: str, lineage: int, operation: int, digest: int | None) -> None:
        """A member takes an operation for final."""
        self._settled[lineage] = max(self._settled.get(lineage, -1), operation)
        known = self._digests.get((lineage, operation))
        if digest is not None and known is not None:
            self.check(known == digest, f"{who} settled operation {operation}, but another result of it counts")

    def agreed(self, who: str, generation: int, operation: int, next_generation: int) -> None:
        """All that complete an operation learn the same from its header."""
        known = self._agreements.setdefault((generation, operation), next_generation)
        self.check(
            known == next_generation,
            f"{who} agreed to {next_generation} in operation {operation} of {generation}, another to {known}",
        )

    def at_clean_point(self, who: str, state: SimulatedState) -> None:
        known = self._bodies.setdefault((state.lineage, state.applied), state.body)
        self.check(known == state.body, f"{who}: loop bodies ran differently before operation {state.applied + 1}")

    def published(self, who: str, state: SimulatedState) -> None:
        """A checkpoint is there for good: it must be of the one history."""
        self.settled(who, state.lineage, state.applied, state.digest)
        self.checkpoints.append(state)

    def left_behind(self, who: str, state: SimulatedState) -> None:
        """The run may go on from this: it has all that was final, and nothing that is not of the one history."""
        settled = self._settled.get(state.lineage, -1)
        self.check(state.applied >= settled, f"{who} left {state.applied} behind, but {settled} was settled")
        known = self._digests.get((state.lineage, state.applied), state.digest)
        self.check(known == state.digest, f"{who} left another operation {state.applied} behind than counts")

    def ended(self, lineage: int, operation: int) -> None:
        """Per epoch the committed samples are the data, each once."""
        batches: dict[int, SimulatedBatch] = {}
        number = operation
        while lineage:
            parent, base = self._bases.get(lineage, (0, 0))
            for (owner, op), batch in self._batches.items():
                if owner == lineage and base < op <= number:
                    batches[op] = batch
            lineage, number = parent, base
        seen: dict[int, int] = {}
        for op in sorted(batches):
            batch = batches[op]
            at = seen.get(batch.epoch, 0)
            self.check(batch.position == at, f"operation {op} took {batch}, but epoch {batch.epoch} stood at {at}")
            seen[batch.epoch] = at + batch.num_samples
        for epoch, count in seen.items():
            is_last = epoch == max(seen)
            self.check(count == self.length or is_last, f"epoch {epoch} has {count} samples of {self.length}")
