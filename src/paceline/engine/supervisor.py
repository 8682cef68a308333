"""The agent's machine: which process is started again, what a signal means, and when all is over.

Pure: `handle(event, now)` returns actions; it knows no process, no clock and no thread. The agent turns what happens to
processes into events and actions into system calls.

A script that takes its ticket has a session; once one worker of this agent has, this is a *session run*: the
coordinator says when it is over, and workers that die are started again. Until then it may be a *plain* script: it is
over when all of its processes have ended, and one that fails ends the others, as people know it from torchrun. A
process that a signal ends in that time leaves it open for `doubt_s` which of the two it is.

Servers are there for the workers, of this host and of others: they say nothing of what the script is, and what becomes
of them decides nothing here. They live as long as the run does, also where no worker of this agent is left; after its
end they have `farewell_s` to end by themselves. Those of a plain script end with it. An agent may have joined a run
with servers alone; then there is no script that could be plain. Only where no worker is left, a server that halts says
for all that the coordinator is gone.

Invariants
- Nothing is started once the run is over, asked to end, or failed; nothing that exited with 0, or that was asked to
  end here, is started again.
- What `slot_group.py` and `coordinator_starts.py` say of restarts and of ends.
- Without a coordinator that comes back, workers are not killed before they had `halt_s` to save what they hold.
- Every way out ends: the outcome is there when no worker, no server and no coordinator of this agent is left.
"""

from __future__ import annotations

import math
import signal
from typing import assert_never

from paceline.control.exit_codes import HALTED, REFUSED, START_AGAIN, exit_words
from paceline.control.messages.agents import AgentDirective
from paceline.engine.coordinator_starts import CoordinatorStarts
from paceline.engine.events import (
    Action,
    AgentTick,
    AskHalt,
    CoordinatorEnded,
    CoordinatorLost,
    Event,
    Exited,
    NotStarted,
    Opened,
    PrintLine,
    ProcessStarted,
    Resumed,
    RunOutcome,
    RunResult,
    SignalCoordinator,
    StartCoordinator,
    StopAsked,
    StopSelf,
    Suspended,
)
from paceline.engine.outcome import RunEnd, SupervisorStage, outcome_of
from paceline.engine.slot_group import SlotGroup
from paceline.engine.slots import AgentRules, Slot, SlotState, label_of

UNHEARD = "the coordinator is not heard of any more; is its host still there?"
FINISHED = "all processes of the script have ended"  # why a run ends whose script has no session


