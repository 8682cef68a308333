"""How a process learns of its run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.control.shell import ticket as tickets
from paceline.control.shell.ticket import Access, Ticket

TICKET = Ticket(
    run="a run",
    folder="/tmp/run",
    address=("10.0.0.1", 4711),
    local_name="paceline-1",
    host="h",
    secret=b"\x00\xffsecret",
    fingerprint=b"\x01" * 32,
    tls=True,
    agent="a1",
)

CHILD = """
import base64, os
from paceline.control.shell import ticket
before = sorted(os.listdir("/proc/self/fd"))
found = ticket.inherited()
assert found.secret == bytes([0, 255]) + b"secret", found
assert found.address == ("10.0.0.1", 4711)
assert ticket.inherited() is None
assert ticket.VARIABLE not in os.environ
assert len(os.listdir("/proc/self/fd")) == len(before) - 1
assert repr(found.secret) not in repr(found)
for place in ("/proc/self/environ", "/proc/self/cmdline"):
    content = open(place, "rb").read()
    assert found.secret not in content and base64.b64encode(found.secret) not in content
print(found.run)
"""


def test_a_child_reads_its_ticket_once() -> None:
    descriptor = tickets.hand_over(TICKET)
    try:
        environment = tickets.environment_for(descriptor)
        child = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, pass_fds=[descriptor], capture_output=True, text=True
        )
    finally:
        os.close(descriptor)
    assert child.stderr == ""
    assert child.stdout == "a run\n"


def test_without_a_ticket_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tickets.VARIABLE, raising=False)
    assert tickets.inherited() is None


@pytest.mark.parametrize("number", ["999999", "none", "-1"])
def test_a_descriptor_that_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv(tickets.VARIABLE, number)
    with pytest.raises(ValueError, match=f"{tickets.VARIABLE}={number} does not lead to a Ticket"):
        tickets.inherited()
    assert tickets.VARIABLE not in os.environ


def test_another_thing_than_a_ticket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tickets.VARIABLE, str(tickets.hand_over({"run": 5})))
    with pytest.raises(ValueError, match="does not lead to a Ticket"):
        tickets.inherited()


def test_a_pipe_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    descriptor = tickets.hand_over(TICKET)
    os.write(writer, os.pread(descriptor, 1 << 16, 0))
    os.close(writer)
    os.close(descriptor)
    monkeypatch.setenv(tickets.VARIABLE, str(reader))
    assert tickets.inherited() == TICKET


def test_the_access_file_is_whole_and_private(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run is going on"):
        tickets.read_access(tmp_path)
    for pid in (1, 2):
        tickets.write_access(tmp_path, Access(pid, TICKET))
        assert tickets.read_access(tmp_path) == Access(pid, TICKET)
        assert (tmp_path / tickets.ACCESS_FILE).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [tickets.ACCESS_FILE]
    (tmp_path / tickets.ACCESS_FILE).write_bytes(b"{")
    with pytest.raises(ValueError, match="cannot be read"):
        tickets.read_access(tmp_path)
    tickets.remove_access(tmp_path)
    tickets.remove_access(tmp_path)
