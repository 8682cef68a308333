"""A lab's hosts share nothing but cables, the cables keep their rate, and nothing of a lab stays behind."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from paceline.testing import netlab
from paceline.testing.eventually import eventually
from paceline.testing.netlab import Host, Netlab, NetlabError

T = TypeVar("T")

WAIT_S = 30.0
needs_netlab = pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "available")


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with Netlab(2) as built:
        yield built


def in_network_of(host: Host | None, work: Callable[[], T]) -> T:
    """Run `work` in a thread that entered the host's network (None: the machine's own)."""
    enter = (lambda: None) if host is None else host.enter
    with ThreadPoolExecutor(1, initializer=enter) as pool:
        return pool.submit(work).result(WAIT_S)


def listen(host: Host, address: str, port: int = 0) -> socket.socket:
    def make() -> socket.socket:
        listener = socket.create_server((address, port))
        listener.settimeout(WAIT_S)
        return listener

    return in_network_of(host, make)


def connect(host: Host | None, address: str, port: int) -> socket.socket:
    return in_network_of(host, lambda: socket.create_connection((address, port), timeout=WAIT_S))


def connected_pair(sender: Host, receiver: Host) -> tuple[socket.socket, socket.socket]:
    with listen(receiver, receiver.address) as listener:
        outgoing = connect(sender, *listener.getsockname())
        incoming, _ = listener.accept()
    incoming.settimeout(WAIT_S)
    return outgoing, incoming


def transfer_s(sender: Host, receiver: Host, num_bytes: int) -> float:
    """How long it takes until the receiver has all of the bytes."""
    outgoing, incoming = connected_pair(sender, receiver)
    with outgoing, incoming, ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        sending = pool.submit(outgoing.sendall, bytes(num_bytes))
        num_received = 0
        while num_received < num_bytes:
            chunk = incoming.recv(1 << 18)
            assert chunk, "the sender closed early"
            num_received += len(chunk)
        sending.result(WAIT_S)
        return time.monotonic() - begun


def refuses_on_loopback(host: Host | None, port: int) -> bool:
    def attempt() -> bool:
        # Holding the port, without listening, keeps others from it, and this connection from meeting itself.
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", port))
            try:
                socket.create_connection(("127.0.0.1", port), timeout=WAIT_S).close()
            except ConnectionRefusedError:
                return True
            return False

    return in_network_of(host, attempt)


def listed_namespaces() -> set[str]:
    result = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=WAIT_S, check=True)
    return {line.split()[0] for line in result.stdout.splitlines()}


def own_namespaces() -> set[str]:
    return {name for name in listed_namespaces() if name.startswith(f"pl-{os.getpid()}-")}


def has_exited(pidfd: int, timeout_s: float = 0.0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def not_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def start_script(script: str) -> subprocess.Popen[str]:
    """Start Python code in a process of its own that can import the module under test."""
    source_dir = str(Path(netlab.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source_dir},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_words(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0], "the script said nothing"
    return process.stdout.readline().split()


# What hosts share, and what they do not


@needs_netlab
def test_hosts_reach_each_other_by_address(lab: Netlab) -> None:
    with listen(lab.hosts[0], lab.hosts[0].address) as listener:
        outgoing = connect(lab.hosts[1], *listener.getsockname())
        incoming, peer = listener.accept()
    with outgoing, incoming:
        outgoing.sendall(b"hello")
        incoming.settimeout(WAIT_S)
        assert incoming.recv(5, socket.MSG_WAITALL) == b"hello"
    assert peer[0] == lab.hosts[1].address


@needs_netlab
def test_loopback_is_each_hosts_own(lab: Netlab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
    with listen(lab.hosts[0], "0.0.0.0", port):
        connect(lab.hosts[0], "127.0.0.1", port).close()
        assert refuses_on_loopback(lab.hosts[1], port)
        assert refuses_on_loopback(None, port)


@needs_netlab
def test_the_machine_gets_no_new_interfaces(lab: Netlab) -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert names.isdisjoint({"switch", "port0", "port1"})
    assert in_network_of(lab.hosts[0], lambda: {name for _, name in socket.if_nameindex()}) >= {"lo", "eth0"}


@needs_netlab
def test_abstract_unix_sockets_are_each_hosts_own(lab: Netlab) -> None:
    name = f"\0paceline-netlab-{os.getpid()}"

    def connect_unix() -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(WAIT_S)
            client.connect(name)

    with in_network_of(lab.hosts[0], lambda: socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(name)
        listener.listen()
        in_network_of(lab.hosts[0], connect_unix)
        for elsewhere in (lab.hosts[1], None):
            with pytest.raises(ConnectionRefusedError):
                in_network_of(elsewhere, connect_unix)


@needs_netlab
def test_two_labs_do_not_meet(lab: Netlab) -> None:
    with Netlab(1) as other, listen(lab.hosts[0], "0.0.0.0") as listener:
        assert other.hosts[0].address == lab.hosts[0].address
        assert other.hosts[0].name != lab.hosts[0].name
        assert refuses_on_loopback(other.hosts[0], listener.getsockname()[1])


# Links


@needs_netlab
@pytest.mark.parametrize("outward", [True, False], ids=["host sends", "host receives"])
def test_rate_holds_in_each_direction(outward: bool) -> None:
    rate, rate_bits, num_bytes = "20mbit", 20_000_000, 1_000_000
    with Netlab(2, rate=rate) as lab:
        limited, free = lab.hosts
        free.set_rate(None)
        # The limit has to survive the cable's being pulled and plugged in.
        limited.cut()
        limited.mend()
        took_s = transfer_s(limited, free, num_bytes) if outward else transfer_s(free, limited, num_bytes)
    # A token bucket lets one burst pass at once, and the rest no faster than its rate.
    assert took_s >= (num_bytes - netlab.burst_bytes(rate)) * 8 / rate_bits


@needs_netlab
def test_set_rate_limits_and_frees_both_ends(lab: Netlab) -> None:
    host = lab.hosts[0]

    def limits() -> list[bool]:
        ends = ((host.name, "eth0"), (host.switch_name, host.switch_port))
        shown = [
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "show", "dev", device],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=True,
            ).stdout
            for namespace, device in ends
        ]
        return ["tbf" in text and "rate 300Mbit" in text for text in shown]

    assert limits() == [False, False]
    host.set_rate("300mbit")
    assert limits() == [True, True]
    host.set_rate(None)
    assert limits() == [False, False]


@needs_netlab
def test_cut_stops_traffic_and_mend_restores_it(lab: Netlab) -> None:
    outgoing, incoming = connected_pair(*lab.hosts)
    with outgoing, incoming:
        outgoing.sendall(b"a")
        assert incoming.recv(1) == b"a"
        lab.hosts[1].cut()
        outgoing.sendall(b"b")
        incoming.settimeout(0.3)
        with pytest.raises(TimeoutError):
            incoming.recv(1)
        lab.hosts[1].mend()
        incoming.settimeout(WAIT_S)
        assert incoming.recv(1) == b"b"


@needs_netlab
def test_what_one_host_sends_to_another_is_lost_and_nothing_else(lab: Netlab) -> None:
    outgoing, incoming = connected_pair(*lab.hosts)
    with outgoing, incoming:
        outgoing.sendall(b"a")
        assert incoming.recv(1) == b"a"
        lab.hosts[0].lose(lab.hosts[1])
        outgoing.sendall(b"b")
        incoming.sendall(b"c")
        assert outgoing.recv(1) == b"c"
        incoming.settimeout(0.3)
        with pytest.raises(TimeoutError):
            incoming.recv(1)
        lab.hosts[0].find(lab.hosts[1])
        incoming.settimeout(WAIT_S)
        assert incoming.recv(1) == b"b"


# Commands inside


@needs_netlab
def test_popen_gives_the_commands_own_pid_and_signals(lab: Netlab) -> None:
    process = lab.hosts[0].popen(["sh", "-c", "echo $$; exec sleep 300"], stdout=subprocess.PIPE, text=True)
    assert read_words(process) == [str(process.pid)]
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGTERM


@needs_netlab
def test_run_returns_status_and_output(lab: Netlab) -> None:
    result = lab.hosts[1].run(["sh", "-c", "ip -o -4 address show dev eth0; exit 3"], timeout_s=WAIT_S)
    assert result.returncode == 3
    assert lab.hosts[1].address in result.stdout
    assert lab.hosts[1].run(["no-such-command"], timeout_s=WAIT_S).returncode == 127


@needs_netlab
def test_run_kills_the_whole_command_after_its_timeout(lab: Netlab, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The shell stays its parent, and the shell's own end does not end it.
    script = f"sleep 300 & echo $! > {pid_file}; wait; true"
    with pytest.raises(subprocess.TimeoutExpired):
        lab.hosts[0].run(["sh", "-c", script], timeout_s=1.0)
    eventually(lambda: not_running(int(pid_file.read_text())), "what ran inside ends")


@needs_netlab
def test_a_host_can_be_pickled_and_entered(lab: Netlab) -> None:
    copy = pickle.loads(pickle.dumps(lab.hosts[0]))
    assert copy == lab.hosts[0]
    # Only inside is this an address to listen on.
    listen(copy, lab.hosts[0].address).close()


@needs_netlab
def test_popen_refuses_what_would_not_reach_the_command(lab: Netlab) -> None:
    with pytest.raises(ValueError, match="shell"):
        lab.hosts[0].popen(["true"], shell=True)


# Taking down


@needs_netlab
def test_close_removes_everything_and_can_be_repeated() -> None:
    lab = Netlab(3)
    assert len(own_namespaces()) == 4
    lab.close()
    assert own_namespaces() == set()
    lab.close()
    for use in (lab.hosts[0].enter, lab.hosts[0].cut, lambda: lab.hosts[0].popen(["true"])):
        with pytest.raises(NetlabError):
            in_network_of(None, use)


@needs_netlab
def test_close_kills_what_still_runs_inside() -> None:
    with Netlab(1) as lab:
        script = "sleep 300 & echo $!; exec sleep 300"
        process = lab.hosts[0].popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        grandchild = os.pidfd_open(int(read_words(process)[0]))
        assert not has_exited(grandchild)
    assert has_exited(grandchild, WAIT_S)
    os.close(grandchild)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL


@needs_netlab
def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: Host, rate: str | None) -> None:
        raise NetlabError(f"no {rate} for {host.name}")

    monkeypatch.setattr(Host, "set_rate", fail)
    with pytest.raises(NetlabError, match="no 1gbit"):
        Netlab(2, rate="1gbit")
    assert own_namespaces() == set()


@needs_netlab
def test_only_the_creators_exit_takes_the_lab_down() -> None:
    script = """
