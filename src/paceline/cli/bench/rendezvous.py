"""What the ranks of a library need to find each other: one function a library, open while its crew lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


@contextmanager
def _meeting(num_ranks: int, folder: Path) -> Iterator[str]:
    from paceline.collective import meeting  # imports torch

    with meeting.Meeting(size=num_ranks) as place:
        yield place.invitation


@contextmanager
def _file_store(num_ranks: int, folder: Path) -> Iterator[str]:
    yield str(folder / "gloo.store")


@contextmanager
def _left_to_launcher(num_ranks: int, folder: Path) -> Iterator[str]:
    yield ""


RENDEZVOUS: dict[str, Callable[[int, Path], AbstractContextManager[str]]] = {
    "paceline": _meeting,
    "gloo": _file_store,
    "openmpi": _left_to_launcher,
    "impi": _left_to_launcher,
}