class Supervisor:
    def __init__(self, rules: AgentRules) -> None:
        self.rules = rules
        workers = [Slot(number, label_of(number, rules.workers)) for number in range(rules.workers)]
        servers = [
            Slot(number, label_of(number, rules.workers), is_server=True)
            for number in range(rules.workers, rules.workers + rules.servers)
        ]
        self.slots = [*workers, *servers]
        self._workers, self._servers = SlotGroup(workers, rules, self._do), SlotGroup(servers, rules, self._do)
        self._slot_groups = (self._workers, self._servers)
        self.exits: dict[int, str] = {}
        self.outcome: RunOutcome | None = None
        self.stage = SupervisorStage.WORKING
        self._sessions = not workers
        self._coordinator_runs = False
        self._coordinator_heard = False
        self._coordinator_starts = CoordinatorStarts(rules)
        self._coordinator_ends_at: float | None = None
        self._coordinator_asked = 0
        self._is_over = False
        self._verdict = ""
        self._released: frozenset[int] = frozenset()
        self._reason = ""
        self._culprit: Slot | None = None
        self._asked: list[int] = []
        self._asked_at = -math.inf
        self._term_at: float | None = None
        self._servers_end_at: float | None = None
        self._has_halted = False
        self._now = 0.0
        self._actions: list[Action] = []

    # -- what the agent looks at -------------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Whether no worker lives here, and none will be started any more."""
        return self._workers.is_final

    @property
    def exhausted(self) -> bool:
        """The same, as the coordinator is to know it: to a coordinator an agent that is exhausted has failed, so that
        a plain script that went well must not be called so."""
        return self.is_spent and (self._sessions or self.stage is SupervisorStage.FAILING)

    @property
    def num_expected(self) -> int:
        """How many workers live here, or may be started yet."""
        return sum(slot.state is not SlotState.FINAL for slot in self._workers.slots)

    @property
    def servers_exhausted(self) -> bool:
        """Whether no server lives here, and none will be started any more."""
        return self._servers.is_final

    def wakes_at(self) -> float | None:
        """When the next `AgentTick` is due, if nothing happens before."""
        times = [*self._workers.due_times(), *self._servers.due_times()]
        mine = (self._term_at, self._servers_end_at, self._coordinator_ends_at, self._coordinator_starts.due_at)
        times += [at for at in mine if at is not None]
        return min(times, default=None)

    # -- events ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        self._actions = []
        self._now = now
        if self.rules.owns_coordinator:
            self._start_coordinator()
        for group in self._slot_groups:
            group.start_all(now)
        return self._actions

    def handle(self, event: Event, now: float) -> list[Action]:
        self._actions = []
        self._now = now
        if self.outcome is None:
            match event:
                case ProcessStarted():
                    self.slots[event.slot].pid = event.pid
                case NotStarted():
                    self._on_not_started(event)
                case Opened():
                    self._on_opened(event)
                case Exited():
                    self._on_exited(event)
                case AgentDirective():
                    self._on_agent_directive(event)
                case CoordinatorEnded():
                    self._on_coordinator_ended(event)
                case CoordinatorLost():
                    if self.stage is SupervisorStage.WORKING:
                        self._fail(None, UNHEARD)
                case StopAsked():
                    self._on_asked(event)
                case Suspended():
                    self._send_all(signal.SIGSTOP)
                    self._signal_coordinator(signal.SIGSTOP)
                    self._do(StopSelf())
                case Resumed():
                    self._signal_coordinator(signal.SIGCONT)
                    self._send_all(signal.SIGCONT)
                case AgentTick():
                    pass  # time alone has passed; `_decide` looks at it
                case _:
                    assert_never(event)
            self._decide()
        return self._actions

    def _on_not_started(self, event: NotStarted) -> None:
        slot = self.slots[event.slot]
        slot.state = SlotState.FINAL
        if slot.is_server:
            self._do(PrintLine(event.reason))
        elif self.stage is SupervisorStage.WORKING:
            self._fail(slot, event.reason)

    def _on_opened(self, event: Opened) -> None:
        self.slots[event.slot].has_session = True
        if self.slots[event.slot].is_server:
            return
        self._sessions = True
        for slot in self._workers.slots:
            if slot.state is SlotState.DOUBTED:  # so it was a worker of the run
                self._start_again(slot, slot.code or 0)

    def _on_exited(self, event: Exited) -> None:
        slot, code = self.slots[event.slot], event.code
        slot.code = code
        slot.outlived_run = self.stage is SupervisorStage.OVER
        self.exits[slot.pid] = exit_words(code)
        lived_s = self._now - slot.since
        if slot.num_starts == 1 and code > 0 and code != START_AGAIN and lived_s < self.rules.settled_s:
            slot.first_failed = True
        if code == HALTED and self.stage is SupervisorStage.WORKING and (self.is_spent or not slot.is_server):
            self._halt_here(UNHEARD)
        if self.stage is not SupervisorStage.WORKING or code == 0 or slot.kill_at is not None or slot.lost:
            slot.state = SlotState.FINAL
        elif slot.is_server:
            self._servers.start_again(slot, code, self._now)
        elif self._sessions:
            self._start_again(slot, code)
        elif code > 0:
            slot.state = SlotState.FINAL
            self._fail(self._died_before() or slot, "")
        else:
            slot.state, slot.until = SlotState.DOUBTED, self._now + self.rules.doubt_s

    def _died_before(self) -> Slot | None:
        """The first worker that a signal ended: those that need it fail soon after, and are not at fault."""
        doubted = (slot for slot in self._workers.slots if slot.state is SlotState.DOUBTED)
        return min(doubted, key=lambda slot: slot.until, default=None)

    def _start_again(self, worker: Slot, code: int) -> None:
        self._workers.start_again(worker, code, self._now)
        if self.is_spent and not self._servers.is_final:
            self._do(PrintLine("no worker is left here; the servers go on as long as the run does"))

    def _on_agent_directive(self, directive: AgentDirective) -> None:
        self._coordinator_heard = True
        self._coordinator_starts.worked()
        for group in self._slot_groups:
            for slot in group.running():
                if slot.pid in directive.kill:
                    group.send(slot, signal.SIGKILL)
            for slot in group.slots:
                if slot.pid in directive.refused and self.stage is SupervisorStage.WORKING and not directive.over:
                    group.refuse(slot, directive.refused[slot.pid])
        for slot in self._workers.slots:
            if slot.pid in directive.lost and slot.code == 0 and slot.state is SlotState.FINAL and not slot.lost:
                self._take_for_lost(slot, is_over=directive.over)
        if directive.over and not self._is_over:
            if directive.failed:
                self._verdict = "failed"
            self._end_run(directive.verdict)

    def _take_for_lost(self, slot: Slot, *, is_over: bool) -> None:
        """It ended as if it had been let go, by `os._exit(0)` say, and was not."""
        if self.stage is SupervisorStage.WORKING and not is_over:
            self._start_again(slot, 0)
        else:
            slot.lost = f"{exit_words(0)} before the end"

    def _on_coordinator_ended(self, event: CoordinatorEnded) -> None:
        self._coordinator_runs = False
        self._coordinator_ends_at = None
        if event.verdict:
            self._verdict = event.verdict
            self._released = event.released
            if not self._is_over:
                self._end_run("")
            for group in self._slot_groups:
                for slot in group.running():
                    if slot.kill_at is None and slot.pid not in event.known:
                        group.terminate(slot, self._now)  # it came when nobody was there any more to say so
            if event.verdict == "failed":
                self._term_at = self._now + self.rules.farewell_s
        elif self.stage in (SupervisorStage.OVER, SupervisorStage.FAILING) or self._coordinator_asked:
            pass  # it could not write down its last word
        elif event.code == REFUSED:
            self._fail(None, "the coordinator cannot work")
        elif self._sessions or not self.is_spent:
            self._coordinator_died(event.code)

    def _coordinator_died(self, code: int) -> None:
        starts = self._coordinator_starts
        starts.ended(code, self._now)
        if starts.due_at is not None:
            if starts.due_at > self._now and starts.is_first_pause:
                self._do(
                    PrintLine("the coordinator waits for room on the disk of the run's folder; the training goes on")
                )
            return
        reason = starts.reason
        if not self._sessions or self.stage is not SupervisorStage.WORKING:
            self._fail(None, reason)
            return
        self._do(PrintLine(f"{reason}; the workers save what they hold, and end"))
        self._halt_here(reason)
        self._workers.send_all(signal.SIGTERM)

    def _on_asked(self, event: StopAsked) -> None:
        if self._now < self._asked_at + self.rules.together_s:
            return
        self._asked_at = self._now
        self._asked.append(event.number)
        if self.stage is SupervisorStage.WORKING:
            self.stage = SupervisorStage.ASKED
        self._cancel_starts()
        if len(self._asked) == 1:
            self._ask_politely(event.number)
        elif len(self._asked) == 2:
            self._do(PrintLine("ending now; Ctrl-C again to kill"))
            self._terminate_all()
        else:
            self._kill_all()

    def _kill_all(self) -> None:
        for group in self._slot_groups:
            group.kill_all()
        if self._coordinator_runs and self._coordinator_ends_at is None:
            self._coordinator_ends_at = self._now + self.rules.grace_s

    def _ask_politely(self, number: int) -> None:
        if not self.rules.owns_coordinator:
            self._do(PrintLine("leaving the run after this step; Ctrl-C again to kill"))
            self._send_all(signal.SIGTERM)
        elif self._sessions and self.stage is SupervisorStage.ASKED:
            self._do(PrintLine("stopping after this step; Ctrl-C again to kill"))
            self._halt("a person asked for the end")
        else:
            self._do(PrintLine("stopping; Ctrl-C again to kill"))
            self._workers.send_all(number)  # servers end when the script has

    def _send_all(self, number: int) -> None:
        for group in self._slot_groups:
            group.send_all(number)

    def _signal_coordinator(self, number: int) -> None:
        if self._coordinator_runs:
            self._do(SignalCoordinator(number))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        for slot in self._workers.slots:
            if slot.state is SlotState.DOUBTED and (self._now >= slot.until or not any(self._workers.running())):
                slot.state = SlotState.FINAL
                self._fail(slot, "")
        for group in self._slot_groups:
            group.do_what_is_due(self._now)
        if self._term_at is not None and self._now >= self._term_at:
            self._term_at = None
            self._terminate_all()
        if self._servers_end_at is not None and self._now >= self._servers_end_at:
            self._servers_end_at = None
            self._servers.terminate_all(self._now)
        if self._coordinator_ends_at is not None and self._now >= self._coordinator_ends_at:
            self._end_coordinator()
        if self._coordinator_starts.due_at is not None and self._now >= self._coordinator_starts.due_at:
            self._start_coordinator()
        if self.is_spent:
            self._wind_up()

    def _wind_up(self) -> None:
        """No worker is left. With a session the coordinator has the last word, for workers of other hosts may go on."""
        goes_on = (
            self._sessions and len(self._asked) < 2 and self.stage in (SupervisorStage.WORKING, SupervisorStage.ASKED)
        )
        if not goes_on and self.stage is not SupervisorStage.OVER:  # there, they are released, and have their time
            self._servers.cancel_starts()
            self._servers.terminate_all(self._now)
        if not self._coordinator_runs:
            if goes_on and self._coordinator_starts.due_at is not None:
                return  # it has the last word when there is room for it
            if self._servers.is_final:
                self._finish()
            return
        if goes_on or self._coordinator_ends_at is not None:
            return
        if not self._coordinator_heard:
            self._end_coordinator()
            return
        if self.stage in (SupervisorStage.WORKING, SupervisorStage.ASKED):
            self._halt(FINISHED)
        self._coordinator_ends_at = self._now + (self.rules.grace_s if self._asked else self.rules.farewell_s)

    def _end_coordinator(self) -> None:
        self._coordinator_asked += 1
        self._coordinator_ends_at = self._now + self.rules.grace_s
        self._do(SignalCoordinator(signal.SIGTERM if self._coordinator_asked == 1 else signal.SIGKILL))

    def _end_run(self, reason: str) -> None:
        """The coordinator says that the run is over."""
        self._is_over = True
        if self.stage is not SupervisorStage.FAILING:
            self.stage = SupervisorStage.OVER
            self._reason = reason
        self._cancel_starts()
        for group in self._slot_groups:
            for slot in group.running():
                if not slot.has_session:  # came too late to take part
                    group.terminate(slot, self._now)
        self._servers_end_at = None if self._servers.is_final else self._now + self.rules.farewell_s
        self._coordinator_ends_at = self._now + self.rules.farewell_s if self._coordinator_runs else None

    def _fail(self, culprit: Slot | None, reason: str) -> None:
        """Nothing will come of it any more; `culprit` is where to look."""
        if self.stage is SupervisorStage.WORKING:
            self.stage = SupervisorStage.FAILING
            self._culprit, self._reason = culprit, reason
        self._cancel_starts()
        self._terminate_all()

    def _halt_here(self, reason: str) -> None:
        """There is no coordinator any more: workers end by themselves, each when it has saved what it holds."""
        self.stage = SupervisorStage.HALTED
        self._reason = reason
        self._cancel_starts()
        self._term_at = self._now + self.rules.halt_s

    def _cancel_starts(self) -> None:
        for group in self._slot_groups:
            group.cancel_starts()

    def _terminate_all(self) -> None:
        for group in self._slot_groups:
            group.terminate_all(self._now)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._coordinator_starts.due_at = None
        if self.stage in (SupervisorStage.WORKING, SupervisorStage.ASKED) and len(self._asked) < 2:
            self._coordinator_runs = True
            self._do(StartCoordinator())

    def _halt(self, reason: str) -> None:
        if not self._has_halted:
            self._has_halted = True
            self._do(AskHalt(reason))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.outcome = outcome_of(
            RunEnd(
                rules=self.rules,
                workers=self._workers.slots,
                servers=self._servers.slots,
                asked=self._asked[0] if self._asked else 0,
                stage=self.stage,
                has_failed=self._verdict == "failed",
                culprit=self._culprit,
                has_sessions=self._sessions,
                released=self._released,
                reason=self._reason,
            )
        )
        is_stopped = self._reason not in ("", FINISHED)  # then the script may not have come to it
        is_unused = bool(self._servers.slots) and not self._sessions and self.rules.owns_coordinator
        if self.outcome.result is RunResult.ENDED and is_unused and not is_stopped:
            self._do(PrintLine("the servers were not used: the script has no session"))

    def _do(self, action: Action) -> None:
        self._actions.append(action)
