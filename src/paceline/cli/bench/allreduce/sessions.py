"""Processes started as a session of their own, so that whatever they start can be found and ended with them.

Process groups are not enough: both MPI launchers give every rank a group of its own, within the session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LOOK_AGAIN_S = 0.02


def start(command: Sequence[str], *, environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(leaders: Sequence[subprocess.Popen[bytes]], *, wait_s: float, grace_s: float) -> None:
    """Waits `wait_s` for the sessions to end, then asks them to, and kills what is left after `grace_s`.

    Asking comes first because a launcher that is asked removes its shared memory; one that is killed cannot.
    """
    sessions = {leader.pid for leader in leaders}
    if _empty_within(sessions, wait_s):
        return _reap(leaders)
    for leader in leaders:
        if leader.poll() is None:
            leader.terminate()
    if not _empty_within(sessions, grace_s):
        while living := _members(sessions):
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_AGAIN_S)
    return _reap(leaders)


def _reap(leaders: Sequence[subprocess.Popen[bytes]]) -> None:
    for leader in leaders:
        leader.wait()


def _empty_within(sessions: set[int], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while _members(sessions):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _members(sessions: set[int]) -> list[int]:
    """The living processes of these sessions."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state parent group session ...; the name may hold spaces and brackets
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if int(session) in sessions and state not in "ZX":
            members.append(int(entry.name))
    return members
