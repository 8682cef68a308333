"""Copies of live tensors, in memory that is used again for each snapshot.

What it costs: one buffer as large as the state (weights once, however often they are tied, and all other tensors), from
the first snapshot, or `reserve`, on. The pages are touched when the buffer is made, so that a later snapshot is a copy
and nothing else. Forked children find zeros in it: a buffer shared with them until written would cost the next
snapshot a fault for every page.

The bytes are moved by memmove on as many threads as torch may use, four at most, which meet once at the end. A state
has hundreds of tensors; with `copy_` the threads would meet after each, and wait there for whoever has lost its core.

Invariant: the tensors of a snapshot are views of the buffer, valid until the next `copy`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import NamedTuple

import torch

from paceline.checkpoint import room
from paceline.checkpoint.files import Prepared

_MAX_THREADS = 4  # more do not make memory faster
_MIN_BYTES_A_THREAD = 4 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which the mmap module does not name


class SnapshotBuffers:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._form: list[tuple[torch.dtype, torch.Size]] = []
        self._places: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def reserve(self, prepared: Prepared) -> None:
        """Have memory for this state ready; a `MemoryError` says how much it would have been."""
        self._fit([*prepared.model_tensors.values(), *prepared.state_tensors.values()])

    def copy(self, prepared: Prepared) -> Prepared:
        tensors = [*prepared.model_tensors.values(), *prepared.state_tensors.values()]
        self._fit(tensors)
        moves = []
        with torch.no_grad():
            for place, tensor in zip(self._places, tensors, strict=True):
                if _is_raw(tensor):
                    moves.append(
                        TensorCopy(place.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize)
                    )
                else:
                    place.copy_(tensor)
        _do_all(moves)
        places = iter(self._places)
        return dataclasses.replace(
            prepared,
            # Only what the manifest needs: a snapshot must not keep the caller's own tensors alive.
            contents=dataclasses.replace(prepared.contents, model={}, state=None, plan=None),
            model_tensors={name: next(places) for name in prepared.model_tensors},
            state_tensors={name: next(places) for name in prepared.state_tensors},
        )

    def release(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._form, self._places = [], []

    def _fit(self, tensors: list[torch.Tensor]) -> None:
        form = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if form == self._form:
            return
        needed = room.bytes_for(form)
        if needed > self.num_bytes:
            self.release()  # first, so that there are never two
            self._memory = _fresh(needed)
        self._places = room.cut(self._memory, form)
        self._form = form


class TensorCopy(NamedTuple):
    """Addresses; whoever makes one keeps the tensors alive until it is done."""

    to: int
    source: int
    num_bytes: int


def _is_raw(tensor: torch.Tensor) -> bool:
    """Whether its bytes in memory are those that are kept."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_plain and not (tensor.is_conj() or tensor.is_neg())


def _do_all(moves: list[TensorCopy]) -> None:
    total = sum(move.num_bytes for move in moves)
    num_threads = max(1, min(torch.get_num_threads(), _MAX_THREADS, total // _MIN_BYTES_A_THREAD))
    parts = divide(moves, num_threads)
    helpers = [threading.Thread(target=_do, args=(part,), name="paceline-copy") for part in parts[1:]]
    for helper in helpers:
        helper.start()
    try:
        _do(parts[0])
    finally:
        for helper in helpers:
            helper.join()


def _do(moves: list[TensorCopy]) -> None:
    for move in moves:
        ctypes.memmove(*move)


def divide(moves: list[TensorCopy], num_parts: int) -> list[list[TensorCopy]]:
    """The same bytes in parts of equal size, to a byte; a move may be cut."""
    share = -(-sum(move.num_bytes for move in moves) // num_parts)
    parts: list[list[TensorCopy]] = [[]]
    left = share
    for to, source, num_bytes in moves:
        begin = 0
        while begin < num_bytes:
            if left == 0:
                parts.append([])
                left = share
            count = min(left, num_bytes - begin)
            parts[-1].append(TensorCopy(to + begin, source + begin, count))
            begin += count
            left -= count
    return parts


def _fresh(num_bytes: int) -> torch.Tensor:
    try:
        area = room.fresh_area(num_bytes)
    except OSError as error:
        raise MemoryError(
            f"no memory for a snapshot of {num_bytes:,} bytes: {error.strerror or error}; a checkpoint needs as "
            "much as the state it saves"
        ) from error
    area.madvise(_WIPE_ON_FORK)
    return torch.frombuffer(area, dtype=torch.uint8).zero_()
