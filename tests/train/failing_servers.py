"""What goes wrong in the process of a server, when the test says so by a file in its folder."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.server.dense import Block
from paceline.server.keeper import RangeKeeper
from paceline.server.messages import Forward
from paceline.wire.memory import available_bytes, total_bytes

FAILING = 1  # the number of the server


def is_time(folder: Path) -> bool:
    return (folder / "fail").exists()


def cannot_follow(folder: Path, number: int) -> None:
    """As a replica: what the primary has made cannot be made here."""
    follow = RangeKeeper._follow

    def fail(keeper: RangeKeeper, ranges: Sequence[int], forward: Forward, parcel: Any) -> None:
        if is_time(folder):
            raise MemoryError("the test has taken it all")
        follow(keeper, ranges, forward, parcel)

    if number == FAILING:
        mock.patch.object(RangeKeeper, "_follow", fail).start()


def cannot_finish_an_update(folder: Path, number: int) -> None:
    """As a primary: some ranges are updated, others are not."""
    update = Block.update
    calls = []

    def fail(block: Block, *arguments: Any) -> None:
        calls.append(block)
        if is_time(folder) and len(calls) % 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        update(block, *arguments)

    if number == FAILING:
        mock.patch.object(Block, "update", fail).start()


def has_no_room_for_rows(folder: Path, _: int) -> None:
    def available() -> int:
        return 0 if is_time(folder) else available_bytes()

    mock.patch("paceline.server.memory.available_bytes", available).start()


def has_few_addresses(_: int) -> None:
    """Fewer than tables reserve."""
    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = present + total_bytes() // 2
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
