"""The ways to load trained weights that docs/how-to/resume.md shows, as it shows them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.checkpoint import load_model
from paceline.errors import CheckpointError

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "resume.md"


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.outside = nn.Linear(4, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.outside(self.norm(self.inside(ids)))
        return logits


class Tied(Untied):
    def __init__(self) -> None:
        super().__init__()
        self.outside.weight = self.inside.weight


class TiedBackwards(Untied):
    """The name that comes second in the state_dict is registered first as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside.weight = self.outside.weight


class Twice(Tied):
    """A module, with its buffers, that is in the model under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.norm


def shown_ways() -> list[str]:
    """The programs of the section about checkpoints that load weights."""
    section = DOCS.read_text().split("\n## Use the trained model\n")[1].split("\n## ")[0]
    found = [code for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL) if "load" in code]
    assert len(found) == 2, "the docs show two ways to load weights"
    return found


def train(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    model = make()
    ids = torch.arange(44) % 11
    session = paceline.Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data=torch.utils.data.TensorDataset(ids),
        global_batch=8,
        seed=0,
        checkpoints=paceline.Checkpoints(folder="kept", every_s=None),
    )
    for epoch in session.epochs(1):
        for batch in epoch:
            session.step(lambda ids: F.cross_entropy(model(ids), ids), batch)
        session.should_stop(1.0, patience=2)
    session.close()
    return model


@pytest.mark.parametrize("make", [Untied, Tied, TiedBackwards])
@pytest.mark.parametrize("code", shown_ways(), ids=["paceline", "safetensors"])
def test_what_the_docs_show_loads_what_was_trained(
    make: Callable[[], nn.Module], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(make)
    torch.manual_seed(2)
    model = make()
    assert not torch.equal(model.state_dict()["inside.weight"], trained.state_dict()["inside.weight"])
    exec(code, {"model": model})
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    if make is not Untied:
        assert model.get_parameter("inside.weight") is model.get_parameter("outside.weight")


def test_buffers_with_two_names_are_loaded_and_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained, model = train(Twice), Twice()
    load_model(model, "kept/best")
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in model.state_dict().items())
    kept = safetensors.torch.load_file("kept/best/model.safetensors")
    assert not any(name.startswith("again.") for name in kept)


def test_what_cannot_be_loaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(Untied)
    best = Path("kept/best")
    with pytest.raises(CheckpointError, match=r"do not fit this model[\s\S]*norm"):
        load_model(nn.Linear(4, 11), best)
    with pytest.raises(CheckpointError, match="give the folder that it is in, kept/best"):
        load_model(Untied(), best / "model.safetensors")
    with pytest.raises(CheckpointError, match="not the folder of a checkpoint"):
        load_model(Untied(), "runs/NONE")
    weights = best.resolve() / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="checksum"):
        load_model(Untied(), best)


def test_rows_of_tables_are_not_forgotten_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Looked(Untied):
        def __init__(self) -> None:
            super().__init__()
            self.inside = paceline.nn.Embedding(4)  # type: ignore[assignment]

    train(Looked)
    with pytest.raises(CheckpointError, match=r"tables, 'inside'.*session\.table"):
        load_model(Looked(), "kept/best")
