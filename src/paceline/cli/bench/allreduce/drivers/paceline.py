"""Paceline's own group."""

from __future__ import annotations

from importlib import metadata

import torch

from paceline.cli.bench.allreduce.drivers.base import AllReduceDriver, Buffer
from paceline.collective import Group, meeting


class PacelineDriver(AllReduceDriver[torch.Tensor]):
    def __init__(self, invitation: str, *, rank: int, num_ranks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._group: Group = meeting.join(invitation, rank=rank, size=num_ranks)
        self.rank = self._group.rank
        self.num_ranks = self._group.size
        try:
            self.version = f"paceline {metadata.version('paceline')}, torch {torch.__version__}"
        except metadata.PackageNotFoundError:
            self.version = f"paceline (from source), torch {torch.__version__}"

    def barrier(self) -> None:
        self._group.barrier()

    def buffer(self, num_elements: int, tensors: str) -> Buffer[torch.Tensor]:
        if tensors == "arena":
            tensor = self._group.empty((num_elements,), torch.float32)
        else:
            tensor = torch.zeros(num_elements, dtype=torch.float32)
        return Buffer(tensor, tensor.numpy())

    def all_reduce(self, buffer: Buffer[torch.Tensor], algorithm: str) -> None:
        self._group.all_reduce(buffer.native, "sum", algorithm=algorithm)

    def close(self) -> None:
        self._group.close()
