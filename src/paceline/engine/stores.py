"""The store of a run, for scripts that use torch.distributed: served by the agent, handed to each worker."""

from __future__ import annotations

import os

from paceline.control.shell.ticket import hand_over
from paceline.engine.entry.sitecustomize import BACKEND_VARIABLE, FOLDER, STORE_VARIABLE
from paceline.engine.local import Attached
from paceline.store import StoreServer
from paceline.wire.descriptors import Fd

BACKENDS = ("paceline",)


def check_backend(backend: str) -> None:
    if backend and backend not in BACKENDS:
        raise ValueError(f"--backend {backend}: there is only {BACKENDS[0]}; without it, scripts run as written")


class Stores:
    """One table for all workers; each process gets a descriptor of its own, because they share its position. With a
    `backend`, scripts get that one where they ask for Gloo or for none; without, they run as written."""

    def __init__(self, host: str, backend: str = "") -> None:
        self._environment = {BACKEND_VARIABLE: backend} if backend else {}
        self._server = StoreServer(host=host)
        self._places: dict[int, Fd] = {}

    def attach(self, slot: int) -> Attached:
        if slot in self._places:
            self._places[slot].close()
        self._places[slot] = Fd(hand_over(self._server.invitation))
        paths = [FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty entry would be the current folder
        return Attached(
            descriptors={STORE_VARIABLE: self._places[slot].fileno()},
            environment={**self._environment, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        for place in self._places.values():
            place.close()
