"""A simulated process that trains: the real `Member` machine, and a script of operations that it goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.control.member import Member
from paceline.control.member_events import (
    Action,
    Apply,
    Begin,
    Burden,
    Done,
    Drop,
    Event,
    Exit,
    Fail,
    Form,
    Found,
    Give,
    Kind,
    Leave,
    Looked,
    Reach,
    Ready,
    Say,
    Surveyed,
    Swap,
    Take,
    Work,
)
from paceline.control.messages import NOTHING, Introduction, Phase, Verdict
from paceline.testing.simulation.truth import Batch, Result, State, Whole, after
from paceline.wire.card import Card

if TYPE_CHECKING:
    from paceline.testing.simulation.world import World

HEARTBEAT_S = 0.4
ORPHAN_S = 6.0


class Worker:
    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.pid = pid
        self.machine: Member = world.mutation.member(name)
        self.alive = True
        self.stopped = False
        self.gift: Whole | Result | None = None
        self._backlog: list[Event] = []
        self._heard = world.now
        self._state = State(0, -1, 0, 0, 0, 0)
        self._result: Result | None = None
        self._last: Result | None = None
        self._snapshot: State | None = None
        self._script: Iterator[Kind] | None = None
        self._work: Work | None = None
        self._pending_kind: Kind | None = None
        world.after(world.random.uniform(0.01, 0.5), self._build)

    # -- the process -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        card = Card(self.name, "worker", self.host, ("", 0), "", b"", False, ())
        introduction = Introduction(card, self.pid, self.host, self.host, {"torch": "2"}, ("w",))
        self.post(Ready(introduction, self._newest_checkpoint()))
        self._script = self._loop()
        self._advance()
        self._beat()

    def _newest_checkpoint(self) -> int:
        return max((state.applied for state in self.world.truth.checkpoints), default=NOTHING)

    def _beat(self) -> None:
        if not self.alive:
            return
        if not self.stopped:
            if self.world.now - self._heard > ORPHAN_S:
                self.world.kill(self, "lost the coordinator")
                return
            if self.machine.phase is Phase.READY:
                self.post(Looked(self._newest_checkpoint()))
            self.world.send_report(self, self.machine.report())
        self.world.after(HEARTBEAT_S, self._beat)

    def post(self, event: Event) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(event)
            return
        if type(event).__name__ == "Directive":
            self._heard = self.world.now
        actions = self.machine.handle(event)
        if isinstance(event, Done) and event.generation == self.machine.generation:
            agreed = self.machine.agreed
            self.world.truth.agreed(
                self.name, event.generation, event.operation, agreed.generation if agreed is not None else 0
            )
        for action in actions:
            if self.alive:
                self._act(action)

    def resume(self) -> None:
        self.stopped = False
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.post(event)

    # -- the script, as a user would write it ------------------------------------------------------------------------

    def _loop(self) -> Iterator[Kind]:
        """Steps, a validation inside of the body now and then, validation and a decision after each epoch."""
        world = self.world
        while True:
            while self._state.position < world.length or self._state.applied < 0:
                yield Kind.STEP
                if (self._state.position // world.batch) % 3 == 0:
                    yield Kind.EVALUATE
            yield Kind.EVALUATE
            yield Kind.DECIDE
            if self._state.epoch + 1 == world.epochs:
                break
            self._state = self._state._replace(epoch=self._state.epoch + 1, position=0)
        yield Kind.END

    def _advance(self) -> None:
        """The loop body runs until it wants the next operation."""
        assert self._script is not None
        if self._state.applied >= 0:
            body = hash((self._state.body, self._state.applied))
            self._state = self._state._replace(body=body)
        kind = next(self._script)
        if kind is Kind.STEP and self._state.applied >= 0:
            self.world.truth.at_clean_point(self.name, self._state)
            if self.machine.plan is not None and self.machine.plan.rank_of(self.name) == 0:
                self._take_snapshot()
        self.post(Begin(kind))

    def _take_snapshot(self) -> None:
        if self._snapshot is None and self.world.random.random() < 0.2:
            self._snapshot = self._state

    # -- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        getattr(self, f"_do_{type(action).__name__.lower()}")(action)

    def _do_say(self, action: Say) -> None:
        self.world.send_report(self, action.report)

    def _do_form(self, action: Form) -> None:
        self.world.truth.issued(action.plan)
        if not self.machine.holds_state:
            self.world.joins(self)
        self.world.group_of(action.plan).arrive(self)

    def _do_drop(self, action: Drop) -> None:
        self.world.drop_groups(self, action.below)

    def _do_reach(self, action: Reach) -> None:
        self.world.after(self.world.random.uniform(0.0, 0.3), self._surveyed, action)

    def _surveyed(self, action: Reach) -> None:
        missing = tuple(name for name in action.survey.targets if not self.world.can_dial(self, name))
        self.post(Surveyed(action.survey.number, missing))

    def _do_found(self, action: Found) -> None:
        plan = self.machine.plan
        assert plan is not None
        found = [state for state in self.world.truth.checkpoints if state.applied == action.base]
        state = found[-1] if found else State(0, 0, 0, 0, 0, 0)
        self.world.truth.founded(plan.generation, state)
        self._state = state._replace(lineage=plan.generation)
        self.world.truth.applied(self.name, self._state, Result(action.base, 0, None, False))

    def _do_give(self, action: Give) -> None:
        gift = Whole(self._state, self._last) if action.whole else self._last
        assert gift is not None
        self.world.group_of(action.plan).give(action, gift)

    def _do_take(self, action: Take) -> None:
        self.world.group_of(action.plan).take(self, action)

    def _do_swap(self, _: Swap) -> None:
        assert isinstance(self.gift, Whole)
        self._state, self._last = self.gift
        self.world.truth.at_clean_point(self.name, self._state)
        self.world.truth.applied(self.name, self._state, Result(self._state.applied, 0, None, False))

    def _do_work(self, action: Work) -> None:
        self._work = action
        seconds = self.world.random.uniform(0.02, 0.12)
        self.world.after(seconds, self._computed, action)

    def _computed(self, action: Work) -> None:
        if not self.alive or self._work is not action or self.machine.plan is not action.plan:
            return
        if self.stopped:
            self.world.after(0.05, self._computed, action)
            return
        batch = None
        if action.kind is Kind.STEP:
            count = min(self.world.batch, self.world.length - self._state.position)
            batch = Batch(self._state.epoch, self._state.position, count)
        self._result = Result(action.operation, action.plan.generation, batch, False)
        group = self.world.group_of(action.plan)
        group.enter(self, action.operation, self.machine.offer(), self.machine.stop_asked)

    def _do_apply(self, action: Apply) -> None:
        result = self.gift if isinstance(self.gift, Result) else self._result
        self.gift = None
        assert result is not None
        self.world.truth.check(
            result.operation == action.operation, f"{self.name} applies {action.operation} with {result}"
        )
        result = result._replace(stopping=self.machine.stopping)
        before = self._state
        self._state = after(self._state, result)
        self._last = result
        if self.world.counts(self.name):
            self.world.truth.applied(self.name, self._state, result)
        is_early = action.settled == action.operation
        self.world.truth.settled(
            self.name, before.lineage, action.settled, (self._state if is_early else before).digest
        )
        if self._snapshot is not None and (
            self._snapshot.applied <= action.settled or self._snapshot.applied == self._state.applied
        ):
            self.world.truth.published(self.name, self._snapshot)
            self._snapshot = None
        if is_early:
            self._take_snapshot()
        self._work = None
        if self.machine.phase is not Phase.ENDED and self.machine._wanted is not Kind.END:
            self.world.after(0.0, self._go_on)

    def _go_on(self) -> None:
        if self.alive and self.machine.phase is not Phase.ENDED:
            self._advance()

    def _do_exit(self, action: Exit) -> None:
        if action.verdict is Verdict.RELEASED and self.machine.phase is Phase.ENDED:
            self.world.leaves_at_end(self)
        self.world.kill(self, f"exited ({action.verdict.value})")

    def fail(self) -> None:
        """The script raises; the process says so and ends."""
        self.post(Fail("ValueError: a fault of the script"))
        self.world.kill(self, "exited with code 1")

    def leave(self) -> None:
        self.post(Leave())

    def find_burden(self, member: str) -> None:
        self.post(Burden(member, "it is slow", self.machine.generation))
