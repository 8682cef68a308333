"""The store of a run whose script uses torch.distributed: served by the agent, handed to each worker."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.control.ticket import hand_over
from paceline.store import STORE_VARIABLE, StoreServer
from paceline.wire.descriptors import Fd

BACKENDS = ("paceline",)
_START = ("-m", "paceline.c10d.start")


def through_backend(command: tuple[str, ...], backend: str) -> tuple[str, ...]:
    """What to run in place of `command` so that its script gets this backend; nothing else without one."""
    if not backend:
        return command
    if backend not in BACKENDS:
        raise ValueError(f"--backend {backend}: there is only {BACKENDS[0]}; without it, scripts run as written")
    return (*_START, *command)


class Stores:
    """One table for all workers; each process gets a descriptor of its own, because they share its position."""

    def __init__(self, host: str) -> None:
        self._server = StoreServer(host=host)
        self._places: dict[int, Fd] = {}

    def attach(self, slot: int) -> Mapping[str, int]:
        if slot in self._places:
            self._places[slot].close()
        self._places[slot] = Fd(hand_over(self._server.invitation))
        return {STORE_VARIABLE: self._places[slot].fileno()}

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for place in self._places.values():
            place.close()
