"""What a worker keeps of the last operation, and gives to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import tree
from paceline.control.messages.progress import ProgressKeeper, StepRow
from paceline.data.cursor import Cursor
from paceline.train.ledger import TrainingLedger
from paceline.train.sampling import Sampling
from paceline.train.saving import Checkpoints, Saver
from paceline.train.training_state import TrainingState


class Nowhere:
    """A strategy that keeps nothing but what the worker has."""

    def gift(self) -> dict[str, Any]:
        return {}

    def full_state(self) -> dict[str, Any]:
        return {}

    def load(self, part: Mapping[str, Any]) -> None:
        pass

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError(name)


class Books:
    """The ledger of one worker, and how many operations it has applied."""

    def __init__(self, name: str) -> None:
        self.applied = 0
        self.model = nn.Linear(3, 2)
        training = TrainingState(self.model, [torch.optim.SGD(self.model.parameters(), 0.1)], [], Nowhere())
        saver = Saver(Checkpoints(), None, lambda *_: None)
        self.ledger = TrainingLedger(
            training, saver, 100, lambda *_: None, sampling=Sampling(4, "", 100), leased=False, resumes=False
        )
        self.progress = ProgressKeeper(name)
        self.ledger.connect("a run", self.progress, lambda: self.applied)

    def step(self) -> None:
        self.applied += 1
        with torch.no_grad():
            self.model.weight += self.applied
        self.ledger.settle(self.applied - 1)
        book = self.ledger.book
        book.cursor, book.steps, book.loss = Cursor(0, self.applied * 4), self.applied, 0.5
        self.ledger.stepped(StepRow(self.applied, 1, 0, book.cursor.position - 4, 4, 0.5, 0.01))
        self.ledger.keep_result(self.applied, 0.5, stopping=False)

    def take_all_from(self, donor: Books) -> None:
        whole = sent(donor.ledger.gift(whole=True))
        self.applied = whole["applied"]
        self.ledger.swap(whole)

    def operations(self) -> list[int]:
        """Of the rows that this worker would send if it were main."""
        progress = self.progress.take(is_main=True)
        assert progress is not None
        return [row.operation for row in progress.steps]


def sent(gift: Any) -> Any:
    """As another worker gets it."""
    return tree.unflatten(*tree.flatten(gift))


def test_who_came_just_now_can_give_the_last_result() -> None:
    donor, newcomer, behind = Books("d"), Books("n"), Books("b")
    donor.step()
    behind.take_all_from(donor)
    donor.step()
    newcomer.take_all_from(donor)
    outcome = behind.ledger.catch(2, sent(newcomer.ledger.gift(whole=False)))
    assert outcome == 0.5
    assert behind.ledger.book == donor.ledger.book
    assert torch.equal(behind.model.weight, donor.model.weight)


def test_a_state_that_the_run_was_founded_with_has_no_last_result() -> None:
    donor, newcomer = Books("d"), Books("n")
    newcomer.take_all_from(donor)
    newcomer.step()
    assert newcomer.ledger.gift(whole=False)["applied"] == 1


def test_who_came_just_now_sends_the_rows_of_those_who_were_there_before() -> None:
    donor, newcomer, later = Books("d"), Books("n"), Books("l")
    for _ in range(3):
        donor.step()
    newcomer.take_all_from(donor)
    newcomer.step()
    later.take_all_from(newcomer)
    later.step()
    assert newcomer.operations() == [1, 2, 3]  # the fourth is not settled
    assert later.operations() == [1, 2, 3, 4]
