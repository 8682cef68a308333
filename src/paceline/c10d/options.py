"""What a script may say about its group: `init_process_group("paceline", pg_options=paceline.c10d.Options(...))`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.c10d.errors import Unreachable
from paceline.collective import Group
from paceline.wire.dialing import is_loopback

LOOPBACK = "127.0.0.1"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`host` is the address that this process listens on; without it, the one from which it reaches the store, or
    loopback where the store has no address. `tls` is on unless that is a loopback address. Members with different
    `host_label` do not share memory, even on one machine."""

    host: str = ""
    tls: bool | None = None
    host_label: str = ""

    def __post_init__(self) -> None:
        if self.host in ("0.0.0.0", "::"):
            raise ValueError(f"host={self.host!r} is every address of this machine; give the one that the others use")


class Closeable(Protocol):
    def close(self) -> None: ...


class FormedGroup:
    """A group that exists already, to be torch's next one, the first one of these processes, and what is to be closed
    after both."""

    def __init__(self, group: Group, first: Group, owned: Sequence[Closeable]) -> None:
        self.group = group
        self.first = first
        self.owned = owned


def listening_address(options: Options, store: Store) -> tuple[str, bool]:
    """Where to listen, and whether with TLS."""
    host = options.host or _address_towards(store)
    return host, not is_loopback(host) if options.tls is None else options.tls


def _address_towards(store: Store) -> str:
    """The address of this machine that a store's server sees; a file, or a table in this process, has none."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    if not host or not port or is_loopback(str(host)):
        return LOOPBACK
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: it only asks for the way there
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unreachable(
            f"the way to the store at {host}:{port} cannot be found: {error}; say on which address this process is "
            "reached, with pg_options=paceline.c10d.Options(host=ADDRESS)"
        ) from error
