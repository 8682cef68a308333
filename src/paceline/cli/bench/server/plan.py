"""What is measured, with whom."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.bench.errors import BadInput

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

    def __post_init__(self) -> None:
        if self.work not in CONTENDERS:
            raise BadInput(f"--work {self.work}: give {DENSE} or {SPARSE}")
        if unknown := [name for name in self.contenders if name not in CONTENDERS[self.work]]:
            known = ", ".join(CONTENDERS[self.work])
            raise BadInput(f"--against {unknown[0]}: with --work {self.work} there is {known}")
        if self.num_rounds < 1 or not 0.2 <= self.seconds <= 600:
            raise BadInput(f"--rounds {self.num_rounds} must be 1 or more, --seconds {self.seconds} from 0.2 to 600")
        if not 1 <= self.num_workers <= 64:
            raise BadInput(f"--workers {self.num_workers}: give 1 to 64")
        if not 1000 <= self.size <= 10**9 or not 1 <= self.dim <= 4096 or not 10 <= self.batch <= 10**7:
            raise BadInput(
                f"--size {self.size} must be 1000 to 1000000000, --dim {self.dim} 1 to 4096, --batch {self.batch} 10 "
                "to 10000000"
            )

    @property
    def measures(self) -> tuple[str, ...]:
        return ("push and pull",) if self.work == DENSE else ("pull", "push")
