"""How torch comes to know the backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from paceline.c10d import rendezvous
from paceline.c10d.errors import WrongCall, translated
from paceline.c10d.options import Formed, Options
from paceline.c10d.process_group import NAME, ProcessGroup


def create(given: Any, options: Any) -> ProcessGroup:
    """What torch calls for every new group on its members; `given` has the store, the rank and the timeout."""
    if isinstance(options, Formed):
        return ProcessGroup(options.group, given.store)
    if options is not None and not isinstance(options, Options):
        raise WrongCall(f"pg_options={options!r}: give a paceline.c10d.Options, or leave it out")
    with translated():
        group = rendezvous.form(
            given.store,
            given.group_rank,
            given.group_size,
            name=str(given.group_id),
            timeout_s=given.timeout.total_seconds(),
            options=options or Options(),
        )
    return ProcessGroup(group, given.store)


def register() -> None:
    if NAME.upper() not in dist.Backend._plugins:
        # Torch's own default for CPU tensors stays: who asks for no backend gets what torch would give.
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
