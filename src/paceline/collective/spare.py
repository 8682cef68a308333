"""The shared memory of a group that does not exist yet, made ready beside the work of the present one.

Every group has memory of its own: a member of an older group that wakes late may still write into that one's. To touch
new pages takes longer than everything else in the forming of a group, so it is done in advance. It costs as much memory
again as the tensors that were asked for, where there is plenty.
"""

from __future__ import annotations

import threading

from paceline.collective.neighbourhood import FIXED_BYTES
from paceline.errors import OutOfSharedMemory
from paceline.wire.memory import SharedMemory, total_bytes, touch

PAUSE_S = 0.5  # what has just changed may change again, and those who wait for it need the cores


class SpareMemory:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: SharedMemory | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def prepare(self, tensor_bytes: int, pause_s: float = PAUSE_S) -> None:
        """Have memory for tensors of this size ready in a while. Does nothing if that is the case, or on its way."""
        with self._changed:
            is_busy = self._thread is not None and self._thread.is_alive()
            if self._closed or is_busy or self._ready is not None or tensor_bytes <= 0:
                return
            arguments = (tensor_bytes, pause_s)
            self._thread = threading.Thread(target=self._prepare, args=arguments, name="paceline-spare", daemon=True)
            self._thread.start()

    def _prepare(self, tensor_bytes: int, pause_s: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, pause_s):
                return
        try:
            memory = SharedMemory.create(FIXED_BYTES + total_bytes())
        except OutOfSharedMemory:
            return  # the group that needs it will say so
        touch(memory, FIXED_BYTES, tensor_bytes)
        with self._changed:
            if not self._closed:
                self._ready = memory
                return
        memory.close()

    def take(self) -> SharedMemory | None:
        """What is ready, if anything is; it belongs to the caller."""
        with self._changed:
            memory, self._ready = self._ready, None
            return memory

    def close(self) -> None:
        with self._changed:
            self._closed = True
            memory, self._ready = self._ready, None
            self._changed.notify_all()
            thread = self._thread
        if memory is not None:
            memory.close()
        if thread is not None:
            thread.join()
