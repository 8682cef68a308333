"""Memory for what is sent to servers and what comes back, used again and again: new shared memory would have to be
committed page by page each time."""

from __future__ import annotations

import math

import torch

from paceline.server.client import GroupClient

_LINE_BYTES = 64
_FIRST_BYTES = 1 << 20


class Scratch:
    """Tensors that are good until `reset`, but for those made before memory had to grow, which are good as long as
    somebody holds them."""

    def __init__(self, client: GroupClient) -> None:
        self._client = client
        self._memory: torch.Tensor | None = None
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if self._memory is None or self._used + num_bytes > self._memory.numel():
            before = 0 if self._memory is None else self._memory.numel()
            self._memory = self._client.empty((max(_FIRST_BYTES, 2 * before, 2 * num_bytes),), torch.uint8)
            self._used = 0
        found = self._memory[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return found

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
