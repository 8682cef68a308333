"""Beacons go out when the process that lit them dies, and at nothing else; nobody but the guardian holds them."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from pathlib import Path

import pytest

from paceline.testing.eventually import eventually
from paceline.wire.beacon import beacons_of
from paceline.wire.card import Card
from paceline.wire.endpoint import Endpoint
from paceline.wire.guardian import guardian
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity
from tests.wire.helpers import SECRET, WAIT_S


def endpoint_of(member: str, *, tls: bool) -> Endpoint:
    return Endpoint(Credentials(identity=Identity(member), secret=SECRET, role="worker"), tls=tls)


class Lit:
    """A forked process that has lit a beacon for `card`, and then waits to be told to close its endpoint or killed."""

    def __init__(self, card: Card, *, forks: bool = False) -> None:
        ready, says = os.pipe()
        hears, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            endpoint = endpoint_of("lighter", tls=card.tls)
            beacons = beacons_of(endpoint)
            beacons.light([card])
            eventually(lambda: beacons.is_lit(card.member), "a beacon")
            child = os.fork() if forks else -1
            if child == 0:
                signal.pause()
                os._exit(0)
            os.write(says, f"{child:9}".encode())
            os.read(hears, 1)
            endpoint.close()
            os.read(hears, 1)
            os._exit(0)
        os.close(hears)
        self.child = int(os.read(ready, 9))
        for number in (ready, says):
            os.close(number)

    def close_endpoint(self) -> None:
        os.write(self._go, b"c")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._go)
        if self.child > 0:
            os.kill(self.child, signal.SIGKILL)


both = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@both
def test_a_death_is_heard_of_once(tls: bool) -> None:
    with endpoint_of("watcher", tls=tls) as watcher:
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        beacons_of(watcher).watch("lighter", heard.put)
        beacons_of(watcher).watch("another", heard.put)
        lit = Lit(Card.of(watcher))
        assert heard.empty()
        lit.kill()
        assert heard.get(timeout=WAIT_S) == "lighter"
        assert heard.empty()


@both
def test_a_death_from_before_the_watch_is_heard_of_too(tls: bool) -> None:
    with endpoint_of("watcher", tls=tls) as watcher:
        first, second = threading.Event(), threading.Event()
        beacons_of(watcher).watch("lighter", lambda _: first.set())
        Lit(Card.of(watcher)).kill()
        assert first.wait(WAIT_S)
        beacons_of(watcher).watch("lighter", lambda _: second.set())
        assert second.is_set()


@both
def test_who_closes_its_endpoint_in_order_did_not_die(tls: bool) -> None:
    with endpoint_of("watcher", tls=tls) as watcher:
        heard = threading.Event()
        beacons_of(watcher).watch("lighter", lambda _: heard.set())
        lit = Lit(Card.of(watcher))
        eventually(lambda: beacons_of(watcher).num_seen() == 1, "the beacon to be seen")
        lit.close_endpoint()
        eventually(lambda: beacons_of(watcher).num_seen() == 0, "the beacon to be taken away")
        lit.kill()
        assert not heard.is_set()


@both
def test_a_watch_that_was_closed_is_not_called(tls: bool) -> None:
    with endpoint_of("watcher", tls=tls) as watcher:
        heard, later = threading.Event(), threading.Event()
        beacons_of(watcher).watch("lighter", lambda _: heard.set()).close()
        beacons_of(watcher).watch("lighter", lambda _: later.set())
        Lit(Card.of(watcher)).kill()
        assert later.wait(WAIT_S)
        assert not heard.is_set()


@both
def test_a_child_of_the_dead_does_not_keep_its_beacon(tls: bool) -> None:
    """As loader workers are: they live on for a while."""
    with endpoint_of("watcher", tls=tls) as watcher:
        heard = threading.Event()
        beacons_of(watcher).watch("lighter", lambda _: heard.set())
        lit = Lit(Card.of(watcher), forks=True)
        os.kill(lit.pid, signal.SIGKILL)
        assert heard.wait(WAIT_S)
        os.kill(lit.child, 0)  # it lives
        lit.kill()


def inodes(folder: str) -> set[str]:
    found = set()
    for path in Path(folder).iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found.add(os.readlink(path))
    return found


def test_only_the_guardian_has_what_it_keeps() -> None:
    """That is what makes it fast: the table that all other threads share is closed after the memory is freed."""
    ours, theirs = socket.socketpair()
    name = os.readlink(f"/proc/self/fd/{theirs.fileno()}")
    kept = guardian().keep(theirs.fileno())
    assert kept is not None
    theirs.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "paceline-guardian"]
    assert name in inodes(f"/proc/self/task/{thread.native_id}/fd")
    assert name not in inodes(f"/proc/self/task/{threading.main_thread().native_id}/fd")
    ours.settimeout(WAIT_S)
    guardian().drop(kept)
    assert ours.recv(2) == b"\0"
    assert ours.recv(1) == b""
    ours.close()


def test_the_guardian_has_nothing_else() -> None:
    """Else the other ends of connections that this process closes would not be told."""
    ours, theirs = socket.socketpair()
    guardian()
    theirs.close()
    ours.settimeout(WAIT_S)
    assert ours.recv(1) == b""
    ours.close()


def test_what_cannot_be_kept_is_said() -> None:
    assert guardian().keep(987_654) is None
