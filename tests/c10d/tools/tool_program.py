"""What the programs of this folder share. Each is a script as its tool's users write them, which torchrun or `paceline
run` starts, and which leaves what it computed, to be compared."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

FOLDER_VARIABLE = "TOOL_FOLDER"  # for what the program writes: one for all ranks
DEATH_VARIABLE = "TOOL_DEATH"  # the rank that is killed at STEP_OF_DEATH
STEP_OF_DEATH = 3
NUM_FEATURES, NUM_CLASSES = 8, 3

num_processes = int(os.environ["WORLD_SIZE"])
folder = Path(os.environ[FOLDER_VARIABLE])
# Named by programs that ask their tool for it; else it is given to them without their knowledge, or is Gloo.
explicit_backend = sys.argv[1] if len(sys.argv) > 1 else None
if explicit_backend is not None:
    import paceline.c10d  # noqa: F401


def model(*, has_statistics: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if has_statistics else nn.Identity()
    # Before statistics a bias has no gradient but what rounding leaves, and Adam would make much of that.
    first = nn.Linear(NUM_FEATURES, 16, bias=not has_statistics)
    return nn.Sequential(first, middle, nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def samples(num: int, seed: int = 0) -> TensorDataset:
    features = torch.randn(num, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features[:, :NUM_CLASSES].argmax(1))


def may_die(step: int) -> None:
    if os.environ.get(DEATH_VARIABLE) == os.environ["RANK"] and step == STEP_OF_DEATH:
        os.kill(os.getpid(), signal.SIGKILL)


def finish(results: dict[str, Any]) -> None:
    """Leave what came out, and the backend that it came by, which the runner takes out before it compares."""
    results["backend"] = dist.get_backend()
    torch.save(_plain(results), folder / f"results-{os.environ['RANK']}.pt")
    dist.destroy_process_group()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
