"""Paceline's store as torch's rendezvous and process groups use one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d

from paceline.c10d.errors import StoreFailed
from paceline.errors import PacelineError
from paceline.store import StoreClient, StoreInvitation

DEFAULT_TIMEOUT = timedelta(seconds=300)
# C++ keeps a store, but not the Python half of it, which must not go while C++ may call it.
_kept: set[Store] = set()
_Base: Any = _distributed_c10d.Store  # its stubs do not know what C++ calls by name


class Store(_Base):  # type: ignore[misc]
    """Everything may be called from any thread. C++ calls `getNumKeys` and `deleteKey`, Python the other names."""

    def __init__(self, invitation: StoreInvitation, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._client = StoreClient(invitation)
        self._timeout = timeout
        _kept.add(self)

    @property
    def host(self) -> str:
        return self._client.invitation.address[0]

    @property
    def port(self) -> int:
        return self._client.invitation.address[1]

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> Store:
        """For another thread; each has a connection of its own anyway."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        with _told():
            self._client.set(key, _encoded(value))

    def get(self, key: str) -> bytes:
        with _told():
            return self._client.get(key, self._timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        with _told():
            return self._client.add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with _told():
            return self._client.compare_set(key, _encoded(expected), _encoded(desired))

    def append(self, key: str, value: str | bytes) -> None:
        with _told():
            self._client.append(key, _encoded(value))

    def check(self, keys: Sequence[str]) -> bool:
        with _told():
            return self._client.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with _told():
            self._client.wait(keys, (self._timeout if timeout is None else timeout).total_seconds())

    def delete_key(self, key: str) -> bool:
        with _told():
            return self._client.delete(key)

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        with _told():
            return self._client.keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        """No group is to be made with it any more."""
        _kept.discard(self)
        self._client.close()


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except PacelineError as error:
        raise StoreFailed(str(error)) from error
