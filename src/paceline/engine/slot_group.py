"""The slots of one kind, an agent's workers or its servers: who is started again and when, and how they are ended.

A part of the `Supervisor` machine, and as pure: what is to be done is handed to `do`. It knows when the next start or
kill is due; why anything is to end is for the supervisor to say.

Invariants
- Between two starts in one slot there is a pause; it doubles, and there are no more than `restarts` of them until a
  process has lived for `settled_s`.
- If the first process of every slot failed by an error of its own, nothing here is started again: the program is
  wrong, not the machines.
- A process that is to end is asked once, and killed `grace_s` later, once.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator

from paceline.control.exit_codes import exit_words
from paceline.engine.events import Action, PrintLine, Signal, StartProcess
from paceline.engine.slots import AgentRules, Slot, SlotState


class SlotGroup:
    """May be empty: then it is final from the beginning."""

    def __init__(self, slots: list[Slot], rules: AgentRules, do: Callable[[Action], None]) -> None:
        self.slots = slots
        self._rules = rules
        self._do = do
        self._hopeless = False

    # -- what the supervisor looks at --------------------------------------------------------------------------------

    @property
    def is_final(self) -> bool:
        """Whether nothing lives here, and nothing will be started any more."""
        return all(slot.state is SlotState.FINAL for slot in self.slots)

    def running(self) -> Iterator[Slot]:
        return (slot for slot in self.slots if slot.state is SlotState.RUNNING)

    def due_times(self) -> Iterator[float]:
        """When something is to be looked at, if nothing happens before."""
        for slot in self.slots:
            if slot.state in (SlotState.WAITING, SlotState.DOUBTED):
                yield slot.until
            elif slot.state is SlotState.RUNNING and slot.kill_at is not None:
                yield slot.kill_at

    # -- starting ----------------------------------------------------------------------------------------------------

    def start_all(self, now: float) -> None:
        for slot in self.slots:
            self._start(slot, now)

    def start_again(self, slot: Slot, code: int, now: float) -> None:
        """Its process has ended in this way: another one later, unless there were too many."""
        self._hopeless = self._hopeless or all(each.first_failed for each in self.slots)
        if now - slot.since >= self._rules.settled_s:
            slot.num_restarts = 0
        if self._hopeless or slot.num_restarts >= self._rules.restarts:
            slot.state = SlotState.FINAL
            slot.lost = exit_words(code)
            if self._hopeless:
                self.cancel_starts()
            if slot.is_server or not self._hopeless:  # a script's own words are shown with the end of the run
                self._do(PrintLine(f"{slot.label} {exit_words(code)}; it is not started again"))
            return
        pause_s = min(self._rules.first_pause_s * 2**slot.num_restarts, self._rules.longest_pause_s)
        slot.num_restarts += 1
        slot.state, slot.until = SlotState.WAITING, now + pause_s
        self._do(PrintLine(f"{slot.label} {exit_words(code)}; it is started again in {pause_s:g} s"))

    def refuse(self, slot: Slot, difference: str) -> None:
        """Its process does not fit the run, and no other would."""
        if slot.lost:
            return
        slot.lost = f"was refused: {difference}"
        if slot.state is SlotState.WAITING:
            slot.state = SlotState.FINAL
        self._do(PrintLine(f"{slot.label} {slot.lost}; it is not started again"))

    def cancel_starts(self) -> None:
        for slot in self.slots:
            if slot.state in (SlotState.WAITING, SlotState.DOUBTED):
                slot.state = SlotState.FINAL

    def do_what_is_due(self, now: float) -> None:
        for slot in self.slots:
            if slot.state is SlotState.WAITING and now >= slot.until:
                self._start(slot, now)
            elif slot.state is SlotState.RUNNING and slot.kill_at is not None and now >= slot.kill_at:
                self._kill(slot)

    def _start(self, slot: Slot, now: float) -> None:
        slot.state, slot.since, slot.code = SlotState.RUNNING, now, None
        slot.has_session = slot.was_ended = False
        slot.kill_at = None
        slot.num_starts += 1
        self._do(StartProcess(slot.number))

    # -- ending ------------------------------------------------------------------------------------------------------

    def terminate_all(self, now: float) -> None:
        """All that live and were not asked with a limit of time before."""
        for slot in self.running():
            if slot.kill_at is None:
                self.terminate(slot, now)

    def terminate(self, slot: Slot, now: float) -> None:
        self.send(slot, signal.SIGTERM)
        slot.kill_at = now + self._rules.grace_s

    def kill_all(self) -> None:
        for slot in self.running():
            self._kill(slot)

    def _kill(self, slot: Slot) -> None:
        self.send(slot, signal.SIGKILL)
        slot.kill_at = math.inf

    def send_all(self, number: int) -> None:
        for slot in self.running():
            self.send(slot, number)

    def send(self, slot: Slot, number: int) -> None:
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            slot.was_ended = True
        self._do(Signal(slot.number, number))
