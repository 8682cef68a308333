"""Operations of torch that the group has in another form: one tensor for all ranks, several tensors at once, sparse
ones. Each is done by the thread that it is called on, as operations of the group with nothing between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective import Group
from paceline.collective.arguments import flat, flat_all

# Tensors up to this go as one: beyond, copying them costs more than one more operation.
MAX_PACKED_BYTES = 1 << 20
# Whose mean is rounded.
INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


def all_gather_single(group: Group, output: torch.Tensor, tensor: torch.Tensor, timeout_s: float | None) -> None:
    with flat(output) as whole, flat(tensor, writes=False) as mine:
        pieces = torch.split(whole, mine.numel()) if mine.numel() else [mine] * group.size
        group.all_gather(pieces, mine, timeout_s=timeout_s)


def reduce_scatter_single(
    group: Group, output: torch.Tensor, tensor: torch.Tensor, op: str, timeout_s: float | None
) -> None:
    with flat(output) as mine, flat(tensor, writes=False) as whole:
        pieces = torch.split(whole, mine.numel()) if mine.numel() else [mine] * group.size
        group.reduce_scatter(mine, pieces, op, timeout_s=timeout_s)


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
    timeout_s: float | None,
) -> None:
    with flat(output) as arriving, flat(tensor, writes=False) as leaving:
        group.all_to_all(
            torch.split(arriving, list(output_counts)), torch.split(leaving, list(input_counts)), timeout_s=timeout_s
        )


def all_reduce_many(group: Group, tensors: Sequence[torch.Tensor], op: str, timeout_s: float | None) -> None:
    """Small tensors of one type go as one."""
    with flat_all(tensors) as flats:
        small: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in flats:
            if one.nbytes > MAX_PACKED_BYTES:
                group.all_reduce(one, op, timeout_s=timeout_s)
            else:
                small.setdefault(one.dtype, []).append(one)
        for parts in small.values():
            packed = torch.cat(parts) if len(parts) > 1 else parts[0]
            group.all_reduce(packed, op, timeout_s=timeout_s)
            if len(parts) > 1:
                for part, result in zip(parts, torch.split(packed, [part.numel() for part in parts]), strict=True):
                    part.copy_(result)


def all_reduce_mean(group: Group, tensor: torch.Tensor, timeout_s: float | None) -> None:
    """Of integers, rounded towards zero, as it is on other devices: programs that know Gloo by its name divide
    themselves there, and ask every other backend for the mean."""
    group.all_reduce(tensor, "sum", timeout_s=timeout_s)
    tensor.div_(group.size, rounding_mode="trunc")


def all_reduce_sparse(group: Group, tensor: torch.Tensor, timeout_s: float | None) -> None:
    """The sum of sparse tensors: all get all entries, and add up those of one place in the same order."""
    mine = tensor.coalesce()
    shape = torch.tensor([mine.sparse_dim(), *mine.shape])
    first = shape.clone()
    group.broadcast(first, 0, timeout_s=timeout_s)
    if not torch.equal(shape, first):
        raise group.mismatch(
            "all_reduce of sparse tensors",
            f"rank {group.rank} has {list(mine.shape)} where rank 0 has {first[1:].tolist()}; all ranks must give the "
            "same shape, with as many sparse dimensions",
        )
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size)]
    group.all_gather(counts, torch.tensor([mine._nnz()]), timeout_s=timeout_s)
    sizes = [int(count) for count in counts]
    indices = _gather_rows(group, mine.indices().t().contiguous(), sizes, timeout_s)
    values = _gather_rows(group, mine.values(), sizes, timeout_s)
    places = torch.cat(indices).t()
    total = torch.sparse_coo_tensor(places, torch.cat(values), mine.shape, check_invariants=False).coalesce()
    tensor.copy_(total)


def _gather_rows(group: Group, rows: torch.Tensor, sizes: Sequence[int], timeout_s: float | None) -> list[torch.Tensor]:
    pieces = [torch.empty((size, *rows.shape[1:]), dtype=rows.dtype) for size in sizes]
    group.all_gather(pieces, rows, timeout_s=timeout_s)
    return pieces
