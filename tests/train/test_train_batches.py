"""The batch after this one, had early: the one that is fetched then, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.balance import Shares
from paceline.data.cursor import Cursor
from paceline.data.loader import LoaderOptions
from paceline.testing.eventually import eventually
from paceline.train.batches import MOST_VALIDATION, GlobalBatches, ValidationData


class Numbers:
    """Some samples raise."""

    def __init__(self, *bad: int) -> None:
        self._bad = bad
        self.num_read = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        if index in self._bad:
            raise ValueError(f"sample {index} is bad")
        return torch.tensor(index)


def batches_of(data: Any, **options: Any) -> GlobalBatches:
    return GlobalBatches(
        data, global_batch=4, seed=0, shuffle=False, order=None, options=LoaderOptions(**options), min_share=1
    )


BOTH, OTHER, LATER = Shares(1, 0, (1, 1)), Shares(1, 1, (3, 1)), Shares(2, 0, (1, 1))


def test_what_was_looked_at_is_what_is_fetched_and_is_read_once() -> None:
    data = Numbers()
    batches = batches_of(data)
    assert batches.fetch(BOTH, 0, Cursor(0, 0)).value.tolist() == [0, 1]
    ahead = batches.look_ahead(BOTH, 0, Cursor(0, 4))
    assert ahead is not None
    assert batches.look_ahead(BOTH, 0, Cursor(0, 4)) is ahead, "asked for again"
    assert batches.fetch(BOTH, 0, Cursor(0, 4)) is ahead
    assert data.num_read == 4


@pytest.mark.parametrize("shares", [OTHER, LATER], ids=["other shares", "another plan"])
def test_what_becomes_another_part_is_fetched_anew(shares: Shares) -> None:
    batches = batches_of(Numbers())
    ahead = batches.look_ahead(BOTH, 0, Cursor(0, 4))
    found = batches.fetch(shares, 0, Cursor(0, 4))
    assert found is not ahead
    assert found.value.tolist() == ([4, 5, 6] if shares is OTHER else [4, 5])
    assert batches.fetch(BOTH, 0, Cursor(0, 4)) is not ahead, "it is gone"


def test_leases_are_looked_at_too() -> None:
    batches = batches_of(Numbers())
    ahead = batches.look_ahead_whole(Cursor(0, 8))
    assert batches.fetch_whole(Cursor(0, 4)).value.tolist() == [4, 5, 6, 7], "an earlier one came"
    assert batches.fetch_whole(Cursor(0, 8)) is not ahead


def test_a_sample_that_raises_does_so_when_its_batch_is_fetched() -> None:
    batches = batches_of(Numbers(5))
    assert batches.look_ahead(BOTH, 0, Cursor(0, 4)) is None
    with pytest.raises(ValueError, match="sample 5 is bad"):
        batches.fetch(BOTH, 0, Cursor(0, 4))
    assert batches.fetch(BOTH, 1, Cursor(0, 4)).value.tolist() == [6, 7]


def test_loader_workers_are_not_waited_for() -> None:
    batches = batches_of(Numbers(), num_workers=1)
    try:
        assert batches.look_ahead(BOTH, 0, Cursor(0, 0)) is None, "they have not been started"
        batches.fetch(BOTH, 0, Cursor(0, 0))
        ahead = eventually(lambda: batches.look_ahead(BOTH, 0, Cursor(0, 4)), "the next batch is there")
        assert ahead is not None
        assert batches.fetch(BOTH, 0, Cursor(0, 4)) is ahead
        assert ahead.value.tolist() == [4, 5]
    finally:
        batches.close()


def children() -> int:
    return sum(len((task / "children").read_text().split()) for task in Path("/proc/self/task").iterdir())


def test_a_script_that_makes_its_validation_data_anew_keeps_few_loader_workers() -> None:
    validation = ValidationData(0, LoaderOptions(num_workers=1))
    before = children()
    try:
        for _ in range(MOST_VALIDATION + 3):
            validation.parts_of(Numbers(), 4).fetch(BOTH, 0, Cursor(0, 0))
        assert children() <= before + MOST_VALIDATION
        kept = Numbers()
        parts = validation.parts_of(kept, 4)
        for _ in range(MOST_VALIDATION - 1):
            validation.parts_of(Numbers(), 4)
        assert validation.parts_of(kept, 4) is parts, "what is used again stays"
    finally:
        validation.close()
