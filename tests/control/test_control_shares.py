"""Fixed shares, declared speeds and stragglers, as the coordinator's machine sees them."""

from __future__ import annotations

import math

import pytest

from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.machines.roster import MemberRecord
from paceline.control.machines.seating import seats_for
from paceline.control.messages.members import Introduction
from paceline.control.messages.plan import Phase, Plan, PlanStart
from paceline.wire.card import Card
from tests.control.table import WORKING, Table


def record(member: str, capacity: float = 0.0, tried: tuple[float, float] | None = None, slot: int = 0) -> MemberRecord:
    card = Card(member, "worker", "h", ("", 0), "", b"", False, ())
    return MemberRecord(Introduction(card, 1, "h", "", capacity=capacity, tried=tried, slot=slot), 0.0)


def plan_of(*members: str, shares: tuple[int, ...] = ()) -> Plan:
    return Plan(1, PlanStart.FOUND, seats_for([record(member) for member in members], None, shares))


def test_without_fixed_shares_the_workers_find_theirs() -> None:
    plan = plan_of("A", "B")
    assert [seat.share for seat in plan.seats] == [0, 0]
    assert plan.is_balanced
    assert not plan_of("A", "B", shares=(1,)).is_balanced


def test_ranks_are_in_the_order_of_slots_among_those_that_come_together() -> None:
    come = [record("C", slot=2), record("A", slot=0), record("B", slot=1)]
    first = Plan(1, PlanStart.FOUND, seats_for(come, None))
    assert first.members == ("A", "B", "C")
    later = seats_for([record("D", slot=0), *come[:2]], first)
    assert [seat.member for seat in later] == ["A", "C", "D"], "who is there keeps its place"


def test_a_member_keeps_its_fixed_share_and_newcomers_take_those_that_are_free() -> None:
    first = plan_of("A", "B", "C", shares=(4, 2, 1))
    assert {seat.member: seat.share for seat in first.seats} == {"A": 4, "B": 2, "C": 1}
    without = Plan(2, PlanStart.RECOVER, seats_for([record("B"), record("C")], first, (4, 2, 1)))
    assert {seat.member: seat.share for seat in without.seats} == {"B": 2, "C": 1}
    again = seats_for([record("C"), record("D"), record("B")], without, (4, 2, 1))
    assert {seat.member: seat.share for seat in again} == {"B": 2, "C": 1, "D": 4}
    # B hands over to D, and works on for a while.
    more = seats_for([record("B"), record("C"), record("D"), record("E")], without, (4, 2, 1))
    assert {seat.member: seat.share for seat in more} == {"B": 2, "C": 1, "D": 4, "E": 1}
    # Started again with other shares than the plan in its memory has.
    other = seats_for([record("B"), record("C")], without, (7, 3))
    assert {seat.member: seat.share for seat in other} == {"B": 7, "C": 3}


@pytest.mark.parametrize("capacity", [math.nan, math.inf, -1.0, 0.0])
def test_what_cannot_be_a_speed_is_not_believed(capacity: float) -> None:
    for tried in [(math.nan, 1.0), (0.0, 0.0), (0.0, -1.0), (-1.0, 1.0), (0.0, math.inf)]:
        (seat,) = seats_for([record("A", capacity, tried)], None)
        assert (seat.capacity, seat.tried) == (0.0, None)
    (seat,) = seats_for([record("A", 2.0, (0.0, 0.5))], None)
    assert (seat.capacity, seat.tried) == (2.0, (0.0, 0.5))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wanted": 4, "most": 4, "shares": (4, 2, 1)}, "--shares 4:2:1 is for 3 workers, but there are 4"),
        ({"wanted": 2, "most": 2, "shares": (4, 2, 1)}, "--shares 4:2:1 is for 3 workers, but there are 2"),
        ({"wanted": 2, "shares": (4, 2)}, "is for 2 workers"),
        ({"wanted": 2, "most": 2, "shares": (4, 0)}, "each share must be 1 or more"),
    ],
)
def test_fixed_shares_that_do_not_fit_are_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunSettings(**settings)  # type: ignore[arg-type]


# -- stragglers --------------------------------------------------------------------------------------------------------


def at_work(settings: RunSettings) -> Table:
    table = Table(settings)
    for member in "ABC":
        table.report(member, phase=Phase.READY)
    for member in "ABC":
        table.report(member, **WORKING)
    return table


def pending_members(table: Table) -> tuple[str, ...]:
    pending = table.machine.standing.pending
    return pending.members if pending is not None else ()


def test_a_straggler_is_drained_if_that_is_wanted() -> None:
    table = at_work(RunSettings(wanted=3, drop_stragglers=True))
    table.report("B", **WORKING, burden="C", why_burden="it takes long", burden_in=1)
    assert pending_members(table) == (), "the word of another member does not count"
    table.report("A", **WORKING, burden="C", why_burden="it took long", burden_in=0)
    assert pending_members(table) == (), "that was in another plan"
    table.report("A", **WORKING, burden="C", why_burden="it takes long", burden_in=1)
    assert pending_members(table) == ("A", "B")
    assert table.machine.records["C"].draining


def test_a_straggler_stays_where_that_was_not_asked_for_or_it_is_needed() -> None:
    for settings in (RunSettings(wanted=3), RunSettings(wanted=3, fewest=3, drop_stragglers=True)):
        table = at_work(settings)
        table.report("A", **WORKING, burden="C", burden_in=1)
        assert pending_members(table) == ()


def test_who_is_not_in_the_plan_cannot_be_a_burden() -> None:
    table = at_work(RunSettings(wanted=3, drop_stragglers=True))
    table.report("A", **WORKING, burden="nobody", burden_in=1)
    assert pending_members(table) == ()
