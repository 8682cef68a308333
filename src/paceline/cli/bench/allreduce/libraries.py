"""The libraries under measurement: how the processes of each are started, and how its ranks find each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.bench.allreduce.plan import GLOO, PACELINE

# Given the number of ranks and a folder: what the ranks need to find each other, valid while it is open.
Rendezvous = Callable[[int, Path], AbstractContextManager[str]]

_DRIVERS = "paceline.cli.bench.allreduce.drivers"


@contextmanager
def by_launcher(num_ranks: int, folder: Path) -> Iterator[str]:
    """The launcher of the library sees to it."""
    yield ""


@contextmanager
def _by_meeting(num_ranks: int, folder: Path) -> Iterator[str]:
    from paceline.collective import meeting  # imports torch

    with meeting.Meeting(size=num_ranks) as place:
        yield place.invitation


@contextmanager
def _by_file(num_ranks: int, folder: Path) -> Iterator[str]:
    yield str(folder / "gloo.store")


@dataclass(frozen=True, kw_only=True)
class BenchLibrary:
    """Its processes are started by us, one a rank, or all of them by its own launcher. `driver` is the class that each
    rank makes, as module:Class. Variables that begin with one of `left_out` do not reach them: libraries run on their
    default settings."""

    name: str
    driver: str
    rendezvous: Rendezvous = by_launcher
    launcher: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ("GLOO_",)


OURS = BenchLibrary(name=PACELINE, driver=f"{_DRIVERS}.paceline:PacelineDriver", rendezvous=_by_meeting)
TORCH_GLOO = BenchLibrary(
    name=GLOO,
    driver=f"{_DRIVERS}.gloo:GlooDriver",
    rendezvous=_by_file,
    environment={"GLOO_SOCKET_IFNAME": "lo"},
)


def environment_of(library: BenchLibrary, *, num_threads: int, folder: Path) -> dict[str, str]:
    """The environment of a library's processes; their temporary files go into `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(library.left_out)}
    return {**kept, "OMP_NUM_THREADS": str(num_threads), "TMPDIR": str(folder), **library.environment}
