"""The `ProcessGroup` that torch.distributed makes, asks about itself and ends; what it does is in `operations`."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.c10d import callbacks
from paceline.c10d.errors import translated
from paceline.c10d.operations import Operations
from paceline.c10d.options import Closeable
from paceline.collective import Group
from paceline.wire.deadline import MAX_SECONDS

NAME = "paceline"
LAST_CALLBACKS_S = 5.0
_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


class ProcessGroup(Operations):
    """Made by `init_process_group("paceline")` and `new_group`."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, group: Group, store: Store, first: Group | None = None, owned: Sequence[Closeable] = ()) -> None:
        super().__init__(group)
        self.first = first or group  # over which `regroup` finds out who is left
        self._keeps_first = True
        self._group_store = store
        self._group_name = group.name
        self._group_desc = ""
        self._split_off: list[ProcessGroup] = []
        self._owned = list(owned)  # closed after the group, the last one first
        _open.add(self)

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    def get_group_store(self) -> Store:
        return self._group_store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_sequence_number_for_group(self) -> int:
        return self._num_operations

    def _set_sequence_number_for_group(self) -> None:
        """It counts from 0 by itself."""

    def set_timeout(self, timeout: timedelta) -> None:
        with translated():
            self.group.set_timeout(min(timeout.total_seconds(), MAX_SECONDS))

    _set_default_timeout = set_timeout

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group over these ranks of this one, by its connections, without the store; None on the other ranks. Torch
        does not know it: it is used by its own methods, and ends with this one at the latest."""
        if self.group.rank not in ranks:
            return None
        with translated():
            group = self.group.regroup(list(ranks))
        name = group_name or group.name
        part = ProcessGroup(group, PrefixStore(f"{name}/", self._group_store))
        part.setGroupName(name)
        part.setGroupDesc(group_desc or "")
        if timeout is not None:
            part.set_timeout(timeout)
        self._split_off.append(part)
        return part

    splitGroup = split_group

    def abort(self) -> None:
        for part in self._split_off:
            part.group.abort("the process group was aborted")
        self.group.abort("the process group was aborted")
        self.shutdown()

    def shutdown(self) -> None:
        """Leave in order; who still needs this rank gets `PeerLost`."""
        _open.discard(self)
        while self._split_off:
            self._split_off.pop().shutdown()
        if self.first is not self.group or self._keeps_first:
            self.group.close()
        if self._keeps_first:
            self.first.close()
        else:
            self.first.retire()
        while self._owned:
            self._owned.pop().close()

    def hand_over_first(self) -> Group:
        """To the next world: the first group will outlive this one."""
        self._keeps_first = False
        return self.first


def open_groups() -> list[ProcessGroup]:
    """Those of this process that were not shut down."""
    return list(_open)


def _disown_all() -> None:
    """A forked child has no part in them."""
    for process_group in open_groups():
        process_group.group.disown()
        process_group.first.disown()
    _open.clear()


os.register_at_fork(after_in_child=_disown_all)


@atexit.register
def _leave_all() -> None:
    """A script that ends without `destroy_process_group` leaves in order all the same, so that nobody who does not need
    it takes it for dead."""
    for process_group in open_groups():
        process_group.shutdown()
    callbacks.wait_all(LAST_CALLBACKS_S)
