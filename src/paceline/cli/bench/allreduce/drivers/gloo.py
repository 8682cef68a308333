"""Gloo, as torch.distributed carries it, over loopback TCP."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.cli.bench.allreduce.drivers.base import AllReduceDriver, Buffer

_WAIT_S = 300


class GlooDriver(AllReduceDriver[torch.Tensor]):
    def __init__(self, store_path: str, *, rank: int, num_ranks: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if not dist.is_available() or not dist.is_gloo_available():
            raise RuntimeError("this torch was built without Gloo; install one from pytorch.org")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store_path}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=_WAIT_S),
        )
        self.rank = rank
        self.num_ranks = num_ranks
        self.version = f"torch {torch.__version__}"

    def barrier(self) -> None:
        dist.barrier()

    def buffer(self, num_elements: int, tensors: str) -> Buffer[torch.Tensor]:
        tensor = torch.zeros(num_elements, dtype=torch.float32)
        return Buffer(tensor, tensor.numpy())

    def all_reduce(self, buffer: Buffer[torch.Tensor], algorithm: str) -> None:
        dist.all_reduce(buffer.native)

    def close(self) -> None:
        dist.destroy_process_group()
