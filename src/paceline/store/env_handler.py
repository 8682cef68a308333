"""`env://` in a worker of `paceline run`: the run's own store, in place of the TCPStore that torch would open.

Contract. Torch calls an `EnvHandler` for every `init_process_group` (or `init_rpc`) by env:// and takes one
(store, rank, size) of what it returns. Where MASTER_ADDR, MASTER_PORT and the world's size are what the run gave, that
is the run's store. Otherwise the world is of the script's own making and is left to torch's handler, as is an
environment in which something is missing, for which torch has its own words. The rank does not decide: where a script
numbers its processes anew, some keep their number by chance, and must not go elsewhere than the others.

Invariants
- All processes of a world decide alike: they compare what is the same for all of them.
- No two worlds have keys in common, though torch begins to count groups anew when the default one is destroyed, so that
  Gloo would find addresses of the world before. Each worker counts its worlds in the store: one that was started again
  comes to the world that the others make after its death.
- Only worlds that came about are counted. A try that failed is repeated with the same keys, because others may be in
  their first one; and what is asked for beside a default group (RPC) finds the keys of that world, as in torch's store.

Failure: `StoreFailed` if the store is gone, if a key does not come within the timeout of the world, or if two workers
come to a world with one rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import default_pg_timeout

from paceline.store.service import StoreInvitation
from paceline.store.torch_store import StoreFailed, TorchStore

PLACE = ("MASTER_ADDR", "MASTER_PORT")

Entry = tuple[PrefixStore, int, int]
Handler = Callable[..., Iterator[Entry]]


class EnvHandler:
    """`invitation` as `hand_over` writes it, `given` the environment that the run gave, `original` torch's handler."""

    def __init__(self, invitation: bytes, given: Mapping[str, str], original: Handler) -> None:
        self._invitation = msgspec.json.decode(invitation, type=StoreInvitation)
        self._given = given
        self._original = original
        self._store: TorchStore | None = None
        self._world = ""  # what its keys begin with
        self._came_about = False

    def __call__(self, url: str, **arguments: Any) -> Iterator[Entry]:
        rank, size = _asked_for("rank", url), _asked_for("world_size", url)
        if rank is None or not self._is_the_runs_world(size):
            return self._original(url, **arguments)
        return self._enter(rank, int(self._given["WORLD_SIZE"]), **arguments)

    def _is_the_runs_world(self, size: int | None) -> bool:
        is_same_place = all(os.environ.get(name) == self._given.get(name) for name in PLACE)
        return (
            "RANK" in self._given and is_same_place and size is not None and str(size) == self._given.get("WORLD_SIZE")
        )

    def _enter(self, rank: int, size: int, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[Entry]:
        if self._store is None:
            self._store = TorchStore(self._invitation)
        self._store.set_timeout(timeout)
        was_destroyed = self._came_about and not dist.is_initialized()
        if was_destroyed or not self._world:
            number = self._store.add(f"worlds of worker {self._given['RANK']}", 1)
            self._world, self._came_about = f"world {number}", False
        self._take_seat(self._store, rank)
        try:
            yield PrefixStore(self._world, self._store), rank, size
            raise RuntimeError("a group on env:// is made once; destroy it and call init_process_group again")
        finally:
            # Torch holds this iterator for as long as it makes the group, and never asks it again.
            self._came_about = self._came_about or dist.is_initialized()

    def _take_seat(self, store: TorchStore, rank: int) -> None:
        mine = self._given["RANK"]
        owner = store.compare_set(f"{self._world}, rank {rank}", "", mine).decode()
        if owner != mine:
            raise StoreFailed(
                f"worker {mine} of this run comes as rank {rank}, as worker {owner} does; give every process a rank of "
                "its own, or leave RANK as it is"
            )


def _asked_for(name: str, url: str) -> int | None:
    """In the address, where torch puts what a script passes to `init_process_group`, or else in the environment."""
    values = parse_qs(urlparse(url).query).get(name) or [os.environ.get(name.upper(), "")]
    try:
        return int(values[0])
    except ValueError:
        return None
