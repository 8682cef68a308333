"""The training thread's side of membership: what to work on, with whom, and what to do when that fails.

The `Member` machine decides; this carries out. Actions that touch the model (found, give, take, swap) and the work
itself wait in a queue for the training thread, which does them whenever it asks for its next operation. Groups are
formed and ended on other threads as soon as the machine says so.

    operate(operation)      does one operation with whoever is there, as often as it takes, and returns its outcome

An attempt that fails because a member was lost is tried again in the next plan. The operation counts when the machine
says so (`ApplyOperation`): then the one before it is settled, and this one is committed; or, if the others were faster,
caught up with by what one of them gave (`Ledger.catch`). Actions are carried out in the order in which the machine
decided on them, whichever thread told it what happened: therefore the queue.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from paceline.control.machines.member import Member
from paceline.control.machines.member_events import (
    Action,
    AdoptPlacement,
    ApplyOperation,
    Begin,
    Caught,
    DoOperation,
    Drop,
    Event,
    Exit,
    FormGroup,
    FoundRun,
    Give,
    GroupBroke,
    Looked,
    OperationDone,
    Reach,
    StateStaged,
    Surveyed,
    SwapState,
    Take,
)
from paceline.control.messages.members import Verdict
from paceline.control.messages.plan import Phase, Plan, PlanStart
from paceline.control.messages.progress import ProgressKeeper
from paceline.errors import (
    Evicted,
    GroupError,
    Mismatch,
    Orphaned,
    PacelineError,
    ProtocolError,
    Refused,
    RunFailed,
    WireError,
)
from paceline.placement.placement import Placement
from paceline.strategy.base import Flag, Notice
from paceline.train import transfer
from paceline.train.groups import Groups, blamed
from paceline.train.halting import OWN_PATIENCE_S
from paceline.train.operation import ALIKE, Place, TrainingOperation
from paceline.train.staging import Staging
from paceline.train.watchdog import WorkerActivity
from paceline.wire.reachable import unreachable

logger = logging.getLogger("paceline.train")

NEWCOMER_S = 30.0  # how long one that has nothing to lose waits for the coordinator: most likely the run is over
_LOOK_S = 1.0
_BRIEFLY_S = 0.005


Answer = TypeVar("Answer")


def _ignore(_: Placement) -> None:
    """Who keeps nothing on servers needs no placement."""


class Client(Protocol):
    """Runs the machine: `MemberClient`, or `Solo` for a run of one."""

    progress: ProgressKeeper

    def post(self, event: Event) -> None: ...

    def look(self, question: Callable[[Member], Answer]) -> Answer: ...

    def unheard_s(self) -> float: ...

    def close(self, flush_s: float = ...) -> None: ...


class Ledger(Protocol):
    """What the session lets happen to the training state; called on the training thread only."""

    goes_on: bool  # whether the state changes while a gift is on its way: the next lease needs nobody

    def look_for_start(self) -> int:
        """The operation that this worker could found the run from: of the newest checkpoint."""

    def found(self, base: int) -> None:
        """Make the state that the run starts from."""

    def gift(self, whole: bool) -> Any:
        """The whole state, or what the last operation changed and came to; as a tree."""

    def swap(self, state: Any) -> None:
        """Become this state."""

    def catch(self, operation: int, result: Any) -> Any:
        """Apply another's result of an operation; returns the outcome."""

    def stopping_in(self, result: Any) -> bool:
        """Whether the end was agreed in that operation."""

    def settle(self, operation: int) -> None:
        """Nothing can undo this operation any more, nor any before it."""

    def keep_result(self, operation: int, outcome: Any, stopping: bool) -> None:
        """What an operation came to, for a worker that is behind by it."""


class Interrupted(GroupError):
    """The plan that an attempt was made in is over."""


