"""Beacons: connections that go out the moment the process that lit them dies.

A member lights one to each process that wants to know of its death at once: a connection that passed the handshake and
then stays silent, its near end held by the guardian alone (`guardian.py` says why that is fast). Beside the ordinary
connection between the two, one of both tells of a death before the memory of the dead process is freed.

A beacon that ends (the kernel of the other side closed it) has *gone out*. One that is reset, or says something, does
not tell of a death: that is how beacons are taken away in order, and what trouble in the network looks like. Beacons
between members belong to their endpoints, not to a group: those who meet again in the next group have them already.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable

from paceline.errors import WireError
from paceline.wire.card import Card
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import eventfd
from paceline.wire.dialing import dial
from paceline.wire.endpoint import Endpoint
from paceline.wire.guardian import guardian
from paceline.wire.handshake import Visitor
from paceline.wire.waiting import READ

logger = logging.getLogger("paceline.wire")

BEACONS_ROOM = "beacon"
LIGHTING_S = 5.0
_READ_BYTES = 256


class Beacon:
    """One of ours, until `close` takes it away in order."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    @classmethod
    def of(cls, connection: Connection) -> Beacon | None:
        """Made of a connection whose other end looks for it; None where there is no guardian. The connection is
        given away."""
        kept = guardian().keep(connection.fileno())
        connection.abandon()
        return cls(kept) if kept is not None else None

    def close(self) -> None:
        guardian().drop(self._kept)


class Watch:
    """Somebody who wants to know when the beacon of `member` (or of anybody) goes out, until `close`."""

    def __init__(self, beacons: Beacons, member: str | None, went_out: Callable[[str], None]) -> None:
        self.member = member
        self.went_out = went_out
        self._beacons = beacons

    def close(self) -> None:
        self._beacons.forget(self)


class Beacons:
    """Those of one endpoint, see `beacons_of`. Used from any thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = weakref.ref(endpoint)
        self._lock = threading.Lock()
        self._lit: dict[str, Beacon | None] = {}  # by member; None while it is being lit
        self._seen: dict[int, tuple[str, Connection]] = {}  # those of others, by descriptor
        self._gone: set[str] = set()
        self._watches: set[Watch] = set()
        self._changed = eventfd()
        self._watcher: threading.Thread | None = None
        self._closed = False
        endpoint.open_room(BEACONS_ROOM, self._welcome)
        endpoint.on_close(self.close)

    # -- ours --------------------------------------------------------------------------------------------------------

    def light(self, cards: Iterable[Card]) -> None:
        """For these members, unless that was done; in the background, and if it cannot be done, not at all."""
        with self._lock:
            dark = [card for card in cards if card.member not in self._lit and not self._closed]
            self._lit |= dict.fromkeys(card.member for card in dark)
        if dark:
            threading.Thread(target=self._light_all, args=(dark,), name="paceline-light", daemon=True).start()

    def is_lit(self, member: str) -> bool:
        return self._lit.get(member) is not None

    def _light_all(self, cards: list[Card]) -> None:
        for card in cards:
            beacon = self._light(card)
            with self._lock:
                if beacon is not None and not self._closed:
                    self._lit[card.member] = beacon
                    continue
                self._lit.pop(card.member, None)
            if beacon is not None:
                beacon.close()

    def _light(self, card: Card) -> Beacon | None:
        endpoint = self._endpoint()
        if endpoint is None or not guardian().works:
            return None
        try:
            deadline = Deadline(LIGHTING_S, f"lighting a beacon for {card.role} {card.member}")
            purpose = f"{BEACONS_ROOM}/{card.member}"
            connection = dial(
                endpoint.credentials, card.address, purpose, deadline=deadline, tls=card.tls, pin=card.fingerprint
            )
        except WireError as error:  # it may be gone already; the group finds out by its own connections
            logger.debug("%s", error)
            return None
        return Beacon.of(connection)

    # -- those of others ---------------------------------------------------------------------------------------------

    def watch(self, member: str | None, went_out: Callable[[str], None]) -> Watch:
        """`went_out` is called with the member, once, on another thread, or here and now if it was seen to go out
        before. None stands for all members."""
        watch = Watch(self, member, went_out)
        with self._lock:
            self._watches.add(watch)
            gone = {name for name in self._gone if member in (None, name)}
        for name in gone:
            went_out(name)
        return watch

    def num_seen(self) -> int:
        """How many beacons of others this process can see."""
        return len(self._seen)

    def forget(self, watch: Watch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def _welcome(self, connection: Connection, visitor: Visitor) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._seen[connection.fileno()] = (visitor.member, connection)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch_all, name="paceline-beacons", daemon=True)
                self._watcher.start()
            os.eventfd_write(self._changed.fileno(), 1)

    def _watch_all(self) -> None:
        poll = select.poll()
        poll.register(self._changed.fileno(), READ)
        known: set[int] = set()
        while True:
            ready = [number for number, _ in poll.poll()]
            with self._lock:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._changed.fileno())
                if self._closed:
                    for _, connection in self._seen.values():
                        connection.close()
                    self._changed.close()
                    return
                gone = [self._read(number) for number in ready if number in self._seen]
                for number in known - set(self._seen):
                    poll.unregister(number)
                for number in set(self._seen):
                    poll.register(number, READ | select.POLLRDHUP)
                known = set(self._seen)
                calls = [
                    (watch, member)
                    for member in gone
                    if member is not None
                    for watch in self._watches
                    if watch.member in (None, member)
                ]
            for watch, member in calls:
                watch.went_out(member)

    def _read(self, number: int) -> str | None:
        """The member whose beacon has gone out, if that is what there is to read."""
        member, connection = self._seen[number]
        try:
            if os.read(number, _READ_BYTES):
                member = ""  # taken away in order
        except BlockingIOError:
            return None
        except OSError:  # a reset
            member = ""
        del self._seen[number]
        connection.close()
        if not member:
            return None
        self._gone.add(member)
        return member

    def close(self) -> None:
        """Take ours away in order, and look at no others any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lit = [beacon for beacon in self._lit.values() if beacon is not None]
            if self._watcher is not None:
                os.eventfd_write(self._changed.fileno(), 1)
            else:
                self._changed.close()
        for beacon in lit:
            beacon.close()


_all: weakref.WeakKeyDictionary[Endpoint, Beacons] = weakref.WeakKeyDictionary()
_all_lock = threading.Lock()


def beacons_of(endpoint: Endpoint) -> Beacons:
    with _all_lock:
        if endpoint not in _all:
            _all[endpoint] = Beacons(endpoint)
        return _all[endpoint]