import os, sys
from paceline.testing.netlab import Netlab
lab = Netlab(1)
child = os.fork()
if child == 0:
    sys.exit(7)
_, status = os.waitpid(child, 0)
stands = lab.hosts[0].run(["true"]).returncode == 0
print(os.waitstatus_to_exitcode(status), stands, lab.hosts[0].name)
"""
    process = start_script(script)
    output, _ = process.communicate(timeout=WAIT_S)
    child_status, stands, name = output.split()
    assert (child_status, stands, process.returncode) == ("7", "True", 0)
    assert name not in listed_namespaces()


@needs_netlab
@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_sweep_removes_what_a_killed_creator_left_and_nothing_else(lab: Netlab, reaped: bool) -> None:
    script = """
import sys
from paceline.testing.netlab import Netlab
lab = Netlab(2)
print(lab.hosts[0].popen(["sleep", "300"]).pid, *(host.name for host in lab.hosts), flush=True)
sys.stdin.read()
"""
    creator = start_script(script)
    try:
        inside_pid, *names = read_words(creator)
        inside = os.pidfd_open(int(inside_pid))
        netlab.sweep()
        assert set(names) <= listed_namespaces()
        assert not has_exited(inside)
    finally:
        creator_fd = os.pidfd_open(creator.pid)
        creator.kill()
        assert has_exited(creator_fd, WAIT_S)
    if reaped:
        creator.wait(WAIT_S)
    netlab.sweep()
    assert listed_namespaces().isdisjoint(names)
    assert has_exited(inside, WAIT_S)
    assert {host.name for host in lab.hosts} <= listed_namespaces()
    creator.communicate(timeout=WAIT_S)
    os.close(inside)
    os.close(creator_fd)


@needs_netlab
def test_sweep_tells_a_reused_pid_by_its_start_time(lab: Netlab) -> None:
    name = f"pl-{os.getpid()}-1-0-host0"
    subprocess.run(["ip", "netns", "add", name], timeout=WAIT_S, check=True)
    netlab.sweep()
    assert name not in listed_namespaces()
    assert lab.hosts[0].name in listed_namespaces()


# Wrong input, and machines where it cannot work


@pytest.mark.parametrize("num_hosts", [0, -1, 251])
def test_a_wrong_number_of_hosts_is_refused(num_hosts: int) -> None:
    with pytest.raises(ValueError, match=f"num_hosts={num_hosts} .*250"):
        Netlab(num_hosts)


@pytest.mark.parametrize("rate", ["", "fast", "1", "-1gbit", "1 gbit", "0gbit", "1gbps", "1gbit; true", "1tbit"])
def test_a_wrong_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=r'rate=.*"1gbit"'):
        Netlab(1, rate=rate)


def test_burst_is_a_millisecond_but_not_less_than_some_frames() -> None:
    assert netlab.burst_bytes("1gbit") == 125_000
    assert netlab.burst_bytes("0.8gbit") == 100_000
    assert netlab.burst_bytes("10mbit") == 32_768


def test_says_that_root_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (netlab.why_unavailable.__wrapped__() or "")


def test_says_which_program_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    assert "`tc`: install iproute2" in (netlab.why_unavailable.__wrapped__() or "")


def test_says_that_namespaces_are_not_permitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("ip", "tc", "nsenter"):
        (tmp_path / program).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = netlab.why_unavailable.__wrapped__() or ""
    assert "not permitted" in reason
    assert "`ip` failed: Operation not permitted" in reason


def test_a_lab_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "why_unavailable", lambda: "netlab needs the moon")
    with pytest.raises(NetlabError, match="the moon"):
        Netlab(1)
