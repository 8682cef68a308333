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

PR_SET_PDEATHSIG = 1
ASKED_S = 3.0  # from asking to killing
SESSION_S = 5.0  # for a session that was killed to be empty
_LOOK_AGAIN_S = 0.01


def members_of(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # pid (name) state parent group session ...; the name may hold spaces and brackets
                    state, _, _, theirs = file.read().rpartition(b")")[2].split()[:4]
            except OSError:  # it ended meanwhile
                continue
            if int(theirs) == session and state not in (b"Z", b"X"):
                found.append(int(name))
    return found


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
