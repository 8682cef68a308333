"""The fewest samples that a worker gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.balance.division import Pace, divide
from paceline.balance.minimum import ANY, WITH_STATISTICS


@pytest.mark.parametrize(
    ("total", "num_workers", "expected"),
    [
        (256, 3, 4),
        (32, 2, 4),
        (32, 8, 4),
        (32, 9, 3),  # an equal share is 3.6
        (7, 2, 3),
        (6, 3, 2),
        (4, 3, 2),  # one of the three rests: BatchNorm takes no single sample
        (1, 1, 2),
    ],
)
def test_batch_statistics_want_enough_samples_but_no_more_than_an_equal_share(
    total: int, num_workers: int, expected: int
) -> None:
    assert WITH_STATISTICS.of(total, num_workers) == expected


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12))
def test_nobody_is_left_without_samples_because_of_what_is_wanted(total: int, speeds: list[float]) -> None:
    paces = [Pace(0.0, speed) for speed in speeds]
    shares = divide(total, paces, WITH_STATISTICS.of(total, len(paces)))
    assert sum(shares) == total
    if total >= WITH_STATISTICS.fewest * len(paces):
        assert min(shares) >= min(WITH_STATISTICS.wanted, total // len(paces))
    assert all(share == 0 or share >= min(total, WITH_STATISTICS.fewest) for share in shares)


@given(st.integers(1, 1000), st.integers(1, 50))
def test_without_batch_statistics_one_sample_will_do(total: int, num_workers: int) -> None:
    assert ANY.of(total, num_workers) == 1
