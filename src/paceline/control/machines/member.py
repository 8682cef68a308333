"""The member's machine: what one worker does about plans, operations, deaths and its own departure.

Its events and actions are in `member_events`. Nothing here waits, and nothing here knows the time.

Invariants
- An operation is applied only in the generation that this member works in, and never in one below its promise.
- The number of the last applied operation grows by one at a time, but for the swap of a newcomer.
- State that arrives changes nothing before it is complete: the swap is one action.
- Nothing ends this member but a verdict of the coordinator.
"""

from __future__ import annotations

from typing import assert_never

from paceline.control.machines.member_events import (
    Action,
    ApplyOperation,
    Begin,
    Burden,
    Caught,
    DoOperation,
    Drop,
    Event,
    Fail,
    FormGroup,
    FoundRun,
    Give,
    GroupBroke,
    GroupFormed,
    GroupNotFormed,
    Leave,
    Looked,
    Looping,
    MemberReady,
    OperationDone,
    OperationKind,
    Reach,
    StateStaged,
    StopRun,
    Surveyed,
    SwapState,
    Take,
)
from paceline.control.machines.run_member import RunMember
from paceline.control.messages.members import Directive, Verdict, Working
from paceline.control.messages.plan import NOTHING, Phase, Plan, PlanStart


class Member(RunMember):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.applied = NOTHING
        self.fenced = 0
        self.plan: Plan | None = None  # the one this member works in
        self.next: Plan | None = None  # a switch that is being prepared
        self.stopping = False  # the end was agreed in a header
        self.stop_asked = False
        self.checkpoint = NOTHING
        self._burden = Burden("")
        self._left = 0
        self._formed: set[int] = set()
        self._broken = 0
        self._suspects: tuple[str, ...] = ()
        self._dead: tuple[str, ...] = ()
        self._told = 0  # the newest plan heard of
        self._joinable = False
        self._survey = 0  # the newest one heard of
        self._surveyed = Surveyed(0)  # the newest one made
        self._offered: Plan | None = None  # what this member's slot named in the operation under way
        self.agreed: Plan | None = None  # what all slots named: it starts at the next clean point
        self._fresh = False  # no operation has been completed in this plan yet
        self._wanted: OperationKind | None = None

    # -- what others look at -----------------------------------------------------------------------------------------

    def offer(self) -> int:
        """The generation that this member is ready to switch to, for its slot in the header of the operation under
        way; 0 for none. Whatever it hears meanwhile, it stands by what it has named."""
        plan = self.next
        is_ready = plan is not None and (plan.generation in self._formed or plan.rank_of(self.name) < 0)
        self._offered = plan if is_ready else None
        return self._offered.generation if self._offered else 0

    @property
    def generation(self) -> int:
        return self.plan.generation if self.plan else 0

    @property
    def holds_state(self) -> bool:
        return self.applied > NOTHING

    @property
    def is_dismissed(self) -> bool:
        """Told to go, with something left undone: others do it, and the servers may be gone by then. So it waits for
        nothing any more."""
        return self._verdict is not None and self.phase is not Phase.ENDED

    def _working(self) -> Working:
        return Working(
            plan=self._told,
            formed=max(self._formed, default=0),
            generation=self.generation,
            broken=self._broken,
            suspects=self._suspects,
            dead=self._dead,
            fenced=self.fenced,
            applied=self.applied,
            checkpoint=self.checkpoint,
            left=self._left,
            burden=self._burden.member,
            why_burden=self._burden.why,
            burden_in=self._burden.generation,
            joinable=self._joinable,
            surveyed=self._surveyed.number,
            unreachable=self._surveyed.unreachable,
        )

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        self._actions = []
        if self._verdict is None or isinstance(event, MemberReady):
            match event:
                case MemberReady():
                    self._on_ready(event)
                case Looked():
                    self._on_looked(event)
                case Leave():
                    self._on_leave()
                case Burden():
                    self._on_burden(event)
                case Looping():
                    self._on_looping()
                case Surveyed():
                    self._on_surveyed(event)
                case StopRun():
                    self.stop_asked = True
                case Fail():
                    self._on_fail(event)
                case Directive():
                    self._on_directive(event)
                case GroupFormed():
                    self._on_formed(event)
                case GroupNotFormed():
                    self._on_unformed(event)
                case GroupBroke():
                    self._on_broke(event)
                case StateStaged():
                    self._on_staged(event)
                case Caught():
                    self._on_caught(event)
                case Begin():
                    self._on_begin(event)
                case OperationDone():
                    self._on_done(event)
                case _:
                    assert_never(event)
        return self._actions

    def _on_ready(self, event: MemberReady) -> None:
        self.checkpoint = event.checkpoint
        super()._on_ready(event)

    def _on_looked(self, event: Looked) -> None:
        if not self.holds_state and event.checkpoint != self.checkpoint:
            self.checkpoint = event.checkpoint
            self._say()

    def _on_burden(self, event: Burden) -> None:
        is_news = event.member != self._burden.member
        self._burden = event
        if is_news or event.member:
            self._say()

    def _on_looping(self) -> None:
        if not self._joinable:
            self._joinable = True
            self._say()

    def _on_surveyed(self, event: Surveyed) -> None:
        if event.number > self._surveyed.number:
            self._surveyed = event
            self._say()

    def _on_fail(self, event: Fail) -> None:
        self._promise(self.generation + 1)
        super()._on_fail(event)

    # -- the coordinator's word --------------------------------------------------------------------------------------

    def _on_directive(self, directive: Directive) -> None:
        if not self._follow(directive):
            return
        self.stop_asked = self.stop_asked or directive.stop
        if directive.survey is not None and directive.survey.number > self._survey:
            self._survey = directive.survey.number
            self._do(Reach(directive.survey))
        changed = self._promise(directive.fence)
        if directive.plan is not None and directive.plan.generation > self._told:
            self._adopt(directive.plan)
            changed = True
        if changed or self._is_to_introduce_itself:
            self._say()

    def _end(self, verdict: Verdict, reason: str) -> None:
        self._wanted = None
        super()._end(verdict, reason)

    def _promise(self, fence: int) -> bool:
        """Never again apply anything of a generation below the fence; whether that is news."""
        if fence <= self.fenced:
            return False
        self.fenced = fence
        if self.plan is not None and self.plan.generation < fence:
            self.plan = None
            if self.phase is Phase.LEAVING:  # the switch that let it go is void; it goes with the next one
                self.phase = Phase.ACTIVE
        if self.next is not None and self.next.generation < fence:
            self.next = None
        if self._offered is not None and self._offered.generation < fence:
            self._offered = None
        if self.agreed is not None and self.agreed.generation < fence:
            self.agreed = None
        self._formed = {generation for generation in self._formed if generation >= fence}
        self._do(Drop(fence))
        return True

    def _adopt(self, plan: Plan) -> None:
        if plan.generation < self.fenced:
            return
        if plan.start is PlanStart.SWITCH and self.holds_state and (self.plan is None or self.agreed):
            return  # it comes too late: this member has fallen back, or has agreed to another; it will be told again
        self._told = plan.generation
        self._suspects = ()
        if plan.start is PlanStart.SWITCH and self.holds_state:
            self.next = plan
        else:
            self._promise(plan.generation)
            self.plan = plan
            self.next = self._offered = self.agreed = None
            self._fresh = True
            self._left = 0
            if plan.start is PlanStart.FOUND and plan.rank_of(self.name) == 0:
                self.applied = plan.base
                self._do(FoundRun(plan.base))
        if plan.rank_of(self.name) >= 0:
            self._do(FormGroup(plan))

    # -- groups ------------------------------------------------------------------------------------------------------

    def _on_formed(self, event: GroupFormed) -> None:
        if event.generation not in (self.generation, self.next.generation if self.next else 0):
            return
        self._formed.add(event.generation)
        if self.plan is not None and self.plan.generation == event.generation:
            self._start()
        self._say()

    def _start(self) -> None:
        """The group of this member's plan is there: give and take what is lacking, then work."""
        plan = self.plan
        assert plan is not None
        if not self.holds_state:
            self._do(Take(plan, plan.gifts[self.name], whole=True))
        elif plan.start is PlanStart.RECOVER and self.applied < plan.base:
            self._do(Take(plan, plan.gifts[self.name], whole=False))
        else:
            for member, source in plan.gifts.items():
                if source == self.name:
                    is_new = plan.start is not PlanStart.RECOVER or member in plan.newcomers
                    self._do(Give(plan, member, whole=is_new))
            if self.phase is Phase.READY:
                self.phase = Phase.ACTIVE
            self._proceed()

    def _on_unformed(self, event: GroupNotFormed) -> None:
        if event.generation >= self.fenced and event.generation == self._told:
            self._report_broken(event)

    def _on_broke(self, event: GroupBroke) -> None:
        if event.generation in (self.generation, self.next.generation if self.next else 0):
            self._report_broken(event)

    def _report_broken(self, event: GroupBroke | GroupNotFormed) -> None:
        """Nothing more will be applied in that generation, so the promise can be given at once, unless this member
        still works in an older one that may be good."""
        generation = event.generation
        self._broken = max(self._broken, generation)
        self._suspects = event.suspects
        if event.died:
            self._dead = event.suspects
        if self.plan is None or self.plan.generation == generation:
            self._promise(generation + 1)
        elif self.next is not None and self.next.generation == generation:
            self.next = None
        self._say()

    def _on_staged(self, event: StateStaged) -> None:
        if self.plan is not None and event.generation == self.plan.generation and not self.holds_state:
            self.applied = event.base
            self.phase = Phase.ACTIVE
            self._do(SwapState(event.base))
            self._say()
            self._proceed()

    def _on_caught(self, event: Caught) -> None:
        plan = self.plan
        if plan is not None and event.generation == plan.generation and event.operation == self.applied + 1:
            self.stopping = self.stopping or event.stopping
            self._apply(plan, event.operation)
            self._say()

    # -- operations --------------------------------------------------------------------------------------------------

    def _on_begin(self, event: Begin) -> None:
        self._wanted = event.kind
        self._proceed()

    def _proceed(self) -> None:
        """Work on what the training wants, if this member can."""
        if self._wanted is None or not self.holds_state or self.phase not in (Phase.ACTIVE, Phase.READY):
            return
        if self._wanted is OperationKind.STEP:
            if self.stopping:
                self._wanted = OperationKind.END
            elif self.agreed is not None:
                self._switch()
                return
        plan = self.plan
        if plan is None or plan.generation not in self._formed:
            return
        if plan.start is PlanStart.RECOVER and self.applied < plan.base:
            return  # behind by one: the result is on its way
        self._do(DoOperation(plan, self.applied + 1, self._wanted))

    def _switch(self) -> None:
        """The clean point that was agreed: from here on, the next plan."""
        plan = self.agreed
        assert plan is not None
        self.next = self._offered = self.agreed = None
        self.plan = plan
        if plan.rank_of(self.name) < 0:
            self.phase = Phase.LEAVING
            self._left = plan.generation
        else:
            self._fresh = True
            self._start()
        self._say()

    def _on_done(self, event: OperationDone) -> None:
        plan = self.plan
        if plan is None or event.generation != plan.generation or event.operation != self.applied + 1:
            return  # of a generation that is over here; whether it counted is for the next plan to say
        if self._fresh:
            self._fresh = False
            self._do(Drop(plan.generation))  # everybody has left the older ones
        if self._all_hold_offered(event.held):
            self.agreed = self._offered
        self.stopping = self.stopping or event.stopping
        self._apply(plan, event.operation)

    def _all_hold_offered(self, held: tuple[int, ...]) -> bool:
        """Every slot names the same next generation."""
        return self._offered is not None and set(held) == {self._offered.generation}

    def _apply(self, plan: Plan, operation: int) -> None:
        self._do(ApplyOperation(plan, operation, operation - 1))
        self.applied = operation
        self._joinable = False
        if self._wanted is OperationKind.END:
            self.phase = Phase.ENDED
            self._say()
        self._wanted = None
