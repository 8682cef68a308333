"""Hot servers are relieved: it converges, it never moves for noise, it never moves to and fro, and it knows its end."""

from __future__ import annotations

import pytest

from paceline.placement.gauge import ENTER, LEAST, LEAVE, Gauge, LoadWindow
from paceline.placement.placing import Site
from paceline.placement.relief import Rests, best_move
from paceline.placement.relieving import CannotRelieve, Relieving
from tests.placement.relief_worlds import ReliefWorld

HERE = {"a": Site(1.0, "h0"), "b": Site(1.0, "h1"), "c": Site(1.0, "h2")}


@pytest.mark.parametrize("block", [*range(3), *(pytest.param(block, marks=pytest.mark.soak) for block in range(3, 50))])
def test_loads_come_as_near_to_each_other_as_moves_can_bring_them_and_stay_there(block: int) -> None:
    for seed in range(block * 60, (block + 1) * 60):
        world = ReliefWorld(seed)
        world.run_until_quiet(60, 3000)
        what = f"{seed=} {world.highest():.2f} {len(world.moves)} moves {world.noise=}"
        assert len(world.moves) <= sum(map(len, world.homes)), what
        assert world.num_returns() <= 1, what
        # Who is relieved is relieved all the way, but for noise, and what no move would help.
        above = (LEAVE if world.moves and not world.stuck else ENTER) + 0.02
        assert world.best_left(1 + above + 2 * world.noise) is None, what


def test_nothing_moves_for_noise() -> None:
    """Servers that have the same to do, with measurements that are off by up to a third."""
    for seed in range(45):
        world = ReliefWorld(seed, noise=(0.05, 0.15, 0.3)[seed % 3], skew=0.0)
        if world.highest() < 1.1:
            world.run(300)
            assert world.moves == [], f"{seed=} {world.noise=}"


def test_loads_that_wander_do_not_make_ranges_wander() -> None:
    """The hot range is another one every 40 rounds: what moves rests longer each time."""
    for seed in range(3):
        world = ReliefWorld(seed, noise=0.02, skew=1.4)
        for _ in range(25):
            world.random.shuffle(world.work)
            world.run(40)
        assert world.most_moves_of_a_range() <= 8, seed


def test_a_machine_that_is_slow_gives_away_what_it_cannot_do() -> None:
    world = ReliefWorld(3, noise=0.05, skew=0.0)
    slow = min(world.sites)
    world.slowness[slow] *= 3
    before = sum(homes[0] == slow for homes in world.homes)
    world.run(1500)
    assert world.highest() < 1.2
    assert sum(homes[0] == slow for homes in world.homes) < before
    assert {move.giver for move in world.moves} >= {slow}


def test_one_range_that_is_hotter_than_everything_is_told_of_once() -> None:
    relieving = Relieving()
    found = []
    for number in range(1, 60):
        windows = {"a": LoadWindow(number, {0: 0.9, 1: 0.0}), "b": LoadWindow(number, {2: 0.1, 3: 0.1})}
        sites = {name: HERE[name] for name in "ab"}
        found.append(relieving.look(windows, [("a",), ("a",), ("b",), ("b",)], sites, [1] * 4))
    (told,) = [one for one in found if one is not None]
    assert isinstance(told, CannotRelieve)
    assert (told.server, told.number) == ("a", 0)


# -- the best move ---------------------------------------------------------------------------------------------------


def test_the_move_that_halves_the_gap_is_the_best() -> None:
    costs = {"a": {0: 1.0, 1: 0.5, 2: 0.1}, "b": {3: 0.6}, "c": {4: 0.8}}
    move = best_move("a", [("a",), ("a",), ("a",), ("b",), ("c",)], costs, HERE, [1] * 5)
    assert move is not None
    assert (move.taker, move.homes) == ("b", {1: ("b",)})
    assert move.before == pytest.approx(1.6)
    assert move.after == pytest.approx(1.1)


def test_where_ranges_are_small_several_go_that_close_a_third_of_the_gap() -> None:
    costs = {"a": dict.fromkeys(range(160), 0.01), "b": {200: 0.4}}
    homes = [("a",)] * 160 + [("b",)] * 41
    move = best_move("a", homes, costs, {name: HERE[name] for name in "ab"}, [1] * 201)
    assert move is not None
    assert len(move.homes) == 40
    assert move.after == pytest.approx(1.2)


