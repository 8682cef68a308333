"""MPI through mpi4py: whichever library the launcher and the environment chose."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from paceline.cli.bench.allreduce.drivers.base import AllReduceDriver, Buffer


class MpiDriver(AllReduceDriver[NDArray[np.float32]]):
    own_name = ""

    def __init__(self, rendezvous: str, *, rank: int, num_ranks: int, num_threads: int) -> None:
        version = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
        # mpi4py takes the first MPI it can load, and a foreign launcher makes every rank a world of its own.
        if self.own_name not in version:
            raise RuntimeError(f"mpi4py loaded '{version}' instead of {self.own_name}")
        self._world = MPI.COMM_WORLD
        self.rank = int(self._world.Get_rank())
        self.num_ranks = int(self._world.Get_size())
        self.version = version.split(", package")[0]

    def barrier(self) -> None:
        self._world.Barrier()

    def buffer(self, num_elements: int, tensors: str) -> Buffer[NDArray[np.float32]]:
        array = np.zeros(num_elements, dtype=np.float32)
        return Buffer(array, array)

    def all_reduce(self, buffer: Buffer[NDArray[np.float32]], algorithm: str) -> None:
        self._world.Allreduce(MPI.IN_PLACE, buffer.native)

    def close(self) -> None:
        MPI.Finalize()


class OpenMpiDriver(MpiDriver):
    own_name = "Open MPI"


class IntelMpiDriver(MpiDriver):
    own_name = "Intel(R) MPI"
