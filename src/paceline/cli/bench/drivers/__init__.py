"""The libraries under measurement, each behind the same narrow contract (`base`)."""

from __future__ import annotations

from typing import Any

from paceline.cli.bench.drivers.base import Driver


def join(library: str, *, rendezvous: str, rank: int, num_ranks: int, num_threads: int) -> Driver[Any]:
    """This process's driver, joined with the other ranks. Imports only what the library needs.

    `rank` is -1 where a launcher gave the rank and the library knows it.
    """
    if library == "paceline":
        from paceline.cli.bench.drivers.paceline import PacelineDriver

        return PacelineDriver(rendezvous, rank=rank, num_ranks=num_ranks, num_threads=num_threads)
    if library == "gloo":
        from paceline.cli.bench.drivers.gloo import GlooDriver

        return GlooDriver(rendezvous, rank=rank, num_ranks=num_ranks, num_threads=num_threads)
    from paceline.cli.bench.drivers.mpi import MpiDriver

    return MpiDriver(library)
