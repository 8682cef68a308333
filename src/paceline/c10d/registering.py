"""How torch comes to know the backend."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from paceline.c10d import rendezvous
from paceline.c10d.errors import WrongCall, translated
from paceline.c10d.options import FormedGroup, Options
from paceline.c10d.process_group import NAME, ProcessGroup


def create(given: Any, options: Any) -> ProcessGroup:
    """What torch calls for every new group on its members; `given` has the store, the rank and the timeout."""
    if isinstance(options, FormedGroup):
        return ProcessGroup(options.group, given.store, options.first, options.owned)
    if options is not None and not isinstance(options, Options):
        raise WrongCall(f"pg_options={options!r}: give a paceline.c10d.Options, or leave it out")
    with translated(), _counting_no_failure():
        group = rendezvous.form(
            _keys_of(given.global_ranks_in_group, given.store),
            given.group_rank,
            given.group_size,
            name=str(given.group_id),
            timeout_s=given.timeout.total_seconds(),
            options=options or Options(),
        )
    return ProcessGroup(group, given.store)


@contextlib.contextmanager
def _counting_no_failure() -> Iterator[None]:
    """Torch names a default group after the number of tries; one that failed here may have been none elsewhere."""
    try:
        yield
    except BaseException:
        if dist.group.WORLD is None:
            distributed_c10d._world.group_count -= 1
        raise


def _keys_of(members: Sequence[int], store: Store) -> Store:
    """Torch counts groups from 0 in every world: on a store that has seen one before, the same name may be that of
    other ranks, with other members. Those of the default group are not listed."""
    if not members:
        return store
    ranks = ",".join(map(str, members))
    return PrefixStore(f"ranks {hashlib.sha256(ranks.encode()).hexdigest()[:16]}", store)


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        # Torch's own default for CPU tensors stays: who asks for no backend gets what torch would give.
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
