"""A rank of Open MPI that reduces until a peer is killed, then goes on with the survivors; `deaths.py` starts it.

Run by `mpirun --with-ft ulfm`, without Paceline. Has torch in memory, as a rank that trains has, if its environment has
it: the end of such a process takes the kernel longer. Leaves its process id and its two times as files.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

with contextlib.suppress(ImportError):
    import torch  # noqa: F401


def main(folder: Path, num_elements: int) -> None:
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    given, reduced = np.zeros(num_elements, dtype=np.float32), np.empty(num_elements, dtype=np.float32)
    world.Allreduce(given, reduced)
    _leave(folder / f"pid.{world.rank}", str(os.getpid()))
    while True:
        try:
            world.Allreduce(given, reduced)
        except MPI.Exception as error:
            noticed = time.monotonic()
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
            break
    world.Revoke()
    survivors = world.Shrink()
    survivors.Allreduce(given, reduced)
    _leave(folder / f"times.{world.rank}", f"{noticed} {time.monotonic()}")
    os._exit(0)  # MPI_Finalize would wait for the dead


def _leave(path: Path, text: str) -> None:
    """Complete or absent: the other side looks for the file's name."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    unfinished.write_text(text)
    unfinished.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
