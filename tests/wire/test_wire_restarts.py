"""A process that takes the place of an earlier one: the same certificate, the same names."""

from __future__ import annotations

import pytest

from paceline.errors import AddressError
from paceline.testing.eventually import eventually
from paceline.wire.connection import Connection
from paceline.wire.dialing import dial
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity
from tests.wire.helpers import SECRET, soon


@pytest.mark.parametrize("tls", [False, True])
def test_who_knows_the_first_finds_the_second(tls: bool) -> None:
    first = Identity()
    with Endpoint(Credentials(first, SECRET, "listener"), tls=tls) as endpoint:
        address, local_name = endpoint.address, endpoint.local_name
    second = Identity(first.member, pem=first.to_pem())
    assert (second.fingerprint, second.certificate) == (first.fingerprint, first.certificate)
    mine = Credentials(Identity(), SECRET, "dialer")
    with Endpoint(Credentials(second, SECRET, "listener"), port=address[1], tls=tls, local_name=local_name) as endpoint:
        endpoint.open_room("room", lambda connection, _: connection.close())
        for where in (address, local_name):
            dial(mine, where, "room", deadline=soon(), tls=tls, pin=first.fingerprint).close()


def test_who_came_before_the_room_opened_is_served() -> None:
    mine = Credentials(Identity(), SECRET, "dialer")
    with Endpoint(Credentials(Identity(), SECRET, "listener")) as endpoint:
        connection = dial(mine, endpoint.address, "room", deadline=soon(), tls=False, pin=None)
        eventually(lambda: "room" in endpoint._parked, "the visitor to be parked")
        endpoint.open_room("room", _greet)
        header, _ = connection.receive(deadline=soon())
        assert header.read_body(int) == 5
        connection.close()


def test_a_name_has_one_holder() -> None:
    mine = Credentials(Identity(), SECRET, "listener")
    with Endpoint(mine) as endpoint, pytest.raises(AddressError, match="still run"):
        Endpoint(mine, local_name=endpoint.local_name)


def test_a_pem_that_is_none_is_refused() -> None:
    first, second = Identity(), Identity()
    for pem in (b"", b"no pem", first.to_pem()[:100]):
        with pytest.raises(ValueError, match="to_pem"):
            Identity("m", pem=pem)
    certificate = first.to_pem().partition(b"-----BEGIN PRIVATE KEY")[0]
    key = second.to_pem().partition(b"-----BEGIN PRIVATE KEY")[2]
    with pytest.raises(ValueError, match="do not belong together"):
        Identity("m", pem=certificate + b"-----BEGIN PRIVATE KEY" + key)


def _greet(connection: Connection, _: Visitor) -> None:
    connection.send("hello", 5, deadline=soon())
    connection.close()
