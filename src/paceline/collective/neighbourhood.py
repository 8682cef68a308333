"""Members of one host: each writes into slots of its own memory and reads those of the others.

Each member has `NUM_SLOTS` slots in its shared memory, and one signal to and one from each neighbour. A move is a
sequence of *rounds*, numbered through the life of the group. In round k a member fills its slot k mod NUM_SLOTS,
signals all neighbours, waits for the signal of each, and reads what it needs of their slots. There is no second
signal to say that reading is done; the count of slots makes it safe:

    A member writes round k at the earliest after it has all signals of round k-2 (rounds may run one ahead). Whoever
    signalled k-2 had by then read round k-4. So with 4 slots nothing is overwritten that somebody still reads.

The first round of an operation carries its header: where the tensor lies if it is in the arena, the operation's
number and its signature. All neighbours compare it with theirs before they use any data.

Only data moves by memory, never a signal: signals are eventfds, so every wait is also a wait for the death of the
others. Of that the locks that a member holds in its memory, one for each neighbour, tell first (`wire.lifeline`).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Sequence

import torch

from paceline.collective.base import Operation
from paceline.collective.health import Health
from paceline.collective.signature import decode
from paceline.errors import ProtocolError
from paceline.wire.descriptors import Fd
from paceline.wire.lifeline import LOCK_BYTES, LifelineHolder, LifelineWatcher
from paceline.wire.memory import SharedMemory
from paceline.wire.waiting import READ

NUM_SLOTS = 4
HEADER_BYTES = 8192
SLOT_BYTES = 2 << 20
MIN_CHUNK_BYTES = 256 * 1024
CHUNK_BYTES = 512 * 1024  # of a slot, where members have a core each: stays in the nearer caches
BACKGROUND_CHUNK_BYTES = 1 << 20  # beside a computation, where every wait is a switch between threads
STRIDE_BYTES = HEADER_BYTES + SLOT_BYTES
_OPENING = struct.Struct("<Qq?")  # the operation's number, where the tensor lies, whether its waits may spin
COUNTS_AT = HEADER_BYTES // 2
MAX_SIGNATURE_BYTES = COUNTS_AT - _OPENING.size - 1
MAX_NEIGHBOURS = (HEADER_BYTES - COUNTS_AT) // 16
LIFELINES_AT = NUM_SLOTS * STRIDE_BYTES
FIXED_BYTES = LIFELINES_AT + MAX_NEIGHBOURS * LOCK_BYTES
MAX_WATCHED = 16  # members on a host: each has a thread for each other

# One failed read of a signal costs about a microsecond: this is how long a wait spins before it sleeps. Now and then
# it offers its core, for the case that the scheduler has put the one it waits for on the same.
NUM_SPINS = 64
SPINS_TO_YIELD = 4

Step = Callable[[int, int], None]


class Neighbour:
    """Another member of this host: its memory, the signal that it waits for, and the one that we wait for."""

    def __init__(self, rank: int, memory: SharedMemory, outgoing: Fd, incoming: Fd) -> None:
        self.rank = rank
        self.memory = memory
        self.outgoing = outgoing
        self.incoming = incoming

    def close(self) -> None:
        self.memory.close()
        self.outgoing.close()
        self.incoming.close()


class Neighbourhood:
    """`neighbours` are the other members of this host; `ranks` all of them with this one, in order."""

    def __init__(
        self, health: Health, memory: SharedMemory, neighbours: Sequence[Neighbour], holder: LifelineHolder
    ) -> None:
        self.health = health
        self.memory = memory
        self.neighbours = sorted(neighbours, key=lambda neighbour: neighbour.rank)
        self.ranks = sorted([health.rank, *(neighbour.rank for neighbour in neighbours)])
        self.index = self.ranks.index(health.rank)
        self.memories = {neighbour.rank: neighbour.memory for neighbour in neighbours} | {health.rank: memory}
        self._signals = [neighbour.outgoing for neighbour in self.neighbours]
        self._holder = holder
        self._watchers: list[LifelineWatcher] = []
        self._round = 0
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        cores = {core for rank in self.ranks for core in health.cards[rank].cores}
        self._fits_cores = len(self.ranks) <= len(cores)
        self._all_spin = True  # in the operation that was opened last

    # -- rounds ------------------------------------------------------------------------------------------------------

    def rounds(self, operation: Operation, count: int, write: Step, read: Step, *, ahead: bool = True) -> None:
        """Do `write(k, slot)` and `read(k, slot)` for k in 0..count-1. With `ahead`, round k+1 is written before k is
        read."""
        if count == 0:
            return
        first = self._round

        def put(k: int) -> None:
            write(k, (first + k) % NUM_SLOTS)
            self.signal_all()

        put(0)
        for k in range(count):
            if ahead and k + 1 < count:
                put(k + 1)
            self.wait_all(operation)
            read(k, (first + k) % NUM_SLOTS)
            if not ahead and k + 1 < count:
                put(k + 1)
        self._round = first + count

    def one_round(self, operation: Operation, slot: int) -> None:
        """Signal that this member's slot is filled, wait for all, compare headers: a whole operation in one round."""
        self.signal_all()
        self.wait_all(operation)
        self._round += 1
        self.read_headers(operation, slot)

    def open(self, operation: Operation, location: int = -1, counts: Sequence[int] | None = None) -> list[int]:
        """The first round of an operation: compare headers. Returns where each local member's tensor lies (-1: not in
        the arena)."""
        slot = self.next_slot()
        self.write_header(operation, slot, location, counts)
        self.signal_all()
        self.wait_all(operation)
        self._round += 1
        return self.read_headers(operation, slot)

    def write_header(
        self, operation: Operation, slot: int, location: int = -1, counts: Sequence[int] | None = None
    ) -> None:
        at = slot * STRIDE_BYTES
        header = _OPENING.pack(operation.number, location, operation.spins) + operation.encoded
        self.memory.view[at : at + len(header)] = header
        if counts is not None:
            packed = struct.pack(f"<{len(counts)}q", *counts)
            self.memory.view[at + COUNTS_AT : at + COUNTS_AT + len(packed)] = packed

    def read_headers(self, operation: Operation, slot: int) -> list[int]:
        """Where each local member's tensor lies, if all are in this operation."""
        at = slot * STRIDE_BYTES
        start = at + _OPENING.size
        stop = start + len(operation.encoded)
        locations = []
        self._all_spin = True
        for rank in self.ranks:
            view = self.memories[rank].view
            number, location, spins = _OPENING.unpack_from(view, at)
            if number != operation.number or view[start:stop].tobytes() != operation.encoded:
                self._fail_mismatch(operation, rank, number, view[start : at + COUNTS_AT])
            locations.append(location)
            self._all_spin &= spins
        return locations

    def _fail_mismatch(self, operation: Operation, rank: int, number: int, encoded: memoryview) -> None:
        self.health.differ(rank, decode(encoded), operation.signature, operation.number, number)
        raise self.health.error(operation.deadline.operation)

    def next_slot(self) -> int:
        return self._round % NUM_SLOTS

    def signal_all(self) -> None:
        for signal in self._signals:
            os.eventfd_write(signal.number, 1)

    def wait_all(self, operation: Operation) -> None:
        for neighbour in self.neighbours:
            self._wait(neighbour, operation)

    def _wait(self, neighbour: Neighbour, operation: Operation) -> None:
        signal = neighbour.incoming.number
        read = os.eventfd_read
        for spin in range(NUM_SPINS if operation.spins and self._fits_cores else 0):
            try:
                read(signal)
                return
            except BlockingIOError:
                if spin % SPINS_TO_YIELD == SPINS_TO_YIELD - 1:
                    os.sched_yield()
        while True:
            # Asked before the read: what was signalled before a goodbye is there by now.
            departed = self.health.has_departed(neighbour.rank)
            try:
                read(signal)
                return
            except BlockingIOError:
                if departed:
                    raise self.health.gone(neighbour.rank, "left the group", operation.deadline.operation) from None
            self.health.wait_any([(signal, READ)], operation.deadline, self.health.describe(neighbour.rank))

    def chunk_elements(self, num_elements: int, dtype: torch.dtype) -> int:
        """How much of a tensor goes through a slot at once, in the operation that was opened last; the same on all
        members. All slots together take less than twice the tensor, if that is more than a MiB. Where a signal costs a
        switch between threads, because one works in the background or because members share cores, chunks are larger
        and fewer."""
        num_bytes = num_elements * dtype.itemsize
        if self._fits_cores:
            limit = CHUNK_BYTES if self._all_spin else BACKGROUND_CHUNK_BYTES
            chosen = max(MIN_CHUNK_BYTES, min(limit, num_bytes * 3 // 8))
        else:
            chosen = max(CHUNK_BYTES, min(SLOT_BYTES, num_bytes // NUM_SLOTS))
        return chosen // dtype.itemsize

    # -- slots -------------------------------------------------------------------------------------------------------

    def slots(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """slots[slot][index of the local member]: the data of a slot as a flat tensor. Made once for each type."""
        found = self._slots.get(dtype)
        if found is None:
            num_elements = SLOT_BYTES // dtype.itemsize
            found = [
                [
                    self.memories[rank].tensor(slot * STRIDE_BYTES + HEADER_BYTES, num_elements, dtype)
                    for rank in self.ranks
                ]
                for slot in range(NUM_SLOTS)
            ]
            self._slots[dtype] = found
        return found

    def watch_lifelines(self, on_death: Callable[[int], None]) -> None:
        """Wait, on threads beside, for the death of a neighbour; it is called with the rank."""
        if len(self.ranks) > MAX_WATCHED:
            return
        for neighbour in self.neighbours:
            address = neighbour.memory.address + LIFELINES_AT + self.index * LOCK_BYTES
            self._watchers.append(
                LifelineWatcher(address, neighbour.memory.buffer, functools.partial(on_death, neighbour.rank))
            )

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()
        self._holder.close()
        for neighbour in self.neighbours:
            neighbour.close()
        self.memory.close()


def hold_lifelines(memory: SharedMemory, num_local: int) -> LifelineHolder:
    """A lock for each member of this host, in this member's memory; before anybody else has that."""
    count = num_local if 1 < num_local <= MAX_WATCHED else 0
    return LifelineHolder(memory.address + LIFELINES_AT, count, memory.buffer)


def nothing(_: int, __: int) -> None:
    """The write and the read of a round that only waits for all."""


def check_size(num_members: int) -> None:
    if num_members > MAX_NEIGHBOURS:
        raise ProtocolError(f"{num_members} members on one host are over the limit of {MAX_NEIGHBOURS}")
