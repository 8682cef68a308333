"""The agent's machine: which worker is started again and when, what a signal means, and when all is over.

Pure: `handle(event, now)` returns actions; it knows no process, no clock and no thread. The agent turns what happens to
processes into events and actions into system calls.

A script that takes its ticket has a session; once one worker of this agent has, this is a *session run*: the
coordinator says when it is over, and workers that die are started again. Until then it may be a *plain* script: it is
over when all of its processes have ended, and one that fails ends the others, as people know it from torchrun. A
process that a signal ends in that time leaves it open for `doubt_s` which of the two it is.

Invariants
- Nothing is started once the run is over, asked to end, or failed; nothing that exited with 0 is started again.
- Between two starts in one slot there is a pause; it doubles, and there are no more than `restarts` of them until a
  process has lived for `settled_s`.
- A worker that is to end is asked, and killed `grace_s` later. Every way out ends: the outcome is there when no worker
  and no coordinator of this agent is left.
"""

from __future__ import annotations

import signal
from collections import deque
from enum import Enum

from paceline.control.messages import AgentDirective
from paceline.engine.base import START_AGAIN, exit_words
from paceline.engine.events import (
    Action,
    Asked,
    AskHalt,
    CoordinatorEnded,
    Event,
    Exited,
    NotStarted,
    Opened,
    Orphaned,
    Outcome,
    Result,
    Resumed,
    Say,
    Signal,
    SignalCoordinator,
    Start,
    StartCoordinator,
    Started,
    StopSelf,
    Suspended,
    Tick,
)
from paceline.engine.slots import Rules, Slot, State

REFUSED = 2  # the coordinator's exit code when starting it again would not help


class Stage(Enum):
    WORKING = "working"
    ASKED = "asked"  # to end, by a person
    OVER = "over"  # the coordinator says so
    FAILING = "failing"  # found out here


