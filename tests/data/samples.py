"""Datasets for the tests; at module level, so that loader workers that are spawned find them."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.data.window import BatchSpec, Following
from paceline.testing.eventually import eventually


class Augmented(Dataset[Any]):
    """Every sample draws from the three global generators."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        return {"index": index, "drawn": drawn, "pid": os.getpid()}


class Troubled(Dataset[Any]):
    """Sample 13 raises, sample 14 raises an error that has no name in another process, sample 15 kills its process."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise ValueError("thirteen")
        if index == 14:

            class Local(Exception):
                pass

            raise Local("fourteen")
        if index == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Gated(Dataset[Any]):
    """Writes down what is fetched; sample 50 waits until the gate file is there."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        self.log = folder / "log"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        if index == 50:
            eventually(self.gate.exists, "the gate is opened")
        return index

    def fetched(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


def works(generation: int, first_step: int, batches: list[list[int]], epoch: int = 0) -> list[BatchSpec]:
    """One work for each list of indices, in consecutive steps."""
    return [BatchSpec((generation, first_step + k), epoch, tuple(indices)) for k, indices in enumerate(batches)]


def after(plan: list[BatchSpec], position: int) -> Following:
    """What follows plan[position]."""
    return lambda k: plan[position + k] if position + k < len(plan) else None


def batches_of(indices: list[int], size: int) -> list[list[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]
