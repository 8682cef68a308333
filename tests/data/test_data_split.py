"""Dividing a batch among ranks, and moving the cursor: pure functions."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.cursor import Cursor, advance, batch_size, is_finished, next_epoch, num_steps
from paceline.data.split import split, split_among_all

SHARES = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


def sizes(ranges: tuple[range, ...]) -> list[int]:
    return [len(part) for part in ranges]


@given(st.integers(0, 10**4), SHARES, st.integers(1, 5))
def test_the_parts_are_the_whole_in_order(count: int, shares: list[int], minimum: int) -> None:
    parts = split(count, shares, minimum)
    assert list(itertools.chain(*parts)) == list(range(count))
    assert all(not part for part, share in zip(parts, shares, strict=True) if share == 0)


@given(SHARES)
def test_a_full_batch_gives_each_its_share(shares: list[int]) -> None:
    assert sizes(split(sum(shares), shares)) == shares


@given(st.integers(0, 10**4), SHARES)
def test_parts_differ_from_the_exact_proportion_by_less_than_one(count: int, shares: list[int]) -> None:
    for size, share in zip(sizes(split(count, shares)), shares, strict=True):
        assert abs(size - count * share / sum(shares)) < 1


@given(st.integers(1, 200), SHARES, st.integers(2, 6))
def test_nobody_gets_less_than_the_minimum(count: int, shares: list[int], minimum: int) -> None:
    found = sizes(split(count, shares, minimum))
    if count < minimum:
        assert sorted(found)[-1] == count
        assert found.index(count) == shares.index(max(shares))
    else:
        assert all(size == 0 or size >= minimum for size in found)


@given(st.integers(1, 200), SHARES, st.integers(2, 6))
def test_a_minimum_that_nobody_falls_below_changes_nothing(count: int, shares: list[int], minimum: int) -> None:
    without = split(count, shares)
    if all(len(part) >= minimum or share == 0 for part, share in zip(without, shares, strict=True)):
        assert split(count, shares, minimum) == without


@given(st.integers(0, 300), SHARES)
def test_among_all_nobody_is_without_or_one_has_everything(count: int, shares: list[int]) -> None:
    parts = split_among_all(count, shares)
    assert list(itertools.chain(*parts)) == list(range(count))
    taking = [size for size in sizes(parts) if size]
    assert len(taking) == len(shares) or taking in ([count], [])
    if count >= len(shares) and all(shares):
        assert len(taking) == len(shares)


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (32, [1, 31], [1, 31]),
        (10, [1, 31], [1, 9]),
        (10, [1, 1, 100], [1, 1, 8]),
        (2, [1, 1, 100], [0, 0, 2]),
        (2, [5, 5, 5], [2, 0, 0]),
        (9, [4, 0, 4], [9, 0, 0]),
    ],
)
def test_known_parts_among_all(count: int, shares: list[int], expected: list[int]) -> None:
    assert sizes(split_among_all(count, shares)) == expected


@pytest.mark.parametrize(
    ("count", "shares", "minimum", "expected"),
    [
        (7, [1, 1, 1, 1], 1, [2, 2, 2, 1]),
        (2, [3, 3, 3], 1, [1, 1, 0]),
        (10, [1, 2, 1], 1, [3, 5, 2]),
        (6, [2, 2, 2, 2], 2, [2, 2, 2, 0]),
        (7, [8, 8, 8, 8], 2, [3, 2, 2, 0]),
        (3, [1, 1, 1], 2, [3, 0, 0]),
        (1, [1, 4, 4], 2, [0, 1, 0]),
        (101, [1, 100], 2, [0, 101]),
        (0, [0, 0], 1, [0, 0]),
    ],
)
def test_known_parts(count: int, shares: list[int], minimum: int, expected: list[int]) -> None:
    assert sizes(split(count, shares, minimum)) == expected


@pytest.mark.parametrize(
    ("count", "shares", "minimum", "says"),
    [
        (-1, [1], 1, "count=-1"),
        (1, [1, -1], 1, "a share is 0"),
        (1, [0, 0], 1, "nobody takes"),
        (1, [1], 0, "minimum=0"),
    ],
)
def test_what_cannot_be_divided_is_refused(count: int, shares: list[int], minimum: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split(count, shares, minimum)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_steps_walk_through_the_epoch(length: int, global_batch: int) -> None:
    cursor = Cursor(3, 0)
    taken = []
    while not is_finished(cursor, length):
        taken.append(batch_size(cursor.position, global_batch, length))
        cursor = advance(cursor, taken[-1], length)
    assert sum(taken) == length
    assert all(size == global_batch for size in taken[:-1])
    assert len(taken) == num_steps(length, global_batch)
    assert cursor == Cursor(3, length)
    assert batch_size(length, global_batch, length) == 0
    assert next_epoch(cursor, length) == Cursor(4, 0)


def test_a_cursor_does_not_leave_its_epoch() -> None:
    with pytest.raises(ValueError, match="cannot move by 3"):
        advance(Cursor(0, 8), 3, 10)
    with pytest.raises(ValueError, match="cannot move by -1"):
        advance(Cursor(0, 8), -1, 10)
    with pytest.raises(ValueError, match="finish it first"):
        next_epoch(Cursor(0, 8), 10)
    with pytest.raises(ValueError, match="position=11"):
        batch_size(11, 4, 10)
    with pytest.raises(ValueError, match="global_batch=0"):
        batch_size(0, 0, 10)
    with pytest.raises(ValueError, match="global_batch=0"):
        num_steps(10, 0)
    with pytest.raises(ValueError, match="counts from 0"):
        Cursor(0, -1)


def test_a_cursor_travels_as_a_message() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Cursor(2, 7)), type=Cursor) == Cursor(2, 7)
