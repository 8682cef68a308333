"""Who joins a run of leases, where no switch is agreed in a header: who gets a seat, who is to blame if that fails."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import RunSettings, Tick
from paceline.control.machines.roster import Fate
from paceline.control.machines.surveys import UNREACHABLE
from paceline.control.messages.members import Introduction
from paceline.control.messages.plan import Phase, Plan, PlanStart
from paceline.wire.card import Card
from tests.control.table import report_of

PAUSE_S = 2.0


class LeasedRun:
    """A is alone at work, and others may join."""

    def __init__(self, **settings: Any) -> None:
        self.now = 0.0
        self._numbers: dict[str, int] = {}
        self.machine = Coordinator(RunSettings(wanted=1, **settings), self.now)
        self.report("A", phase=Phase.READY)
        self.works("A")

    @property
    def plan(self) -> Plan:
        plan = self.machine.standing.current
        assert plan is not None
        return plan

    def seated(self) -> tuple[str, ...]:
        return self.plan.members

    def report(self, member: str, **fields: Any) -> None:
        number = self._numbers[member] = self._numbers.get(member, 0) + 1
        card = Card(member, "worker", f"host of {member}", ("", 0), "", b"", False, ())
        introduction = Introduction(card, ord(member), card.host, "", leased=True)
        self.now += 0.01
        self.machine.handle(report_of(member, number, 1, introduction=introduction, **fields), self.now)

    def works(self, member: str, **fields: Any) -> None:
        """In the plan in force, and between two leases."""
        at = self.plan.generation
        known = {"plan": at, "formed": at, "generation": at, "applied": 4, "joinable": True}
        self.report(member, phase=Phase.ACTIVE, fenced=self.machine.standing.fence, **{**known, **fields})

    def breaks(self, member: str, *suspects: str, has_state: bool) -> None:
        """It could not form the group of the plan in force, and has given its promise."""
        at = self.plan.generation
        phase, applied = (Phase.ACTIVE, 4) if has_state else (Phase.READY, -1)
        told = {"plan": at, "broken": at, "suspects": suspects, "fenced": at + 1}
        self.report(member, phase=phase, applied=applied, joinable=has_state, **told)

    def promises(self, member: str, *, has_state: bool) -> None:
        """It was told of the fence before it noticed anything."""
        self.breaks(member, has_state=has_state)

    def wait(self, seconds: float, *speakers: str) -> None:
        ends_at = self.now + seconds
        while self.now < ends_at:
            self.now += 0.1
            self.machine.handle(Tick(), self.now)
            for member in speakers:
                self.works(member) if member == "A" else self.report(member, phase=Phase.READY)


@pytest.fixture
def run() -> LeasedRun:
    """N is there, and has a seat in the plan in force; nobody has formed its group yet."""
    run = LeasedRun()
    run.report("N", phase=Phase.READY)
    run.works("A")
    assert (run.plan.start, run.seated(), run.plan.newcomers) == (PlanStart.RECOVER, ("A", "N"), ("N",))
    return run


def test_a_newcomer_that_lives_and_cannot_be_reached_goes(run: LeasedRun) -> None:
    run.breaks("A", "N", has_state=True)
    run.promises("N", has_state=False)
    assert run.machine.records["N"].fate is Fate.EVICTED
    assert run.machine.records["N"].reason.startswith(UNREACHABLE)
    assert run.seated() == ("A",)


def test_a_newcomer_that_complains_gets_a_seat_once_more_after_a_pause_and_then_goes(run: LeasedRun) -> None:
    run.breaks("N", "A", has_state=False)
    run.promises("A", has_state=True)
    assert run.machine.records["N"].fate is None
    assert run.seated() == ("A",)
    alone = run.plan.generation
    run.wait(PAUSE_S / 2, "A", "N")
    assert run.plan.generation == alone, "the same seats are not tried again at once"
    run.wait(PAUSE_S, "A", "N")
    assert run.seated() == ("A", "N")
    run.breaks("N", "A", has_state=False)
    run.promises("A", has_state=True)
    assert run.machine.records["N"].fate is Fate.EVICTED
    assert run.seated() == ("A",)


def test_a_newcomer_that_has_got_the_state_is_no_newcomer_any_more(run: LeasedRun) -> None:
    run.breaks("A", "N", has_state=True)
    run.breaks("N", "A", has_state=True)
    assert run.machine.records["N"].fate is None


def test_others_may_come_while_the_seats_that_broke_wait(run: LeasedRun) -> None:
    run.breaks("N", "A", has_state=False)
    run.report("M", phase=Phase.READY)
    run.promises("A", has_state=True)
    assert run.seated() == ("A", "M")


@pytest.mark.parametrize("most", [1, 9])
def test_who_is_alone_and_leaves_hands_over_to_a_newcomer(most: int) -> None:
    run = LeasedRun(most=most)
    run.report("N", phase=Phase.READY)
    run.works("A", leaving=True)
    run.works("A", leaving=True)
    assert run.seated() == ("A", "N")


def test_who_leaves_hands_over_also_where_somebody_was_let_go_because_hosts_are_parted() -> None:
    """Others get a seat only when they and all who stay have reached each other, and nobody stays. The plan with the
    newcomer is made at once, and no other one before it."""
    run = LeasedRun()
    run.report("M", phase=Phase.READY)
    run.works("A")
    run.breaks("A", "M", has_state=True)
    run.promises("M", has_state=False)
    assert run.machine.records["M"].fate is Fate.EVICTED
    run.works("A")
    before = run.plan.generation
    run.report("N", phase=Phase.READY)
    run.wait(PAUSE_S, "A")
    assert run.plan.generation == before, "it waits for what they say of each other"
    for _ in range(2):
        run.works("A", leaving=True)
    assert (run.plan.generation, run.seated()) == (before + 1, ("A", "N"))


def test_who_leaves_tries_a_newcomer_again_after_a_pause_if_that_failed(run: LeasedRun) -> None:
    run.breaks("N", "A", has_state=False)
    run.promises("A", has_state=True)
    alone = run.plan.generation
    run.works("A", leaving=True)
    assert run.plan.generation == alone
    assert not run.machine.standing.halting
    run.wait(PAUSE_S * 1.5, "N")
    run.works("A", leaving=True)
    run.works("A", leaving=True)
    assert run.seated() == ("A", "N")


def test_who_leaves_in_the_operations_of_an_epochs_end_hands_over_after_them() -> None:
    run = LeasedRun()
    run.works("A", joinable=False)
    run.report("N", phase=Phase.READY)
    before = run.plan.generation
    for _ in range(20):
        run.works("A", joinable=False, leaving=True)
        run.report("N", phase=Phase.READY)
    assert run.plan.generation == before
    assert not run.machine.standing.halting
    for _ in range(2):
        run.works("A", leaving=True)
    assert run.seated() == ("A", "N")


def test_who_leaves_ends_the_run_if_nobody_is_there_to_take_over() -> None:
    run = LeasedRun()
    run.works("A", joinable=False, leaving=True)
    assert run.machine.standing.halting
