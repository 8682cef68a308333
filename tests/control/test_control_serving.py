"""The coordinator's side of the server group: which placement follows from who lives and what they said."""

from __future__ import annotations

import msgspec

from paceline.control.machines.roster import MemberRecord
from paceline.control.machines.server_manager import Aim, Change, ServerManager, idle_in, say_idle
from paceline.control.messages.members import Introduction, Report, Serving
from paceline.control.messages.plan import Phase
from paceline.placement.placement import Placement, Replicas
from paceline.wire.card import Card
from paceline.wire.decoding import decode


def record(name: str, *, ready: bool = True, leaving: bool = False, serving: Serving | None = None) -> MemberRecord:
    card = Card(name, "server", name, ("", 0), name, b"", False, ())
    found = MemberRecord(Introduction(card, 1, name, ""), 0.0)
    if ready:
        found.report = Report(name, 1, 1, Phase.READY, leaving=leaving, serving=serving)
    return found


def founded(manager: ServerManager, names: str, num_ranges: int = 4) -> Placement:
    return manager.found(1, [record(name) for name in names], [1] * num_ranges).placement


def settle(manager: ServerManager, names: str, *, leaving: str = "", building: str = "", num_ranges: int = 4) -> None:
    """Everybody does at once what the newest placement asks of it, until nothing more follows."""
    everything = tuple(range(num_ranges))
    for _ in range(30):
        said = Serving(manager.placement.version, everything, everything)
        records = [record(name, leaving=name in leaving, serving=said) for name in names]
        records += [record(name, ready=False) for name in building]
        if manager.update(records, [1] * num_ranges) is None:
            return
    raise AssertionError("the placement never comes to rest")


def costs_on(manager: ServerManager, name: str, costs: dict[int, float]) -> dict[int, float]:
    """Of the ranges that a server is primary of."""
    return {number: costs[number] for number in manager.placement.ranges_of.get(name, ())}


def measuring(
    manager: ServerManager, costs: dict[str, dict[int, float]], rounds: range, *, leaving: str = ""
) -> list[Placement]:
    """All do at once what they are told, and say so often what their ranges cost them; what follows."""
    found = []
    for window in rounds:
        for _ in range(6):
            ranges = manager.placement.ranges
            everything = tuple(range(len(ranges)))
            version = manager.placement.version
            said = {
                name: Serving(
                    version, everything, everything, window=window, costs=costs_on(manager, name, costs[name])
                )
                for name in costs
            }
            records = [record(name, leaving=name in leaving, serving=said[name]) for name in costs]
            change = manager.update(records, [1] * len(ranges))
            if change is None:
                break
            found.append(change.placement)
    return found


def homes(placement: Placement) -> list[set[str]]:
    return [{one.server for one in replicas.everybody()} for replicas in placement.ranges]


def test_a_run_that_is_founded_has_all_its_ranges_empty() -> None:
    placement = founded(ServerManager(2), "abc")
    assert placement.version == 1
    assert all(replicas.origin == 1 and len(replicas.backups) == 1 for replicas in placement.ranges)
    assert placement.card_of.keys() == set("abc")


def test_nothing_follows_from_nothing_new() -> None:
    manager = ServerManager(2)
    founded(manager, "abc")
    assert manager.update([record(name) for name in "abc"], [1] * 4) is None
    assert ServerManager(2).update([record("a")], [1]) is None


def test_a_run_may_be_founded_again_with_another_number_of_ranges() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=4)
    again = founded(manager, "ab", num_ranges=7)
    assert again.version == 2
    assert [replicas.origin for replicas in again.ranges] == [2] * 7


def test_a_server_that_comes_gets_its_part() -> None:
    manager = ServerManager(1)
    founded(manager, "a")
    settle(manager, "ab")
    assert {len(numbers) for numbers in manager.placement.ranges_of.values()} == {2}
    assert all(replicas.origin == 1 for replicas in manager.placement.ranges)


def test_a_death_moves_its_ranges_to_backups_and_nothing_is_lost() -> None:
    manager = ServerManager(2)
    founded(manager, "abc")
    change = manager.update([record(name) for name in "bc"], [1] * 4)
    assert change is not None
    assert change.lost == ()
    assert all(replicas.primary.server != "a" for replicas in change.placement.ranges)
    settle(manager, "bc")
    assert homes(manager.placement) == [set("bc")] * 4


def test_ranges_that_nobody_has_any_more_are_named() -> None:
    manager = ServerManager(1)
    before = founded(manager, "ab")
    change = manager.update([record("b")], [1] * 4)
    assert change == Change(manager.placement, before.ranges_of["a"])
    assert all(manager.placement.ranges[number].origin == 2 for number in change.lost)


def test_when_all_servers_are_gone_the_placement_waits_for_others() -> None:
    manager = ServerManager(1)
    founded(manager, "a")
    assert manager.update([], [1] * 4) is None
    change = manager.update([record("b")], [1] * 4)
    assert change is not None
    assert change.lost == (0, 1, 2, 3)


def test_who_leaves_holds_nothing_in_the_end() -> None:
    manager = ServerManager(2)
    founded(manager, "abc")
    settle(manager, "abc", leaving="a")
    assert not manager.holds("a")
    assert homes(manager.placement) == [set("bc")] * 4
    assert all(replicas.origin == 1 for replicas in manager.placement.ranges)


def test_the_last_one_stays_until_another_comes() -> None:
    manager = ServerManager(1)
    founded(manager, "a")
    settle(manager, "a", leaving="a")
    assert manager.holds("a")
    settle(manager, "ab", leaving="a")
    assert homes(manager.placement) == [{"b"}] * 4


