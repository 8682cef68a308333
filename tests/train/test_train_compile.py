"""Compiled models: shares change without compiling again and again, and checkpoints have plain names."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import paceline
from paceline.testing.rehearsal import Rehearsal, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import Numbered, make_model

torch.set_num_threads(1)

LENGTH, BATCH = 48, 12


def plain(model: nn.Module) -> nn.Module:
    return model


def around(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def a_part(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    return model


def train(compiled: Callable[[nn.Module], nn.Module], epochs: int, pause_s: float = 0.0, **checkpoints: Any) -> Any:
    torch.manual_seed(3)
    model = compiled(make_model())
    session = Session(
        *(model, torch.optim.AdamW(model.parameters(), lr=1e-2)),
        data=Numbered(LENGTH),
        global_batch=BATCH,
        checkpoints=Checkpoints(every_s=None, **checkpoints),
    )

    def loss_fn(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)
        return F.cross_entropy(model(x), y)

    with session:
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(loss_fn, batch)
                if pause_s:
                    say((session.world_size, counters["stats"]["unique_graphs"]))
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("compiled", [around, in_place, a_part])
def test_a_checkpoint_has_plain_names_and_fits_compiled_and_plain_models(
    tmp_path: Path, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    found = train(compiled, 1, folder=tmp_path)
    names = list(safetensors.torch.load_file(tmp_path / "latest" / "model.safetensors"))
    assert sorted(names) == sorted(make_model().state_dict())
    others: list[Callable[[nn.Module], nn.Module]] = [plain, around, a_part]
    for other in others:
        model = other(make_model())
        paceline.load_model(model, tmp_path / "latest")
        assert [value.tolist() for value in model.state_dict().values()] == found
    wanted = train(plain, 3)
    train(plain, 2, folder=tmp_path, resume=True)
    found = train(compiled, 3, folder=tmp_path, resume=True)
    assert all(torch.allclose(torch.tensor(one), torch.tensor(two)) for one, two in zip(found, wanted, strict=True))


def dynamic(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, dynamic=True, backend=backend)  # type: ignore[return-value]


NO_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile has no C++ compiler here"
)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.soak, NO_COMPILER])])
def test_shares_change_and_nothing_is_compiled_again(tmp_path: Path, backend: str) -> None:
    """When to compile again is decided alike for all backends; the usual one takes a minute where nothing is cached."""
    with Rehearsal(train, partial(dynamic, backend=backend), 12, 0.1, workers=3, folder=tmp_path) as run:
        run.wait_for(lambda: any(size == 3 for size, _ in run.said(0)))
        run.kill(1)
        run.wait_for(lambda: any(size == 2 for size, _ in run.said(0)))
        results = run.finish([0, 2])
        graphs = {said[1] for said in (*run.said(0), *run.said(2))}
    assert graphs == {1}
    wanted = train(plain, 12)
    for result in results:
        for one, two in zip(result, wanted, strict=True):
            assert torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-3, atol=1e-4)
