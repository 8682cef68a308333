"""How two tensors become one, and which types each reduction takes. A reduction has no state: it is a row of a
table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Combine = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]

_BITS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool})
_FRACTIONS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ORDERED = (_BITS | _FRACTIONS) - _COMPLEX


class Reduction(NamedTuple):
    """`combine(a, b, out)` may be given `out` that is `a` or `b`. Members that combine the same operands do it in one
    order."""

    combine: Combine
    dtypes: frozenset[torch.dtype]
    divides: bool = False


def _by(operator: Callable[..., torch.Tensor]) -> Combine:
    def combine(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
        return operator(a, b, out=out)

    return combine


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_by(torch.add), _BITS | _FRACTIONS),
    "mean": Reduction(_by(torch.add), _FRACTIONS, divides=True),
    "product": Reduction(_by(torch.mul), _BITS | _FRACTIONS),
    "min": Reduction(_by(torch.minimum), _ORDERED),
    "max": Reduction(_by(torch.maximum), _ORDERED),
    "band": Reduction(_by(torch.bitwise_and), _BITS),
    "bor": Reduction(_by(torch.bitwise_or), _BITS),
    "bxor": Reduction(_by(torch.bitwise_xor), _BITS),
}


def find(name: str, dtype: torch.dtype) -> Reduction:
    """The reduction, or an error that says which there are."""
    try:
        reduction = REDUCTIONS[name]
    except (KeyError, TypeError):
        raise ValueError(f"there is no reduction {name!r}; choose one of: {', '.join(REDUCTIONS)}") from None
    if dtype not in reduction.dtypes:
        takes = ", ".join(sorted(str(known).removeprefix("torch.") for known in reduction.dtypes))
        raise TypeError(f"the reduction {name!r} does not take {dtype}; it takes {takes}")
    return reduction
