"""Whom a process can reach: found out without a word of the other process, and without a trace there."""

from __future__ import annotations

import logging
import socket

import pytest

from paceline.testing.eventually import eventually
from paceline.wire.endpoint import Endpoint
from paceline.wire.reachable import unreachable
from tests.wire.helpers import credentials, num_welcomes


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address: tuple[str, int] = listener.getsockname()
    return address


def test_who_listens_is_reached_though_it_never_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert unreachable({"silent": silent.getsockname(), "nobody": closed_port()}) == ("nobody",)


def test_nobody_to_reach_is_no_question() -> None:
    assert unreachable({}) == ()


@pytest.mark.parametrize("tls", [True, False])
def test_an_endpoint_is_reached_and_does_not_complain(tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint(credentials(), host="127.0.0.1", tls=tls)
    try:
        with caplog.at_level(logging.WARNING):
            assert unreachable({"here": endpoint.address}) == ()
            eventually(lambda: num_welcomes() == 0, "the end of the visit")
        if tls:  # between hosts there is no other
            assert not caplog.records
    finally:
        endpoint.close()
