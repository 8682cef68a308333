"""Going on with who is left, in the same processes and without a Session.

    while step < num_steps:
        try:
            train_one_step(ddp_model)
        except RuntimeError:                                  # PeerLost, or what DDP makes of it
            paceline.c10d.regroup()
            ddp_model = DistributedDataParallel(model)        # rank 0 gives all its weights
            ...                                               # decide together from where to go on

Every survivor calls it. It finds out who lives, forms their group over connections of their own, and makes that
torch's default group: ranks keep their order, without gaps. The store that the world was made with may be gone with
the process that held it, so the new rank 0 serves the next one, until that world is destroyed.

What it does not do: know which steps counted on whom, or which samples are done. That is what a Session is for.

How they agree: `collective/succession.py`. The first group of these processes, over which they do, stays in the
background until the last world is destroyed.

Failure: `TimedOut` names the survivors that did not come; further deaths meanwhile only make the group smaller. Groups
of the old world are destroyed when it succeeds; when it does not, it can be called again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.c10d.errors import WrongCall, translated
from paceline.c10d.options import Closeable, FormedGroup
from paceline.c10d.process_group import NAME, ProcessGroup, open_groups
from paceline.store import StoreInvitation, StoreServer
from paceline.store.torch_store import TorchStore
from paceline.wire.card import Card
from paceline.wire.deadline import MAX_SECONDS

DEFAULT_TIMEOUT = timedelta(seconds=60)


def regroup(timeout: timedelta = DEFAULT_TIMEOUT) -> ProcessGroup:
    """Make a new default group of the processes that are left, in this one too; it must be called by all of them."""
    world = dist.group.WORLD
    if not isinstance(world, ProcessGroup):
        raise WrongCall("regroup needs a default group on the backend paceline; call init_process_group first")
    if world not in open_groups():
        raise WrongCall("the default group was aborted or shut down here, and is gone; destroy it and begin again")
    # Who still waits in an operation of the old world comes too; the groups over parts of it first.
    for old in [*(one for one in open_groups() if one is not world), world]:
        old.group.abort("regroup was called")
    served = _Served(host=world.group.cards[world.group.rank].address[0])
    try:
        with translated():
            following, word = world.first.succeed(
                make_word=served.open,
                describe=functools.partial(_describe, world.group.cards),
                timeout_s=world.group.timeout_s,
                forming_s=min(timeout.total_seconds(), MAX_SECONDS),
            )
        served.connect(word, world.group.timeout_s)
    except BaseException:
        served.close()
        raise
    first = world.hand_over_first()
    try:
        dist.destroy_process_group()
        options: Any = FormedGroup(following, first, served.owned)
        dist.init_process_group(
            NAME,
            store=served.store,
            rank=following.rank,
            world_size=following.size,
            timeout=timedelta(seconds=following.timeout_s),
            pg_options=options,
        )
    except BaseException:
        for owned in (following, first, served):
            owned.close()
        raise
    made = dist.group.WORLD
    assert isinstance(made, ProcessGroup)
    return made


def _describe(cards: Sequence[Card], card: Card) -> str:
    """By the rank that it has in the world that ends."""
    return f"rank {cards.index(card)}" if card in cards else f"{card.role} {card.member}"


class _Served:
    """A store for the groups to come, and what of it belongs to this process."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.store: Any = None
        self.owned: list[Closeable] = []

    def open(self) -> bytes:
        """On the first rank: serve it, and say where."""
        server = StoreServer(host=self._host)
        self.owned.append(server)
        return msgspec.json.encode(server.invitation)

    def connect(self, word: bytes, timeout_s: float) -> None:
        if not word:  # of who is alone
            self.store = HashStore()
            return
        store = self.store = TorchStore(msgspec.json.decode(word, type=StoreInvitation), timedelta(seconds=timeout_s))
        self.owned.append(store)

    def close(self) -> None:
        while self.owned:
            self.owned.pop().close()
