"""What is told of placements and servers: few lines, and the right figures."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.recorder import states_of
from paceline.control.machines.agents import Starting
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Note, RunSettings
from paceline.control.machines.placement_news import PlacementNews
from paceline.control.messages.agents import AgentReport, ProcessVitals
from paceline.control.messages.members import Introduction, Serving
from paceline.control.messages.plan import Phase
from paceline.placement.placement import Placement, Replica, Replicas
from paceline.wire.card import Card
from tests.control.table import report_of


def card(member: str, role: str = "server") -> Card:
    return Card(member, role, "h", ("", 0), "", b"", False, ())


def held(primary: str, *backups: str, joining: tuple[str, ...] = (), handing: str = "", origin: int = 1) -> Replicas:
    return Replicas(
        Replica(primary, 1),
        tuple(Replica(name, 1) for name in backups),
        tuple(Replica(name, 1) for name in joining),
        origin,
        handing,
    )


def placement(version: int, *ranges: Replicas, began: int = 1) -> Placement:
    names = sorted({one.server for replicas in ranges for one in replicas.everybody()})
    return Placement(version, began, began, tuple(map(card, names)), ranges)


FOUNDED = placement(1, held("a", "b"), held("b", "a"), held("a", "b"))


def test_a_founding_is_told_once() -> None:
    moves = PlacementNews()
    assert moves.news(FOUNDED) == ["version 1: 3 ranges on a, b, each on 2 servers"]
    assert moves.news(FOUNDED) == []
    again = placement(9, held("a"), began=9)
    assert moves.news(again) == ["version 9: 1 range on a"]


def test_a_move_is_told_when_it_begins_and_when_all_is_in_place() -> None:
    moves = PlacementNews(FOUNDED)
    rest = (held("b", "a"), held("a", "b"))
    assert moves.news(placement(2, held("a", "b", joining=("c",)), *rest)) == ["version 2: ranges move to c"]
    assert moves.news(placement(3, held("a", "b", "c", handing="c"), *rest)) == []
    done = placement(4, held("c", "b"), *rest)
    assert moves.news(done) == ["version 4: all 3 ranges are in place: a 1, b 1, c 1"]
    assert moves.news(placement(5, held("c"), *rest)) == [], "a copy that is let go is no news"


def test_after_a_death_the_copies_go_on() -> None:
    moves = PlacementNews(FOUNDED)
    alone = placement(2, *[held("b")] * 3)
    assert moves.news(alone) == ["version 2: b goes on with 2 ranges, of which it has copies"]
    lost = placement(3, *[held("c", origin=3)] * 3)
    assert moves.news(lost) == [], "what is lost is told by the coordinator"


def test_a_coordinator_that_came_back_does_not_repeat_what_was_told() -> None:
    moving = placement(2, held("a", "b", joining=("c",)), held("b"), held("a"))
    moves = PlacementNews(moving)
    assert moves.news(placement(3, held("a", "b", joining=("c",)), held("b"), held("a", "b"))) == []


def test_many_servers_are_counted_not_named() -> None:
    moves = PlacementNews()
    many = placement(1, *(held(f"s{number}") for number in range(20)))
    assert moves.news(many) == ["version 1: 20 ranges on 20 servers"]
    moves.news(placement(2, *(held(f"s{number}", joining=("t",)) for number in range(20))))
    told = moves.news(placement(3, *(held(f"s{number}", "t") for number in range(20))))
    assert told == ["version 3: all 20 ranges are in place: 1 to 1 on each of 20 servers"]


class Table:
    """A coordinator, a worker that needs servers, and two servers."""

    def __init__(self, num_ranges: int = 8, replicas: int = 2) -> None:
        self._number = 0
        self._num_ranges = num_ranges
        self.warnings: list[str] = []
        self.machine = Coordinator(RunSettings(wanted=1, servers=2, replicas=replicas), 0.0)
        self.report("a", "server", serving=Serving(num_keys=7, num_bytes=70, busy=0.123))
        self.report("b", "server")
        self.report("w", "worker")

    def report(self, member: str, role: str, *, phase: Phase = Phase.READY, **fields: Any) -> None:
        self._number += 1
        ranges = (100,) * self._num_ranges if role == "worker" else ()
        introduction = Introduction(card(member, role), 1, "h", "", ranges=ranges)
        report = report_of(member, self._number, 1, phase, introduction=introduction, **fields)
        actions = self.machine.handle(report, 0.01 * self._number)
        self.warnings += [one.text for one in actions if isinstance(one, Note) and one.kind == "warning"]

    def states(self) -> dict[str, MemberRow]:
        return {state.member: state for state in states_of(self.machine)}


def test_the_states_of_servers_say_what_they_hold() -> None:
    table = Table()
    states = table.states()
    assert (states["w"].role, states["w"].rank, states["w"].ranges) == ("worker", 0, 0)
    first, second = states["a"], states["b"]
    assert (first.role, first.rank, first.phase) == ("server", -1, "serving")
    assert first.ranges + second.ranges == 8
    assert (first.backups, second.backups) == (second.ranges, first.ranges)
    assert (first.num_keys, first.num_bytes, first.busy, second.num_keys) == (7, 70, 0.12, 0)
    assert [state.member for state in states_of(table.machine, ["b"])] == ["b"]


def test_a_server_that_leaves_is_told_from_one_that_waits_and_one_that_is_gone() -> None:
    table = Table()
    table.report("c", "server")
    assert table.states()["c"].arriving > 0, "what it gets is on its way"
    table.report("a", "server", leaving=True)
    assert table.states()["a"].phase == "leaving"
    table.report("b", "server", phase=Phase.FAILED, cause="out of memory", serving=Serving(num_keys=5))
    gone = table.states()["b"]
    assert (gone.fate, gone.ranges, gone.num_keys) == ("failed", 0, 0)


def test_hosts_of_one_name_are_told_apart_by_their_addresses() -> None:
    table = Table()
    assert {state.host for state in table.states().values()} == {"h"}
    stranger = msgspec.structs.replace(card("x", "worker"), address=("10.0.0.2", 1))
    table.machine.handle(report_of("x", 1, 1, Phase.READY, introduction=Introduction(stranger, 1, "h", "")), 1.0)
    hosts = {name: state.host for name, state in table.states().items()}
    assert hosts["x"] == "h (10.0.0.2)"
    assert hosts["w"] == hosts["a"] == f"h ({card('w', 'worker').address[0]})"


def test_processes_that_have_not_joined_are_known_from_their_agents() -> None:
    table = Table()
    assert table.machine.starting() == []
    living = {1: ProcessVitals("R", True), 7: ProcessVitals("R", True), 8: ProcessVitals("R", True)}
    table.machine.handle(AgentReport("", 1, living, servers=(8,)), 1.0)
    assert table.machine.starting() == [Starting("", 7, False), Starting("", 8, True)]


def test_servers_that_are_not_used_or_hold_nothing_are_told_once() -> None:
    assert Table().warnings == []
    (idle,) = Table(1, replicas=1).warnings
    assert idle.startswith(("server a holds nothing", "server b holds nothing"))
    unused = Table(0)
    unused.report("c", "server")
    assert len(unused.warnings) == 1
    assert unused.warnings[0].startswith("the servers of this run are not used")


def test_a_server_that_joins_a_run_without_servers_is_told() -> None:
    machine = Coordinator(RunSettings(wanted=1), 0.0)
    machine.handle(report_of("w", 1, 1, Phase.READY, introduction=Introduction(card("w", "worker"), 1, "h", "")), 0.1)
    assert machine.standing.current is not None
    facts = report_of("s", 1, 1, Phase.BUILDING, introduction=Introduction(card("s"), 2, "h", ""))
    notes = [one for one in machine.handle(facts, 0.2) if isinstance(one, Note)]
    assert [one.kind for one in notes] == ["joined", "warning"]
