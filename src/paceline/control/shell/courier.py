"""A process's one connection to the coordinator, kept for as long as the process wants it.

One thread connects (over the Unix socket where the coordinator is on this host, else by TCP with the pinned
certificate), says what its owner composes, at once when there is something new and at least every `heartbeat_s`, and
hands what it hears to its owner. When the connection is lost it connects again, with growing pauses, without end;
whoever is not heard of for `orphan_s` is reported once.

Latency: `speak` wakes the thread by a descriptor, and the answer wakes it by its socket; nothing is polled for.
"""

from __future__ import annotations

import logging
import random
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.control.shell.line import Bell, ControlConnection
from paceline.control.shell.ticket import Ticket
from paceline.errors import AddressError, ConnectionLost, WireError
from paceline.wire.beacon import BEACONS_ROOM, Beacon
from paceline.wire.card import this_host
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import dial
from paceline.wire.frame import Header
from paceline.wire.handshake import Credentials
from paceline.wire.waiting import PLAIN, READ, Waiter, Wanted

logger = logging.getLogger("paceline.control")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
CONNECTING_S = 5.0
BEACON_S = 1.0
QUIET_S = 5.0
SILENT_LINE_S = 15.0  # an answer comes to every heartbeat; without any, the connection is taken for dead

BYE = "bye"


class CourierCallbacks(NamedTuple):
    """Called by the courier's thread. `compose` gives the frames to send now, `hear` gets every frame, `is_spent` says
    whether everything was said and heard, so that the connection may end."""

    compose: Callable[[], Iterable[tuple[str, Any]]]
    hear: Callable[[Header], None]
    on_connected: Callable[[], None]
    on_orphaned: Callable[[], None]
    is_spent: Callable[[], bool]


def reach(ticket: Ticket, mine: Credentials, purpose: str, *, deadline: Deadline, waiter: Waiter = PLAIN) -> Connection:
    """A connection to the coordinator, by the shorter way if there is one."""
    if ticket.host == this_host():
        try:
            return dial(
                mine, ticket.local_name, purpose, deadline=deadline, tls=False, pin=ticket.fingerprint, waiter=waiter
            )
        except AddressError:
            pass  # nobody there; the address below may say more
    return dial(mine, ticket.address, purpose, deadline=deadline, tls=ticket.tls, pin=ticket.fingerprint, waiter=waiter)


