"""Groups as the members see them: all complete an operation or, when one is lost, some and not others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.control.machines.member_events import (
    Give,
    GroupBroke,
    GroupFormed,
    GroupNotFormed,
    OperationDone,
    OperationKind,
    Take,
)
from paceline.control.messages.plan import Plan
from paceline.testing.joint.models import ModelAgreement
from paceline.testing.joint.truth import OperationResult, Violation, Whole

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World

FORMING_S = 2.0


class SimulatedGroup:
    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self.plan = plan
        self._names = dict.fromkeys(plan.members)  # a set whose order does not depend on the process
        self._arrived: set[str] = set()
        self._formed: set[str] = set()
        self._failed: dict[str, tuple[str, ...]] = {}  # members that found the group broken
        self._gone: dict[str, bool] = {}  # members that left it, and whether by dying
        self._entered: dict[int, dict[str, tuple[int, bool]]] = {}
        self._kinds: dict[int, OperationKind] = {}
        self._waiting: dict[str, int] = {}
        self._gifts: dict[str, Whole | OperationResult] = {}
        self._takers: dict[str, Take] = {}
        self._agreement = ModelAgreement(world, plan)

    # -- forming -----------------------------------------------------------------------------------------------------

    def arrive(self, worker: SimulatedWorker) -> None:
        self._arrived.add(worker.name)
        self._world.after(FORMING_S, self._give_up, worker)
        cut_off = [name for name in self._names if self._world.is_cut(worker.name, name)]
        if cut_off:
            self._fail_forming(worker, tuple(cut_off))
        elif self._gone:
            self._fail_forming(worker, tuple(name for name, died in self._gone.items() if died))
        elif len(self._arrived) == len(self._names):
            self._agreement.settle()
            for name in self._names:
                self._world.after(self._world.delay(), self._form, self._world.workers[name])

    def _give_up(self, worker: SimulatedWorker) -> None:
        if worker.name not in self._formed:
            self._fail_forming(worker, tuple(name for name in self._names if name not in self._arrived))

    def _form(self, worker: SimulatedWorker) -> None:
        if worker.name in self._gone or worker.name in self._failed:
            return
        if self._gone and self._world.random.random() < 0.5:
            self._fail_forming(worker, tuple(name for name, died in self._gone.items() if died))
            return
        self._formed.add(worker.name)
        self._agreement.formed(worker)
        worker.post(GroupFormed(self.plan.generation))

    def _fail_forming(self, worker: SimulatedWorker, suspects: tuple[str, ...]) -> None:
        if worker.name not in self._failed and worker.name not in self._gone:
            self._failed[worker.name] = suspects
            self.leave(worker.name, died=False)
            self._world.after(self._world.delay(), worker.post, GroupNotFormed(self.plan.generation, suspects))

    # -- operations --------------------------------------------------------------------------------------------------

    def enter(self, worker: SimulatedWorker, operation: int, kind: OperationKind, held: int, stopping: bool) -> None:
        """All members do the same operation, of the same kind, or the group does not agree."""
        self._agreement.check()
        known = self._kinds.setdefault(operation, kind)
        if known is not kind:
            raise Violation(f"{worker.name} comes to operation {operation} with {kind}, another with {known}")
        for name, other in self._waiting.items():
            is_complete = len(self._entered.get(other, {})) == len(self._names)
            if other != operation and name not in self._gone and not is_complete:
                raise Violation(f"{worker.name} is in operation {operation} while {name} is in {other}")
        self._waiting[worker.name] = operation
        cut_off = tuple(name for name in self._names if self._world.is_cut(worker.name, name))
        if self._gone or cut_off:
            dead = tuple(name for name, died in self._gone.items() if died)
            self._break(worker, cut_off or dead)
            return
        rows = self._entered.setdefault(operation, {})
        rows[worker.name] = (held, stopping)
        if len(rows) == len(self._names):
            held_by_rank = tuple(rows[name][0] for name in self.plan.members)
            done = OperationDone(self.plan.generation, operation, held_by_rank, any(flag for _, flag in rows.values()))
            self._world.faults.operation_completes()
            for name in self._names:
                self._world.after(self._world.delay(), self._complete, self._world.workers[name], done)

    @property
    def is_delivering(self) -> bool:
        """Whether all have come to an operation that one of them has not heard the end of yet."""
        return any(len(self._entered.get(one, {})) == len(self._names) for one in self._waiting.values())

    def _complete(self, worker: SimulatedWorker, done: OperationDone) -> None:
        if self._waiting.get(worker.name) != done.operation or worker.name in self._gone:
            return
        if self._gone and self._world.random.random() < 0.5:
            self._break(worker, tuple(name for name, died in self._gone.items() if died))
            return
        del self._waiting[worker.name]
        worker.post(done)

    def _break(self, worker: SimulatedWorker, suspects: tuple[str, ...]) -> None:
        self._waiting.pop(worker.name, None)
        self.leave(worker.name, died=False)
        self._world.after(self._world.delay(), worker.post, GroupBroke(self.plan.generation, suspects))

    def leave(self, name: str, *, died: bool) -> None:
        """A member dropped the group, or died: who waits for it finds out, unless it has all it needs."""
        if name in self._gone or name not in self._names:
            return
        self._gone[name] = died
        if died:
            self._tell_neighbours(name)
        suspects = (name,) if died else ()
        for other in [name for name in self._names if name not in self._gone]:
            worker = self._world.workers[other]
            rows = self._entered.get(self._waiting.get(other, -1), {})
            is_complete = len(rows) == len(self._names)
            if other in self._waiting and not is_complete:
                self._world.after(self._world.delay(), self._notice, worker, suspects)
            elif other in self._arrived and other not in self._formed and len(self._arrived) != len(self._names):
                self._world.after(self._world.delay(), self._fail_forming, worker, suspects)
            elif other in self._takers:
                self._world.after(self._world.delay(), self._notice, worker, suspects)

    def _tell_neighbours(self, name: str) -> None:
        """The kernel tells whoever is on the host of a dead member, whatever it is at; mostly, and mostly first."""
        for other in [other for other in self._names if other in self._formed and other != name]:
            worker = self._world.workers[other]
            if worker.host == self._world.workers[name].host and self._world.random.random() < 0.7:
                told = GroupBroke(self.plan.generation, (name,), died=True)
                self._world.after(self._world.random.uniform(0.0, 0.002), worker.post, told)

    def _notice(self, worker: SimulatedWorker, suspects: tuple[str, ...]) -> None:
        if worker.name not in self._gone:
            self._break(worker, suspects)

    # -- gifts -------------------------------------------------------------------------------------------------------

    def give(self, action: Give, gift: Whole | OperationResult) -> None:
        self._gifts[action.to] = gift
        self._try_handover(action.to)

    def take(self, worker: SimulatedWorker, action: Take) -> None:
        self._takers[worker.name] = action
        if self._gone:
            self._world.after(self._world.delay(), self._notice, worker, ())
        self._try_handover(worker.name)

    def _try_handover(self, name: str) -> None:
        if name in self._gifts and name in self._takers:
            self._world.after(self._world.delay() * 6, self._arrive_whole, self._world.workers[name])

    def _is_sound(self, worker: SimulatedWorker) -> bool:
        take = self._takers.get(worker.name)
        return take is not None and worker.name not in self._gone and take.source not in self._gone

    def _arrive_whole(self, worker: SimulatedWorker) -> None:
        if not self._is_sound(worker):
            late = self._gifts[worker.name]
            if worker.name in self._takers and isinstance(late, Whole) and self._world.random.random() < 0.5:
                # It had arrived, and is noticed when the plan is over.
                self._world.after(self._world.random.random(), worker.staged, self.plan.generation, late)
            return
        del self._takers[worker.name]
        gift = self._gifts[worker.name]
        if isinstance(gift, Whole):
            worker.staged(self.plan.generation, gift)
        else:
            worker.caught(self.plan.generation, gift)
