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

Failure: `TimedOut` if survivors do not come; further deaths meanwhile only make the group smaller. Groups of the old
world are destroyed when it succeeds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.c10d.errors import WrongCall, translated
from paceline.c10d.options import Closeable, Formed
from paceline.c10d.process_group import NAME, ProcessGroup, open_groups
from paceline.collective import Group
from paceline.errors import GroupAborted, PeerLost
from paceline.store import StoreInvitation, StoreServer
from paceline.store.torch_store import Store
from paceline.wire.deadline import MAX_SECONDS, Deadline

DEFAULT_TIMEOUT = timedelta(seconds=60)


def regroup(timeout: timedelta = DEFAULT_TIMEOUT) -> ProcessGroup:
    """Make a new default group of the processes that are left, in this one too; it must be called by all of them."""
    world = dist.group.WORLD
    if not isinstance(world, ProcessGroup):
        raise WrongCall("regroup needs a default group on the backend paceline; call init_process_group first")
    # Who still waits in an operation of the old world comes too; the groups over parts of it first.
    for old in [*(one for one in open_groups() if one is not world), world]:
        old.group.abort("regroup was called")
    with translated():
        following, served = _form_again(world.group, Deadline(min(timeout.total_seconds(), MAX_SECONDS), "regroup"))
    try:
        dist.destroy_process_group()
        options: Any = Formed(following, served.owned)
        dist.init_process_group(
            NAME,
            store=served.store,
            rank=following.rank,
            world_size=following.size,
            timeout=timedelta(seconds=following.timeout_s),
            pg_options=options,
        )
    except BaseException:
        following.close()
        served.close()
        raise
    made = dist.group.WORLD
    assert isinstance(made, ProcessGroup)
    return made


class _Served:
    """A store for the groups to come, and what of it belongs to this process."""

    def __init__(self) -> None:
        self.store: Any = None
        self.owned: list[Closeable] = []

    def close(self) -> None:
        while self.owned:
            self.owned.pop().close()


def _form_again(group: Group, deadline: Deadline) -> tuple[Group, _Served]:
    """Members that see different deaths first try in vain with different lists, until all have the same. All of them
    are in the new group and know its store, or all try again: the old one stays until then, to tell who lives."""
    while True:
        deadline.check("the survivors to agree on who is left")
        following, served = None, _Served()
        try:
            following = group.regroup(group.survivors(), forming_s=_rest(deadline))
            _share_store(following, served, deadline)
            return following, served
        except BaseException as error:
            if following is not None:
                following.close()
            served.close()
            if not isinstance(error, PeerLost | GroupAborted):
                raise


def _share_store(group: Group, served: _Served, deadline: Deadline) -> None:
    """The first rank serves it, and says where over the new group."""
    if group.size == 1:
        served.store = HashStore()
        return
    text = b""
    if group.rank == 0:
        server = StoreServer(host=group.cards[0].address[0])
        served.owned.append(server)
        text = msgspec.json.encode(server.invitation)
    length = torch.tensor([len(text)])
    group.broadcast(length, 0, timeout_s=_rest(deadline))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(data, 0, timeout_s=_rest(deadline))
    invitation = msgspec.json.decode(bytes(data.tolist()), type=StoreInvitation)
    store = served.store = Store(invitation, timedelta(seconds=group.timeout_s))
    served.owned.append(store)
    group.barrier(timeout_s=_rest(deadline))


def _rest(deadline: Deadline) -> float:
    return max(0.001, deadline.remaining_s())
