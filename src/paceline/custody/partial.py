"""Folders that are not checkpoints: being written, or being removed.

Such a folder is called `.partial-<random>`, stands beside the checkpoints, and is locked (flock on the folder itself)
by the process that works on it. The kernel drops the lock when that process dies, however it dies, so whoever gets
the lock of a partial folder may remove it. A folder whose lock cannot be asked for (a file system without locks)
is left alone.

Invariant: a checkpoint appears under its name by one rename of a complete, synced folder, and disappears by one rename;
where it takes the place of another of that name, both happen in one.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from paceline.fault_points import FaultPoint
from paceline.wire.descriptors import Fd, creating

PREFIX = ".partial-"
FREE_BYTES: FaultPoint[[Path], int] = FaultPoint("room is looked for before a file is written")
NAMING: FaultPoint[[Path], None] = FaultPoint("a checkpoint is complete and synced, and gets its name")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_libc = ctypes.CDLL(None)
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Lock(enum.Enum):
    OURS = "ours"
    TAKEN = "taken"
    UNKNOWN = "unknown"  # this file system has no locks: nobody can be sure that the writer is dead


class Partial:
    """A folder of this process. Ends by `publish` or `remove`."""

    def __init__(self, parent: Path) -> None:
        while True:
            self.path = parent / f"{PREFIX}{secrets.token_hex(8)}"
            self.path.mkdir()
            # A sweep may come between the making and the lock; then it has this one, and we make another.
            with contextlib.suppress(FileNotFoundError):
                self._fd = _open(self.path, _FOLDER)
                if _lock(self._fd) is not Lock.TAKEN and _is_at(self._fd, self.path):
                    return
                self._fd.close()

    def create(self, name: str) -> Fd:
        return _open(self.path / name, _FILE)

    def publish(self, final: Path) -> None:
        """Give the folder its name. One that has this name already changes places with it, so that there is one at any
        time, also for who reads meanwhile; where the file system cannot do that, it is removed first: a death in
        between leaves none of the two, and never half of one."""
        os.fsync(self._fd.fileno())
        NAMING.reach(final)
        if final.is_dir():
            replaced = _open(final, _FOLDER)
            try:
                _lock(replaced)  # under its next name it would be swept
                if _exchange(self.path, final):
                    sync_folder(final.parent)
                    shutil.rmtree(self.path, ignore_errors=True)
                    self._fd.close()
                    return
            finally:
                replaced.close()
            retire(final)
        os.rename(self.path, final)
        sync_folder(final.parent)
        self._fd.close()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._fd.close()


def retire(checkpoint: Path) -> None:
    """Remove a checkpoint: at once as such, then its bytes."""
    fd = _open(checkpoint, _FOLDER)
    try:
        _lock(fd)
        doomed = checkpoint.parent / f"{PREFIX}{secrets.token_hex(8)}"
        os.rename(checkpoint, doomed)
        sync_folder(checkpoint.parent)
        shutil.rmtree(doomed, ignore_errors=True)
    finally:
        fd.close()


def sweep(parent: Path) -> list[Path]:
    """Remove what dead processes left."""
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        try:
            fd = _open(path, _FOLDER)
        except OSError:  # gone, or no folder
            continue
        try:
            if _lock(fd) is Lock.OURS and _is_at(fd, path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            fd.close()
    return removed


def free_bytes(folder: Path) -> int:
    """What is free on the disk that a folder is on."""
    if (fewer := FREE_BYTES.reach(folder)) is not None:
        return fewer
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sync_folder(path: Path) -> None:
    fd = _open(path, _FOLDER & ~os.O_NOFOLLOW)
    try:
        os.fsync(fd.fileno())
    finally:
        fd.close()


def _exchange(one: Path, other: Path) -> bool:
    """Two names change places, at once. Not every file system can do that."""
    if not hasattr(_libc, "renameat2"):
        return False
    return bool(_libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0)


def _open(path: Path, flags: int) -> Fd:
    # A forked child closes its copy: else a loader worker would keep the lock of a trainer that is dead.
    with creating:
        return Fd(os.open(path, flags, 0o644))


def _lock(fd: Fd) -> Lock:
    try:
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.UNKNOWN
    return Lock.OURS


def _is_at(fd: Fd, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
