"""Columns: one number or one row of numbers for each slot of a table, in memory that grows in place.

A column reserves addresses for as many slots as the machine could ever hold, and takes memory only for the slots in
use, a slab at a time. So nothing is copied when it grows, a gather is one call over one contiguous array, and a slot
keeps its place for good.

- What was never written is zero.
- A lack of memory is a `MemoryError` from `grow`, before anything has changed: the pages of a slab are taken at once,
  after a look at what the machine (and the control group) has left.
- Slots handed to `gather` and `scatter` must be below the last `grow`; that is not checked.
"""

from __future__ import annotations

import contextlib
import errno
import mmap

import numpy as np
import numpy.typing as npt
import torch

from paceline.wire.mapping import MADV_POPULATE_WRITE
from paceline.wire.memory import available_bytes

Slots = npt.NDArray[np.int64]

# A slab is an eighth of what is there, so that little is unused, within these bounds.
SLAB = 65_536
_MIN_SLAB = 1024
# Left to the rest of the machine: a server that takes the last page is killed, not refused.
SPARE_BYTES = 64 * 2**20
# The module `mmap` learned this name late.
_MAP_NORESERVE = 0x4000


class Column:
    """`width` numbers of one dtype for each slot; `tensor` is [max_slots, width], of which `num_slots` can be used.

    `urgent` ones may take what is left to the rest of the machine: they are small, and what frees memory needs them.
    """

    def __init__(self, *, width: int, dtype: torch.dtype, max_slots: int, what: str, urgent: bool = False) -> None:
        self._what = what
        self._spare_bytes = 0 if urgent else SPARE_BYTES
        self._cell_bytes = width * dtype.itemsize
        self._mapping = reserve(max_slots * self._cell_bytes, what)
        self.num_slots = 0
        self.tensor = torch.frombuffer(self._mapping, dtype=dtype, count=max_slots * width).view(max_slots, width)
        # Whole cells as opaque bytes: numpy moves those faster than torch moves rows, and knows no bfloat16.
        self._cells = np.frombuffer(self._mapping, dtype=f"V{self._cell_bytes}", count=max_slots)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self._cell_bytes

    def grow(self, num_slots: int) -> None:
        """Have at least so many slots."""
        while self.num_slots < num_slots:
            slab = min(max(self.num_slots // 8, _MIN_SLAB), SLAB, len(self._cells) - self.num_slots)
            if slab == 0:
                raise _out_of_memory((num_slots - self.num_slots) * self._cell_bytes, self._what, "it is full")
            check_available(slab * self._cell_bytes, self._what, self._spare_bytes)
            if self.num_slots >= SLAB:
                # Small tables stay small; in a large one an address is found sooner with large pages.
                advise_large_pages(self._mapping)
            self._populate(self.num_slots * self._cell_bytes, slab * self._cell_bytes)
            self.num_slots += slab

    def gather(self, slots: Slots, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows [n, width] of these slots; `out` must be contiguous and of the dtype of the column."""
        if out is None:
            out = self.tensor.new_empty((len(slots), self.tensor.shape[1]))
        # With "raise" numpy would gather into a copy first.
        np.take(self._cells, slots, out=self._cells_of(out), mode="clip")
        return out

    def scatter(self, slots: Slots, rows: torch.Tensor) -> None:
        """Write rows [n, width], contiguous and of the dtype of the column, to these slots."""
        np.put(self._cells, slots, self._cells_of(rows), mode="clip")

    def _cells_of(self, rows: torch.Tensor) -> npt.NDArray[np.void]:
        cells: npt.NDArray[np.void] = rows.view(-1).view(torch.uint8).numpy().view(f"V{self._cell_bytes}")
        return cells

    def _populate(self, start: int, num_bytes: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mapping.madvise(MADV_POPULATE_WRITE, first, start + num_bytes - first)
        except OSError as error:
            # Older kernels do not know it: there, pages come one at a time when they are first written.
            if error.errno != errno.EINVAL:
                raise _out_of_memory(num_bytes, self._what, f"the system refuses ({error.strerror})") from error


def reserve(num_bytes: int, what: str) -> mmap.mmap:
    """Addresses without memory: a page costs some when it is first written, and is zero until then."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        return mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except OSError as error:
        raise _out_of_memory(num_bytes, what, f"the system refuses to reserve it ({error.strerror})") from error


def advise_large_pages(mapping: mmap.mmap) -> None:
    # A kernel without them says so, and works.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def check_available(num_bytes: int, what: str, spare_bytes: int = SPARE_BYTES) -> None:
    available = max(0, available_bytes() - spare_bytes)
    if num_bytes > available:
        raise _out_of_memory(num_bytes, what, f"this machine has {available / 2**20:,.0f} MiB available")


def _out_of_memory(num_bytes: int, what: str, why: str) -> MemoryError:
    return MemoryError(
        f"no {num_bytes / 2**20:,.1f} MiB more for {what}: {why}; evict rows, add servers, or give this one more memory"
    )
