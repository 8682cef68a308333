"""Paceline's store as torch's rendezvous and process groups use one. Nothing here registers anything with torch: a
script that runs on other backends has its world as torch would have made it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from paceline.errors import PacelineError
from paceline.store.client import StoreClient
from paceline.store.service import StoreInvitation
from paceline.wire.deadline import MAX_SECONDS

DEFAULT_TIMEOUT = timedelta(seconds=300)
# C++ keeps a store, but not the Python half of it, which must not go while C++ may call it.
_kept: set[TorchStore] = set()
_Base: Any = _distributed_c10d.Store  # its stubs do not know what C++ calls by name


class StoreFailed(dist.DistStoreError):
    """The store is gone, or somebody did not come to it."""


class TorchStore(_Base):  # type: ignore[misc]
    """Everything may be called from any thread. C++ calls `getNumKeys` and `deleteKey`, Python the other names. The
    timeout is kept by the base, where torch sets it through every `PrefixStore`."""

    def __init__(self, invitation: StoreInvitation, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._client = StoreClient(invitation)
        self.set_timeout(timeout)
        _kept.add(self)

    @property
    def host(self) -> str:
        return self._client.invitation.address[0]

    @property
    def port(self) -> int:
        return self._client.invitation.address[1]

    def clone(self) -> TorchStore:
        """For another thread; each has a connection of its own anyway."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        with _told():
            self._client.set(key, _encoded(value))

    def get(self, key: str) -> bytes:
        with _told():
            return self._client.get(key, _seconds(self.timeout))

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
            self._client.wait(keys, _seconds(self.timeout if timeout is None else timeout))

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


def _seconds(timeout: timedelta) -> float:
    """To torch's stores 0 is no timeout; its RPC waits for as long as a number of milliseconds can say."""
    return min(timeout.total_seconds(), MAX_SECONDS) if timeout > timedelta(0) else MAX_SECONDS


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except PacelineError as error:
        raise StoreFailed(str(error)) from error