class Supervisor:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.slots = [Slot(number) for number in range(rules.workers)]
        self.exits: dict[int, str] = {}
        self.outcome: Outcome | None = None
        self.stage = Stage.WORKING
        self._sessions = False
        self._coordinator_runs = False
        self._coordinator_heard = False
        self._coordinator_deaths: deque[float] = deque()
        self._coordinator_ends_at: float | None = None
        self._coordinator_asked = 0
        self._is_over = False
        self._verdict = ""
        self._released: frozenset[int] = frozenset()
        self._reason = ""
        self._culprit: Slot | None = None
        self._asked: list[int] = []
        self._term_at: float | None = None
        self._hopeless = False
        self._has_halted = False
        self._now = 0.0
        self._actions: list[Action] = []

    # -- what the agent looks at -------------------------------------------------------------------------------------

    @property
    def is_spent(self) -> bool:
        """Whether nothing lives here, and nothing will be started any more."""
        return all(slot.state is State.FINAL for slot in self.slots)

    @property
    def exhausted(self) -> bool:
        """The same, as the coordinator is to know it: to a coordinator an agent that is exhausted has failed, so that
        a plain script that went well must not be called so."""
        return self.is_spent and (self._sessions or self.stage is Stage.FAILING)

    def wakes_at(self) -> float | None:
        """When the next `Tick` is due, if nothing happens before."""
        times = [slot.until for slot in self.slots if slot.state in (State.WAITING, State.DOUBTED)]
        times += [slot.kill_at for slot in self.slots if slot.state is State.RUNNING and slot.kill_at is not None]
        times += [at for at in (self._term_at, self._coordinator_ends_at) if at is not None]
        return min(times, default=None)

    # -- events ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        self._actions = []
        self._now = now
        if self.rules.owns_coordinator:
            self._start_coordinator()
        for slot in self.slots:
            self._start(slot)
        return self._actions

    def handle(self, event: Event, now: float) -> list[Action]:
        self._actions = []
        self._now = now
        if self.outcome is None:
            getattr(self, f"_on_{type(event).__name__.lower()}")(event)
            self._decide()
        return self._actions

    def _on_started(self, event: Started) -> None:
        self.slots[event.slot].pid = event.pid

    def _on_notstarted(self, event: NotStarted) -> None:
        slot = self.slots[event.slot]
        slot.state = State.FINAL
        if self.stage is Stage.WORKING:
            self._fail(slot, event.reason)

    def _on_opened(self, event: Opened) -> None:
        self.slots[event.slot].has_session = True
        self._sessions = True
        for slot in self.slots:
            if slot.state is State.DOUBTED:  # so it was a worker of the run
                self._start_again(slot, slot.code or 0)

    def _on_exited(self, event: Exited) -> None:
        slot, code = self.slots[event.slot], event.code
        slot.code = code
        slot.outlived_run = self.stage is Stage.OVER
        self.exits[slot.pid] = exit_words(code)
        lived_s = self._now - slot.since
        if slot.num_starts == 1 and code > 0 and code != START_AGAIN and lived_s < self.rules.settled_s:
            slot.first_failed = True
        if self.stage is not Stage.WORKING or code == 0:
            slot.state = State.FINAL
        elif self._sessions:
            self._start_again(slot, code)
        elif code > 0:
            slot.state = State.FINAL
            self._fail(slot, "")
        else:
            slot.state, slot.until = State.DOUBTED, self._now + self.rules.doubt_s

    def _on_agentdirective(self, directive: AgentDirective) -> None:
        self._coordinator_heard = True
        for slot in self.slots:
            if slot.state is State.RUNNING and slot.pid in directive.kill:
                self._send(slot, signal.SIGKILL)
        if directive.over and not self._is_over:
            if directive.failed:
                self._verdict = "failed"
            self._end_run(directive.verdict)

    def _on_coordinatorended(self, event: CoordinatorEnded) -> None:
        self._coordinator_runs = False
        self._coordinator_ends_at = None
        if event.verdict:
            self._verdict = event.verdict
            self._released = event.released
            if not self._is_over:
                self._end_run("")
            for slot in self.slots:
                if slot.state is State.RUNNING and slot.kill_at is None and slot.pid not in event.known:
                    self._terminate(slot)  # it came when nobody was there any more to say so
            if event.verdict == "failed":
                self._term_at = self._now + self.rules.farewell_s
        elif self.stage in (Stage.OVER, Stage.FAILING) or self._coordinator_asked:
            pass  # it could not write down its last word
        elif event.code == REFUSED:
            self._fail(None, "the coordinator cannot work")
        elif self._sessions or not self.is_spent:
            self._coordinator_died(event.code)

    def _coordinator_died(self, code: int) -> None:
        deaths = self._coordinator_deaths
        deaths.append(self._now)
        while deaths[0] < self._now - self.rules.coordinator_window_s:
            deaths.popleft()
        if len(deaths) > self.rules.coordinator_deaths:
            self._fail(None, f"the coordinator ended {len(deaths)} times; the last time it {exit_words(code)}")
            return
        self._start_coordinator()

    def _on_orphaned(self, _: Orphaned) -> None:
        if self.stage is Stage.WORKING:
            self._fail(None, "the coordinator is not heard of any more; is its host still there?")

    def _on_asked(self, event: Asked) -> None:
        self._asked.append(event.number)
        if self.stage is Stage.WORKING:
            self.stage = Stage.ASKED
        self._cancel_starts()
        if len(self._asked) == 1:
            self._ask_politely(event.number)
        elif len(self._asked) == 2:
            self._do(Say("ending now; Ctrl-C again to kill"))
            self._terminate_all()
        else:
            self._kill_all()

    def _ask_politely(self, number: int) -> None:
        if not self.rules.owns_coordinator:
            self._do(Say("leaving the run after this step; Ctrl-C again to kill"))
            self._send_all(signal.SIGTERM)
        elif self._sessions and self.stage is Stage.ASKED:
            self._do(Say("stopping after this step; Ctrl-C again to kill"))
            self._halt("a person asked for the end")
        else:
            self._do(Say("stopping; Ctrl-C again to kill"))
            self._send_all(number)

    def _on_suspended(self, _: Suspended) -> None:
        self._send_all(signal.SIGSTOP)
        if self._coordinator_runs:
            self._do(SignalCoordinator(signal.SIGSTOP))
        self._do(StopSelf())

    def _on_resumed(self, _: Resumed) -> None:
        if self._coordinator_runs:
            self._do(SignalCoordinator(signal.SIGCONT))
        self._send_all(signal.SIGCONT)

    def _on_tick(self, _: Tick) -> None:
        """Time alone has passed; `_decide` looks at it."""

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        for slot in self.slots:
            if slot.state is State.WAITING and self._now >= slot.until:
                self._start(slot)
            elif slot.state is State.DOUBTED and (self._now >= slot.until or self._nobody_runs()):
                slot.state = State.FINAL
                self._fail(slot, "")
            elif slot.state is State.RUNNING and slot.kill_at is not None and self._now >= slot.kill_at:
                self._kill(slot)
        if self._term_at is not None and self._now >= self._term_at:
            self._term_at = None
            self._terminate_all()
        if self._coordinator_ends_at is not None and self._now >= self._coordinator_ends_at:
            self._end_coordinator()
        if self.is_spent:
            self._wind_up()

    def _nobody_runs(self) -> bool:
        return not any(slot.state is State.RUNNING for slot in self.slots)

    def _wind_up(self) -> None:
        """No worker is left. With a session the coordinator has the last word, for workers of other hosts may go on."""
        if not self._coordinator_runs:
            self._finish()
            return
        goes_on = self._sessions and len(self._asked) < 2 and self.stage in (Stage.WORKING, Stage.ASKED)
        if goes_on or self._coordinator_ends_at is not None:
            return
        if not self._coordinator_heard:
            self._end_coordinator()
            return
        if self.stage in (Stage.WORKING, Stage.ASKED):
            self._halt("all processes of the script have ended")
        self._coordinator_ends_at = self._now + (self.rules.grace_s if self._asked else self.rules.farewell_s)

    def _end_coordinator(self) -> None:
        self._coordinator_asked += 1
        self._coordinator_ends_at = self._now + self.rules.grace_s
        self._do(SignalCoordinator(signal.SIGTERM if self._coordinator_asked == 1 else signal.SIGKILL))

    def _end_run(self, reason: str) -> None:
        """The coordinator says that the run is over."""
        self._is_over = True
        if self.stage is not Stage.FAILING:
            self.stage = Stage.OVER
            self._reason = reason
        self._cancel_starts()
        for slot in self.slots:
            if slot.state is State.RUNNING and not slot.has_session:  # came too late to take part
                self._terminate(slot)
        self._coordinator_ends_at = self._now + self.rules.farewell_s if self._coordinator_runs else None

    def _fail(self, culprit: Slot | None, reason: str) -> None:
        """Nothing will come of it any more; `culprit` is where to look."""
        if self.stage is Stage.WORKING:
            self.stage = Stage.FAILING
            self._culprit, self._reason = culprit, reason
        self._cancel_starts()
        self._terminate_all()

    # -- workers -----------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        slot.state, slot.since, slot.code = State.RUNNING, self._now, None
        slot.has_session = slot.was_ended = False
        slot.kill_at = None
        slot.num_starts += 1
        self._do(Start(slot.number))

    def _start_again(self, slot: Slot, code: int) -> None:
        if all(each.first_failed for each in self.slots):
            self._hopeless = True  # the script is wrong, not the machines
        if self._now - slot.since >= self.rules.settled_s:
            slot.num_restarts = 0
        if self._hopeless or slot.num_restarts >= self.rules.restarts:
            slot.state = State.FINAL
            if not self._hopeless:
                self._do(Say(f"w{slot.number} {exit_words(code)}; it is not started again"))
            else:
                self._cancel_starts()
            return
        pause_s = min(self.rules.first_pause_s * 2**slot.num_restarts, self.rules.longest_pause_s)
        slot.num_restarts += 1
        slot.state, slot.until = State.WAITING, self._now + pause_s
        self._do(Say(f"w{slot.number} {exit_words(code)}; it is started again in {pause_s:g} s"))

    def _cancel_starts(self) -> None:
        for slot in self.slots:
            if slot.state in (State.WAITING, State.DOUBTED):
                slot.state = State.FINAL

    def _terminate_all(self) -> None:
        for slot in self.slots:
            if slot.state is State.RUNNING and slot.kill_at is None:
                self._terminate(slot)

    def _terminate(self, slot: Slot) -> None:
        self._send(slot, signal.SIGTERM)
        slot.kill_at = self._now + self.rules.grace_s

    def _kill(self, slot: Slot) -> None:
        self._send(slot, signal.SIGKILL)
        slot.kill_at = None

    def _kill_all(self) -> None:
        for slot in self.slots:
            if slot.state is State.RUNNING:
                self._kill(slot)
        if self._coordinator_runs and self._coordinator_ends_at is None:
            self._coordinator_ends_at = self._now + self.rules.grace_s

    def _send_all(self, number: int) -> None:
        for slot in self.slots:
            if slot.state is State.RUNNING:
                self._send(slot, number)

    def _send(self, slot: Slot, number: int) -> None:
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            slot.was_ended = True
        self._do(Signal(slot.number, number))

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self._coordinator_runs = True
        self._do(StartCoordinator())

    def _halt(self, reason: str) -> None:
        if not self._has_halted:
            self._has_halted = True
            self._do(AskHalt(reason))

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        culprit = self._culprit or self._failed_afterwards()
        if self._asked:
            self.outcome = Outcome(Result.INTERRUPTED, 128 + self._asked[0], reason=self._reason)
        elif self._verdict == "failed" and self.stage is Stage.OVER:
            self.outcome = Outcome(Result.FAILED, 1, reason=self._reason)
        elif self.stage is Stage.FAILING or culprit is not None:
            number = culprit.number if culprit is not None else -1
            self.outcome = Outcome(Result.FAILED, self._failure_code(), number, self._reason)
        else:
            self.outcome = Outcome(Result.ENDED, 0, reason=self._reason)

    def _failed_afterwards(self) -> Slot | None:
        """A worker that was let go in peace and failed after that, perhaps before the agent knew that all was over; a
        guest knows of nobody's release, but of the end."""
        failed = [slot for slot in self.slots if slot.code and not slot.was_ended]
        if self.rules.owns_coordinator:
            failed = [slot for slot in failed if slot.pid in self._released]
        elif len(failed) < len(self.slots):
            failed = [slot for slot in failed if slot.outlived_run]
        return failed[0] if failed else None

    def _failure_code(self) -> int:
        """The script's own code where no session can speak for it."""
        code = self._culprit.code if self._culprit is not None and not self._sessions else None
        if code is None:
            return 1
        return code if code > 0 else 128 - code

    def _do(self, action: Action) -> None:
        self._actions.append(action)
