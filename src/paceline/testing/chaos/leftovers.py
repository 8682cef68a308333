"""What a run left on the machine: processes, namespaces, mounts, shared memory; and descriptors that it keeps."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_PATIENCE_S = 5.0
# A group or a connection more or less is no leak.
_MORE_DESCRIPTORS = 48


def left_of(processes: Callable[[], Mapping[int, str]], seen: set[int], place: Path) -> list[str]:
    """After everything was taken down. `seen` are processes that the run had: their shared memory has their names."""
    until = time.monotonic() + _PATIENCE_S
    while processes() and time.monotonic() < until:
        time.sleep(0.05)
    found = [f"process {pid} is left: {line[:100]}" for pid, line in processes().items()]
    prefix = f"pl-{os.getpid()}-"
    netns = Path("/run/netns")
    found += [f"namespace {path.name} is left" for path in netns.glob(f"{prefix}*")] if netns.is_dir() else []
    found += [f"mount {line.split()[4]} is left" for line in _mounts() if line.split()[4].startswith(str(place))]
    found += [f"shared memory {path.name} is left" for path in Path("/dev/shm").iterdir() if _names(path.name) & seen]
    return found


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _names(name: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", name)}


def descriptors_of(pids: Mapping[int, str]) -> dict[int, int]:
    """How many each of these processes has open."""
    counts: dict[int, int] = {}
    for pid in pids:
        try:
            counts[pid] = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue  # it ended meanwhile
    return counts


def grown(before: Mapping[int, int], after: Mapping[int, int]) -> list[str]:
    """Processes that lived through it all and have many more descriptors than before."""
    return [
        f"process {pid} has {after[pid]} descriptors open, {after[pid] - count} more than at the beginning"
        for pid, count in before.items()
        if pid in after and after[pid] - count > _MORE_DESCRIPTORS
    ]
