"""Arguments of torch's process groups, in one form each.

The methods of a process group are called by torch.distributed with lists of one tensor and an options object, and by
people with a tensor and plain arguments: `pg.allreduce([t], opts)`, `pg.allreduce(t, ReduceOp.MAX)`,
`pg.broadcast(t, root=1)`. Both come out of here as a `TorchCall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from paceline.c10d.errors import WrongCall
from paceline.wire.deadline import MAX_SECONDS
from paceline.wire.dtypes import NAMES

_REDUCTIONS = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.PRODUCT, "product"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.BAND, "band"),
    (ReduceOp.BOR, "bor"),
    (ReduceOp.BXOR, "bxor"),
)
# What a tensor of another type is moved as: the same bytes, with the same layout.
_SAME_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class TorchCall(NamedTuple):
    """`timeout_s` is None where the group's own counts; `is_async` says that the caller does not wait at once."""

    op: str
    root: int
    timeout_s: float | None
    is_async: bool


def read(opts: Any, op: Any = None, root: int = 0, timeout: timedelta | None = None) -> TorchCall:
    """From an options object, or from plain arguments."""
    if isinstance(opts, timedelta):
        opts, timeout = None, opts
    elif isinstance(opts, int):
        opts, root = None, opts
    elif opts is not None and not hasattr(opts, "asyncOp"):
        opts, op = None, opts
    if opts is None:
        return TorchCall(_name_of(ReduceOp.SUM if op is None else op), root, seconds(timeout), True)
    name = _name_of(opts.reduceOp) if hasattr(opts, "reduceOp") else "sum"
    return TorchCall(name, getattr(opts, "rootRank", 0), seconds(opts.timeout), opts.asyncOp)


def _name_of(op: Any) -> str:
    for known, name in _REDUCTIONS:
        if op == known:
            return name
    raise WrongCall(f"there is no {op} on CPU tensors; use one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")


def seconds(timeout: timedelta | None) -> float | None:
    """None where nothing, or no time, is given; more than can be counted is as good as for ever."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return min(timeout.total_seconds(), MAX_SECONDS)


def only(name: str, tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The one tensor of a list of one: a process has one device here."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise WrongCall(f"{name} takes one tensor of each process, not {len(tensors)}")
    return tensors[0]


def only_list(name: str, lists: Sequence[Any]) -> list[torch.Tensor]:
    if len(lists) and isinstance(lists[0], torch.Tensor):
        return list(lists)
    if len(lists) != 1:
        raise WrongCall(f"{name} takes one list of tensors of each process, not {len(lists)}")
    return list(lists[0])


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of its bytes if its type is one that is only moved and never reduced."""
    if tensor.dtype in NAMES or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_quantized:  # torch's views of its bytes crash
        raise WrongCall(
            f"a quantized tensor ({tensor.dtype}) cannot be moved; move its int_repr(), and how it was made"
        )
    try:
        return tensor.view(_SAME_BYTES[tensor.dtype.itemsize])
    except (KeyError, RuntimeError) as error:
        raise WrongCall(
            f"a tensor of {tensor.dtype} cannot be moved as bytes: {error}; clone() it, or convert it"
        ) from error


def require_dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise WrongCall(f"{name} takes dense tensors, not {tensor.layout}; only all_reduce takes sparse ones")
    return tensor


def even_parts(name: str, tensor: torch.Tensor, size: int) -> int:
    """How many elements each of `size` parts of a tensor has."""
    if tensor.numel() % size:
        raise WrongCall(
            f"{name}: a tensor of {tensor.numel()} elements cannot be cut into {size} equal parts, one for each rank"
        )
    return tensor.numel() // size


def split_rows(name: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """How many elements each rank has of a tensor that is cut along its first dimension."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows = list(splits or ())
    if not rows:
        if num_rows % size:
            raise WrongCall(f"{name}: {num_rows} rows cannot be divided equally among {size} ranks; give split sizes")
        rows = [num_rows // size] * size
    if len(rows) != size or sum(rows) != num_rows or min(rows) < 0:
        raise WrongCall(
            f"{name}: split sizes {rows} are not {size} numbers, none below 0, that add up to {num_rows} rows"
        )
    width = tensor.numel() // num_rows if num_rows else 0
    return [count * width for count in rows]
