"""The coordinator finds out who can reach whom, lets go whom it must, and lets nobody in that cannot reach all."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Event, Remember, RunSettings, Tell, Tick
from paceline.control.machines.roster import Fate
from paceline.control.machines.surveys import AGAIN_S, UNREACHABLE
from paceline.control.messages.members import Directive, Introduction, Survey
from paceline.control.messages.plan import Phase
from paceline.wire.card import Card
from tests.control.table import report_of


class Hosts:
    """A coordinator on host a, and members that are named by their host and a number."""

    def __init__(self, *members: str, **settings: Any) -> None:
        self.now = 0.0
        self.told: dict[str, Directive] = {}
        self._numbers: dict[str, int] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._memory: dict[str, bytes] = {}
        self._settings = RunSettings(wanted=len(members), **settings)
        self.machine = Coordinator(self._settings, self.now, None, "a")
        for member in members:
            self.say(member, phase=Phase.READY)
        self.work(*members)

    def say(self, member: str, **fields: Any) -> None:
        """What a member said before still holds."""
        said = self._said[member] = {**self._said.get(member, {}), **fields}
        number = self._numbers[member] = self._numbers.get(member, 0) + 1
        card = Card(member, "worker", member[0], (f"host-{member[0]}", 1), "", b"", False, ())
        introduction = Introduction(card, sum(map(ord, member)), member[0], "")
        self.handle(report_of(member, number, 1, introduction=introduction, **said))

    def handle(self, event: Event) -> None:
        self.now += 0.01
        for action in self.machine.handle(event, self.now):
            if isinstance(action, Remember) and action.value is not None:
                self._memory[action.key] = action.value
            elif isinstance(action, Tell):
                self.told[action.directive.member] = action.directive

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for member in list(self._said):
                self.say(member)
            self.handle(Tick())

    def work(self, *members: str, applied: int = 5) -> None:
        """All of them work in the newest plan."""
        plan, fence = self.machine.standing.newest, self.machine.standing.fence
        for member in members:
            self.say(member, phase=Phase.ACTIVE, plan=plan, formed=plan, generation=plan, fenced=fence, applied=applied)

    def complain(self, member: str, *suspects: str) -> None:
        newest = self.machine.standing.newest
        self.say(member, broken=newest, suspects=suspects, fenced=newest + 1, generation=0)

    def survey_of(self, member: str) -> Survey:
        survey = self.told[member].survey
        assert survey is not None
        return survey

    def answer(self, member: str, *missing: str) -> None:
        """To the newest survey that it was told of."""
        self.say(member, surveyed=self.survey_of(member).number, unreachable=missing)

    def seated(self) -> tuple[str, ...]:
        """The members of the plan in force, or of the switch that is prepared."""
        standing = self.machine.standing
        plan = standing.pending or standing.current
        return plan.members if plan is not None else ()

    def fates(self) -> dict[str, Fate]:
        return {name: record.fate for name, record in self.machine.records.items() if record.fate is not None}


@pytest.fixture
def hosts() -> Hosts:
    """b1 and c1 complain of each other; all have promised."""
    hosts = Hosts("a1", "b1", "c1")
    hosts.complain("b1", "c1")
    hosts.complain("c1", "b1")
    hosts.complain("a1")
    return hosts


def test_members_that_complain_of_living_ones_are_asked_before_anything_is_decided(hosts: Hosts) -> None:
    assert hosts.machine.standing.newest == 1
    assert hosts.survey_of("a1").targets == {"b1": ("host-b", 1), "c1": ("host-c", 1)}
    assert hosts.survey_of("b1").targets == {"a1": ("host-a", 1), "c1": ("host-c", 1)}


def test_one_direction_is_enough_and_the_others_go_on(hosts: Hosts) -> None:
    hosts.answer("a1")
    hosts.answer("b1", "c1")
    assert hosts.machine.standing.newest == 1, "not before all have answered"
    hosts.answer("c1")
    assert hosts.fates() == {"c1": Fate.EVICTED}
    assert hosts.machine.records["c1"].reason.startswith(UNREACHABLE)
    assert hosts.seated() == ("a1", "b1")
    assert hosts.told["a1"].survey is None, "what was answered is not asked again"


def test_a_path_that_is_there_again_costs_nobody(hosts: Hosts) -> None:
    for member in ("a1", "b1", "c1"):
        hosts.answer(member)
    assert hosts.fates() == {}
    assert hosts.seated() == ("a1", "b1", "c1")


def test_who_does_not_answer_is_waited_for_until_the_silence_deadline(hosts: Hosts) -> None:
    hosts.answer("a1", "c1")
    hosts.answer("b1", "c1")
    hosts.pass_time(4.0)
    assert hosts.machine.standing.newest == 1
    hosts.pass_time(2.0)
    assert hosts.fates() == {"c1": Fate.EVICTED}
    assert hosts.seated() == ("a1", "b1")


def test_those_are_kept_that_have_come_furthest_and_the_rest_starts_from_there() -> None:
    hosts = Hosts("a1", "b1", "c1")
    hosts.say("c1", applied=6)
    for member, suspects in (("a1", ()), ("b1", ("c1",)), ("c1", ("b1",))):
        hosts.complain(member, *suspects)
    hosts.answer("a1")
    hosts.answer("b1", "c1")
    hosts.answer("c1", "b1")
    plan = hosts.machine.standing.current
    assert plan is not None
    assert (plan.members, plan.base) == (("a1", "c1"), 6)


def test_a_base_that_only_those_let_go_had_is_not_waited_for() -> None:
    hosts = Hosts("a1", "a2", "b1")
    hosts.say("b1", applied=6)
    for member, suspects in (("a1", ("b1",)), ("a2", ()), ("b1", ("a1",))):
        hosts.complain(member, *suspects)
    hosts.answer("a1", "b1")
    hosts.answer("a2", "b1")
    hosts.answer("b1", "a1", "a2")
    plan = hosts.machine.standing.current
    assert plan is not None
    assert (plan.members, plan.base) == (("a1", "a2"), 5)


def test_one_process_that_cannot_be_reached_does_not_cost_the_others_on_its_host() -> None:
    hosts = Hosts("a1", "b1", "b2")
    hosts.complain("a1", "b2")
    hosts.complain("b1")
    hosts.complain("b2")
    hosts.answer("a1", "b2")
    for member in ("b1", "b2"):
        hosts.answer(member)
    assert hosts.fates() == {}
    assert hosts.seated() == ("a1", "b1", "b2")


def test_neighbours_that_lose_each_other_need_no_survey() -> None:
    hosts = Hosts("a1", "a2", "b1")
    hosts.complain("a1", "a2")
    hosts.complain("a2", "a1")
    hosts.complain("b1")
    assert hosts.machine.standing.newest == 2


def test_fewer_than_the_least_save_what_they_have_and_stop() -> None:
    hosts = Hosts("a1", "b1", "c1", fewest=3)
    for member, suspects in (("a1", ()), ("b1", ("c1",)), ("c1", ("b1",))):
        hosts.complain(member, *suspects)
    hosts.answer("a1")
    hosts.answer("b1", "c1")
    hosts.answer("c1", "b1")
    assert hosts.seated() == ("a1", "b1")
    assert "--min" in hosts.machine.standing.halting
    assert hosts.told["a1"].stop


def test_a_coordinator_that_comes_back_asks_again_under_a_higher_number(hosts: Hosts) -> None:
    before = hosts.survey_of("a1").number
    hosts.machine = Coordinator(hosts._settings, hosts.now, hosts._memory, "a")
    for member in ("a1", "b1", "c1"):
        hosts.say(member)
    assert hosts.survey_of("a1").number > before


@pytest.fixture
def parted(hosts: Hosts) -> Hosts:
    """c1 is gone, a1 and b1 work; c2 comes from the same host as c1 did."""
    hosts.answer("a1")
    hosts.answer("b1", "c1")
    hosts.answer("c1", "b1")
    hosts.work("a1", "b1")
    hosts.say("c2", phase=Phase.READY)
    return hosts


def test_who_comes_after_somebody_was_let_go_must_reach_every_member_first(parted: Hosts) -> None:
    assert parted.seated() == ("a1", "b1")
    assert set(parted.survey_of("c2").targets) == {"a1", "b1"}
    assert set(parted.survey_of("b1").targets) == {"c2"}
    for member, missing in (("a1", ()), ("b1", ()), ("c2", ("b1",))):
        parted.answer(member, *missing)
    assert parted.seated() == ("a1", "b1")
    parted.pass_time(AGAIN_S + 0.5)
    assert parted.seated() == ("a1", "b1")
    for member in ("a1", "b1", "c2"):
        assert parted.seated() == ("a1", "b1"), "not before all have answered"
        parted.answer(member)
    assert parted.seated() == ("a1", "b1", "c2")


def test_and_every_member_must_reach_it(parted: Hosts) -> None:
    for member, missing in (("a1", ()), ("b1", ("c2",)), ("c2", ())):
        parted.answer(member, *missing)
    parted.pass_time(1.0)
    assert parted.seated() == ("a1", "b1")


def test_a_neighbour_of_all_members_has_nobody_to_reach() -> None:
    hosts = Hosts("a1", "b1")
    hosts.complain("a1", "b1")
    hosts.complain("b1", "a1")
    hosts.answer("a1", "b1")
    hosts.answer("b1", "a1")
    hosts.work("a1")
    hosts.say("a2", phase=Phase.READY)
    assert hosts.seated() == ("a1", "a2")


def test_where_nobody_was_let_go_newcomers_are_seated_at_once() -> None:
    hosts = Hosts("a1", "b1")
    hosts.say("c1", phase=Phase.READY)
    assert hosts.seated() == ("a1", "b1", "c1")


def test_a_coordinator_that_comes_back_remembers_that_somebody_was_let_go(parted: Hosts) -> None:
    parted.machine = Coordinator(parted._settings, parted.now, parted._memory, "a")
    for member in ("a1", "b1", "c2", "a1"):
        parted.say(member)
    assert parted.seated() == ("a1", "b1")
    for member in ("a1", "b1", "c2"):
        parted.answer(member)
    assert parted.seated() == ("a1", "b1", "c2")


def test_an_answer_for_other_members_than_those_of_the_plan_does_not_count(parted: Hosts) -> None:
    number = parted.survey_of("c2").number
    parted.say("a2", phase=Phase.READY)
    for member, missing in (("a1", ()), ("b1", ("c2",)), ("a2", ()), ("c2", ())):
        parted.answer(member, *missing)
    parted.work("a1", "b1", "a2")
    assert parted.seated() == ("a1", "b1", "a2")
    assert set(parted.survey_of("c2").targets) == {"a1", "b1", "a2"}
    for member in ("a1", "b1", "a2", "c2"):
        parted.say(member, surveyed=number, unreachable=())
    assert parted.seated() == ("a1", "b1", "a2")
