"""Fine-tuning: frozen weights stay out of checkpoints; and Muon beside AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.testing.rehearsal import Rehearsal
from paceline.train.fitting import fit
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from paceline.train.task import Best, Task, Validation
from tests.train.trainers import Numbered

torch.set_num_threads(1)


class Adapted(nn.Module):
    """A frozen layer, and a change of low rank that is learned."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen: torch.Tensor = self.base(x)
        return frozen + x @ self.down.T @ self.up.T


def make_model(base_seed: int = 0, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(base_seed)
    layers = nn.Linear(8, 16), nn.Linear(16, 3)
    torch.manual_seed(seed)
    return nn.Sequential(Adapted(layers[0], 2), nn.BatchNorm1d(16), nn.Tanh(), Adapted(layers[1], 2))


FROZEN = {f"{layer}.base.{name}" for layer in (0, 3) for name in ("weight", "bias")}


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y, _: F.cross_entropy(model(x), y)


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]  # with the frozen ones, as many write it


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in trained if one.ndim == 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW([one for one in trained if one.ndim != 2], lr=1e-2)]


def train(
    epochs: int,
    model: nn.Module | None = None,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw,
    **checkpoints: Any,
) -> dict[str, torch.Tensor]:
    model = model or make_model()
    session = Session(
        model,
        *optimizers(model),
        data=Numbered(40),
        global_batch=8,
        checkpoints=Checkpoints(every_s=None, **checkpoints),
        batch_norm="sync",
    )
    with session:
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(loss_of(model), batch)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


def test_frozen_weights_are_left_out_of_checkpoints_and_training_goes_on(tmp_path: Path) -> None:
    wanted = train(3)
    first = train(2, folder=tmp_path, only_trained=True)
    names = safetensors.torch.load_file(tmp_path / "latest" / "model.safetensors").keys()
    assert names == wanted.keys() - FROZEN, "buffers stay: training changes them"
    used = make_model(seed=5)
    paceline.load_model(used, tmp_path / "latest")
    check_equal(used.state_dict(), first)
    with pytest.raises(ValueError, match=r"no frozen weights, and those of this model .*0\.base\.weight.*load these"):
        train(3, make_model(base_seed=9), folder=tmp_path, resume=True, only_trained=True)
    check_equal(train(3, make_model(seed=7), folder=tmp_path, resume=True, only_trained=True), wanted)


def test_what_was_trained_and_is_frozen_now_stays_in(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = Checkpoints(folder=tmp_path, every_s=None, only_trained=True)
    with Session(model, optimizer, data=Numbered(40), global_batch=8, checkpoints=checkpoints) as session:
        for epoch in session.epochs(2):
            for batch in epoch:
                session.step(loss_of(model), batch)
            model[0].up.requires_grad_(False)
    assert "0.up" in safetensors.torch.load_file(tmp_path / "latest" / "model.safetensors")


def test_the_best_weights_of_fit_are_without_them_too(tmp_path: Path) -> None:
    model = make_model()
    scores = iter([1.0, 2.0, 3.0])
    kept: list[dict[str, torch.Tensor]] = []

    def validate(*_: torch.Tensor) -> dict[str, float]:
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"loss": next(scores)}

    task = Task(
        model=model,
        optimizer=adamw(model),
        loss_fn=loss_of(model),
        data=Numbered(40),
        global_batch=8,
        epochs=3,
        validation=Validation(data=Numbered(8), validate=validate, best=Best()),
        checkpoints=Checkpoints(folder=tmp_path, every_s=None, only_trained=True),
    )
    fit(task)
    check_equal(model.state_dict(), kept[0])
    state = safetensors.torch.load_file(tmp_path / "latest" / "state.safetensors")
    assert not [name for name in state if ".base." in name]


def test_muon_and_adamw_are_resumed_and_equal_one_process(tmp_path: Path) -> None:
    wanted = train(3, optimizers=muon)
    train(1, optimizers=muon, folder=tmp_path / "alone")
    check_equal(train(3, make_model(seed=7), muon, folder=tmp_path / "alone", resume=True), wanted)
    with Rehearsal(train_with_muon, workers=2, folder=tmp_path) as run:
        results = run.finish()
        assert all(isinstance(result, dict) for result in results), results
    for name, value in wanted.items():
        for result in results:
            assert torch.allclose(torch.tensor(result[name]), value, rtol=1e-2, atol=1e-2), name
        assert results[0][name] == results[1][name], name


def train_with_muon() -> dict[str, Any]:
    return {name: value.tolist() for name, value in train(3, optimizers=muon).items()}
