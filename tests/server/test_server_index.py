"""The index of keys does what a dict does, for any keys, and hands out slots as promised."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server import memory
from paceline.server.index import KeyIndex
from paceline.testing import faults

LOW, HIGH = -(2**63), 2**63 - 1
# The inverse of the hash's multiplier: multiples of it have small products, as near to one bucket as keys can be.
INVERSE = pow(0x9E3779B97F4A7C15, -1, 2**64)


def keys_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class Model:
    """The same by a dict and a list of free slots."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.freed: list[int] = []
        self.num_slots = 0

    def add(self, keys: list[int]) -> list[int]:
        for key in keys:
            if key not in self.slots:
                if self.freed:
                    self.slots[key] = self.freed.pop()
                else:
                    self.slots[key] = self.num_slots
                    self.num_slots += 1
        return [self.slots[key] for key in keys]

    def find(self, keys: list[int]) -> list[int]:
        return [self.slots.get(key, -1) for key in keys]

    def remove(self, keys: list[int]) -> list[int]:
        freed = [self.slots.pop(key) for key in dict.fromkeys(keys) if key in self.slots]
        self.freed += freed
        return freed


def run_both(calls: list[tuple[str, list[int]]]) -> None:
    made, model = KeyIndex(), Model()
    for name, keys in calls:
        found = getattr(made, name)(keys_of(*keys)).tolist()
        assert found == getattr(model, name)(keys), name
        assert len(made) == len(model.slots)
        assert made.num_slots == model.num_slots
    known = list(model.slots)
    assert made.find(keys_of(*known)).tolist() == list(model.slots.values())
    assert made.keys_of(keys_of(*model.slots.values())).tolist() == known


# Few enough that they meet again, with the extremes among them.
KEYS = st.one_of(st.integers(-40, 40), st.sampled_from([LOW, LOW + 1, HIGH, HIGH - 1, 2**32, -(2**32), 2**31]))
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "find", "remove"]), st.lists(KEYS | st.integers(LOW, HIGH), max_size=40))
)


@settings(max_examples=150, deadline=None)
@given(CALLS)
def test_it_does_what_a_dict_does(calls: list[tuple[str, list[int]]]) -> None:
    run_both(calls)


@pytest.mark.parametrize("seed", range(4))
def test_long_sequences_with_rebuilds(seed: int) -> None:
    dice = random.Random(seed)
    calls = []
    for _ in range(60):
        name = dice.choice(["add", "add", "find", "remove"])
        calls.append((name, [dice.randrange(-3000, 3000) * 2**30 for _ in range(dice.randrange(900))]))
    run_both(calls)


PATTERNS = {
    "sequential": torch.arange(-50_000, 50_000),
    "even": torch.arange(100_000) * 2,
    "multiples of 2**32": torch.arange(100_000) << 32,
    "multiples of 2**40": torch.arange(100_000) << 40,
    "same lower half": (torch.arange(100_000) << 32) + 12345,
    "same upper half": torch.arange(100_000) + (7 << 50),
    "both halves alike": torch.arange(100_000) * (2**32 + 1),
    "strides of a prime": torch.arange(100_000) * 1_000_003,
    "near one bucket": torch.tensor([signed(at * INVERSE) for at in range(100_000)]),
    "high to low": torch.arange(HIGH, HIGH - 100_000, -1),
    "from the lowest": torch.arange(LOW, LOW + 100_000),
}


@pytest.mark.parametrize("keys", PATTERNS.values(), ids=PATTERNS)
def test_patterns_of_ids(keys: torch.Tensor) -> None:
    made = KeyIndex()
    slots = made.add(keys)
    assert torch.equal(slots, torch.arange(100_000))
    order = torch.randperm(100_000)
    assert torch.equal(made.find(keys[order]), slots[order])
    assert torch.equal(made.keys_of(slots), keys)
    others = keys ^ (1 << 61)
    assert int((made.find(others) >= 0).sum()) == int(torch.isin(others, keys).sum())


@pytest.mark.parametrize("key", [0, -1, 1, LOW, HIGH])
def test_a_key_that_could_be_mistaken_for_an_empty_place(key: int) -> None:
    made = KeyIndex()
    assert made.find(keys_of(key)).tolist() == [-1]
    assert made.add(keys_of(5, key)).tolist() == [0, 1]
    assert made.remove(keys_of(key)).tolist() == [1]
    assert made.find(keys_of(key, 5)).tolist() == [-1, 0]
    assert made.add(keys_of(key, key)).tolist() == [1, 1]


def test_equal_keys_of_one_call_get_one_slot_in_order_of_first_appearance() -> None:
    keys = torch.randint(0, 20_000, (200_000,), generator=torch.Generator().manual_seed(1))
    made = KeyIndex()
    slots = made.add(keys)
    firsts = list(dict.fromkeys(keys.tolist()))
    assert torch.equal(made.keys_of(torch.arange(len(made))), keys_of(*firsts))
    assert torch.equal(made.keys_of(slots), keys)


def test_removing_all_and_adding_again_does_not_grow() -> None:
    made = KeyIndex()
    for turn in range(30):
        keys = torch.arange(20_000) + turn * 20_000
        assert sorted(made.add(keys).tolist()) == list(range(20_000))
        before = made.num_bytes
        assert len(made.remove(keys)) == 20_000
    assert len(made) == 0
    assert made.num_slots == 20_000
    assert made.num_bytes <= before + memory.SLAB * 4


def test_bytes_a_key() -> None:
    made = KeyIndex()
    for start in range(0, 1_200_000, 50_000):
        made.add(torch.arange(start, start + 50_000) * 977)
        if len(made) >= 500_000:
            assert made.num_bytes <= 24 * len(made) + memory.SLAB * 8


def test_a_lack_of_memory_adds_nothing() -> None:
    """There is room for the keys, and none for the buckets."""
    made = KeyIndex()
    made.add(torch.arange(1000))
    made.remove(torch.arange(10))
    for _ in range(3):
        with (
            faults.little_memory(memory.SPARE_BYTES + (1 << 20)),
            pytest.raises(MemoryError, match="for the buckets of an index"),
        ):
            made.add(torch.arange(500, 400_000))
        assert len(made) == 990
        assert made.num_slots == 1000
        assert made.find(torch.arange(0, 2000)).tolist() == [-1] * 10 + list(range(10, 1000)) + [-1] * 1000
    assert made.add(keys_of(2**40, 2**41)).tolist() == [9, 8]
    made.add(torch.arange(500, 400_000))
    assert len(made) == 399_992


def test_keys_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int32"):
        KeyIndex().find(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        KeyIndex().add(torch.zeros((2, 2), dtype=torch.int64))


def test_no_keys() -> None:
    made = KeyIndex()
    none = keys_of()
    assert [len(call(none)) for call in (made.find, made.add, made.remove, made.keys_of)] == [0, 0, 0, 0]