class Courier:
    def __init__(
        self,
        ticket: Ticket,
        mine: Credentials,
        purpose: str,
        owner: CourierCallbacks,
        *,
        heartbeat_s: float,
        orphan_s: float,
        lights_beacon: bool = False,
    ) -> None:
        if not 0 < heartbeat_s < SILENT_LINE_S:
            raise ValueError(f"heartbeat_s={heartbeat_s} must be above 0 and below {SILENT_LINE_S:g} s")
        self._ticket, self._mine, self._purpose = ticket, mine, purpose
        self._owner = owner
        self._heartbeat_s = heartbeat_s
        self._orphan_s = orphan_s
        self._lights_beacon = lights_beacon
        self._bell = Bell()
        self._news = False
        self._heard = time.monotonic()
        self._orphaned = False
        self._ends_at: float | None = None  # set by close
        self._persists = True
        self._last_complaint = ""
        self._thread = threading.Thread(target=self._run, name="paceline-courier", daemon=True)

    def start(self) -> None:
        self._heard = time.monotonic()
        self._thread.start()

    def speak(self) -> None:
        """There is something new to say. From any thread; does not wait."""
        self._news = True
        self._bell.ring()

    @property
    def is_closing(self) -> bool:
        return self._ends_at is not None

    def unheard_s(self) -> float:
        return time.monotonic() - self._heard

    def close(self, flush_s: float, *, persist: bool) -> None:
        """Say the last word within `flush_s`, then end. Who persists also connects again for that."""
        self._persists = persist
        self._ends_at = time.monotonic() + flush_s
        self.speak()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()
        if self._thread.ident is None:
            self._bell.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while not self._is_over():
                heard = self._heard
                try:
                    self._serve_one()
                except WireError as error:
                    self._complain(error)
                if self._heard > heard:
                    pause_s = FIRST_PAUSE_S
                if self._ends_at is not None and not self._persists:
                    return
                # Unequal pauses keep a thousand members from coming back in one moment.
                self._pause(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._bell.close()

    def _is_over(self) -> bool:
        return self._ends_at is not None and time.monotonic() >= self._ends_at

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not self._is_over():
            self._check_orphaned()
            poll = select.poll()
            poll.register(self._bell.fileno(), READ)
            poll.poll(left_s * 1000)
            self._bell.silence()  # that there is news is kept in `_news`
            if self._ends_at is not None and not self._persists:
                return

    def _serve_one(self) -> None:
        deadline = Deadline(CONNECTING_S, f"connecting to the coordinator of run {self._ticket.run}")
        connection = reach(self._ticket, self._mine, self._purpose, deadline=deadline, waiter=_Interruptible(self))
        connection.waiter = PLAIN
        line = ControlConnection(connection, self._bell)
        beacon = self._light_beacon() if self._lights_beacon else None
        try:
            self._owner.on_connected()
            self._converse(line)
        finally:
            line.close()
            if beacon is not None:
                beacon.close()

    def _light_beacon(self) -> Beacon | None:
        """So that the coordinator hears of the end of this process before its memory is freed."""
        try:
            deadline = Deadline(BEACON_S, "lighting a beacon for the coordinator")
            purpose = f"{BEACONS_ROOM}/{self._mine.identity.member}"
            return Beacon.of(reach(self._ticket, self._mine, purpose, deadline=deadline, waiter=_Interruptible(self)))
        except WireError as error:
            logger.debug("%s", error)
            return None

    def _converse(self, line: ControlConnection) -> None:
        beat_at = 0.0
        says_bye = False
        while True:
            now = time.monotonic()
            if (self._news or now >= beat_at) and not says_bye:
                self._news = False
                for kind, body in self._owner.compose():
                    line.put(kind, body)
                beat_at = now + self._heartbeat_s
                if self._ends_at is not None and self._owner.is_spent():
                    line.put(BYE, None)  # after the last word; the answer says that it was heard
                    says_bye = True
            line.send()
            line.wait(min(beat_at, self._ends_at or beat_at) - time.monotonic())
            for header in line.frames():
                self._heard = time.monotonic()
                self._orphaned = False
                if header.kind == BYE:
                    if says_bye:
                        self._ends_at = time.monotonic()
                    return
                self._owner.hear(header)
            if self._is_over():
                return
            if time.monotonic() - line.heard > SILENT_LINE_S:
                raise ConnectionLost(f"{line.connection.peer} does not answer")
            self._check_orphaned()

    def _check_orphaned(self) -> None:
        if not self._orphaned and self.unheard_s() > self._orphan_s:
            self._orphaned = True
            self._owner.on_orphaned()

    def _complain(self, error: WireError) -> None:
        """Once for each kind of trouble, and again when it has changed."""
        kind = type(error).__name__
        # A coordinator that is still starting, or is started again, is no trouble yet.
        is_early = self.unheard_s() < QUIET_S
        is_known = kind == self._last_complaint or self._ends_at is not None
        level = logging.DEBUG if is_known or is_early else logging.WARNING
        self._last_complaint = "" if is_early else kind
        logger.log(level, "no connection to the coordinator: %s; trying again", error)


class _Interruptible:
    """Ends a wait for the coordinator when its owner does not want it any more."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        courier = self._courier
        poll = select.poll()
        poll.register(courier._bell.fileno(), READ)
        for descriptor, events in wanted:
            poll.register(descriptor, events)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(deadline.remaining_ms())}
            courier._bell.silence()
            if courier._is_over() or (courier._ends_at is not None and not courier._persists):
                raise ConnectionLost("the connection is not wanted any more")
            if ready - {courier._bell.fileno()}:
                return
            if not ready:
                raise deadline.error(waited_for)
