"""MPI through mpi4py: whichever library the launcher and the environment chose."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from paceline.cli.bench.drivers.base import Buffer, Driver

_OWN_NAMES = {"openmpi": "Open MPI", "impi": "Intel(R) MPI"}


class MpiDriver(Driver[NDArray[np.float32]]):
    def __init__(self, library: str) -> None:
        version = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
        # mpi4py takes the first MPI it can load, and a foreign launcher makes every rank a world of its own.
        if _OWN_NAMES[library] not in version:
            raise RuntimeError(f"mpi4py loaded '{version}' instead of {_OWN_NAMES[library]}")
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
