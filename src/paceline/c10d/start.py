"""`python -m paceline.c10d.start SCRIPT [ARGS]`: runs a script that knows nothing of Paceline on this backend.

What it asks for as gloo, or leaves open, becomes this backend, in the default group and in those made later; other
backends stay as written. If whoever started this process handed over a store, `env://` leads there, and torch opens no
port of its own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from torch.distributed import distributed_c10d

import paceline.c10d
from paceline.c10d.process_group import NAME
from paceline.control.ticket import take_inherited
from paceline.store import STORE_VARIABLE, StoreInvitation
from paceline.store.torch_store import Store


def take_the_place_of_gloo() -> None:
    """Every group that torch makes goes through one function of its own."""
    original: Any = distributed_c10d._new_process_group_helper
    signature = inspect.signature(original)

    def make(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        if _is_for_us(str(bound.arguments["backend"])):
            bound.arguments["backend"] = distributed_c10d.Backend(NAME)
            if not isinstance(bound.arguments.get("backend_options"), paceline.c10d.Options):
                bound.arguments["backend_options"] = None  # Gloo's own
        return original(*bound.args, **bound.kwargs)

    distributed_c10d._new_process_group_helper = make


def _is_for_us(backend: str) -> bool:
    if backend == "undefined":  # torch would choose for each device
        return not torch.accelerator.is_available()
    return backend in ("gloo", "cpu:gloo")


def lead_to(invitation: StoreInvitation) -> None:
    """`env://` is this store, and the rank and size that the environment says."""

    store = Store(invitation)

    def rendezvous(
        url: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        asked = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(asked.get("rank", os.environ["RANK"]))
        size = int(asked.get("world_size", os.environ["WORLD_SIZE"]))
        store.set_timeout(timeout)
        yield store, rank, size
        raise RuntimeError("a group on env:// is made once; destroy it and call init_process_group again")

    # As a name in torch.distributed it is the function, not the module.
    handlers: Any = importlib.import_module("torch.distributed.rendezvous")
    handlers._rendezvous_handlers["env"] = rendezvous


def main() -> None:
    take_the_place_of_gloo()
    invitation = take_inherited(STORE_VARIABLE, StoreInvitation)
    if invitation is not None:
        lead_to(invitation)
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