class Membership:
    def __init__(self, machine: Member, run: str) -> None:
        self._machine = machine
        self._run = run
        self._queue: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._place: Place | None = None
        self._told: Exit | None = None  # to go, as the coordinator said
        self._exit: Exit | None = None  # the same, when the training thread has heard of it
        self.last_plan: Plan | None = None  # in which an operation was attempted
        self._gift: Any = None
        self._done: _Done | None = None
        self._has_state = False  # as of what the training thread has done
        self._givers: list[threading.Thread] = []
        self._packed: Callable[[], _Packed | None] = lambda: None  # what they send
        self._staging = Staging(0)
        self.on_placement: Callable[[Placement], None] = _ignore
        self.operation = 0  # the last one that was tried, for errors
        self.patience_s = OWN_PATIENCE_S  # for a coordinator that is not heard, of who has no plan
        self._since = 0.0

    def connect(self, client: Client, groups: Groups, ledger: Ledger) -> None:
        self._client = client
        self._groups = groups
        self._ledger = ledger

    def expect_state(self, num_bytes: int) -> None:
        """Have memory ready for a state of about this size, unless it is founded here."""
        self._staging = Staging(num_bytes)

    def act(self, action: Action) -> None:
        """What the machine wants done; from any thread."""
        if isinstance(action, FormGroup):
            self._groups.form(action.plan)
            self._queue.put(action)
        elif isinstance(action, Drop):
            self._groups.drop(action.below)
        elif isinstance(action, AdoptPlacement):
            self.on_placement(action.placement)
        elif isinstance(action, Reach):
            threading.Thread(target=self._reach, args=(action,), name="paceline-survey", daemon=True).start()
        else:
            if isinstance(action, Exit):
                self._told = action
            self._queue.put(action)

    def _reach(self, action: Reach) -> None:
        survey = action.survey
        self._client.post(Surveyed(survey.number, unreachable(survey.targets)))

    # -- what an attempt looks at ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the attempt under way is in vain. Cheap: it is called very often."""
        place = self._place
        if place is not None and self._machine.plan is not place.plan:
            raise Interrupted(f"generation {place.plan.generation} is over")

    def check_wait(self) -> None:
        """Raise if servers are waited for in vain: also by a worker that was told to go."""
        self.check()
        if self._machine.is_dismissed and self._told is not None:
            self._leave(self._told)

    def notice(self, place: Place) -> Notice:
        """What this worker says in the header of an operation. Asked as late as can be: a plan that it is ready for by
        then can be switched to at the next step."""
        held, stop_asked = self._client.look(lambda machine: (machine.offer(), machine.stop_asked))
        return place.notice(held, stop_asked=stop_asked)

    def standing(self) -> WorkerActivity | None:
        """What the training thread is at, for the watchdog."""
        place = self._place
        if place is None:
            return None
        what = f"operation {place.operation} ({place.kind.value}) of generation {place.plan.generation}"
        return WorkerActivity(
            f"worker {self._machine.name}, rank {place.rank} of {place.size}, is in {what}", self._since
        )

    # -- operations --------------------------------------------------------------------------------------------------

    def wait_for_state(self) -> None:
        """Return when this member has the training state: made, or received."""
        while not self._has_state:
            if self._next_action(_LOOK_S) is None:
                self._client.post(Looked(self._ledger.look_for_start()))

    def wait_for_plan(self) -> Plan:
        """The plan that this member works in; between two of them, the next one."""
        while (plan := self._client.look(lambda machine: machine.plan)) is None:
            self._next_action(_BRIEFLY_S)
        return plan

    def attend(self) -> None:
        """Carry out what is to be done beside the work, where that is no operation: give the state to a newcomer, or
        go."""
        while self._next_action(0.0) is not None:
            pass

    def operate(self, wanted: TrainingOperation, end: TrainingOperation) -> Any:
        """Do an operation until it counts; its outcome. Where the run was asked to stop, it is the `end` instead of a
        step."""
        self._client.post(Begin(wanted.kind))
        while True:
            action = self._next_action(_LOOK_S)
            if isinstance(action, _Applied):
                return action.outcome
            if isinstance(action, FormGroup) and self._is_next_in(action.plan):
                wanted.prepare(action.plan)
            elif isinstance(action, DoOperation):
                self._try(action, wanted if action.kind is wanted.kind else end)

    def _is_next_in(self, plan: Plan) -> bool:
        """Whether this member will go on in a plan where it stands."""

        def question(machine: Member) -> bool:
            return plan.start is PlanStart.RECOVER and machine.plan is plan and machine.applied == plan.base

        return self._client.look(question)

    def _try(self, work: DoOperation, operation: TrainingOperation) -> None:
        plan = work.plan
        if self._client.look(lambda machine: machine.plan) is not plan:
            return
        group = self._groups.get(plan.generation)
        if group is None and len(plan.seats) > 1:
            return  # dropped just now
        self.operation = work.operation
        self._since = time.monotonic()
        self._place = place = Place(plan, plan.rank_of(self._machine.name), group, work.operation, work.kind)
        self.last_plan = plan
        self._groups.enter(plan.generation)
        try:
            rows = operation.attempt(place)
        except Mismatch as error:
            if error.is_internal:  # the script has no part in it, and must not be blamed
                raise
            raise Mismatch(f"{place} does not fit what another worker does; {ALIKE} ({error})") from error
        except (GroupError, WireError) as error:
            logger.debug("operation %d in generation %d: %s", work.operation, plan.generation, error)
            self._client.post(GroupBroke(plan.generation, *blamed(error)))
            return
        finally:
            self._place = None
            self._groups.leave()
        stopping = rows.any(Flag.STOP)
        self._done = _Done(work.operation, lambda: self._commit(operation, place, stopping))
        self._client.post(OperationDone(plan.generation, work.operation, tuple(row.held for row in rows), stopping))

    def _commit(self, operation: TrainingOperation, place: Place, stopping: bool) -> Any:
        outcome = operation.commit(place)
        # A copy: what the script does with its own is its affair.
        self._ledger.keep_result(place.operation, copy.copy(outcome), stopping)
        return outcome

    def _apply(self, action: ApplyOperation) -> _Applied:
        """What was done here, or caught up with, counts."""
        done, self._done = self._done, None
        assert done is not None
        assert done.operation == action.operation
        self._ledger.settle(action.settled)
        return _Applied(done.commit())

    def _next_action(self, wait_s: float) -> Action | _Applied | None:
        """Carry out what is in the queue, one at a time; work, and the outcome of what counts, is for the caller."""
        if self._exit is not None:
            self._leave(self._exit)  # the script went on as if it had not been told
        try:
            action = self._queue.get(timeout=wait_s)
        except queue.Empty:
            self._look_after()
            return None
        if isinstance(action, FoundRun):
            self._staging.release()
            self._ledger.found(action.base)
            self._has_state = True
        elif isinstance(action, Give):
            self._give(action)
        elif isinstance(action, Take):
            self._take(action)
        elif isinstance(action, ApplyOperation):
            return self._apply(action)
        elif isinstance(action, SwapState):
            self._ledger.swap(self._gift)
            self._gift = None
            self._has_state = True
        elif isinstance(action, Exit):
            self._leave(action)
        return action

    def _look_after(self) -> None:
        """Nothing to do for a while: is there still somebody who could tell us what?"""
        unheard_s = self._client.unheard_s()
        if unheard_s > (self.patience_s if self._has_state else NEWCOMER_S):
            raise Orphaned(
                f"operation {self.operation + 1} waits for a plan, but the coordinator has been silent for "
                f"{unheard_s:.0f} s; look at its log, and if the run is not over, start it again with --resume"
            )

    # -- state -------------------------------------------------------------------------------------------------------

    def _give(self, action: Give) -> None:
        """Send in the background. What is sent does not change before the receiver has it: the next operation needs the
        receiver, and where leases come before that, a copy is sent."""
        group = self._groups.get(action.plan.generation)
        if group is None:
            return
        # Here and not in the thread, so that what cannot be sent is an error of the script that put it there.
        packed = self._pack(action)
        rank = action.plan.rank_of(action.to)

        def send() -> None:
            try:
                transfer.send(group, rank, packed.parcel)
            except PacelineError:
                pass  # the receiver sees the group fail too, and says so
            except Exception as error:
                logger.exception("the state could not be sent")
                group.abort(f"sending the state failed: {error}")

        self._givers = [thread for thread in self._givers if thread.is_alive()]
        giver = threading.Thread(target=send, name="paceline-giver", daemon=True)
        self._givers.append(giver)
        giver.start()

    def _pack(self, action: Give) -> _Packed:
        """All that get the state by one plan get the same, and where it is a copy there is one of it, for as long as
        somebody sends it."""
        packed, key = self._packed(), (action.plan.generation, action.whole)
        if packed is None or packed.key != key:
            packed = _Packed(key, transfer.pack(self._ledger.gift(action.whole), copies=self._ledger.goes_on))
            self._packed = weakref.ref(packed)
        return packed

    def _take(self, action: Take) -> None:
        plan = action.plan
        group = self._groups.get(plan.generation)
        if group is None:
            return
        self._groups.enter(plan.generation)
        try:
            self._gift = transfer.receive(group, plan.rank_of(action.source), self._staging)
        except (GroupError, WireError) as error:
            # The end of the group is told by who sees the cause; what arrived as it should not is seen here only.
            level = logging.WARNING if isinstance(error, ProtocolError) else logging.DEBUG
            logger.log(level, "the state that generation %d begins with: %s", plan.generation, error)
            self._client.post(GroupBroke(plan.generation, *blamed(error)))
            return
        finally:
            self._groups.leave()
        if action.whole:
            self._client.post(StateStaged(plan.generation, self._gift["applied"]))
            return
        gift, self._gift = self._gift, None
        self._done = _Done(plan.base, lambda: self._ledger.catch(plan.base, gift))
        self._client.post(Caught(plan.generation, plan.base, self._ledger.stopping_in(gift)))

    # -- the end -----------------------------------------------------------------------------------------------------

    def wait_for_release(self) -> str:
        """Wait, after the end, until all have acknowledged it; the coordinator's reason."""
        while self._client.unheard_s() < NEWCOMER_S:
            try:
                self._next_action(_LOOK_S)
            except Released as released:
                return released.reason
        raise Orphaned("the coordinator is gone, but all had come to the end")

    def _leave(self, action: Exit) -> None:
        self._exit = action
        if action.verdict is Verdict.RELEASED:
            raise Released(action.reason, self._client.look(lambda machine: machine.phase))
        errors = {Verdict.REFUSED: Refused, Verdict.FAILED: RunFailed}
        raise errors.get(action.verdict, Evicted)(action.reason)

    def close(self) -> None:
        self._staging.release()
        for giver in self._givers:
            giver.join(5.0)


class Released(PacelineError):
    """This member may go. `phase` says what it was doing."""

    def __init__(self, reason: str, phase: Phase) -> None:
        super().__init__(reason)
        self.reason = reason
        self.phase = phase


class _Packed:
    """State on its way, in the generation and as much of it as `key` says."""

    def __init__(self, key: tuple[int, bool], parcel: transfer.StateParcel) -> None:
        self.key = key
        self.parcel = parcel


class _Done(NamedTuple):
    """An operation that is complete here, and what to do when it counts."""

    operation: int
    commit: Callable[[], Any]


class _Applied(NamedTuple):
    """An operation counts, and came to this."""

    outcome: Any
