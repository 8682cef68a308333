"""The order of an epoch: a permutation, the same everywhere and for ever, computed slice by slice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import EpochOrder, Orders

LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 31, 63, 64, 65, 1000, 1024, 9999, 2**16 - 1, 2**16, 2**16 + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_is_a_permutation(length: int) -> None:
    whole = EpochOrder(7, 3, length).slice(0, length)
    assert whole.dtype == np.int64
    assert np.array_equal(np.sort(whole), np.arange(length))


@given(st.integers(0, 300), st.integers(), st.integers(0, 10**6))
def test_is_a_permutation_for_any_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    assert sorted(EpochOrder(seed, epoch, length).slice(0, length)) == list(range(length))


@given(st.data(), st.integers(1, 5000))
def test_slices_agree_with_the_whole(data: st.DataObject, length: int) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    order = EpochOrder(1, 2, length)
    assert np.array_equal(order.slice(start, stop), order.slice(0, length)[start:stop])


@pytest.mark.parametrize(
    ("arguments", "start", "values"),
    [
        ((0, 0, 10), 0, [7, 4, 1, 9, 2, 0, 6, 5, 8, 3]),
        ((42, 5, 1000), 500, [195, 172, 908, 454, 701, 634, 527, 904]),
        (
            (-1, 0, 10**9),
            999_999_992,
            [429908439, 242170347, 4323434, 774314585, 594130860, 152050013, 611825178, 747647868],
        ),
        ((2**70, 1, 2**40), 12345, [146983194235, 745608740133, 73567295238, 425233259753]),
    ],
)
def test_never_changes(arguments: tuple[int, int, int], start: int, values: list[int]) -> None:
    """A run that is resumed with a later version must go on with the same order."""
    assert EpochOrder(*arguments).slice(start, start + len(values)).tolist() == values


def test_a_slice_of_a_billion_samples() -> None:
    found = EpochOrder(0, 0, 10**9).slice(10**9 - 256, 10**9)
    assert len(set(found.tolist())) == 256
    assert 0 <= found.min() < found.max() < 10**9


def test_looks_random() -> None:
    length = 10_000
    whole = EpochOrder(3, 0, length).slice(0, length)
    positions = np.arange(length)
    # For random permutations: displacement length/3, one fixed point, half of the neighbours rising.
    assert abs(np.abs(whole - positions).mean() / length - 1 / 3) < 0.02
    assert (whole == positions).sum() < 8
    assert abs((np.diff(whole) > 0).mean() - 0.5) < 0.02
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.05
    # No step between neighbours is frequent.
    assert np.bincount(np.diff(whole) % length).max() < 10


@pytest.mark.parametrize("length", [5, 12, 100])
def test_each_sample_is_equally_often_at_each_position(length: int) -> None:
    epochs = 2000
    seen = np.zeros((length, length))
    for epoch in range(epochs):
        seen[np.arange(length), EpochOrder(1, epoch, length).slice(0, length)] += 1
    expected = epochs / length
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    length = 10_000
    orders = [EpochOrder(seed, epoch, length).slice(0, length) for seed in range(3) for epoch in range(3)]
    for k, one in enumerate(orders):
        for other in orders[k + 1 :]:
            assert (one == other).sum() < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert EpochOrder(0, 0, 10, shuffle=False).slice(3, 7).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (5, 11)])
def test_a_slice_outside_of_the_epoch_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not within an epoch of 10"):
        EpochOrder(0, 0, 10).slice(start, stop)
    with pytest.raises(ValueError, match="not within an epoch of 10"):
        Orders(seed=0, length=10, order=lambda seed, epoch, length: range(length)).slice(0, start, stop)


def test_the_built_in_order_through_orders() -> None:
    orders = Orders(seed=4, length=100)
    for epoch in (0, 1, 0):
        assert np.array_equal(orders.slice(epoch, 10, 20), EpochOrder(4, epoch, 100).slice(10, 20))


@settings(deadline=None)  # a busy machine is no fault of the code
@given(st.data())
def test_slices_that_are_computed_ahead_are_the_same(data: st.DataObject) -> None:
    length, stride = data.draw(st.integers(1, 9000)), data.draw(st.integers(1, 600))
    orders = Orders(seed=4, length=length, stride=stride)
    wanted = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, length), st.integers(0, stride)), max_size=4)
    )
    for epoch, start, size in wanted:
        # As a loader asks: the next ones, some of them ahead, and again.
        for number in (0, 1, 5, 1, 2):
            low, high = (min(length, start + number * stride + more) for more in (0, size))
            assert np.array_equal(orders.slice(epoch, low, high), EpochOrder(4, epoch, length).slice(low, high))


def test_what_is_computed_ahead_cannot_be_changed() -> None:
    orders = Orders(seed=4, length=100, stride=10)
    with pytest.raises(ValueError, match="read-only"):
        orders.slice(0, 0, 10)[0] = 1


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, tuple], ids=["list", "array", "tensor", "tuple"])
def test_a_users_order_is_asked_once_an_epoch(make: type) -> None:
    asked = []

    def order(seed: int, epoch: int, length: int) -> object:
        asked.append((seed, epoch, length))
        return make([(k + epoch) % length for k in range(length)])

    orders = Orders(seed=9, length=6, order=order)
    for epoch in (0, 1):
        for start in (0, 2, 4):
            expected = [(k + epoch) % 6 for k in (start, start + 1)]
            found = orders.slice(epoch, start, start + 2)
            assert found.dtype == np.int64
            assert found.tolist() == expected
    assert orders.slice(0, 4, 6).tolist() == [4, 5]  # loader workers are an epoch ahead
    assert asked == [(9, 0, 6), (9, 1, 6)]
    assert orders.slice(1, 6, 6).tolist() == []


@pytest.mark.parametrize(
    ("given_order", "error", "says"),
    [
        (range(5), ValueError, "5 indices for epoch 2 of a dataset of 6"),
        (iter(range(6)), TypeError, "has no length"),
        ([0, 1, 2, 3, 4, 6], ValueError, "names sample 6"),
        ([0, 1, 2, 3, 4, -1], ValueError, "names sample -1"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], TypeError, "plain integers"),
    ],
)
def test_a_wrong_order_of_a_user_is_refused(given_order: object, error: type[Exception], says: str) -> None:
    orders = Orders(seed=0, length=6, order=lambda seed, epoch, length: given_order)
    with pytest.raises(error, match=says):
        orders.slice(2, 0, 6)
