"""What a caller may pass to a collective: checked before anything is sent, so a wrong argument harms nobody but its
caller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paceline.wire.dtypes import NAMES, name_of

_PLAIN = {torch.Tensor, torch.nn.Parameter}


def check_tensor(name: str, tensor: torch.Tensor, *, writes: bool = True) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in NAMES
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and type(tensor) in _PLAIN
    ):
        return
    if isinstance(tensor, FakeTensor):
        raise TypeError(f"{name} is a fake tensor, which has no data; give a real one, or use the backend fake")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor; move its parts (unbind()), or their values and sizes")
    if not tensor.is_cpu:
        raise TypeError(
            f"{name} is on {tensor.device}; these collectives work in host memory. "
            "Copy it with .cpu(), or use NCCL between GPUs"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name} is {tensor.layout}; only dense tensors can be reduced or moved. Call .to_dense() first"
        )
    name_of(tensor.dtype)
    if writes and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise TypeError(f"{name} was made in inference mode and cannot be changed outside of it; clone() it")
    if writes and any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TypeError(f"{name} is an expanded tensor, several elements of which share memory; clone() it")


def check_rank(name: str, rank: int, size: int) -> None:
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"{name}={rank!r} is not a rank of this group; ranks are 0..{size - 1}")


def check_ranks(ranks: Sequence[int], rank: int, size: int) -> None:
    """Those of a new group, which a member of it calls for."""
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in {list(ranks)}; only members of the new group may call regroup")
    if len(set(ranks)) != len(ranks) or not all(0 <= one < size for one in ranks):
        raise ValueError(f"{list(ranks)} are not distinct ranks of 0..{size - 1}")


def check_list(
    name: str, tensors: Sequence[torch.Tensor], size: int, dtype: torch.dtype | None, *, writes: bool
) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name} has {len(tensors)} tensors for a group of {size}; give one for each rank")
    for index, tensor in enumerate(tensors):
        check_tensor(f"{name}[{index}]", tensor, writes=writes)
        if tensor.dtype != dtype:
            raise TypeError(f"{name}[{index}] is {tensor.dtype} where {dtype} is expected; all must be of one type")


def check_same(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    check_tensor(other_name, other, writes=False)
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype}{list(tensor.shape)} but {other_name} is {other.dtype}{list(other.shape)}; "
            "they are the same data and must fit"
        )


def given_at_root(
    name: str,
    tensors: Sequence[torch.Tensor] | None,
    own: tuple[str, torch.Tensor],
    root: int,
    rank: int,
    size: int,
    *,
    writes: bool,
) -> list[torch.Tensor]:
    """What the root gives, one for each rank, its own among them; nothing on the others."""
    if rank != root:
        if tensors is not None:
            raise ValueError(f"rank {rank} is not the root (rank {root}) and must give {name}=None")
        return []
    if tensors is None:
        raise ValueError(f"the root (rank {root}) must give {name}, one tensor for each rank")
    check_list(name, tensors, size, own[1].dtype, writes=writes)
    check_same(f"{name}[root]", tensors[root], *own)
    return list(tensors)


def as_flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as a flat one that shares its memory, or None where its layout does not allow that."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return None
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    # Not view(-1): that keeps the odd stride which a tensor of one element may have.
    return tensor.as_strided((tensor.numel(),), (1,))


def put(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy between flat tensors that may be one, or overlap."""
    distance = abs(source.data_ptr() - target.data_ptr())
    if distance:
        target.copy_(source.clone() if distance < source.nbytes else source)


class flat:
    """A tensor as one flat contiguous one: itself where that is possible, else a copy that is written back at the
    end."""

    __slots__ = ("_copied", "_data", "_tensor", "_writes")

    def __init__(self, tensor: torch.Tensor, *, writes: bool = True) -> None:
        self._tensor = tensor.detach()
        self._writes = writes
        data = as_flat(self._tensor)
        self._copied = data is None
        self._data = self._tensor.resolve_conj().resolve_neg().contiguous().view(-1) if data is None else data

    def __enter__(self) -> torch.Tensor:
        return self._data

    def __exit__(self, error: object, *_: object) -> None:
        if self._copied and self._writes and error is None:
            self._tensor.copy_(self._data.view(self._tensor.shape))


class flat_all:
    """The same for a list."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, writes: bool = True) -> None:
        self._flats = [flat(tensor, writes=writes) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [entry.__enter__() for entry in self._flats]

    def __exit__(self, error: object, *_: object) -> None:
        for entry in self._flats:
            entry.__exit__(error)