def test_a_backup_takes_over_rather_than_another_is_brought_up() -> None:
    costs = {"a": {0: 1.0, 1: 1.0}, "b": {0: 0.2, 1: 0.2}, "c": {2: 0.6}}
    move = best_move("a", [("a", "b"), ("a", "b"), ("c", "b")], costs, HERE, [100] * 3)
    assert move is not None
    assert (move.taker, move.homes, move.num_bytes) == ("b", {0: ("b", "a")}, 0)


def test_a_backup_goes_elsewhere_when_that_is_what_weighs() -> None:
    costs = {"a": {0: 0.1, 1: 0.9, 2: 0.9}, "b": {1: 0.7, 2: 0.4}, "c": {}}
    homes = [("a", "c"), ("b", "a"), ("b", "a")]
    move = best_move("a", homes, costs, HERE, [1] * 3)
    assert move is not None
    assert (move.taker, move.homes) == ("c", {1: ("b", "c")})


def test_no_move_brings_two_replicas_to_one_host_or_more_than_it_may_hold_to_a_server() -> None:
    together = {"a": Site(1.0, "h0"), "b": Site(1.0, "h1"), "c": Site(1.0, "h1")}
    costs = {"a": {0: 1.5, 1: 1.5}, "b": {0: 1.5, 1: 1.5}, "c": {}}
    assert best_move("a", [("a", "b"), ("a", "b")], costs, together, [1, 1]) is None
    full = {"a": {0: 1.0, 1: 1.0}, "b": {2: 0.1}}
    two = {name: HERE[name] for name in "ab"}
    assert best_move("a", [("a",), ("a",), ("b",)], full, two, [10, 10, 100]) is None
    assert best_move("a", [("a",), ("a",), ("b",)], full, two, [10, 10, 10]) is not None


def test_what_rests_does_not_move_and_rests_longer_each_time() -> None:
    rests = Rests()
    assert rests.resting() == set()
    for rest in (10, 20, 40):
        rests.moved([7])
        for _ in range(rest):
            assert rests.resting() == {7}
            rests.tick()
        assert rests.resting() == set()
    again = Rests(rests.num_moves)
    assert again.resting() == {7}, "as if it had just moved"
    costs = {"a": {7: 1.0, 8: 1.0}, "b": {}}
    homes = [("a",)] * 9
    move = best_move("a", homes, costs, {name: HERE[name] for name in "ab"}, [1] * 9, {7})
    assert move is not None
    assert move.homes.keys() == {8}


# -- the gauge -------------------------------------------------------------------------------------------------------


def windows(number: int, hot: float, other: float = 1.0) -> dict[str, LoadWindow]:
    return {"a": LoadWindow(number, {0: hot}), "b": LoadWindow(number, {1: other})}


def test_a_server_is_hot_after_enough_rounds_and_not_while_one_of_them_is_silent() -> None:
    gauge = Gauge()
    assert not gauge.take(windows(1, 3.0)), "what began before it is looked at is left out"
    for number in range(3, 3 + LEAST):
        assert gauge.hot() == []
        assert gauge.take(windows(number, 3.0))
        assert not gauge.take(windows(number, 3.0)), "once"
        assert not gauge.take({**windows(number, 3.0), "a": LoadWindow(number + 1, {0: 9.0})}), "b has said nothing new"
    assert gauge.hot() == ["a"]
    gauge.restart(windows(9, 3.0))
    assert gauge.hot() == []


def test_idle_servers_are_not_compared() -> None:
    gauge = Gauge()
    gauge.take(windows(0, 0.0))
    assert not any(gauge.take(windows(number, 0.04, 0.0)) for number in range(2, 30))


def test_other_servers_begin_anew() -> None:
    gauge = Gauge()
    for number in range(1, 9):
        gauge.take(windows(number, 3.0))
    assert gauge.hot() == ["a"]
    gauge.take({**windows(9, 3.0), "c": LoadWindow(1, {})})
    assert gauge.hot() == []


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_ranges_are_placed_by_what_they_have_to_do_where_that_is_known() -> None:
    assert Relieving().weights([10, 30]) == [10.0, 30.0]
    relieving = Relieving(work=(3.0, 1.0, 0.0))
    assert relieving.weights([100, 100, 200]) == pytest.approx([0.75, 0.25, 0.05])
    assert relieving.weights([1, 1]) == [1.0, 1.0], "of another cut"
