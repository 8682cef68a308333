"""A folder that a script names for its checkpoints belongs to one training; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import find, load_model
from paceline.errors import CheckpointError
from paceline.train.folder_claim import OWNER, FolderClaim
from paceline.train.saving import Checkpoints
from paceline.train.session import Session


def train(folder: Path, *, length: int = 40, epochs: int = 1, resume: bool = False, kind: Any = torch.optim.SGD) -> int:
    """How many steps were done in all."""
    model = nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.randn(length, 3), torch.randn(length, 1))
    checkpoints = Checkpoints(folder=folder, every_s=None, every_steps=5, resume=resume)
    optimizer = kind(model.parameters(), lr=0.01)
    with Session(model, optimizer, data=data, global_batch=4, checkpoints=checkpoints) as session:
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
        return session.steps


def test_a_training_does_not_begin_among_checkpoints_of_another(tmp_path: Path) -> None:
    """It went on from them without a word, or had its own removed because theirs had higher numbers."""
    torch.manual_seed(3)
    train(tmp_path, epochs=3)
    before = [found.operation for found in find(tmp_path)]
    with pytest.raises(CheckpointError, match=rf"earlier training, up to operation {before[0]}; go on.*resume=True"):
        train(tmp_path)
    assert [found.operation for found in find(tmp_path)] == before
    assert train(tmp_path, epochs=4, resume=True) == 40


def test_a_folder_without_checkpoints_is_anybodys(tmp_path: Path) -> None:
    assert train(tmp_path / "new") == 10
    (tmp_path / "new" / "latest").unlink(missing_ok=True)
    load_model(nn.Linear(3, 1), find(tmp_path / "new")[0].path)


def test_workers_of_one_run_share_a_folder_also_those_that_are_started_again(tmp_path: Path) -> None:
    train(tmp_path, resume=True)
    FolderClaim(tmp_path, "a", resumes=True).take()
    again = FolderClaim(tmp_path, "a", resumes=False)
    again.take()
    again.check()
    with pytest.raises(CheckpointError, match="earlier training"):
        FolderClaim(tmp_path, "b", resumes=False).take()


def test_two_trainings_at_once_do_not_write_into_one_folder(tmp_path: Path) -> None:
    first, second = (FolderClaim(tmp_path, name, resumes=False) for name in "ab")
    first.take()
    second.take()  # there is no checkpoint yet, so the folder may be of a training that failed early
    second.check()
    with pytest.raises(CheckpointError, match=r"another training writes its checkpoints into .*, too"):
        first.check()


def test_in_the_middle_of_an_epoch_the_data_must_have_as_many_samples(tmp_path: Path) -> None:
    """Else some would be lost, and others would count twice."""
    torch.manual_seed(3)
    train(tmp_path)
    find(tmp_path)[0].path.rename(tmp_path / "away")  # that of the end
    assert find(tmp_path)[0].operation == 5
    for length in (20 + 4, 80):
        with pytest.raises(ValueError, match=rf"an epoch of 40 samples, and now the data has {length}"):
            train(tmp_path, length=length, resume=True)


def test_another_optimizer_does_not_go_on_with_the_state_of_this_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    train(tmp_path)
    with pytest.raises(ValueError, match="the state is of SGD, and this session has Adam; go on with the optimizers"):
        train(tmp_path, epochs=2, resume=True, kind=torch.optim.Adam)


def test_a_folder_that_could_not_be_claimed_for_want_of_room_is_with_the_first_checkpoint(tmp_path: Path) -> None:
    """Else workers that are started again would take the run's own checkpoints for another training's."""
    claim = FolderClaim(tmp_path, "a", resumes=False)
    claim.take()
    (tmp_path / OWNER).unlink()
    claim.check()
    assert (tmp_path / OWNER).read_text() == "a"
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]
