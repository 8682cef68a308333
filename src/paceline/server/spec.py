"""What a sparse table is: its shape, the values its rows begin with, and the optimizer that updates them.

All servers and workers of a run have the same spec of a table. It fails when it is built, naming the field, the value
and a remedy.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_INITS = ("normal", "uniform", "zeros")
_OPTIMIZERS = ("sgd", "adagrad", "adam", "adamw")


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`scale` is the standard deviation of "normal", and the bound of "uniform" on either side.

    `rowwise` keeps one second moment a row instead of one an element; Adam's first moment stays per element.
    `momentum` has SGD keep its buffer, `amsgrad` has Adam keep its maximum: memory is laid out for them, so a push that
    asks for one which the table does not keep is refused.
    `admit_after` is in how many pushes an id must have been before the next one makes its row. `evict_after` is after
    how many updates without it a row is dropped; 0: never.
    """

    name: str
    dim: int
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    seed: int = 0
    init: Literal["normal", "uniform", "zeros"] = "normal"
    scale: float = 0.01
    optimizer: Literal["sgd", "adagrad", "adam", "adamw"] = "adagrad"
    rowwise: bool = False
    momentum: bool = False
    amsgrad: bool = False
    admit_after: int = 0
    evict_after: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': a table needs a name; its rows begin with values that depend on it")
        if self.dim < 1:
            raise self._wrong("dim", "a row has 1 number or more")
        if self.dtype not in _DTYPES:
            raise self._wrong("dtype", f"use one of {', '.join(_DTYPES)}")
        if self.init not in _INITS:
            raise self._wrong("init", f"use one of {', '.join(_INITS)}")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise self._wrong("scale", "use a number, 0 or more")
        if self.optimizer not in _OPTIMIZERS:
            raise self._wrong("optimizer", f"use one of {', '.join(_OPTIMIZERS)}")
        if self.rowwise and self.optimizer == "sgd":
            raise self._wrong("rowwise", "sgd has no second moment; leave it False, or use adagrad, adam or adamw")
        if self.momentum and self.optimizer != "sgd":
            raise self._wrong("momentum", f"{self.optimizer} keeps no such buffer; leave it False, or use sgd")
        if self.amsgrad and self.optimizer not in ("adam", "adamw"):
            raise self._wrong("amsgrad", f"{self.optimizer} has no maximum; leave it False, or use adam or adamw")
        if self.admit_after < 0:
            raise self._wrong("admit_after", "use 0 (a row is made when it is first seen) or more")

        if self.evict_after < 0:
            raise self._wrong("evict_after", "use 0 (rows stay for good) or a number of updates")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def math_dtype(self) -> torch.dtype:
        """What updates are computed in and state is kept in: 16 bits are too few for either."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def _wrong(self, field: str, remedy: str) -> ValueError:
        return ValueError(f"table {self.name!r}: {field}={getattr(self, field)!r}; {remedy}")
