"""Memory for the state that a newcomer waits for, made ready while it waits.

The first touch of memory can take longer than the copy into it. A worker that waits knows about how much will come: its
model, and what an optimizer like Adam keeps. What comes up short is taken anew, what is too much is given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

import torch

from paceline.checkpoint import room
from paceline.wire import mapping
from paceline.wire.memory import available_bytes


class Staging:
    """One state's worth of memory. `take` may be called once."""

    def __init__(self, expected_bytes: int) -> None:
        self._area: mmap.mmap | None = None
        self._toucher: threading.Thread | None = None
        if 0 < expected_bytes <= available_bytes() // 4:
            with contextlib.suppress(OSError):
                self._area = room.fresh_area(expected_bytes)
        if self._area is not None:
            # A child that is forked meanwhile would make every write a copy.
            self._area.madvise(mmap.MADV_DONTFORK)
            self._toucher = threading.Thread(target=_touch, args=(self._area,), name="paceline-staging", daemon=True)
            self._toucher.start()

    def take(self, form: room.Form) -> list[torch.Tensor]:
        """Tensors of these types and shapes, with anything in them. `OSError` if there is no memory."""
        area, needed = self._area, max(room.bytes_for(form), 1)
        self.release()
        if area is None or len(area) < needed:
            area = room.fresh_area(needed)
        else:
            area.madvise(mmap.MADV_DOFORK)
            kept = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            if kept < len(area):
                area.madvise(mmap.MADV_DONTNEED, kept, len(area) - kept)
        return room.cut(torch.frombuffer(area, dtype=torch.uint8), form)

    def release(self) -> None:
        """Nothing will come."""
        if self._toucher is not None:
            self._toucher.join()
        self._area = self._toucher = None


def _touch(area: mmap.mmap) -> None:
    view = (ctypes.c_char * len(area)).from_buffer(area)
    mapping.populate(ctypes.addressof(view), len(area))
