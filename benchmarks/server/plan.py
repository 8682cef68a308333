"""What is measured, with whom."""

from __future__ import annotations

from dataclasses import dataclass

DENSE, SPARSE = "dense", "sparse"
PACELINE, RPC, RAY, REDIS = "paceline", "rpc", "ray", "redis"
CONTENDERS = {DENSE: (PACELINE, RPC, RAY), SPARSE: (PACELINE, RPC, REDIS)}
ZIPF = 1.05


@dataclass(frozen=True)
class Plan:
    """Dense: `size` float32 parameters are pushed and pulled whole, with an update by SGD in between. Sparse: rows of
    `dim` of a table with `size` rows, `batch` ids at a time, drawn by Zipf's law; rows are counted as asked for."""

    work: str
    size: int
    num_workers: int
    num_rounds: int
    seconds: float
    contenders: tuple[str, ...]
    dim: int = 16
    batch: int = 100_000

    @property
    def measures(self) -> tuple[str, ...]:
        return ("push and pull",) if self.work == DENSE else ("pull", "push")

    @property
    def unit(self) -> str:
        return "iterations/s" if self.work == DENSE else "million rows/s"
