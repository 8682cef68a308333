"""Sees to it that nothing outlives an agent. Run as a script, by itself, with nothing but the standard library.

    python -I -S reaper.py exec PARENT COMMAND...   become COMMAND, and die when the thread that started it dies
    python -I -S reaper.py watch                    the reaper: end what was entrusted to it when standard input ends

A worker dies with its agent by the kernel's hand (PR_SET_PDEATHSIG, which outlives `exec`); but what the worker has
started itself, loader workers above all, would not. Each worker leads a session of its own, and the reaper, told of
every session, ends those that are left when the agent is gone, however it went.

The reaper reads lines: `kill SESSION` and `end SESSION` entrust one (the second is asked to end before it is killed),
`forget SESSION` takes one back. The agent takes back everything before it closes the pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
ASKED_S = 3.0  # from asking to killing
SESSION_S = 5.0  # for a session that was killed to be empty
_LOOK_AGAIN_S = 0.01


class ProcessStat(NamedTuple):
    """What the kernel says of a process; ticks are those of the clock, `start_ticks` since boot."""

    state: str
    parent: int
    session: int
    cpu_ticks: int
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        return self.state not in ("Z", "X")


def stat_of(pid: int) -> ProcessStat | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # pid (name) state parent group session ...; the name may hold spaces and brackets
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    cpu_ticks = int(fields[11]) + int(fields[12])
    return ProcessStat(fields[0], int(fields[1]), int(fields[3]), cpu_ticks, int(fields[19]))


def members_of(session: int) -> list[int]:
    """The living processes of a session."""
    found = ((pid, stat_of(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
    return [pid for pid, stat in found if stat is not None and stat.session == session and stat.is_alive]


def kill_session(session: int) -> None:
    """Kill everything in a session, also what it starts meanwhile."""
    ends_at = time.monotonic() + SESSION_S
    while (living := members_of(session)) and time.monotonic() < ends_at:
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)


def become(parent: int, command: list[str]) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        os._exit(127)


def watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    entrusted: dict[int, str] = {}
    for line in sys.stdin:
        order, _, session = line.strip().partition(" ")
        if order == "forget":
            entrusted.pop(int(session), None)
        elif order in ("kill", "end"):
            entrusted[int(session)] = order
    asked = [session for session, order in entrusted.items() if order == "end"]
    for session in asked:
        with contextlib.suppress(OSError):
            os.killpg(session, signal.SIGTERM)
            os.killpg(session, signal.SIGCONT)
    for session, order in entrusted.items():
        if order == "kill":
            kill_session(session)
    ends_at = time.monotonic() + ASKED_S
    while any(members_of(session) for session in asked) and time.monotonic() < ends_at:
        time.sleep(_LOOK_AGAIN_S)
    for session in asked:
        kill_session(session)


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        become(int(sys.argv[2]), sys.argv[3:])
    else:
        watch()
