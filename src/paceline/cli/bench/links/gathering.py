"""How the hosts of a measurement find each other.

The first host listens, and prints a code with its address, a secret and its fingerprint. Each of the others dials it
with that code and says every third of a second that it is still there; it is told who else is. One that hangs up is
forgotten again. When all are there, the first host fixes the order, every host learns it with its next word, and all
form one group.

Failure: a code that is none is a `ValueError`. Nobody behind it is an `AddressError`, one host too many a `CallFailed`,
hosts that do not come in time a `DeadlineExceeded`; each says what to do.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from paceline.errors import AddressError, ConnectionLost, WireError
from paceline.wire import calls
from paceline.wire.card import Card
from paceline.wire.codes import AccessCode
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import is_loopback
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity

MAX_NAME = 40
DIAL_S = 15.0
LOOK_S = 0.3
SILENT_S = 15.0  # after which a host that says nothing is taken to be gone

_ROOM = "links"

# Called with the names of the hosts that are here, whenever they change.
OnChange = Callable[[Sequence[str]], None]


class LinksCode(AccessCode, frozen=True, array_like=True):
    """What the first host prints. It is good for as long as that host waits."""

    PREFIX = "paceline-links1:"
    WHAT = "a code of paceline bench links"


class HostEntry(msgspec.Struct, frozen=True):
    name: str
    card: Card


class HostList(msgspec.Struct, frozen=True):
    """Who is here. Once it is complete it does not change any more, and its order is that of the ranks."""

    hosts: tuple[HostEntry, ...]
    num_wanted: int
    run: str

    @property
    def is_complete(self) -> bool:
        return len(self.hosts) == self.num_wanted

    @property
    def names(self) -> tuple[str, ...]:
        """Each of its own, where hosts have the same name by their address."""
        names = [host.name for host in self.hosts]
        for form in ("{name} ({card.address[0]})", "{name} ({card.address[0]}:{card.address[1]})"):
            count = Counter(names)
            names = [
                form.format(name=host.name, card=host.card) if count[name] > 1 else name
                for name, host in zip(names, self.hosts, strict=True)
            ]
        return tuple(names)


class GatheredHosts(msgspec.Struct, frozen=True):
    """All hosts, and which of them this one is; `endpoint` is open."""

    endpoint: Endpoint
    hosts: HostList
    rank: int


class FirstHost:
    """Opens the room; `wait` returns when all are there. Used from one thread; visitors are served on their own."""

    def __init__(self, address: str, name: str, num_hosts: int) -> None:
        secret, identity = secrets.token_bytes(32), Identity()
        tls = not is_loopback(address)
        self._endpoint = Endpoint(Credentials(identity, secret, "worker"), host=address, tls=tls)
        self._changed = threading.Condition()
        self._list = HostList((entry_of(name, self._endpoint),), num_hosts, secrets.token_hex(4))
        self._endpoint.open_room(_ROOM, self._serve)
        self.code = LinksCode(self._endpoint.address, secret, identity.fingerprint, tls).encode()

    def wait(self, wait_s: float, on_change: OnChange) -> GatheredHosts:
        deadline = Deadline(wait_s, "paceline bench links")
        with self._changed:
            while not self._list.is_complete:
                on_change(self._list.names)
                missing = self._list.num_wanted - len(self._list.hosts)
                deadline.check(f"{missing} more hosts; on each: paceline bench links --join CODE")
                self._changed.wait(min(1.0, deadline.remaining_s()))
            on_change(self._list.names)
            return GatheredHosts(self._endpoint, self._list, 0)

    def close(self) -> None:
        self._endpoint.close()

    def _serve(self, connection: Connection, visitor: Visitor) -> None:
        def here(request: calls.CallBody) -> object:
            return self._note(request.read(HostEntry))

        try:
            with contextlib.suppress(WireError):
                calls.serve(connection, {"here": here}, idle_s=SILENT_S, answer_s=SILENT_S)
        finally:
            self._forget(visitor.member)
            connection.close()

    def _note(self, entry: HostEntry) -> HostList:
        with self._changed:
            if entry.card.member not in (host.card.member for host in self._list.hosts):
                if self._list.is_complete:
                    raise ValueError(
                        f"all {self._list.num_wanted} hosts are there; the first host says with --hosts how many"
                    )
                entry = msgspec.structs.replace(entry, name=printable(entry.name))
                self._replace((*self._list.hosts, entry))
            return self._list

    def _forget(self, member: str) -> None:
        with self._changed:
            if not self._list.is_complete:
                self._replace(tuple(host for host in self._list.hosts if host.card.member != member))

    def _replace(self, hosts: tuple[HostEntry, ...]) -> None:
        self._list = msgspec.structs.replace(self._list, hosts=hosts)
        self._changed.notify_all()


def gather_by_code(text: str, name: str, wait_s: float, on_change: OnChange) -> GatheredHosts:
    """Come to the first host, and wait for the others."""
    code = LinksCode.decode(text)
    mine = Credentials(Identity(), code.secret, "worker")
    deadline = Deadline(wait_s, "paceline bench links")
    with contextlib.closing(_dial(code, mine, deadline)) as connection:
        endpoint = Endpoint(mine, host=connection.socket.getsockname()[0], tls=code.tls)
        try:
            for hosts in _hosts_so_far(connection, entry_of(name, endpoint), deadline):
                on_change(hosts.names)
        except BaseException:
            endpoint.close()
            raise
    members = [host.card.member for host in hosts.hosts]
    return GatheredHosts(endpoint, hosts, members.index(mine.identity.member))


def _hosts_so_far(connection: Connection, entry: HostEntry, deadline: Deadline) -> Iterator[HostList]:
    """Until all are there."""
    while True:
        try:
            asking = Deadline(SILENT_S, "asking the first host")
            hosts = calls.call(connection, "here", entry, answer_type=HostList, deadline=asking)
        except ConnectionLost as error:
            raise ConnectionLost(
                f"the first host gave up before all were there ({error}); begin again there"
            ) from error
        yield hosts
        if hosts.is_complete:
            return
        deadline.check(f"{hosts.num_wanted - len(hosts.hosts)} more hosts")
        time.sleep(LOOK_S)


def _dial(code: LinksCode, mine: Credentials, deadline: Deadline) -> Connection:
    within = Deadline(min(DIAL_S, deadline.remaining_s()), "reaching the first host")
    try:
        return code.dial(mine, _ROOM, within)
    except AddressError as error:
        raise AddressError(
            f"the code leads to nobody: {error}; does the first host still wait, and can this one reach it?"
        ) from error


def entry_of(name: str, endpoint: Endpoint) -> HostEntry:
    # A label of its own: two commands on one machine are measured over the network too.
    return HostEntry(printable(name), Card.of(endpoint, endpoint.credentials.identity.member))


def printable(name: str) -> str:
    """What another host calls itself, fit for a terminal."""
    return "".join(letter for letter in name if letter.isprintable())[:MAX_NAME].strip() or "unnamed"
