"""All benchmarks, and how each is run by `make bench` and `make bench-quick`."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from benchmarks.common import Benchmark


class Run(NamedTuple):
    """A module of this package, and what it is given. With `quick_too` false a quick run would repeat another one."""

    module: str
    arguments: tuple[str, ...] = ()
    quick_too: bool = True

    @property
    def title(self) -> str:
        return " ".join((self.module, *self.arguments))


RUNS = (
    Run("allreduce", ("--plot",)),
    Run("allreduce", ("--ranks", "4"), quick_too=False),
    Run("steps"),
    Run("tiny"),
    Run("ddp"),
    Run("shares", ("--work", "cnn")),
    Run("shares", ("--work", "timed")),
    Run("shares", ("--work", "cnn", "--speeds", "1", "1", "--change-every", "0", "--no-ddp"), quick_too=False),
    Run("server", ("--work", "dense")),
    Run("server", ("--work", "sparse")),
    Run("server_unequal"),
    Run("server_deaths"),
    Run("server_ratings"),
    Run("cache"),
    Run("index"),
    Run("network"),
    Run("hosts"),
    Run("deaths"),
    Run("aborts"),
    Run("memory"),
    Run("outages"),
    Run("joins"),
    Run("equality"),
    Run("batch_norm"),
    Run("checkpoint"),
    Run("control"),
)


def load(module: str) -> Benchmark:
    """The benchmark of a module: its own, or that of its `benchmark.py`."""
    found = importlib.import_module(f"benchmarks.{module}")
    if not hasattr(found, "BENCHMARK"):
        found = importlib.import_module(f"benchmarks.{module}.benchmark")
    benchmark: Benchmark = found.BENCHMARK
    return benchmark
