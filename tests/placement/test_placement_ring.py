"""Consistent hashing: all are in every walk, the strong are first more often, and who goes changes little."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.placement.ring import Ring

CAPACITIES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.floats(0.25, 4.0), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(CAPACITIES, st.integers(0, 10_000))
def test_every_walk_has_all_servers_once(capacities: dict[str, float], number: int) -> None:
    walk = Ring(capacities).walk(number)
    assert sorted(walk) == sorted(capacities)
    assert walk == Ring(dict(reversed(capacities.items()))).walk(number)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=6), st.integers(0, 10_000))
def test_who_goes_leaves_the_order_of_the_others_as_it_was(names: set[str], number: int) -> None:
    gone = min(names)
    before = Ring(dict.fromkeys(names, 1.0)).walk(number)
    after = Ring(dict.fromkeys(names - {gone}, 1.0)).walk(number)
    assert after == [name for name in before if name != gone]


def test_the_strong_are_first_more_often() -> None:
    ring = Ring({"weak": 1.0, "strong": 3.0})
    first = Counter(ring.walk(number)[0] for number in range(2_000))
    assert 2.0 < first["strong"] / first["weak"] < 4.5
