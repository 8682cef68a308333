"""Decisions of the coordinator's machine that look small: who is to blame, and for how long."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from paceline.control.machines import founding
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import (
    CoordinatorState,
    Disconnected,
    Note,
    RunSettings,
    Tick,
)
from paceline.control.machines.fit import likely_cause
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import GroupBroke, GroupFormed, StateStaged
from paceline.control.machines.roster import Fate
from paceline.control.messages.agents import AgentReport, ProcessVitals
from paceline.control.messages.members import Directive, Introduction, Report, Serving, Verdict
from paceline.control.messages.plan import Phase, PlanStart
from paceline.placement.placement import Placement, Replica, Replicas
from paceline.wire.card import Card
from tests.control.table import WORKING, Table, report_of


@pytest.fixture
def table() -> Table:
    """A and B are at work in generation 1."""
    table = Table()
    for member in "AB":
        table.report(member, phase=Phase.READY)
    for member in "AB":
        table.report(member, **WORKING)
    return table


def test_a_suspicion_ends_with_the_plan_in_which_it_arose(table: Table) -> None:
    broken = {"phase": Phase.ACTIVE, "plan": 1, "fenced": 2, "applied": 5, "broken": 1}
    table.report("A", suspects=("B",), **broken)
    table.report("B", **broken)
    again = {"phase": Phase.ACTIVE, "plan": 2, "formed": 2, "generation": 2, "fenced": 2, "applied": 500, "broken": 1}
    table.report("A", suspects=("B",), **again)
    table.report("B", **again)
    table.restart()
    table.report("A", suspects=("B",), **again)  # B has not connected again yet
    assert table.fate_of("B") is None


def test_a_member_that_is_suspected_and_disconnected_is_dead(table: Table) -> None:
    table.handle(Disconnected("B"))
    assert table.fate_of("B") is None
    table.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=5, broken=1, suspects=("B",))
    assert table.fate_of("B") is Fate.DEAD


def test_who_was_seen_to_die_is_dead_though_its_connection_stands(table: Table) -> None:
    table.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=5, broken=1, suspects=("B",), dead=("B",))
    assert table.fate_of("B") is Fate.DEAD
    plan = table.machine.standing.current
    assert plan is not None
    assert plan.members == ("A",)


def join(table: Table, *newcomers: str) -> dict[str, Any]:
    """Newcomers get a plan of their own; what one says when its group could not be formed."""
    for member in newcomers:
        table.report(member, phase=Phase.READY)
    pending = table.machine.standing.pending
    assert pending is not None
    generation = pending.generation
    return {"phase": Phase.READY, "plan": generation, "generation": generation, "broken": generation}


def test_who_reports_a_dying_newcomer_is_not_to_blame(table: Table) -> None:
    unformed = join(table, "N", "M")
    table.handle(Disconnected("N"))
    table.report("M", fenced=9, suspects=("N",), **unformed)
    assert table.fate_of("M") is None


def test_who_reports_a_dying_member_is_not_to_blame(table: Table) -> None:
    unformed = join(table, "N")
    table.report("N", fenced=9, suspects=("B",), **unformed)
    table.handle(Disconnected("B"))
    assert table.fate_of("N") is None


def test_a_newcomer_that_lives_and_cannot_be_reached_goes(table: Table) -> None:
    join(table, "N")
    pending = table.machine.standing.pending
    assert pending is not None
    table.report("A", **{**WORKING, "plan": 2, "broken": pending.generation}, suspects=("N",))
    assert table.fate_of("N") is Fate.EVICTED
    assert table.fate_of("A") is None


def say_broken(table: Table, member: str, *suspects: str) -> None:
    """A member of the plan in force, or a newcomer, could not form the group of the next one."""
    pending = table.machine.standing.pending
    assert pending is not None
    generation = pending.generation
    if member in "AB":
        table.report(member, **{**WORKING, "plan": generation, "broken": generation}, suspects=suspects)
    else:
        table.report(member, phase=Phase.READY, plan=generation, fenced=99, broken=generation, suspects=suspects)


def wait(table: Table, seconds: float) -> None:
    ends_at = table.now + seconds
    while table.now < ends_at:
        table.handle(Tick())


def test_a_complaint_that_comes_after_the_first_report_counts(table: Table) -> None:
    join(table, "N")
    say_broken(table, "B")  # it has only seen that others gave up
    say_broken(table, "A", "N")
    assert table.fate_of("N") is Fate.EVICTED
    assert table.machine.standing.newest == 2


def test_a_newcomer_that_complains_of_the_same_member_in_two_switches_goes(table: Table) -> None:
    join(table, "N")
    for fate in (None, Fate.EVICTED):
        for member in "AB":
            say_broken(table, member)
        table.handle(Tick())
        say_broken(table, "N", "B")
        for member in "AB":
            table.report(member, **WORKING)
        assert table.fate_of("N") is fate
        wait(table, 2.5)
    assert table.machine.standing.newest == 3


def test_the_same_seats_are_not_tried_again_at_once(table: Table) -> None:
    join(table, "N")
    for member in "ABN":
        say_broken(table, member)
    wait(table, 1.0)
    assert table.machine.standing.newest == 2
    wait(table, 2.0)
    assert table.machine.standing.newest == 3


def test_other_seats_are_tried_at_once(table: Table) -> None:
    join(table, "N")
    for member in "ABN":
        say_broken(table, member)
    table.report("M", phase=Phase.READY)
    pending = table.machine.standing.pending
    assert pending is not None
    assert set(pending.members) == set("ABNM")


def test_who_does_not_say_why_a_switch_broke_is_not_waited_for_for_ever() -> None:
    table = Table(RunSettings(wanted=2, fewest=2, silence_s=1.0))
    for member in "AB":
        table.report(member, phase=Phase.READY)
    for member in "AB":
        table.report(member, **WORKING)
    join(table, "N")
    say_broken(table, "A")
    for _ in range(3):
        wait(table, 0.5)
        table.report("N", phase=Phase.READY)
        table.report("B", **WORKING)
        table.report("A", **WORKING, broken=2)
    assert table.machine.standing.newest == 3


def test_a_spare_that_has_seen_a_newer_checkpoint_founds_the_run_from_it(table: Table) -> None:
    table.report("C", phase=Phase.READY, checkpoint=3)
    table.report("C", phase=Phase.READY, checkpoint=6)
    table.report("D", phase=Phase.READY, checkpoint=3)
    table.handle(Disconnected("B"))
    table.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=8, broken=1, suspects=("B",))
    table.report("A", phase=Phase.FAILED, plan=1, fenced=2, applied=8, cause="a fault")
    table.report("C", phase=Phase.READY, checkpoint=6, fenced=table.machine.standing.fence)
    table.report("D", phase=Phase.READY, checkpoint=3, fenced=table.machine.standing.fence)
    plan = table.machine.plan_of("C")
    assert plan is not None
    assert (plan.base, plan.rank_of("C")) == (6, 0)


def test_nobody_waits_for_workers_that_will_not_come() -> None:
    table = Table(RunSettings(wanted=3, fewest=1, grace_s=20.0))
    for number, exhausted in enumerate((False, True), start=1):
        for member in "AB":
            table.report(member, phase=Phase.READY)
        assert table.machine.standing.current is None
        living = {table.pid_of(member): ProcessVitals("S", False) for member in "AB"}
        table.handle(AgentReport("", number, living, {}, exhausted))
    plan = table.machine.standing.current
    assert plan is not None
    assert plan.members == ("A", "B")


def test_nobody_waits_for_a_worker_that_was_drained() -> None:
    """All others died: who comes in their place founds the run at once, though more were wanted in the beginning."""
    table = Table(RunSettings(wanted=3, fewest=1, grace_s=20.0))
    for member in "AB":
        table.report(member, phase=Phase.READY)
    living = {table.pid_of(member): ProcessVitals("S", False) for member in "AB"}
    table.handle(AgentReport("", 1, living, {}, num_expected=3))
    assert table.machine.standing.current is None, "one more may come"
    table.handle(AgentReport("", 2, living, {}, num_expected=2))
    plan = table.machine.standing.current
    assert plan is not None
    assert plan.members == ("A", "B")


def test_who_has_left_is_no_holder_of_the_state_when_those_it_left_are_gone(table: Table) -> None:
    """A may have gone on alone, and told nobody: what B holds can be older than what counted."""
    table.report("B", **WORKING, leaving=True)
    pending = table.machine.standing.pending
    assert pending is not None
    assert pending.members == ("A",)
    gone = {**WORKING, "plan": 2, "generation": 2, "phase": Phase.LEAVING, "applied": 6, "leaving": True, "left": 2}
    table.report("B", **gone)
    table.restart()  # and forgets what A has said
    table.report("B", **gone)
    table.handle(AgentReport("", 1, {}, {table.pid_of("A"): "was killed"}))
    assert table.fate_of("A") is Fate.DEAD
    fence = table.machine.standing.fence
    table.report("B", **{**gone, "phase": Phase.ACTIVE, "generation": 0, "fenced": fence})
    assert table.machine.standing.current is None, "the newest checkpoint has it"
    assert table.fate_of("B") is Fate.RELEASED


# -- a founder that is lost, a journal that is lost ------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 1, 0), (1, 0, 1)])
def test_rank_0_of_a_founding_gives_to_all_others_in_whatever_order_they_came(slots: tuple[int, ...]) -> None:
    table = Table(RunSettings(wanted=3, fewest=3))
    for member, slot in zip("ABC", slots, strict=True):
        table.report(member, slot=slot, phase=Phase.READY)
    plan = table.machine.standing.current
    assert plan is not None
    first, *others = plan.members
    assert plan.gifts == dict.fromkeys(others, first)


def test_who_has_the_newest_checkpoint_founds_the_run_also_if_others_sat_before_it() -> None:
    table = Table(RunSettings(wanted=3, fewest=1))
    for slot, member in enumerate("ABC"):
        table.report(member, slot=slot, phase=Phase.READY)
    table.handle(AgentReport("", 1, {}, {table.pid_of("A"): "was killed"}))
    for member, checkpoint in (("B", 0), ("C", 7)):
        table.report(member, phase=Phase.READY, plan=1, fenced=2, broken=1, dead=("A",), checkpoint=checkpoint)
    plan = table.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.base, plan.members, plan.gifts) == (PlanStart.FOUND, 7, ("C", "B"), {"B": "C"})


def test_a_founder_that_is_lost_before_the_first_step_is_not_waited_for() -> None:
    """Who had a seat goes on at once; the next one joins later."""
    table = Table(RunSettings(wanted=3, fewest=1))
    for member in "ABC":
        table.report(member, phase=Phase.READY)
    founder, *others = table.machine.standing.current.members  # type: ignore[union-attr]
    living = {table.pid_of(member): ProcessVitals("R", True) for member in others}
    table.handle(AgentReport("", 1, living, {table.pid_of(founder): "was killed"}))
    for member in others:
        table.report(member, phase=Phase.READY, plan=1, fenced=2, broken=1, suspects=(founder,), dead=(founder,))
    plan = table.machine.standing.current
    assert plan is not None
    assert (plan.start, sorted(plan.members)) == (PlanStart.FOUND, sorted(others))


@pytest.mark.parametrize("checkpoints", [(0, 0, 0), (0, 0, 4), (0, 7, 4)])
def test_rank_0_founds_and_all_others_are_given_its_state(checkpoints: tuple[int, int, int]) -> None:
    """Whoever comes first, in whichever slot: who has the newest checkpoint, of these the lowest slot."""
    for order in itertools.permutations("ABC"):
        table = Table(RunSettings(wanted=3, fewest=3))
        for member in order:
            slot = "ABC".index(member)
            table.report(member, phase=Phase.READY, slot=slot, checkpoint=checkpoints[slot])
        plan = table.machine.standing.current
        assert plan is not None
        founder, *others = plan.members
        assert founder == "ABC"[checkpoints.index(max(checkpoints))]
        assert others == sorted(others), "the others are in the order of slots"
        assert plan.gifts == dict.fromkeys(others, founder)
        assert plan.base == max(checkpoints)


def test_a_switch_that_broke_is_not_forgotten_before_all_of_it_were_heard_again() -> None:
    """It was made, and of those who made it only one newcomer lives. The coordinator comes back, and hears it last."""
    table = Table(RunSettings(wanted=1))
    for member in "AMN":
        table.report(member, phase=Phase.READY)
    table.report("A", **WORKING)
    pending = table.machine.standing.pending
    assert pending is not None
    assert pending.members == ("A", "M", "N")
    table.restart()
    table.report("X", phase=Phase.READY)
    table.handle(AgentReport("", 1, {}, {table.pid_of("M"): "was killed"}))
    table.handle(AgentReport("", 2, {}, {table.pid_of("A"): "was killed"}))
    broke = {"plan": pending.generation, "broken": pending.generation, "fenced": table.machine.standing.fence}
    table.report("N", phase=Phase.ACTIVE, applied=6, **broke)
    plan = table.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.base, plan.members) == (PlanStart.RECOVER, 6, ("N",))


def test_a_run_that_begins_waits_for_all_that_are_wanted() -> None:
    table = Table(RunSettings(wanted=3, fewest=1))
    for member in "AB":
        table.report(member, phase=Phase.READY)
    assert table.machine.standing.current is None


def test_a_newcomer_does_not_found_a_run_of_which_others_hold_the_state(table: Table) -> None:
    """The journal is gone; the newcomer is heard first."""
    fresh = Table(RunSettings(wanted=1))
    living = {fresh.pid_of(member): ProcessVitals("R", True) for member in "ABN"}
    fresh.handle(AgentReport("", 1, living))
    fresh.report("N", phase=Phase.READY)
    assert fresh.machine.standing.current is None
    for member in "AB":
        fresh.report(member, **WORKING)
    standing = fresh.machine.standing
    assert (standing.term, standing.newest, standing.fence) == (2, 1, 2)
    for member, applied in (("A", 6), ("B", 5)):
        fresh.report(member, phase=Phase.ACTIVE, plan=1, fenced=2, applied=applied)
    plan = fresh.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.generation, plan.base, set(plan.members)) == (PlanStart.RECOVER, 2, 6, {"A", "B"})
    assert [fresh.fate_of(member) for member in "ABN"] == [None, None, None]


def listen(table: Table) -> None:
    """Until it has heard whoever could come."""
    until = table.now + RunSettings().listen_s
    while table.now < until:
        table.now += 0.1
        table.handle(Tick())


def test_a_coordinator_that_comes_back_with_nothing_gives_hosts_that_it_forgot_time_to_come() -> None:
    """The newcomer is on its own host, and is all that its agent sees; who holds the state is on another."""
    fresh = Table(RunSettings(wanted=1))
    fresh.machine = Coordinator(RunSettings(wanted=1), fresh.now, {}, is_again=True)
    fresh.handle(AgentReport("", 1, {fresh.pid_of("N"): ProcessVitals("R", True)}))
    fresh.report("N", phase=Phase.READY)
    assert fresh.machine.standing.current is None
    fresh.report("A", **WORKING)
    listen(fresh)
    fresh.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=6)
    plan = fresh.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.base, plan.members) == (PlanStart.RECOVER, 6, ("A",))


def test_a_founder_that_may_have_done_leases_is_not_founded_over_before_its_group_is_formed() -> None:
    founder = report_of("A", 1, 1, Phase.READY, plan=1, fenced=1, applied=0, placement=1)
    assert founding.holds(founder), "what it did is on the servers, and a founding would load them anew"
    assert not founding.holds(msgspec.structs.replace(founder, placement=0)), "it has done nothing yet"
    assert not founding.holds(report_of("B", 1, 1, Phase.READY, plan=1, fenced=1, placement=1)), "it has no state"


def test_it_does_not_wait_for_them_for_ever() -> None:
    fresh = Table(RunSettings(wanted=1))
    fresh.machine = Coordinator(RunSettings(wanted=1), fresh.now, {}, is_again=True)
    fresh.report("N", phase=Phase.READY)
    listen(fresh)
    plan = fresh.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.members) == (PlanStart.FOUND, ("N",))


def test_who_comes_too_late_with_a_state_is_told_so_and_comes_back(table: Table) -> None:
    fresh = Table(RunSettings(wanted=1))
    fresh.report("A", **WORKING)
    fresh.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=5)
    fresh.report("B", **{**WORKING, "applied": 6})
    assert fresh.fate_of("B") is Fate.EVICTED
    assert "came with operation 6" in fresh.machine.records["B"].reason


def test_who_was_told_of_a_term_proves_that_it_is_forgotten() -> None:
    standing = CoordinatorState(term=1)
    stranger = report_of("A", 7, 1, Phase.READY)
    assert founding.forgotten(stranger, standing, is_known=False) == founding.Forgotten(2, 0)
    assert founding.forgotten(stranger, standing, is_known=True) is None
    assert founding.forgotten(stranger, CoordinatorState(term=9), is_known=False) == founding.Forgotten(9, 0)
    assert founding.forgotten(report_of("A", 1, 1, Phase.BUILDING), standing, is_known=False) is None
    assert founding.forgotten(report_of("A", 1, 0, Phase.READY), standing, is_known=False) is None
    assert founding.forgotten(report_of("A", 1, 4, Phase.READY, plan=9), standing, is_known=True) == founding.Forgotten(
        5, 9
    )


def test_a_coordinator_that_comes_back_with_nothing_uses_no_number_again() -> None:
    """Who was told of generations, terms and placements may be stopped, and be heard of later."""
    fresh = Table(RunSettings(wanted=1))
    fresh.machine = Coordinator(RunSettings(wanted=1), fresh.now, {}, is_again=True, born=1_000)
    fresh.report("N", phase=Phase.READY)
    listen(fresh)
    standing = fresh.machine.standing
    assert standing.current is not None
    assert (standing.term, standing.current.generation, standing.current.start) == (1_001, 1_001, PlanStart.FOUND)
    assert fresh.machine.placement.version == 1_000
    fresh.restart()
    assert (fresh.machine.standing.term, fresh.machine.standing.newest) == (1_002, 1_001)


def test_the_first_coordinator_counts_from_one_and_so_does_one_that_remembers() -> None:
    assert Coordinator(RunSettings(), 0.0, {}, born=1_000).standing.term == 1
    remembered = {"standing": msgspec.msgpack.encode(CoordinatorState(term=4, newest=7))}
    machine = Coordinator(RunSettings(), 0.0, remembered, is_again=True, born=1_000)
    assert (machine.standing.term, machine.standing.newest, machine.placement.version) == (5, 7, 7)


def test_a_journal_that_is_lost_is_said_once() -> None:
    machine = Coordinator(RunSettings(wanted=9), 0.0, {}, is_again=True, born=1_000)
    actions = [machine.handle(report_of(member, 9, 4, Phase.ACTIVE, plan=3, applied=5), 0.1) for member in "AB"]
    notes = [action for each in actions for action in each if isinstance(action, Note) and action.kind == "forgotten"]
    assert [note.text for note in notes] == ["member A knows of generation 3; the journal is lost"]
    assert (machine.standing.term, machine.standing.newest) == (1_001, 1_000)


def test_who_leaves_with_the_state_of_a_run_that_was_forgotten_hands_it_over_first() -> None:
    fresh = Table(RunSettings(wanted=1))
    fresh.machine = Coordinator(RunSettings(wanted=1), fresh.now, {}, is_again=True)
    fresh.report("A", leaving=True, **WORKING)
    fresh.report("N", phase=Phase.READY)
    assert fresh.fate_of("A") is None
    listen(fresh)
    fresh.report("A", phase=Phase.ACTIVE, plan=1, fenced=2, applied=6, leaving=True)
    plan = fresh.machine.standing.current
    assert plan is not None
    assert (plan.start, plan.base, plan.members) == (PlanStart.RECOVER, 6, ("A",))


def test_a_lost_journal_of_a_run_with_servers_is_said_and_not_guessed() -> None:
    fresh = Table(RunSettings(wanted=1))
    card = Card("A", "worker", "h", ("", 0), "", b"", False, ())
    introduction = Introduction(card, 1, "h", "", ranges=(4, 4))
    fresh.handle(report_of("A", 1, 1, introduction=introduction, **WORKING))
    assert fresh.machine.standing.over == "failed"
    assert "database is lost" in fresh.machine.standing.reason


def card_of(member: str, role: str) -> Card:
    return Card(member, role, "h", ("", 0), "", b"", False, ())


def placed(version: int, *servers: str) -> Placement:
    """Two ranges, the first server has both and the others copies."""
    first, *others = (Replica(server, 1) for server in servers)
    ranges = (Replicas(first, tuple(others), origin=1),) * 2
    return Placement(version, 1, 1, tuple(card_of(server, "server") for server in servers), ranges)


def served(member: str, held: Placement | None, known: int = 0, **fields: Any) -> Report:
    """A member that a coordinator does not know any more introduces itself, with the placement that it goes by."""
    role = "server" if member.startswith("S") else "worker"
    ranges = () if role == "server" else (4, 4)
    introduction = Introduction(card_of(member, role), Table.pid_of(member), "h", "", ranges=ranges)
    version = known or (held.version if held is not None else 0)
    said = {"phase": Phase.READY, "plan": 1, "serving": Serving(version)} if role == "server" else {}
    return report_of(member, 1, 1, introduction=introduction, held=held, placement=version, **{**said, **fields})


def test_a_coordinator_that_forgot_where_the_ranges_are_goes_by_what_members_say() -> None:
    """The newest placement counts, and every server keeps what it has."""
    fresh = Table(RunSettings(wanted=1, servers=2, replicas=2))
    fresh.handle(served("S1", placed(7, "S1", "S2")))
    fresh.handle(served("S2", placed(8, "S1", "S2")))
    fresh.restart()  # who has introduced itself does not do so again
    fresh.handle(served("A", None, known=8, **WORKING))
    for server in ("S1", "S2"):
        fresh.handle(report_of(server, 2, 3, Phase.READY, placement=8, serving=Serving(8)))
    fresh.handle(report_of("A", 2, 3, Phase.ACTIVE, plan=1, fenced=2, applied=5, placement=8))
    standing = fresh.machine.standing
    assert not standing.over
    assert standing.current is not None
    assert (standing.current.start, standing.current.base) == (PlanStart.RECOVER, 5)
    assert fresh.machine.placement.version >= 8
    assert [one.primary for one in fresh.machine.placement.ranges] == [Replica("S1", 1)] * 2
    assert all(one.origin == 1 and one.backups == (Replica("S2", 1),) for one in fresh.machine.placement.ranges)
    fresh.restart()
    assert [one.primary for one in fresh.machine.placement.ranges] == [Replica("S1", 1)] * 2, "it remembers that"


def test_servers_that_hold_something_are_waited_for_and_not_for_ever() -> None:
    settings = RunSettings(wanted=1, servers=2, replicas=2)
    fresh = Table(settings)
    fresh.handle(served("S2", placed(8, "S1", "S2")))
    fresh.handle(served("A", placed(8, "S1", "S2"), **WORKING))
    assert fresh.machine.standing.current is None
    while fresh.now < settings.silence_s + 1.0:
        fresh.now += 0.2
        fresh.handle(report_of("S2", round(fresh.now * 100), 2, Phase.READY, placement=8, serving=Serving(8)))
        fresh.handle(report_of("A", round(fresh.now * 100), 2, Phase.ACTIVE, plan=1, fenced=2, applied=5, placement=8))
        fresh.handle(Tick())
    assert fresh.machine.standing.current is not None
    assert [one.primary.server for one in fresh.machine.placement.ranges] == ["S2", "S2"], "a copy takes its place"


def test_a_placement_of_which_nobody_says_what_it_was_is_not_guessed() -> None:
    """The worker has heard of another one than that which is left; the range may have gone on there."""
    fresh = Table(RunSettings(wanted=1, servers=1))
    fresh.handle(served("S1", placed(7, "S1")))
    fresh.handle(served("A", None, known=8, **WORKING))
    assert fresh.machine.standing.over == "failed"
    assert "database is lost" in fresh.machine.standing.reason


def test_a_range_that_no_server_has_any_more_is_not_given_up_where_a_checkpoint_has_it() -> None:
    settings = RunSettings(wanted=1, servers=1)
    fresh = Table(settings)
    fresh.handle(served("S2", placed(7, "S1")))
    fresh.handle(served("A", placed(7, "S1"), **WORKING))
    while fresh.now < settings.silence_s + 1.0:
        fresh.now += 0.2
        fresh.handle(Tick())
    assert fresh.machine.standing.over == "failed"
    assert "no server that lives has some of it" in fresh.machine.standing.reason


def test_a_run_that_is_founded_anew_uses_no_number_that_servers_know() -> None:
    """No worker is left; what servers hold is of the last founding, and must not be taken for that of this one."""
    settings = RunSettings(wanted=1, servers=1)
    fresh = Table(settings)
    fresh.machine = Coordinator(settings, fresh.now, {}, is_again=True, born=1000)
    fresh.handle(served("S1", placed(7, "S1")))
    fresh.restart()
    fresh.handle(report_of("S1", 2, 1002, Phase.READY, placement=7, serving=Serving(7)))
    fresh.handle(served("N", None, phase=Phase.READY, checkpoint=3))
    listen(fresh)
    plan, placement = fresh.machine.standing.current, fresh.machine.placement
    assert plan is not None
    assert (plan.start, plan.base) == (PlanStart.FOUND, 3)
    assert plan.generation > 1000
    assert (placement.version, placement.founding) == (1001, plan.generation)


# -- who does not fit --------------------------------------------------------------------------------------------------

FACTS = {"dataset_length": "40", "the data's fingerprint": "aa"}


def test_a_refusal_before_the_run_has_begun_ends_it_and_names_both_sides() -> None:
    table = Table()
    table.report("A", FACTS, phase=Phase.READY)
    table.report("B", FACTS | {"the data's fingerprint": "bb"}, phase=Phase.BUILDING)
    assert (table.fate_of("A"), table.fate_of("B")) == (Fate.RELEASED, Fate.REFUSED)
    assert table.machine.standing.over == "failed"
    first, second = table.machine.standing.reason.splitlines()
    assert "worker B (process 66 on h) differs from worker A (process 65 on h): the data's fingerprint is bb" in first
    assert "is the data random? seed it" in second


def test_a_refusal_later_costs_the_newcomer_only_also_while_the_run_is_founded_again(table: Table) -> None:
    table.report("C", {"seed": "2"}, phase=Phase.READY)
    assert table.fate_of("C") is Fate.REFUSED
    assert not table.machine.standing.over
    for member in "AB":
        table.machine.records[member].fate = Fate.DEAD  # all that knew the run's facts are gone
    table.machine._memory.keep(current=None)
    table.report("D", phase=Phase.READY)
    table.report("E", {"seed": "2"}, phase=Phase.READY)
    assert (table.fate_of("D"), table.fate_of("E")) == (None, Fate.REFUSED)
    assert not table.machine.standing.over


@pytest.mark.parametrize(
    ("difference", "cause"),
    [
        ("parameter 3 is 'a' here but 'b' on the other members", "build its model"),
        ("dataset_length is 41 here but 40", "they divide it themselves"),
        ("the version of torch is 2 here but 3", "install the same version"),
        ("seed is 2 here but 1", "its arguments"),
    ],
)
def test_where_to_look_first(difference: str, cause: str) -> None:
    assert cause in likely_cause(difference)


def test_a_newcomer_that_got_the_state_proves_to_the_next_coordinator_that_the_switch_was_made(table: Table) -> None:
    """C came by a switch that all have made; the coordinator dies before it hears of it, and A and B with it. C alone
    holds the state, and works in no generation any more, because its group broke: the run goes on from it."""
    join(table, "C")
    member, pending = Member("C"), table.machine.standing.pending
    assert pending is not None
    generation = pending.generation
    member.handle(Directive(1, 1, "C", Verdict.KNOWN, plan=pending))
    for event in (GroupFormed(generation), StateStaged(generation, 7), GroupBroke(generation, ("A", "B"))):
        member.handle(event)
    report = member.report()
    broken = {"phase": report.phase, **msgspec.structs.asdict(report.working)}
    table.restart()
    for _ in range(10):  # longer than it listens, shorter than the silence deadline
        table.report("C", **broken)
        wait(table, 0.2)
    assert table.fate_of("C") is None
    table.handle(AgentReport("", 1, {}, {table.pid_of(member): "was killed by SIGKILL" for member in "AB"}))
    table.report("C", **broken)
    assert table.fate_of("C") is None
    current = table.machine.standing.current
    assert current is not None
    assert (current.start, current.members, current.base) == (PlanStart.RECOVER, ("C",), 7)
