"""A process that trains: the real `Member` machine, and a script of operations that it goes through.

In each mode the script is that of a user: steps, validation, decisions, the end. What a step is differs: an operation
of the group alone, one whose gradients are staged on servers (`stepping`), or leases with no step at all (`leasing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, assert_never

from paceline.collective.choice import ModelShelf
from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseGrant
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import (
    Action,
    AdoptPlacement,
    ApplyOperation,
    Begin,
    Burden,
    Caught,
    DoOperation,
    Drop,
    Event,
    Exit,
    Fail,
    FormGroup,
    FoundRun,
    Give,
    Leave,
    Looked,
    MemberReady,
    OperationDone,
    OperationKind,
    Reach,
    SendReport,
    StateStaged,
    Surveyed,
    SwapState,
    Take,
)
from paceline.control.messages.members import Introduction, Verdict
from paceline.control.messages.plan import NOTHING, Phase
from paceline.placement.placement import Placement
from paceline.server.messages import CommitStep, Load
from paceline.testing.joint.leasing import Leasing
from paceline.testing.joint.processes import SimulatedProcess
from paceline.testing.joint.stepping import Stepping
from paceline.testing.joint.trips import Loading
from paceline.testing.joint.truth import Log, OperationResult, SimulatedBatch, SimulatedState, Whole, after
from paceline.wire.card import Card

if TYPE_CHECKING:
    from paceline.testing.joint.world import World

HEARTBEAT_S = 0.4
ORPHAN_S = 6.0


class SimulatedWorker(SimulatedProcess):
    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        super().__init__(world, name, host, pid)
        self.machine: Member = world.mutation.member(name)
        self.placement = Placement()
        self.models = ModelShelf()
        self.state = SimulatedState(0, -1, 0, 0, 0, 0)
        self.leasing = Leasing(world, self) if world.is_leased else None
        self.stepping = Stepping(world, self) if world.mode == "sync" else None
        self._loading = Loading(world, self)
        self._gift: Whole | OperationResult | None = None
        self._result: OperationResult | None = None
        self._last: OperationResult | None = None
        self._snapshot: SimulatedState | None = None
        self._script: Iterator[OperationKind | None] | None = None
        self._awaits_state = False
        self._work: DoOperation | None = None
        self._works_since = 0.0
        self._exit: Exit | None = None
        self._was_main = False
        self.is_orphaned = False  # it has given up, and saves what servers have
        world.after(world.random.uniform(0.01, 0.5), self.receive, self._build)

    # -- the process -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        world = self.world
        card = Card(self.name, "worker", self.host, ("", 0), "", b"", False, ())
        introduction = Introduction(
            card,
            self.pid,
            self.host,
            self.host,
            {"torch": "2"},
            ("w",),
            ranges=(1,) * world.num_ranges,
            leased=world.is_leased,
            slot=self.pid % 3,
        )
        self.line.connect()
        self.post(MemberReady(introduction, self._newest_checkpoint()))
        self._script = self._leases_and_operations() if world.is_leased else self._steps_and_operations()
        self.advance()
        self._beat()

    def _newest_checkpoint(self) -> int:
        return max((state.applied for state in self.world.truth.checkpoints), default=NOTHING)

    def _beat(self) -> None:
        if self.world.is_finished:
            return
        if self.world.halting.lost_at >= 0.0:
            self.world.halting.look(self)
        elif self.world.now - self.line.heard > ORPHAN_S:
            self.world.kill(self, "lost the coordinator")
        if not self.alive:
            return
        if self.machine.phase is Phase.READY:
            self.post(Looked(self._newest_checkpoint()))
        self.line.look()
        self.speak()
        self.later(HEARTBEAT_S, self._beat)

    def connected(self) -> None:
        if self.machine.phase is not Phase.BUILDING:
            self.receive(self.speak)

    def speak(self) -> None:
        self.line.say(self.machine.report())
        if self.leasing is not None:
            self.leasing.speak()

    def hear(self, kind: str, body: Any) -> None:
        if isinstance(body, LeaseGrant):
            assert self.leasing is not None
            self.leasing.hear(body)
        else:
            self._handle(body)

    def post(self, event: Event) -> None:
        self.receive(self._handle, event)

    def _handle(self, event: Event) -> None:
        actions = self.machine.handle(event)
        if isinstance(event, OperationDone) and event.generation == self.machine.generation:
            agreed = self.machine.agreed
            self.world.truth.agreed(
                self.name, event.generation, event.operation, agreed.generation if agreed is not None else 0
            )
        for action in actions:
            if self.alive:
                self._act(action)

    @property
    def lineage(self) -> int:
        return self.state.lineage

    @property
    def is_main(self) -> bool:
        """The first seat, as far as is known: between two plans, of the last one."""
        plan = self.machine.plan
        if plan is not None:
            self._was_main = plan.rank_of(self.name) == 0
        return self._was_main

    # -- the script, as a user would write it ------------------------------------------------------------------------

    def _steps_and_operations(self) -> Iterator[OperationKind | None]:
        """Steps, a validation inside of the body now and then, validation and a decision after each epoch."""
        world = self.world
        while True:
            while self.state.position < world.length or self.state.applied < 0:
                yield OperationKind.STEP
                if (self.state.position // world.batch) % 3 == 0:
                    yield OperationKind.EVALUATE
            yield OperationKind.EVALUATE
            yield OperationKind.DECIDE
            if world.is_last(self.state.epoch):
                break
            self.state = self.state._replace(epoch=self.state.epoch + 1, position=0)
        yield OperationKind.END

    def _leases_and_operations(self) -> Iterator[OperationKind | None]:
        """None stands for an epoch of leases, or for waiting for the state."""
        assert self.leasing is not None
        if self.state.applied < 0:
            self._awaits_state = True
            yield None
        while True:
            self.leasing.begin()
            yield None
            if self.leasing.is_stopped:
                break
            yield OperationKind.EVALUATE
            yield OperationKind.DECIDE
            if self.world.is_last(self.state.epoch):
                break
            self.state = self.state._replace(epoch=self.state.epoch + 1)
        yield OperationKind.END

    def advance(self) -> None:
        """The loop body runs until it wants the next operation."""
        assert self._script is not None
        if self.state.applied >= 0:
            self.state = self.state._replace(body=hash((self.state.body, self.state.applied)))
        kind = next(self._script)
        if kind is None:
            return
        if kind is OperationKind.STEP and self.state.applied >= 0:
            self.world.truth.at_clean_point(self.name, self.state)
            if self.is_main:
                self._take_snapshot()
        self._begin(kind)

    def _begin(self, kind: OperationKind) -> None:
        if kind is OperationKind.END and not self.machine.stopping and not self.world.checks.may_end():
            self.later(0.1, self._begin, kind)
        else:
            self.post(Begin(kind))

    def _take_snapshot(self) -> None:
        if self._snapshot is None and self.world.random.random() < 0.2:
            self._snapshot = self.state

    def _has_state(self) -> None:
        if self._awaits_state:
            self._awaits_state = False
            self.world.after(0.0, self.receive, self.advance)

    # -- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case SendReport():
                self.line.say(action.report)
            case AdoptPlacement():
                self.placement = action.placement
            case Reach():
                self.later(self.world.random.uniform(0.0, 0.3), self._surveyed, action)
            case FormGroup():
                self._do_form(action)
            case Drop():
                self.world.drop_groups(self, action.below)
            case FoundRun():
                self._do_found(action)
            case Give():
                self._do_give(action)
            case Take():
                self.world.group_of(action.plan).take(self, action)
            case SwapState():
                self._do_swap()
            case DoOperation():
                self._do_work(action)
            case ApplyOperation():
                self._do_apply(action)
            case Exit():
                self._do_exit(action)
            case _:
                assert_never(action)

    def _surveyed(self, action: Reach) -> None:
        missing = tuple(name for name in action.survey.targets if not self.world.can_dial(self.name, name))
        self.post(Surveyed(action.survey.number, missing))

    def _do_form(self, action: FormGroup) -> None:
        self.world.truth.issued(action.plan)
        if not self.machine.holds_state:
            self.world.faults.joins(self)
        self.world.group_of(action.plan).arrive(self)

    def _do_found(self, action: FoundRun) -> None:
        plan = self.machine.plan
        assert plan is not None
        found = [state for state in self.world.truth.checkpoints if state.applied == action.base]
        state = found[-1] if found else SimulatedState(0, 0, 0, 0, 0, 0)
        self.world.truth.issued(plan)
        lineage = self.world.truth.lineage_of(plan.generation)
        self.world.truth.founded(lineage, state)
        self.world.checks.founded(plan.generation, state)
        self.state = state._replace(lineage=lineage, settling=None)
        self.world.truth.applied(self.name, self.state, OperationResult(action.base, 0, None, False))
        self._has_state()

    def _do_give(self, action: Give) -> None:
        gift = Whole(self.state, self._last) if action.whole else self._last
        assert gift is not None
        self.world.group_of(action.plan).give(action, gift)

    def staged(self, generation: int, whole: Whole) -> None:
        """The whole state has arrived, through the group of a generation."""
        self.receive(self._take_in, whole, StateStaged(generation, whole.state.applied))

    def caught(self, generation: int, result: OperationResult) -> None:
        self.receive(self._take_in, result, Caught(generation, result.operation, result.stopping))

    def _take_in(self, gift: Whole | OperationResult, event: Event) -> None:
        kept, self._gift = self._gift, gift
        self._handle(event)
        if self._gift is gift:  # the machine did not want it
            self._gift = kept

    def _do_swap(self) -> None:
        assert isinstance(self._gift, Whole)
        (self.state, self._last), self._gift = self._gift, None
        if not self.world.is_leased:
            self.world.truth.at_clean_point(self.name, self.state)
        self.world.truth.applied(self.name, self.state, OperationResult(self.state.applied, 0, None, False))
        self._has_state()
        self.world.faults.joined(self)

    @property
    def works_since(self) -> float:
        """When the operation under way began; negative in none."""
        return self._works_since if self._work is not None and self.machine.plan is self._work.plan else -1.0

    @property
    def asks_since(self) -> float:
        """When it began to wait for servers, on the way of its script; negative where it does not."""
        if self.leasing is not None:
            return self.leasing.asks_since
        return self.stepping.makes_since if self.stepping is not None and self.stepping.making is not None else -1.0

    def _do_work(self, action: DoOperation) -> None:
        self._work = action
        self._works_since = self.world.now
        if self.stepping is not None and action.kind is OperationKind.STEP:
            self.stepping.prepare(action, self._compute)
        elif self.leasing is not None and action.kind is OperationKind.EVALUATE:
            self.leasing.refresh(action, self._compute)  # all leases are done: all workers see the same model
        else:
            self._compute(action)

    def _compute(self, action: DoOperation) -> None:
        self.later(self.world.random.uniform(0.02, 0.12), self._computed, action)

    def is_current(self, action: DoOperation) -> bool:
        return self.alive and self._work is action and self.machine.plan is action.plan

    def _computed(self, action: DoOperation) -> None:
        if not self.is_current(action):
            return
        batch, commit = None, None
        if action.kind is OperationKind.STEP:
            count = min(self.world.batch, self.world.length - self.state.position)
            batch = SimulatedBatch(self.state.epoch, self.state.position, count)
        self._result = OperationResult(action.operation, action.plan.generation, batch, False)
        if self.stepping is not None and action.kind is OperationKind.STEP:
            commit = CommitStep(action.plan.generation, self.state.steps + 1, len(action.plan.seats), 1.0)
            self._result = self._result._replace(commit=commit)
            self.stepping.stage(action, commit.step, self._meet)
        else:
            self._meet(action)

    def _meet(self, action: DoOperation) -> None:
        """In the header of the operation."""
        if self.is_current(action):
            group = self.world.group_of(action.plan)
            group.enter(self, action.operation, action.kind, self.machine.offer(), self.machine.stop_asked)

    def _do_apply(self, action: ApplyOperation) -> None:
        result = self._gift if isinstance(self._gift, OperationResult) else self._result
        self._gift = None
        assert result is not None
        self.world.truth.check(
            result.operation == action.operation, f"{self.name} applies {action.operation} with {result}"
        )
        result = result._replace(stopping=self.machine.stopping)
        before = self.state
        self.state = after(self.state, result)
        self._last = result
        if self.world.head.counts(self.name):
            self.world.truth.applied(self.name, self.state, result)
        else:
            self.world.truth.applied_apart(self.state, result)
        is_early = action.settled == action.operation
        self.world.truth.settled(self.name, before.lineage, action.settled, (self.state if is_early else before).digest)
        snapshot = self._snapshot
        if snapshot is not None and snapshot.applied <= action.settled:
            self.world.truth.published(self.name, snapshot)
            self._snapshot = None
        if is_early and not self.world.is_leased:
            self._take_snapshot()
        self._work = None
        if self.machine.phase is not Phase.ENDED and self.machine._wanted is not OperationKind.END:
            if self.stepping is not None and result.commit is not None:
                self.stepping.commit(result.commit, self._go_on)
            else:
                self.world.after(0.0, self.receive, self._go_on)

    def _go_on(self) -> None:
        if self.alive and self.machine.phase is not Phase.ENDED:
            self.advance()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _do_exit(self, action: Exit) -> None:
        self._exit = action
        if self.leasing is None or not self.leasing.is_busy:
            self.leave_if_told()

    def leave_if_told(self) -> bool:
        """Between two leases, or where there is nothing to finish; whether it is gone."""
        action = self._exit
        if action is None:
            return False
        if action.verdict is Verdict.RELEASED and self.machine.phase is Phase.ENDED:
            self.world.leaves_at_end(self)
        self.world.kill(self, f"exited ({action.verdict.value})")
        return True

    def fail(self) -> None:
        """The script raises; the process says so and ends."""
        self.post(Fail("ValueError: a fault of the script"))
        self.world.kill(self, "exited with code 1")

    def leave(self) -> None:
        self.post(Leave())

    def find_burden(self, member: str) -> None:
        self.post(Burden(member, "it is slow", self.machine.generation))

    # -- what servers lack -------------------------------------------------------------------------------------------

    def load_empty(self, empty: Iterable[int]) -> None:
        self._loading.load(empty)

    def load_of(self, number: int, origin: int, is_lost: bool) -> tuple[Load, Log]:
        """What this worker loads a range with that is empty since that version."""
        if is_lost:
            self.world.checks.restored(number)
        if self.leasing is None:
            return Load(origin, is_lost, step=self.state.steps), (("since", origin, self.state.steps),)
        if is_lost:
            return self.leasing.load_of_lost(number, origin)
        log, done = self.state.leases[number] if self.state.leases else ((), LeaseSet())
        beyond = tuple(sorted(done.beyond))
        load = Load(origin, epoch=done.epoch, prefix=done.prefix, beyond=beyond)
        return load, (("since", origin, 0), *log[1:])
