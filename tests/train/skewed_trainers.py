"""A training whose rows are nearly all in a few partitions of the ids: those of one server, as the test chooses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

import paceline.server.__main__ as server_main
from paceline.nn import Embedding
from paceline.server import metering, service
from paceline.server.layout import NUM_PARTITIONS
from paceline.server.parcels import Parcel, Partitions
from paceline.server.store import TensorStore
from paceline.server.tables import Tables
from paceline.testing import faults
from paceline.testing.rehearsal import say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

LENGTH, BATCH, NUM_IDS, DIM = 64, 16, 100, 8
STEPS = LENGTH // BATCH
_PATIENCE_S = 60.0
NEVER = Checkpoints(every_s=None, keep_best=0)


class Skewed(NamedTuple):
    """`folder` has the files "hot", the partitions that are, and "enough", when the training may end."""

    folder: str
    epochs: int = 10**6
    is_alone: bool = False


def rows_take_time(_: int) -> None:
    """In a server: an update of rows takes as long as there are rows, whatever else this machine has to do."""
    _slow_down(4e-5)


def the_first_is_slow(number: int) -> None:
    _slow_down(4e-5 if number == 0 else 1e-5)


def _slow_down(seconds_per_row: float) -> None:
    """And measure in short windows: a test has less patience than a training."""
    metering.WINDOW_S, metering.FEWEST, server_main.LOOK_S = 0.2, 4, 0.1

    class SlowTables(Tables):
        def update(self, parts: Sequence[tuple[Parcel, set[int]]], *others: Any) -> None:
            time.sleep(sum(len(ids) for _, (ids, _) in self._summed(parts)) * seconds_per_row)
            super().update(parts, *others)

    class Store(TensorStore):
        def __init__(self) -> None:
            super().__init__()
            self.tables = SlowTables()

    faults.arm(service.STORE, Store)


def hot_ids(partitions: list[int]) -> torch.Tensor:
    candidates = torch.arange(40_000)
    return candidates[torch.isin(Partitions(0, NUM_PARTITIONS).of(candidates), torch.tensor(partitions))]


def _partitions(folder: Path) -> list[int]:
    """As soon as the test has chosen them."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (folder / "hot").exists():
        assert time.monotonic() < deadline, "nobody says which partitions are hot"
        time.sleep(0.01)
    found: list[int] = json.loads((folder / "hot").read_text())
    return found


def train_skewed(case: Skewed) -> dict[str, Any]:
    torch.manual_seed(1)
    folder = Path(case.folder)
    table = Embedding(DIM, scale=0.1)
    model = torch.nn.ModuleDict({"table": table, "out": torch.nn.Linear(DIM, 1)})
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.rand(LENGTH, NUM_IDS, generator=generator), torch.randn(LENGTH, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(model, optimizer, data=data, global_batch=BATCH, seed=3, strategy="server", checkpoints=NEVER)
    ids: list[torch.Tensor] = []

    def loss_fn(where: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not ids:
            ids.append(hot_ids(_partitions(folder)))
        chosen = ids[0][(where * len(ids[0])).long()]
        out: torch.Tensor = model["out"](model["table"](chosen).mean(1))[:, 0]
        return ((out - y) ** 2).mean()

    with session:
        for epoch in session.epochs(case.epochs):
            for batch in epoch:
                session.step(loss_fn, batch)
                if not case.is_alone:
                    say(session.steps)
            is_enough = not case.is_alone and (folder / "enough").exists()
            if session.should_stop(math.inf if is_enough else -float(session.steps), patience=0):
                break
        with torch.no_grad():
            rows = model["table"](ids[0]).tolist()
    parameters = {name: value.tolist() for name, value in model["out"].state_dict().items()}
    return {"steps": session.steps, "rows": rows, "parameters": parameters}
