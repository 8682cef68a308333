"""What every strategy promises, as tests on real processes.

    class TestAllReduce(StrategyContract):
        strategy = "allreduce"

What one process learns, any number of workers learn, to rounding: through a death, a join, a leave, a step that is not
finite, parameters that only some workers use or nobody does, and a stop in the middle of an epoch with another number
of workers after it. The model has a table and a dense part, so that each part of a strategy is used. Strategies that
let workers update by themselves are tried with `consistency="bounded:0"`, where the order of updates is fixed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline.nn
from paceline.control.machines.coordinator_events import RunSettings
from paceline.strategy.options import StrategyName
from paceline.testing.rehearsal import Rehearsal, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

LENGTH, BATCH = 60, 6
STEPS = LENGTH // BATCH
_BAD = 23  # the sample whose loss is not a number
_MARKED = 41  # the sample that alone uses a layer
_PAUSE_S = 0.03  # in which a fault can happen


class StrategyContract:
    strategy: StrategyName = "allreduce"
    consistency = "sync"
    num_servers = 0

    def test_through_a_death_a_join_and_a_leave_it_learns_what_one_process_learns(self, tmp_path: Path) -> None:
        enough = tmp_path / "enough"
        with self._run(tmp_path / "run", 3, str(enough)) as run:
            run.wait_for(lambda: all(len(run.said(number)) > 2 for number in range(3)))
            run.kill(1)
            run.wait_for(lambda: min(len(run.said(0)), len(run.said(2))) > 5)
            run.add()
            run.wait_said(3, 2)
            run.terminate(0)
            run.wait_for(lambda: run.workers[0].exit_code is not None)
            enough.touch()
            results = run.finish([2, 3])
            assert not run.events("lost"), "the state was lost: what follows would compare a rollback"
        self._check(results)

    def test_after_a_stop_it_goes_on_with_other_workers_where_it_was(self, tmp_path: Path) -> None:
        enough, folder = tmp_path / "enough", tmp_path / "run"
        with self._run(folder, 2, str(enough)) as run:
            run.wait_for(lambda: all(len(run.said(number)) > 2 for number in range(2)))
            run.ask("halt", "to go on with others")
            run.finish()
        enough.touch()
        with self._run(folder, 1, str(enough)) as run:
            results = run.finish()
        self._check(results)

    def _run(self, folder: Path, workers: int, enough: str) -> Rehearsal:
        settings = RunSettings(wanted=workers, fewest=1, servers=self.num_servers)
        folder.mkdir(exist_ok=True)
        return Rehearsal(
            train, self.strategy, self.consistency, enough, workers=workers, folder=folder, settings=settings
        )

    def _check(self, results: list[Any]) -> None:
        epochs = results[0]["epochs"]
        assert epochs > 0
        alone = train("allreduce", "sync", "", epochs=epochs)
        for result in results:
            assert result["epochs"] == epochs
            if self.consistency == "sync":  # where leases are done, each worker counts what it skipped itself
                assert result["skipped"] == epochs
            for name, value in alone["weights"].items():
                found = torch.tensor(result["weights"][name])
                assert torch.allclose(found, torch.tensor(value), rtol=1e-3, atol=1e-4), name


class _Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(number), torch.randn(5, generator=torch.Generator().manual_seed(number))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = paceline.nn.Embedding(4)
        self.always, self.sometimes, self.never = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(numbers % 7) + self.always(x)
        marked = (numbers == _MARKED)[:, None]
        if marked.any():
            out = out + marked * self.sometimes(x)
        worth = torch.where(numbers == _BAD, torch.nan, 1.0)[:, None]
        return (out * worth).square().mean()


def train(strategy: StrategyName, consistency: str, enough: str, *, epochs: int = 1000) -> dict[str, Any]:
    """Until all workers see that it is enough; without such a file for so many epochs, alone."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = _Samples()
    session = Session(
        *(model, optimizer),
        data=data,
        global_batch=BATCH,
        strategy=strategy,
        consistency=consistency,
        nonfinite="skip",
        checkpoints=Checkpoints(every_s=None),
    )

    def loss_fn(numbers: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if enough:
            time.sleep(_PAUSE_S)
        return model(numbers, x)  # type: ignore[no-any-return]

    done = 0
    with session:
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(loss_fn, batch)
                if enough:
                    say(session.steps)
            done = epoch.number + 1
            if enough and session.evaluate(lambda *_: {"enough": float(Path(enough).exists())}, data)["enough"] == 1.0:
                break
        ids, rows = session.table(model.table)
        learned = {**dict(model.named_parameters()), "ids": ids, "rows": rows}
    weights = {name: value.tolist() for name, value in learned.items() if value.numel()}
    return {"epochs": done, "skipped": session.skipped, "weights": weights}
