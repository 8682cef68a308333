"""Keys, values and who waits for them, for any number of threads. It holds at most `MAX_BYTES`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.wire.deadline import Deadline

MAX_BYTES = 1 << 28


class KeyValueTable:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._put(key, value)

    def append(self, key: str, value: bytes) -> None:
        with self._changed:
            self._put(key, self._values.get(key, b"") + value)

    def add(self, key: str, amount: int) -> int:
        """Count; a key that is not there counts from 0."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set it if it is as expected, or absent where nothing is expected; what it is afterwards."""
        with self._changed:
            current = self._values.get(key)
            if current == expected or (current is None and not expected):
                self._put(key, desired)
                return desired
            return expected if current is None else current

    def wait(self, keys: Sequence[str], deadline: Deadline) -> bool:
        """Whether all keys are there before the deadline."""
        with self._changed:
            return self._wait_for(lambda: all(key in self._values for key in keys), deadline)

    def get(self, key: str, deadline: Deadline) -> bytes | None:
        """Its value, once it is there; None after the deadline."""
        with self._changed:
            if self._wait_for(lambda: key in self._values, deadline):
                return self._values[key]
            return None

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        with self._changed:
            value = self._values.pop(key, None)
            self._num_bytes -= len(key) + len(value) if value is not None else 0
            return value is not None

    def keys(self) -> list[str]:
        with self._changed:
            return list(self._values)

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for(self, is_there: Callable[[], bool], deadline: Deadline) -> bool:
        self._changed.wait_for(lambda: self._closed or is_there(), deadline.remaining_s())
        return is_there()

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._num_bytes + growth > MAX_BYTES:
            raise ValueError(f"the store holds at most {MAX_BYTES >> 20} MiB; delete keys that nobody needs any more")
        self._num_bytes += growth
        self._values[key] = value
        self._changed.notify_all()
