"""A small network on one machine: hosts that share nothing but cables, for tests and measurements.

    with Netlab(2, rate="1gbit") as lab:
        server = lab.hosts[0].popen(["python", "serve.py"])
        print(lab.hosts[1].run(["python", "fetch.py", lab.hosts[0].address], timeout_s=10).stdout)

Each host is a network namespace with its own loopback, its own ports and abstract unix sockets, and one
`eth0`. A veth pair is its cable; a bridge, in a namespace of its own, is the switch:

    host 0: eth0 (10.77.0.1) ──── port0 ┐
    host 1: eth0 (10.77.0.2) ──── port1 ┼ switch      tbf on eth0 limits what a host sends,
    host 2: eth0 (10.77.0.3) ──── port2 ┘             tbf on its port what it receives

Files, processes, shared memory and processors are the machine's and stay shared.

Contract
- `why_unavailable()` says whether a lab can be built here. If it does not return None, `Netlab` raises
  `NetlabError` with that sentence, so a test asks first and skips.
- `Netlab(num_hosts, rate=...)` returns when every link works. `close()` (the end of `with`, or the end of the
  interpreter) kills what still runs inside and removes the namespaces; it can be called again.
- A `Host` is plain data: it can be pickled and used in any process of root while the lab stands.

Invariants
- The machine's own namespace is never touched, so labs cannot clash with it or with each other.
- In any t seconds a link with a rate lets at most `burst_bytes(rate) + rate * t` pass, in each direction.
- Only the process that made a lab takes it down; in a forked child `close()` does nothing.
- A namespace's name holds its creator's pid and start time. A creator that was killed leaves its namespaces
  and the processes in them behind until `sweep()`, which each new lab begins with, finds it gone.

Failure cases
- `ValueError` for a wrong argument, before anything is made.
- `NetlabError` if a lab cannot be built (what was made so far is removed first), if a host is used after
  `close()`, or if a process inside survives SIGKILL (the namespaces are removed nevertheless).
- `sweep()` judges creators by the pids that it can see: do not share `/run/netns` between pid namespaces.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.engine.reaper import stat_of
from paceline.errors import PacelineError

MAX_HOSTS = 250  # they share one /24

_NETNS_DIR = Path("/run/netns")
_NAME = re.compile(r"pl-(?P<pid>\d+)-(?P<start_ticks>\d+)-\d+-\w+")
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>bit|kbit|mbit|gbit)")
_BITS_PER_UNIT = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_MIN_RATE_BITS = 1_000
_MAX_RATE_BITS = 100_000_000_000

_TOOL_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_ENTER_TIMEOUT_S = 10.0
_POLL_S = 0.001

_NOBODY = "02:00:00:00:00:00"  # an address that no host has
_CLONE_NEWNET = 0x40000000
# These would apply to the program that steps into the namespace, not to the command.
_REFUSED_POPEN_KWARGS = frozenset({"executable", "group", "extra_groups", "shell", "user"})

_lab_numbers = itertools.count()


class NetlabError(PacelineError):
    """The lab cannot be built, used or taken down; the message says which command failed and how."""


@functools.cache
def why_unavailable() -> str | None:
    """None if labs can be built here, else a sentence that says what is missing; tried once a process."""
    if sys.platform != "linux":
        return f"netlab needs Linux network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "netlab needs root to make network namespaces: run as root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"netlab needs the program `{program}`: install {package}"
    try:
        _try_all_parts()
    except NetlabError as error:
        return f"network namespaces, veth, bridge or tbf are not permitted here: {error}"
    return None


def sweep() -> list[str]:
    """Remove the namespaces, and kill the processes in them, whose creator is gone; returns their names."""
    orphaned = [name for name, creator in _listed_namespaces() if not creator.is_alive()]
    _tear_down(orphaned)
    return orphaned


def enter(namespace_name: str) -> None:
    """Move the calling thread into a host's network (`Host.name`), for good.

    Threads and processes it starts from now on are in there too, other threads are not: call it first thing
    in a new process. Sockets belong to the network in which they were made, whoever uses them later.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = os.open(_NETNS_DIR / namespace_name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetlabError(f"cannot enter {namespace_name}: {error}; is its lab closed?") from error
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise NetlabError(f"cannot enter {namespace_name}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def burst_bytes(rate: str) -> int:
    """How much a link of this rate lets pass at once after it was idle.

    A millisecond of the rate, so that a timer which fires late on a busy machine loses no bandwidth, and at
    least 32 kB, so that TCP can hand over some twenty frames in one piece.
    """
    return max(32_768, _parse_rate(rate) // 8 // 1_000)


@dataclass(frozen=True)
class Host:
    """One host of a lab: `name` is its network namespace, `address` what the other hosts reach it by."""

    name: str
    address: str
    switch_name: str
    switch_port: str

    def popen(self, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start a command inside, as `subprocess.Popen` would; its pid is the command's own.

        The process is in the host's network when this returns, so closing the lab kills it. A command that
        does not exist ends with status 127.
        """
        refused = sorted(_REFUSED_POPEN_KWARGS & popen_kwargs.keys())
        if refused:
            raise ValueError(f"popen_kwargs={refused} cannot be used in a namespace: make them part of argv")
        identity = self._identity()
        # nsenter becomes the command (exec, no fork), so signals and exit status are the command's.
        process = subprocess.Popen(["nsenter", f"--net={_NETNS_DIR / self.name}", "--", *argv], **popen_kwargs)
        self._wait_inside(process, identity)
        return process

    def run(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return its status and output.

        After `timeout_s` it is killed with its process group, and `subprocess.TimeoutExpired` is raised.
        """
        process = self.popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=_KILL_TIMEOUT_S)
            raise
        return subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)

    def enter(self) -> None:
        """Move the calling thread into this host's network, for good; see the function `enter`."""
        enter(self.name)

    def cut(self) -> None:
        """Pull the cable: packets vanish, while addresses, routes and connections stay as they are."""
        # The switch's end: taking eth0 down would drop its routes, and senders would learn of it at once.
        self._set_port("down")

    def mend(self) -> None:
        """Plug the cable in again."""
        self._set_port("up")
        # A look for a neighbour that began while the cable was out would fail, and with it what is sent from now on.
        _batch(["ip", "-n", self.name], ["neigh flush dev eth0"])

    def lose(self, other: Host) -> None:
        """Let vanish whatever this host sends to another one; what the other sends still arrives."""
        # A neighbour that nobody is: the switch hands its frames to all, and nobody takes them.
        entry = f"neigh replace {other.address} lladdr {_NOBODY} dev eth0 nud permanent"
        _batch(["ip", "-n", self.name], [entry])

    def find(self, other: Host) -> None:
        """Let it arrive again."""
        _batch(["ip", "-n", self.name], [f"neigh del {other.address} dev eth0"])

    def set_rate(self, rate: str | None) -> None:
        """Limit both directions of the link to a rate such as "100mbit"; None takes the limit away."""
        qdisc = _qdisc(rate)
        _batch(["tc", "-n", self.switch_name], [f"qdisc replace dev {self.switch_port} root {qdisc}"])
        _batch(["tc", "-n", self.name], [f"qdisc replace dev eth0 root {qdisc}"])
        _batch(["ip", "-n", self.name], [f"link set eth0 gso_max_size {_largest_packet_bytes(rate)}"])

    def _set_port(self, state: str) -> None:
        _batch(["ip", "-n", self.switch_name], [f"link set {self.switch_port} {state}"])

    def _identity(self) -> _NamespaceId:
        identity = _namespace_id(_NETNS_DIR / self.name)
        if identity is None:
            raise NetlabError(f"host {self.name} is gone: its lab was closed")
        return identity

    def _wait_inside(self, process: subprocess.Popen[Any], identity: _NamespaceId) -> None:
        deadline = time.monotonic() + _ENTER_TIMEOUT_S
        while _namespace_id(Path(f"/proc/{process.pid}/ns/net")) != identity:
            if process.poll() is not None:
                return
            if time.monotonic() > deadline:
                process.kill()
                process.wait(timeout=_KILL_TIMEOUT_S)
                raise NetlabError(f"pid {process.pid} did not get into {self.name} in {_ENTER_TIMEOUT_S} s")
            time.sleep(_POLL_S)


class Netlab:
    """`num_hosts` hosts on one switch, each link limited to `rate` ("1gbit", "50mbit") or not at all."""

    def __init__(self, num_hosts: int, *, rate: str | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts} is out of range: give 1 to {MAX_HOSTS}")
        if rate is not None:
            _parse_rate(rate)
        reason = why_unavailable()
        if reason is not None:
            raise NetlabError(reason)
        sweep()
        prefix = f"{_Creator.current().prefix()}-{next(_lab_numbers)}"
        self._owner_pid = os.getpid()
        self._closed = False
        self._switch_name = f"{prefix}-switch"
        self.hosts = [
            Host(f"{prefix}-host{k}", f"10.77.0.{k + 1}", self._switch_name, f"port{k}") for k in range(num_hosts)
        ]
        atexit.register(self.close)
        try:
            self._build(rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Netlab:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs inside and remove the namespaces; nothing the second time or in a forked child."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        _tear_down([self._switch_name, *(host.name for host in self.hosts)])

    def _build(self, rate: str | None) -> None:
        _batch(["ip"], [f"netns add {name}" for name in (self._switch_name, *(h.name for h in self.hosts))])
        _batch(["ip", "-n", self._switch_name], self._switch_commands())
        for host in self.hosts:
            commands = ["link set lo up", f"address add {host.address}/24 dev eth0", "link set eth0 up"]
            _batch(["ip", "-n", host.name], commands)
            if rate is not None:
                host.set_rate(rate)

    def _switch_commands(self) -> Iterator[str]:
        # Without the spanning tree protocol a port forwards as soon as it is up.
        yield "link add switch type bridge stp_state 0"
        yield "link set switch up"
        for host in self.hosts:
            yield f"link add {host.switch_port} type veth peer name eth0 netns {host.name}"
            yield f"link set {host.switch_port} master switch up"


@dataclass(frozen=True)
class _NamespaceId:
    device: int
    inode: int


@dataclass(frozen=True)
class _Creator:
    """A process, told apart from later ones with the same pid by when it started."""

    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> _Creator:
        pid = os.getpid()
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise NetlabError(f"cannot read /proc/{pid}/stat: mount /proc")
        return cls(pid, start_ticks)

    def prefix(self) -> str:
        return f"pl-{self.pid}-{self.start_ticks}"

    def is_alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone, or dead and not yet reaped."""
    stat = stat_of(pid)
    return stat.start_ticks if stat is not None and stat.is_alive else None


def _listed_namespaces() -> Iterator[tuple[str, _Creator]]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(_NETNS_DIR.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match:
                yield path.name, _Creator(int(match["pid"]), int(match["start_ticks"]))


def _namespace_id(path: Path) -> _NamespaceId | None:
    try:
        status = path.stat()
    except OSError:
        return None  # the process ended or the lab was closed between the listing and this look
    return _NamespaceId(status.st_dev, status.st_ino)


def _tear_down(names: Sequence[str]) -> None:
    if not names:
        return
    try:
        _kill_inside(names)
    finally:
        # Another sweep may have been faster, or a build may have stopped half way: a missing one is no error.
        _run_tool(["ip", "-force", "-batch", "-"], (f"netns delete {name}" for name in names))
    left = [name for name in names if (_NETNS_DIR / name).exists()]
    if left:
        raise NetlabError(f"could not remove the namespaces {left}: try `ip netns delete` on them")


def _kill_inside(names: Iterable[str]) -> None:
    ids = {identity for name in names if (identity := _namespace_id(_NETNS_DIR / name))}
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while pids := _pids_inside(ids):
        if time.monotonic() > deadline:
            raise NetlabError(f"processes {pids} in {sorted(names)} are still there after SIGKILL")
        for pid in pids:
            _kill_if_inside(pid, ids)
        time.sleep(_POLL_S)


def _pids_inside(ids: set[_NamespaceId]) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    # Whoever takes the lab down may have entered it.
    return [pid for pid in pids if pid != os.getpid() and _namespace_id(Path(f"/proc/{pid}/ns/net")) in ids]


def _kill_if_inside(pid: int, ids: set[_NamespaceId]) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The descriptor pins the process: look again, for the pid may have passed on to a stranger.
        if _namespace_id(Path(f"/proc/{pid}/ns/net")) in ids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _parse_rate(rate: str) -> int:
    match = _RATE.fullmatch(rate)
    bits = round(float(match["number"]) * _BITS_PER_UNIT[match["unit"]]) if match else 0
    if not _MIN_RATE_BITS <= bits <= _MAX_RATE_BITS:
        raise ValueError(f'rate={rate!r} is not a rate from 1kbit to 100gbit: write it like "1gbit" or "50mbit"')
    return bits


def _qdisc(rate: str | None) -> str:
    if rate is None:
        return "noqueue"
    # A queue of 20 ms is what switches have: TCP's window can keep the line full, and delay stays bounded.
    return f"tbf rate {_parse_rate(rate)}bit burst {burst_bytes(rate)} latency 20ms"


def _largest_packet_bytes(rate: str | None) -> int:
    """The largest packet TCP may hand to the link, for the kernel to cut into frames at its far end.

    tbf would cut up whatever exceeds its burst, frame by frame, which costs as much processor time as the
    transfer itself. It counts the headers of all frames, about 5 %, which is why a tenth is left for them.
    """
    return 65_536 if rate is None else min(65_536, burst_bytes(rate) * 9 // 10)


def _try_all_parts() -> None:
    name = f"{_Creator.current().prefix()}-{next(_lab_numbers)}-probe"
    try:
        _batch(["ip"], [f"netns add {name}"])
        _batch(["ip", "-n", name], ["link add switch type bridge", "link add eth0 type veth peer name port0"])
        _batch(["tc", "-n", name], [f"qdisc replace dev eth0 root {_qdisc('1gbit')}"])
    finally:
        _tear_down([name])


def _batch(tool: Sequence[str], commands: Iterable[str]) -> None:
    """Give many commands to one run of `ip` or `tc`: starting it takes longer than what it does."""
    result = _run_tool([*tool, "-batch", "-"], commands)
    if result.returncode != 0:
        raise NetlabError(f"`{' '.join(tool)}` failed: {result.stderr.strip()}")


def _run_tool(argv: Sequence[str], commands: Iterable[str]) -> subprocess.CompletedProcess[str]:
    text = "".join(f"{command}\n" for command in commands)
    try:
        return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetlabError(f"`{' '.join(argv)}` failed: {error}") from error