def test_who_leaves_waits_for_those_on_their_way_and_not_for_nobody() -> None:
    manager = ServerManager(2)
    founded(manager, "ab")
    settle(manager, "ab", leaving="a", building="c")
    assert homes(manager.placement) == [set("ab")] * 4
    settle(manager, "ab", leaving="a")
    assert homes(manager.placement) == [{"b"}] * 4


def test_who_was_not_heard_of_since_the_coordinator_came_back_lives_all_the_same() -> None:
    before = founded(ServerManager(2), "ab")
    manager = ServerManager(2, before)
    assert manager.update([record(name, ready=False) for name in "ab"], [1] * 4) is None
    assert manager.placement == before


def test_who_is_not_ready_gets_nothing() -> None:
    manager = ServerManager(1)
    founded(manager, "a")
    assert manager.update([record("a"), record("b", ready=False)], [1] * 4) is None


def test_a_goal_stands_while_the_same_servers_are_there() -> None:
    """What is on its way arrives before anything else is wanted."""
    manager = ServerManager(1)
    founded(manager, "a")
    seen: list[tuple[Replicas, ...]] = []
    settle(manager, "ab")
    seen.append(manager.placement.ranges)
    settle(manager, "ab")
    seen.append(manager.placement.ranges)
    assert seen[0] == seen[1]


ALIKE = dict.fromkeys(range(8), 0.1)


def skewed(manager: ServerManager) -> dict[str, dict[int, float]]:
    """The first ranges of one server are ten times as hot as all others, wherever they are."""
    hot = manager.placement.ranges_of["a"][:2]
    return dict.fromkeys("ab", ALIKE | dict.fromkeys(hot, 1.0))


def test_a_hot_server_gives_a_range_away_and_it_is_said_why() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=8)
    costs = skewed(manager)
    before = manager.aim
    assert measuring(manager, costs, range(1, 40)) != []
    assert list(manager.aim.num_moves.values()) == [1]
    assert manager.aim.homes != before.homes
    (text,) = manager.take_news()
    assert text.startswith("a has 1.")
    assert "goes to b" in text
    assert manager.take_news() == []
    hot = [number for number, cost in costs["a"].items() if cost == 1.0]
    assert {manager.placement.ranges[number].primary.server for number in hot} == {"a", "b"}
    assert all(replicas.origin == 1 for replicas in manager.placement.ranges)


def test_nothing_is_given_away_for_load_where_that_is_not_wanted() -> None:
    manager = ServerManager(1, by_load=False)
    founded(manager, "ab", num_ranges=8)
    assert measuring(manager, skewed(manager), range(1, 60)) == []


def test_a_coordinator_that_comes_back_leaves_ranges_where_load_brought_them() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=8)
    costs = skewed(manager)
    measuring(manager, costs, range(1, 40))
    remembered = decode(msgspec.msgpack.encode(manager.aim), Aim)
    later = ServerManager(1, manager.placement, remembered)
    assert measuring(later, costs, range(40, 41)) == []
    assert later.aim is remembered
    # In the middle of a move it goes on with it.
    other = ServerManager(1)
    founded(other, "ab", num_ranges=8)
    costs = skewed(other)
    for window in range(1, 40):
        said = {name: Serving(window=window, costs=costs_on(other, name, costs[name])) for name in "ab"}
        if other.update([record(name, serving=said[name]) for name in "ab"], [1] * 8) is not None:
            break
    assert any(one.joining for one in other.placement.ranges)
    after = ServerManager(1, other.placement, other.aim)
    measuring(after, costs, range(40, 42))
    assert [one.primary.server for one in after.placement.ranges] == [homes[0] for homes in other.aim.homes]


def test_who_comes_later_gets_its_part_of_the_load_and_not_of_the_bytes() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=8)
    costs = skewed(manager)
    measuring(manager, costs, range(1, 40))
    measuring(manager, {**costs, "c": costs["a"]}, range(40, 41))
    loads = {
        server: sum(costs["a"][number] for number in numbers) for server, numbers in manager.placement.ranges_of.items()
    }
    assert max(loads.values()) <= 1.01, loads


def test_nothing_is_given_away_while_somebody_leaves() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=8)
    costs = skewed(manager)
    measuring(manager, costs, range(1, 40), leaving="b")
    assert homes(manager.placement) == [{"a"}] * 8
    assert manager.take_news() == []


def test_a_server_that_nothing_would_relieve_is_named_once() -> None:
    manager = ServerManager(1)
    founded(manager, "ab", num_ranges=8)
    hot = manager.placement.ranges_of["a"][0]
    costs = dict.fromkeys("ab", dict.fromkeys(range(8), 0.001) | {hot: 0.9})
    assert measuring(manager, costs, range(1, 60)) == []
    (text,) = manager.take_news()
    assert text.startswith("a has 1.99 times the mean load")
    assert f"range {hot} alone is 1.98 of that; only a faster machine would help" in text


def test_a_server_that_holds_nothing_is_named() -> None:
    manager = ServerManager(1)
    founded(manager, "abc", num_ranges=2)
    (idle,) = idle_in(manager.aim)
    assert say_idle(idle, manager.aim) == (
        f"server {idle} holds nothing: the run has 2 ranges of parameters, and other servers have all; fewer --servers "
        "would do"
    )
    founded(manager, "abc", num_ranges=3)
    assert not idle_in(manager.aim)
