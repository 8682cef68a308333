"""Who comes in crowds, or with memory that may shrink, harms nobody else."""

from __future__ import annotations

import os

import pytest

from paceline.errors import ConnectionLost, ProtocolError
from paceline.testing.eventually import eventually
from paceline.wire import endpoint as endpoints
from paceline.wire.connection import Connection
from paceline.wire.descriptors import Fd
from paceline.wire.dialing import connect
from paceline.wire.endpoint import Endpoint
from paceline.wire.mapping import PAGE
from paceline.wire.memory import SharedMemory
from paceline.wire.waiting import PLAIN
from tests.wire.helpers import assert_serves, credentials, soon


def test_silent_visitors_of_one_address_do_not_keep_those_of_this_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_HANDSHAKES_OF_ONE", 4)
    with Endpoint(credentials(role="server")) as endpoint:
        crowd = [connect(endpoint.address, soon(), PLAIN) for _ in range(10)]
        eventually(lambda: endpoint._handshakes["127.0.0.1"] == 4, "the address has its share")
        assert_serves(endpoint, local=True)
        for connection in crowd:
            connection.close()
        eventually(lambda: not endpoint._handshakes, "the crowd is gone")
        assert_serves(endpoint)


def test_a_visitor_over_the_share_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_HANDSHAKES_OF_ONE", 1)
    with Endpoint(credentials(role="server")) as endpoint:
        first = connect(endpoint.address, soon(), PLAIN)
        eventually(lambda: endpoint._handshakes.total() == 1, "the first is in its handshake")
        second = connect(endpoint.address, soon(), PLAIN)
        eventually(lambda: is_closed(second), "the second is closed")
        first.close()
        second.close()


def is_closed(connection: Connection) -> bool:
    try:
        connection.receive_some(memoryview(bytearray(1)))
    except ConnectionLost:
        return True
    return False


def test_memory_that_may_shrink_is_not_attached() -> None:
    descriptor = Fd(os.memfd_create("paceline-unsealed"))
    os.ftruncate(descriptor.fileno(), PAGE)
    with pytest.raises(ProtocolError, match="not fixed"):
        SharedMemory.attach(descriptor)
    descriptor.close()


def test_nobody_can_shrink_memory_that_was_handed_over() -> None:
    memory = SharedMemory.create(4 * PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor.fileno(), PAGE)
    attached = SharedMemory.attach(Fd(os.dup(memory.descriptor.fileno())))
    memory.bytes[0] = 7
    assert int(attached.bytes[0]) == 7
    attached.close()
    memory.close()
