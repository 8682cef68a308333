"""After every test nothing may be left: processes, descriptors, threads, namespaces, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported, and for every process that a test starts. Two threads that wait for each other after every
# small operation are no faster here, and several times slower where other processes want the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Helpers of multiprocessing that live as long as the test run.
_LASTING = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
_UNNAMED = re.compile(r"#[0-9]+(?= \(deleted\)$)")
_LASTING_THREAD = "paceline-guardian"  # one a process, from its first group over several hosts on


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares what there is before and after; what lasts for a module is made before the first look."""
    for name in request.fixturenames:
        if name != "nothing_is_left":
            request.getfixturevalue(name)
    before = _present()
    yield
    deadline = time.monotonic() + 5.0
    while (left := _left(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not left, f"left behind by this test: {left}"


@pytest.fixture
def mount_small(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a disk of a size such as "16m", in a folder of this test."""
    from paceline.testing import faults

    with contextlib.ExitStack() as mounted:

        def mount(size: str) -> Path:
            try:
                mounted.enter_context(faults.small_disk(tmp_path / "small", size))
            except PermissionError as error:
                pytest.skip(str(error))
            return tmp_path / "small"

        yield mount


def _left(before: dict[str, set[str]]) -> dict[str, list[str]]:
    now = _present()
    more = {kind: now[kind] - before[kind] for kind in now if now[kind] - before[kind]}
    if shared := more.pop("shared memory", None):
        more["shared memory"] = shared - _of_others(shared)
    return {kind: sorted(names) for kind, names in more.items() if names}


def _of_others(names: set[str]) -> set[str]:
    """Which of these a process of another session has mapped, or made in its name: others may test here too."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # no process, one that ended, or one that is not ours to see
            if os.getsid(int(process.name)) != os.getsid(0):
                maps = (process / "maps").read_text()
                made = f"torch_{process.name}_"
                found.update(name for name in names if f"/dev/shm/{name}" in maps or name.startswith(made))
    return found


def _present() -> dict[str, set[str]]:
    return {
        "descriptors": _descriptors(),
        "processes": _children(),
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")}
        - {_LASTING_THREAD},
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()},
        "namespaces": {path.name for path in Path("/run/netns").glob(f"pl-{os.getpid()}-*")},  # others may test too
    }


def _descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # the listing's own descriptor
        if not target.startswith(("/dev/", "pipe:", "/proc")) or "memfd" in target:
            # `capfd` opens its unnamed files anew between setup and call: their numbers may be another's by then.
            found.add(f"{entry.name} -> {_UNNAMED.sub('#', target)}")
    return found


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread or a process may end between the listing and the look.
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if not any(lasting in command for lasting in _LASTING):
                    found.add(f"{pid}: {command}")
    return found
