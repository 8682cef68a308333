"""Dividing a batch among workers of known pace, over thousands of random cases."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.balance import Pace, divide
from paceline.balance.division import finish_s, ideal_s

pytestmark = pytest.mark.timeout(60)


def some_paces(chance: random.Random, count: int, *, limits: bool = True) -> list[Pace]:
    return [
        Pace(
            chance.choice([0.0, 0.0, chance.uniform(0, 0.5)]),
            10 ** chance.uniform(-4, 0),
            chance.choice([0, 0, chance.randint(1, 50)]) if limits else 0,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_shares_sum_to_the_batch_and_keep_the_bounds_where_that_is_possible(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        paces, total, minimum = some_paces(chance, chance.randint(1, 12)), chance.randint(1, 300), chance.randint(1, 3)
        shares = divide(total, paces, minimum)
        assert sum(shares) == total
        taking = [share for share in shares if share]
        if total >= minimum * len(paces):
            assert len(taking) == len(paces)
        assert all(share >= min(minimum, total) for share in taking)
        highs = [max(minimum, pace.limit or total) for pace in paces]
        if total >= minimum * len(paces) and sum(highs) >= total:
            assert all(share <= high for share, high in zip(shares, highs, strict=True))


def test_no_other_division_is_shorter() -> None:
    chance = random.Random(1)
    for _ in range(200):
        paces, total = some_paces(chance, chance.randint(1, 4), limits=False), chance.randint(4, 12)
        least = min(
            finish_s(paces, shares)
            for shares in itertools.product(range(1, total + 1), repeat=len(paces))
            if sum(shares) == total
        )
        found = finish_s(paces, divide(total, paces))
        assert found == pytest.approx(least, rel=1e-12)
        assert ideal_s(total, paces) <= found * (1 + 1e-12) or any(pace.fixed_s for pace in paces)


@pytest.mark.parametrize("seed", range(10))
def test_who_becomes_faster_never_gets_less_and_nobody_else_gets_more(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        paces, total = some_paces(chance, chance.randint(2, 8)), chance.randint(8, 200)
        rank = chance.randrange(len(paces))
        faster = paces.copy()
        pace = paces[rank]
        faster[rank] = pace._replace(per_sample_s=pace.per_sample_s * chance.uniform(0.2, 1.0))
        before, after = divide(total, paces), divide(total, faster)
        assert after[rank] >= before[rank]
        assert all(after[other] <= before[other] for other in range(len(paces)) if other != rank)


def test_known_cases() -> None:
    assert divide(256, [Pace(0, 1.0)] * 4) == (64, 64, 64, 64)
    assert divide(10, [Pace(0, 1.0)] * 4) == (3, 3, 2, 2)
    assert divide(175, [Pace(0, 1.0), Pace(0, 2.0), Pace(0, 4.0)]) == (100, 50, 25)
    # One sample of the slow one takes longer than all others together, but it takes part.
    assert divide(10, [Pace(0, 1.0), Pace(0, 1000.0)]) == (9, 1)
    assert divide(100, [Pace(0, 1.0), Pace(0, 1.0, limit=10)]) == (90, 10)


def test_more_workers_than_samples_let_the_slowest_rest() -> None:
    assert divide(2, [Pace(0, 3.0), Pace(0, 1.0), Pace(0, 2.0)]) == (0, 1, 1)
    assert divide(5, [Pace(0, 3.0), Pace(0, 1.0), Pace(0, 2.0)], minimum=2) == (0, 3, 2)
    assert divide(1, [Pace(0, 3.0), Pace(0, 1.0)], minimum=2) == (0, 1)


def test_limits_that_are_too_low_together_are_filled_and_the_rest_goes_by_speed() -> None:
    assert divide(100, [Pace(0, 1.0, limit=10), Pace(0, 1.0, limit=10)]) == (50, 50)
    low = divide(100, [Pace(0, 1.0, limit=10), Pace(0, 9.0, limit=40)])
    assert low == (60, 40)


def test_a_thousand_workers() -> None:
    chance = random.Random(0)
    paces = some_paces(chance, 1000)
    assert sum(divide(100_000, paces)) == 100_000


@pytest.mark.parametrize(
    ("paces", "said"),
    [
        ([Pace(0, 0.0)], "0.0 s a sample"),
        ([Pace(0, math.nan)], "nan s a sample"),
        ([Pace(0, -1.0)], "-1.0 s a sample"),
        ([Pace(0, math.inf)], "inf s a sample"),
        ([Pace(0, 1.0), Pace(-1.0, 1.0)], "rank 1 takes -1.0 s a step"),
        ([Pace(0, 1.0, limit=-1)], "the limit -1"),
        ([], "nobody"),
    ],
)
def test_bad_paces_are_named(paces: list[Pace], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        divide(4, paces)
    with pytest.raises(ValueError, match="1 sample or more"):
        divide(0, [Pace(0, 1.0)])
