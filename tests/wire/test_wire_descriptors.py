"""A forked child keeps no descriptor of the wire, so the death of its parent is seen at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConnectionLost, ProtocolError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import Fd, creating, eventfd, pidfd_of_self
from paceline.wire.endpoint import Endpoint
from paceline.wire.handover import receive_descriptors, send_descriptors
from paceline.wire.memory import Arena, SharedMemory
from tests.wire.helpers import (
    SECRET,
    WAIT_S,
    assert_serves,
    connected,
    credentials,
    in_fork,
    open_sockets_and_anonymous,
    soon,
    visit,
)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_forked_child_has_none_of_its_parents_descriptors_and_the_parents_still_work(tls: bool) -> None:
    foreign = open_sockets_and_anonymous()
    with (
        Endpoint(credentials(), tls=tls) as endpoint,
        connected("unix") as (alice, bob),
        connected("tls") as (carol, dan),
    ):
        dialed = visit(endpoint, "room/x")
        accepted, _ = endpoint.expect("room/x").wait(soon(), "the visitor")
        waiting = endpoint.expect("room/never")
        memory = SharedMemory.create(1 << 20)
        tensor = Arena(memory, 0).empty((10,), torch.uint8).fill_(3)
        signal_fd, process = eventfd(), pidfd_of_self()
        here = open_sockets_and_anonymous()
        assert len(here) - len(foreign) >= 12, "the test must have something to find"

        def look() -> list[Any]:
            left = {
                name: target for name, target in open_sockets_and_anonymous().items() if foreign.get(name) != target
            }
            usable = []
            for owner in (alice, carol, dialed, accepted):
                with contextlib.suppress(ConnectionLost):
                    owner.send("from the child", None, deadline=soon())
                    usable.append(owner.peer)
            endpoint.close()  # says nothing to anybody, and does not hang
            return [left, usable]

        assert in_fork(look) == [{}, []]

        for sender, receiver in [(alice, bob), (dan, carol), (dialed, accepted), (accepted, dialed)]:
            sender.send("hi", 1, [torch.ones(3)], deadline=soon())
            assert receiver.receive(deadline=soon())[0].kind == "hi"
        assert_serves(endpoint)
        assert_serves(endpoint, local=True)
        os.eventfd_write(signal_fd.fileno(), 1)
        assert os.eventfd_read(signal_fd.fileno()) == 1
        assert tensor.tolist() == [3] * 10
        assert memory.committed_bytes() > 0
        memory.close()
        for owner in (dialed, accepted, signal_fd, process, waiting._arrived):
            owner.close()


def test_a_forked_child_can_open_and_fork_itself() -> None:
    with connected("unix"):

        def open_and_fork() -> Any:
            with connected("unix") as (alice, bob):
                alice.send("hi", None, deadline=soon())
                kind = bob.receive(deadline=soon())[0].kind
                mine = {str(alice.fileno()), str(bob.fileno())}
                return [kind, in_fork(lambda: sorted(mine & set(os.listdir("/proc/self/fd"))))]

        kind, inherited = in_fork(open_and_fork)
        assert kind == "hi"
        listing = 1  # the descriptor that lists the folder may have one of the numbers
        assert len(inherited) <= listing


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_death_of_a_trainer_is_seen_although_its_loader_workers_live(tls: bool) -> None:
    with Endpoint(credentials(), tls=tls) as endpoint:
        told = {"port": endpoint.address[1], "secret": SECRET.hex(), "tls": tls}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        trainer = subprocess.Popen(
            [sys.executable, "-m", "tests.wire.trainer"], stdin=subprocess.PIPE, env=environment, text=True
        )
        workers: list[int] = []
        try:
            assert trainer.stdin is not None
            trainer.stdin.write(json.dumps(told) + "\n")
            trainer.stdin.close()
            connection, _ = endpoint.expect("room/x").wait(soon("a trainer"), "its visit")
            loading = connection.receive(deadline=soon("a trainer"))[0].read_body(dict)
            workers = loading["workers"]
            assert len(workers) == 2
            os.kill(loading["pid"], signal.SIGKILL)
            with pytest.raises(ConnectionLost, match="worker"):
                connection.receive(deadline=Deadline(2.0, "seeing the death of a trainer"))
            assert all(map(is_alive, workers)), "the workers must outlive the trainer for this to show anything"
            connection.close()
        finally:
            trainer.kill()
            trainer.wait()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


def test_a_fork_never_catches_a_connection_that_is_being_made() -> None:
    """Threads open and close connections all the time; no child may find one."""
    stop = threading.Event()
    foreign = set(open_sockets_and_anonymous().values())
    problems: list[BaseException] = []

    with Endpoint(credentials()) as endpoint:

        def come_and_go(local: bool) -> None:
            number = 0
            try:
                while not stop.is_set():
                    number += 1
                    purpose = f"room/{local}/{number}"
                    dialed = visit(endpoint, purpose, local=local)
                    accepted, _ = endpoint.expect(purpose).wait(soon(), "the visitor")
                    dialed.close()
                    accepted.close()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=come_and_go, args=(local,)) for local in (False, True)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(60):
                found = in_fork(lambda: [t for t in open_sockets_and_anonymous().values() if t.startswith("socket:")])
                assert set(found) <= foreign, "a child inherited a connection"
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert not problems


def test_a_fork_waits_for_who_is_creating() -> None:
    """A descriptor that exists but is not registered yet must not be seen by a child."""
    made, go = threading.Event(), threading.Event()
    opened: list[Fd] = []

    def create_slowly() -> None:
        with creating:
            number = os.eventfd(0)
            made.set()
            go.wait(0.2)
            opened.append(Fd(number))

    thread = threading.Thread(target=create_slowly)
    thread.start()
    assert made.wait(WAIT_S)
    left = in_fork(lambda: [target for target in open_sockets_and_anonymous().values() if "eventfd" in target])
    thread.join(WAIT_S)
    opened[0].close()
    assert left == []


# -- handing over ----------------------------------------------------------------------------------------------------


def test_descriptors_are_handed_over_and_are_the_same_files() -> None:
    with connected("unix") as (alice, bob):
        mine = [eventfd() for _ in range(5)]
        send_descriptors(alice, mine, soon())
        theirs = receive_descriptors(bob, 5, soon())
        for number, descriptor in enumerate(mine):
            os.eventfd_write(descriptor.fileno(), 1)
            assert os.eventfd_read(theirs[number].fileno()) == 1
            assert not os.get_inheritable(theirs[number].fileno())
        for descriptor in [*mine, *theirs]:
            descriptor.close()


@pytest.mark.parametrize("num_sent", [0, 1, 3])
def test_another_number_of_descriptors_than_agreed_is_a_protocol_error_and_none_stays(num_sent: int) -> None:
    with connected("unix") as (alice, bob):
        mine = [eventfd() for _ in range(num_sent)]
        before = len(os.listdir("/proc/self/fd"))
        send_descriptors(alice, mine, soon())
        with pytest.raises(ProtocolError, match="alice handed over"):
            receive_descriptors(bob, 2, soon())
        assert len(os.listdir("/proc/self/fd")) == before
        for descriptor in mine:
            descriptor.close()


def test_who_leaves_instead_of_handing_over_is_named() -> None:
    with connected("unix") as (alice, bob):
        alice.close()
        with pytest.raises(ConnectionLost, match="alice"):
            receive_descriptors(bob, 1, soon())
        with pytest.raises(ConnectionLost, match="alice"):
            send_descriptors(bob, [], soon())


def test_a_connection_of_a_closed_socket_is_closed() -> None:
    one, other = socket.socketpair()
    connection = Connection(one, peer="other")
    assert not connection.closed
    connection.abandon()
    assert connection.closed
    connection.abandon()
    other.close()
