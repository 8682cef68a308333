"""Who has no secret cannot keep out who has it: visitors are counted by user."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from paceline.wire import endpoint as endpoints
from paceline.wire.dialing import dial
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity
from tests.wire.helpers import SECRET, soon

NOBODY = 65534
STRANGER = """
    import os, socket, sys, time
    os.setuid(65534)
    held = []
    for _ in range(250):
        one = socket.socket(socket.AF_UNIX)
        one.connect(chr(0) + sys.argv[1])
        held.append(one)
    print("held", flush=True)
    sys.stdin.read()
"""


def credentials() -> Credentials:
    return Credentials(Identity(), SECRET, "worker")


def test_places_are_kept_for_the_owner_whoever_comes() -> None:
    with Endpoint(credentials()) as endpoint:
        for number in range(10):
            for _ in range(200):
                endpoint._admit(f"user {number}")
        assert not endpoint._admit("user 99")
        assert endpoint._handshakes["user 0"] == endpoints.MAX_HANDSHAKES_OF_ONE
        assert endpoint._admit(endpoints.OWN)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_holds_hundreds_of_connections_keeps_out_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "HANDSHAKE_S", 60.0)  # they are held all the time
    with Endpoint(credentials()) as endpoint:
        endpoint.open_room("room")
        command = [sys.executable, "-c", textwrap.dedent(STRANGER), endpoint.local_name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdin is not None
            assert stranger.stdout.readline() == "held\n"
            for number in range(20):
                mine = dial(credentials(), endpoint.local_name, f"room/{number}", deadline=soon(), tls=False, pin=None)
                mine.close()
            assert endpoint._handshakes[f"user {NOBODY}"] <= endpoints.MAX_HANDSHAKES_OF_ONE
            stranger.stdin.close()
