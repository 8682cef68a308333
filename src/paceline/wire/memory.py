"""Memory of one member that the others of its host can see: a memfd without a name, and an arena of tensors in it.

    [ fixed part: what the group's signals speak of ][ arena: tensors, taken and given back in blocks ]

The file is as large as the machine's memory but sparse: a page costs memory when it is first taken, and is given back
when its tensor is gone. So peers map it once, and no message is needed when it grows. Memory for a tensor is
committed when the tensor is made: the lack of it is an `OutOfSharedMemory` then, not a SIGBUS in the middle of a
reduction.

The memory belongs to one generation of one group. A member that wakes late can still write into it, and harms nobody,
because the next group has its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.errors import OutOfSharedMemory, ProtocolError
from paceline.fault_points import FaultPoint
from paceline.wire import mapping
from paceline.wire.descriptors import Fd, creating
from paceline.wire.mapping import PAGE

AVAILABLE_BYTES: FaultPoint[[], int] = FaultPoint("memory is looked for before it is taken")
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """One mapping of one member's memory: its own (`create`) or a peer's (`attach`)."""

    def __init__(self, descriptor: Fd, num_bytes: int) -> None:
        self.descriptor = descriptor
        self._closing = threading.RLock()
        self.num_bytes = num_bytes
        self.buffer = mapping.map_shared(descriptor.fileno(), num_bytes)
        self.address = ctypes.addressof(self.buffer)
        self.bytes = torch.frombuffer(self.buffer, dtype=torch.uint8)
        self.view = memoryview(self.buffer).cast("B")

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        with creating:
            descriptor = Fd(os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.ftruncate(descriptor.fileno(), num_bytes)
            fcntl.fcntl(descriptor.fileno(), fcntl.F_ADD_SEALS, _FIXED_SIZE)
            return cls(descriptor, num_bytes)
        except OSError as error:
            descriptor.close()
            raise _out_of_memory(num_bytes, f"the system refuses to reserve it ({error.strerror})") from error

    @classmethod
    def attach(cls, descriptor: Fd) -> SharedMemory:
        num_bytes = os.fstat(descriptor.fileno()).st_size
        try:
            # Memory that could shrink could end this process by SIGBUS.
            if fcntl.fcntl(descriptor.fileno(), fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                raise ProtocolError("a peer handed over memory whose size is not fixed")
            return cls(descriptor, num_bytes)
        except OSError as error:
            raise _out_of_memory(num_bytes, f"the system refuses to map it ({error.strerror})") from error

    def tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes[offset : offset + num_elements * dtype.itemsize].view(dtype)

    def committed_bytes(self) -> int:
        """What of it costs memory now."""
        return os.fstat(self.descriptor.fileno()).st_blocks * 512

    def release(self, offset: int, num_bytes: int) -> None:
        """Give whole pages back to the host. Called by finalizers, which may run inside any other call: so
        re-entrant."""
        with self._closing:
            if self.descriptor.number >= 0:
                mapping.punch_hole(self.descriptor.number, offset, num_bytes)

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last tensor in it does."""
        with self._closing:
            self.descriptor.close()


def touch(memory: SharedMemory, start: int, num_bytes: int) -> None:
    """Have these pages ready, so that tensors in them cost little when they are made. Where there is little memory it
    does nothing: whoever makes the tensors will be told."""
    if num_bytes <= available_bytes() // 4:
        with contextlib.suppress(OSError, ValueError):
            mapping.commit(memory.descriptor.fileno(), start, num_bytes)
            mapping.populate(memory.address + start, num_bytes)


class Arena:
    """Hands out tensors in a member's own shared memory, first fit, in whole pages; takes them back when they are
    collected."""

    def __init__(self, memory: SharedMemory, start: int) -> None:
        self._memory = memory
        self._start = start
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(start, memory.num_bytes - start)]
        # Filled by finalizers, which may run anywhere, also inside `_take` on this thread: so it needs no lock.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        extents = tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise ValueError(f"a tensor cannot have the shape {extents}; every extent must be 0 or more")
        num_elements = math.prod(extents)
        if num_elements == 0:
            return torch.empty(extents, dtype=dtype)
        num_bytes = -(-num_elements * dtype.itemsize // PAGE) * PAGE
        offset = self._take(num_bytes)
        try:
            self._commit(offset, num_bytes)
        except BaseException:
            self._returned.append((offset, num_bytes))
            raise
        block = mapping.part_of(self._memory.buffer, offset, num_bytes)
        # Every view of the tensor shares its storage, and the storage holds the block: its end is the end of all use.
        weakref.finalize(block, self._give_back, offset, num_bytes).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=num_elements).view(extents)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where the tensor's bytes lie in the shared memory, or -1."""
        offset = tensor.data_ptr() - self._memory.address
        return offset if self._start <= offset < self._memory.num_bytes else -1

    def _commit(self, offset: int, num_bytes: int) -> None:
        available = available_bytes()
        if num_bytes > available:
            raise _out_of_memory(num_bytes, f"this host has {available / 2**20:,.0f} MiB available")
        try:
            mapping.commit(self._memory.descriptor.fileno(), offset, num_bytes)
        except OSError as error:
            mapping.punch_hole(self._memory.descriptor.fileno(), offset, num_bytes)
            raise _out_of_memory(num_bytes, f"the system refuses ({error.strerror})") from error
        mapping.populate(self._memory.address + offset, num_bytes)

    def _take(self, num_bytes: int) -> int:
        with self._lock:
            self._merge_returned()
            for index, (offset, free) in enumerate(self._free):
                if free >= num_bytes:
                    self._free[index] = (offset + num_bytes, free - num_bytes)
                    return offset
        raise _out_of_memory(num_bytes, "it is more than the memory of this host, less what other tensors hold")

    def _merge_returned(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self._free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((start, length))
        self._free = merged

    def _give_back(self, offset: int, num_bytes: int) -> None:
        self._memory.release(offset, num_bytes)
        self._returned.append((offset, num_bytes))


def total_bytes() -> int:
    """The memory of this machine; no tensor can be larger."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def available_bytes() -> int:
    """What this process could still take: of the machine, and of its control group where that is less."""
    if (fewer := AVAILABLE_BYTES.reach()) is not None:
        return fewer
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((group / "memory.current").read_text()))
    except OSError:
        return available
    return max(0, available)


def _out_of_memory(num_bytes: int, why: str) -> OutOfSharedMemory:
    return OutOfSharedMemory(
        f"no {num_bytes / 2**20:,.0f} MiB of shared memory: {why}; use smaller tensors or fewer members on this host, "
        "or free memory"
    )
