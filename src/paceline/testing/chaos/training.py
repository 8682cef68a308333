"""What the workers of a chaos run execute: `python -m paceline.testing.chaos.training PLACE MODE LOADERS EVALUATES`.

It trains the model of `oracle.py` until the file PLACE/enough is there. Each worker writes a line for every step into
PLACE/beats/PID, and at its end what its model holds into PLACE/finals/PID.npz: outside of the run's own folder, whose
disk may be full.

PACELINE_CHAOS_MUTATION=newcomer makes workers wrong that start after the first fault may have come: they learn their
samples twice. It shows that the harness finds a fault, and what it makes of it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline
from paceline.data.loader import LoaderOptions
from paceline.testing.chaos import oracle
from paceline.testing.chaos.schedule import MUTATION, Mode
from paceline.testing.counting import Numbers
from paceline.train.saving import Checkpoints

_FIXED_S, _PER_SAMPLE_S = 0.008, 0.001  # of computing
_LOADING_S = 0.001  # of a sample
_MOST_EPOCHS = 100_000


class Counter(nn.Module):
    """`counts` and the rows of `table` say the same of the same samples."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(oracle.NUM_WEIGHTS))
        self.table = paceline.nn.Embedding(1, name="counted", init="zeros")
        self.pace = nn.Parameter(torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(ids)
        return self.counts[ids].mean() + rows.mean()


class Samples(Numbers):
    def __init__(self, loading_s: float) -> None:
        super().__init__(oracle.LENGTH)
        self._loading_s = loading_s

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._loading_s:
            time.sleep(self._loading_s)
        return super().__getitem__(index)


class BeatWriter:
    """The lines of this worker: `step TIME NUMBER`, `end TIME CODE`."""

    def __init__(self, place: Path) -> None:
        self._file = os.open(place / "beats" / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, word: str, number: int) -> None:
        os.write(self._file, f"{word} {time.monotonic():.4f} {number}\n".encode())


def main(arguments: list[str]) -> None:
    place, mode = Path(arguments[0]), Mode(arguments[1])
    loaders, evaluates = int(arguments[2]), bool(int(arguments[3]))
    torch.set_num_threads(1)
    beats = BeatWriter(place)
    beats.write("start", 0)
    try:
        _train(place, mode, loaders, evaluates, beats)
    except SystemExit as end:
        beats.write("end", int(end.code or 0))
        raise
    beats.write("end", 0)


def _train(place: Path, mode: Mode, loaders: int, evaluates: bool, beats: BeatWriter) -> None:
    model = Counter()
    session = _session(model, mode, loaders)
    present = 0
    validation = Samples(0.0)
    is_wrong = os.environ.get(MUTATION) == "newcomer" and (place / "began").exists()
    times = 2.0 if is_wrong else 1.0

    def loss_fn(ids: torch.Tensor) -> torch.Tensor:
        time.sleep(_FIXED_S + _PER_SAMPLE_S * len(ids))
        counted: torch.Tensor = model((present % oracle.NUM_SLOTS) * oracle.LENGTH + ids)
        return model.pace.sum() - times * counted

    def validate(ids: torch.Tensor) -> dict[str, Any]:
        return {"seen": paceline.Total(torch.tensor(float(len(ids))))}

    for epoch in session.epochs(_MOST_EPOCHS):
        present = epoch.number
        for batch in epoch:
            session.step(loss_fn, batch)
            beats.write("step", session.steps)
        if evaluates:
            seen = session.evaluate(validate, validation)["seen"]
            assert seen == oracle.LENGTH, f"epoch {present}: validation saw {seen} of {oracle.LENGTH} samples"
        is_enough = (place / "enough").exists()
        if session.should_stop(float("inf") if is_enough else -float(present), patience=0):
            break
    ids, rows = session.table(model.table)
    session.close()
    _write_final(place, model, present + 1, ids, rows)


def _session(model: Counter, mode: Mode, loaders: int) -> paceline.Session:
    counting = torch.optim.SGD([model.counts, model.table.weight], lr=float(oracle.GLOBAL_BATCH))
    pacing = torch.optim.SGD([model.pace], lr=oracle.PACE_LR, momentum=oracle.PACE_MOMENTUM)
    strategy = {Mode.ALLREDUCE: "allreduce", Mode.HYBRID: "hybrid"}.get(mode, "server")
    consistency = {Mode.BOUNDED: "bounded:2", Mode.ASYNC: "async"}.get(mode, "sync")
    return paceline.Session(
        model,
        counting,
        pacing,
        data=Samples(_LOADING_S if loaders else 0.0),
        global_batch=oracle.GLOBAL_BATCH,
        seed=oracle.ORDER_SEED,
        loader=LoaderOptions(num_workers=loaders),
        checkpoints=Checkpoints(every_s=None, every_steps=30, keep_last=1000),
        strategy=strategy,  # type: ignore[arg-type]
        consistency=consistency,
    )


def _write_final(place: Path, model: Counter, epochs: int, ids: torch.Tensor, rows: torch.Tensor) -> None:
    draft = place / "finals" / f".{os.getpid()}.npz"
    table = np.zeros(oracle.NUM_WEIGHTS, np.float32)
    table[ids.numpy()] = rows.detach().numpy()[:, 0]
    counts, pace = model.counts.detach().numpy(), model.pace.detach().numpy()
    np.savez(draft, counts=counts, table=table, pace=pace, epochs=np.int64(epochs))
    draft.replace(place / "finals" / f"{os.getpid()}.npz")


if __name__ == "__main__":
    main(sys.argv[1:])
