"""The next placement: one safe step, whatever happened."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.placement.evolving import MAX_BROUGHT_UP, Heard, evolve, start
from paceline.placement.placement import Placement, Replica, Replicas
from paceline.placement.placing import Homes

NAMES = "abcd"


def alive(names: str, **said: Heard) -> dict[str, Heard]:
    return {name: said.get(name, Heard(1)) for name in names}


def step(now: Replicas, heard: dict[str, Heard], *wanted: str, version: int = 9) -> Replicas:
    (found,) = evolve([now], heard, [wanted], version)
    return found


def of(primary: str, *backups: str) -> Replicas:
    return Replicas(Replica(primary, 1), tuple(Replica(name, 1) for name in backups), origin=1)


def test_all_ranges_start_empty_with_all_who_are_wanted() -> None:
    assert start([("a", "b")], 3) == (Replicas(Replica("a", 3), (Replica("b", 3),), origin=3),)


def test_where_all_is_as_it_should_be_nothing_changes() -> None:
    now = of("a", "b")
    assert step(now, alive("abc"), "a", "b") == now


def test_who_is_wanted_and_not_there_is_brought_up_and_admitted_when_it_has_everything() -> None:
    joining = step(of("a"), alive("ab"), "a", "b")
    assert joining.joining == (Replica("b", 9),)
    assert step(joining, alive("ab", b=Heard(8, frozenset({0}))), "a", "b", version=10) == joining
    admitted = step(joining, alive("ab", b=Heard(9, frozenset({0}))), "a", "b", version=10)
    assert (admitted.backups, admitted.joining) == ((Replica("b", 9),), ())


def test_a_hand_over_is_begun_said_and_made_and_the_old_primary_stays_as_a_backup() -> None:
    begun = step(of("a", "b"), alive("ab"), "b", "a")
    assert (begun.primary.server, begun.handing, begun.handing_since) == ("a", "b", 9)
    early = Heard(8, frozenset(), frozenset({0}))
    assert step(begun, alive("ab", a=early), "b", "a", version=10) == begun
    said = Heard(9, frozenset(), frozenset({0}))
    assert step(begun, alive("ab", a=said), "b", "a", version=10) == of("b", "a")


def test_who_is_not_wanted_is_let_go_only_when_all_who_are_have_everything() -> None:
    now = of("a", "b")
    coming = step(now, alive("abc"), "a", "c")
    assert coming.backups == now.backups
    there = step(coming, alive("abc", c=Heard(9, frozenset({0}))), "a", "c", version=10)
    assert there.backups == (Replica("c", 9),)


def test_the_heir_of_a_dead_primary_is_a_backup_and_all_others_are_brought_up_anew() -> None:
    now = Replicas(Replica("a", 1), (Replica("b", 1), Replica("c", 1)), (Replica("d", 5),), origin=1)
    after = step(now, alive("bcd"), "c", "b")
    assert after.primary == Replica("c", 1)
    assert after.backups == ()
    assert after.joining == (Replica("b", 9), Replica("d", 9))
    assert after.origin == 1


def test_who_is_joining_never_becomes_primary() -> None:
    now = Replicas(Replica("a", 1), (), (Replica("b", 5),), origin=1)
    assert step(now, alive("b"), "b") == Replicas(Replica("b", 9), origin=9)


def test_the_death_of_the_heir_ends_the_hand_over() -> None:
    begun = step(of("a", "b"), alive("ab"), "b", "a")
    after = step(begun, alive("a"), "a", version=10)
    assert after == of("a")


def test_nothing_is_handed_over_to_who_has_not_spoken_since_the_coordinator_came_back() -> None:
    now, silent = of("a", "b"), Heard()
    assert not step(now, alive("ab", b=silent), "b").handing
    begun = step(now, alive("ab"), "b")
    assert begun.handing == "b"
    handed = Heard(9, frozenset(), frozenset({0}))
    waiting = step(begun, alive("ab", a=handed, b=silent), "b", version=10)
    assert waiting.primary.server == "a"  # it may be asked to leave: then this is the last copy that surely lives
    assert step(waiting, alive("ab", a=handed), "b", version=11).primary.server == "b"
    assert step(waiting, alive("a", a=handed), "a", version=11) == of("a")


def test_no_copy_is_let_go_while_one_of_those_that_stay_has_not_spoken() -> None:
    now, silent = of("a", "b", "c"), Heard()
    assert step(now, alive("abc", a=silent), "a", "b") == now
    assert step(now, alive("abc", b=silent), "a", "b") == now
    assert step(now, alive("abc", c=silent), "a", "b") == of("a", "b")


def test_the_heir_of_a_dead_primary_is_rather_one_that_has_spoken() -> None:
    now = of("a", "b", "c")
    assert step(now, alive("bc", b=Heard()), "b", "c").primary.server == "c"
    assert step(now, alive("bc", b=Heard(), c=Heard()), "c", "b").primary.server == "c"


def test_a_primary_brings_up_only_so_many_at_a_time() -> None:
    count = 2 * MAX_BROUGHT_UP
    found = evolve([of("a")] * count, alive("ab"), [("a", "b")] * count, 9)
    assert sum(len(replicas.joining) for replicas in found) == MAX_BROUGHT_UP


def test_a_placement_knows_who_is_primary_of_what() -> None:
    placement = Placement(1, 1, 1, (), (of("a", "b"), of("b"), of("a")))
    assert placement.ranges_of == {"a": (0, 2), "b": (1,)}
    assert of("a", "b").of("b") == Replica("b", 1)
    assert of("a", "b").of("c") is None


homes = st.permutations(NAMES).flatmap(lambda names: st.integers(1, 3).map(lambda count: tuple(names[:count])))


@settings(max_examples=150, deadline=None)
@given(homes, st.lists(st.tuples(homes, st.sets(st.sampled_from(NAMES), max_size=1)), max_size=5))
def test_any_goal_is_reached_and_without_a_death_there_are_never_fewer_who_have_everything(
    first: Homes, changes: Sequence[tuple[Homes, set[str]]]
) -> None:
    """Servers do at once what they are told; a goal names only who lives."""
    (now,) = start([first], 1)
    version, living = 1, set(NAMES)
    for goal, dead in changes:
        living -= dead if len(living) > 1 else set()
        wanted = tuple(name for name in goal if name in living) or (min(living),)
        for _ in range(12):
            num_whole = sum(one.server in living for one in (now.primary, *now.backups))
            fewest = min(num_whole, len(wanted)) if now.primary.server in living else 1
            version += 1
            everything = frozenset({0})
            heard = {name: Heard(version - 1, everything, everything) for name in living}
            (now,) = evolve([now], heard, [wanted], version)
            assert len({one.server for one in now.everybody()}) == len(now.everybody())
            assert {one.server for one in now.everybody()} <= living
            assert 1 + len(now.backups) >= fewest
        assert now.primary.server == wanted[0]
        assert {one.server for one in now.backups} == set(wanted[1:])
        assert not now.joining
        assert not now.handing
