"""What goes wrong in the process of a server, when the test says so by a file in its folder."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path
from typing import Any

from paceline.server import service
from paceline.server.dense import Block
from paceline.server.keeper import RangeKeeper
from paceline.server.messages import Acknowledged, Forward
from paceline.server.parcels import Parcel
from paceline.server.store import TensorStore
from paceline.testing import faults
from paceline.wire.memory import AVAILABLE_BYTES, total_bytes

FAILING = 1  # the number of the server


def is_time(folder: Path) -> bool:
    return (folder / "fail").exists()


def cannot_follow(folder: Path, number: int) -> None:
    """As a replica: what the primary has made cannot be made here."""

    class Keeper(RangeKeeper):
        def take(self, sender: str, forward: Forward, parcel: Parcel) -> Acknowledged:
            if is_time(folder):
                raise MemoryError("the test has taken it all")
            return super().take(sender, forward, parcel)

    if number == FAILING:
        faults.arm(service.KEEPER, Keeper)


def cannot_finish_an_update(folder: Path, number: int) -> None:
    """As a primary: some ranges are updated, others are not."""
    num_updates = itertools.count()

    class FailingBlock(Block):
        def update(self, *arguments: Any) -> None:
            if is_time(folder) and next(num_updates) % 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            super().update(*arguments)

    class Store(TensorStore):
        make_block = FailingBlock

    if number == FAILING:
        faults.arm(service.STORE, Store)


def has_no_room_for_rows(folder: Path, _: int) -> None:
    faults.arm(AVAILABLE_BYTES, lambda: 0 if is_time(folder) else None)


def has_few_addresses(_: int) -> None:
    """Fewer than tables reserve."""
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = present + total_bytes() // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
