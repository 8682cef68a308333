"""The run's folder: on a disk of this machine, and used by one coordinator at a time.

SQLite's write-ahead log needs memory shared between the processes that use the database, and locks that hold; network
file systems give neither reliably. So they are refused, by the type of the mount.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

from paceline.errors import PacelineError
from paceline.wire.descriptors import Fd, creating

LOCK_FILE = "coordinator.lock"
TAKING_S = 1.0  # a coordinator that was just killed may still be on its way out

NETWORK_TYPES = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "9p",
        "afs",
        "coda",
        "lustre",
        "ceph",
        "gpfs",
        "beegfs",
        "glusterfs",
        "gfs2",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "pvfs",
        "panfs",
        "davfs",
        "acfs",
        "vmhgfs",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.rclone",
        "fuse.juicefs",
        "fuse.glusterfs",
        "fuse.ceph-fuse",
        "fuse.ceph",
        "fuse.davfs",
        "fuse.davfs2",
        "fuse.vmhgfs-fuse",
        "fuse.curlftpfs",
        "fuse.smbnetfs",
        "fuse.mfs",
        "fuse.moosefs",
        "fuse.seaweedfs",
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.hdfs",
        "fuse.fuse_dfs",
        "fuse.lustre",
    ]
)


class FolderRefused(PacelineError):
    """The run's folder cannot be used; the message says why, and what to do."""


def type_of_mount(path: str, mountinfo: str) -> str:
    """The type of the file system that holds an absolute, resolved path, by the text of /proc/self/mountinfo."""
    found, longest = "", -1
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5 or not after.split():
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two on one point the later one hides the earlier
            found, longest = after.split()[0], len(point)
    return found


def refuse_network(path: str, mountinfo: str) -> None:
    kind = type_of_mount(path, mountinfo)
    if kind in NETWORK_TYPES:
        raise FolderRefused(
            f"the run's folder {path} is on a network file system ({kind}), where its database could be damaged; "
            "give a folder on a disk of this machine (--folder), checkpoints may stay on the network"
        )


def prepare(folder: Path) -> Path:
    """The folder, made if it is not there, resolved and found fit."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        resolved = folder.resolve(strict=True)
        mountinfo = Path("/proc/self/mountinfo").read_text()
    except OSError as error:
        raise FolderRefused(f"the run's folder {folder} cannot be used: {error}; give another one") from error
    refuse_network(str(resolved), mountinfo)
    return resolved


class FolderLock:
    """Held by the coordinator for its life; the kernel lets go when the process dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        try:
            with creating:
                self._file = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise FolderRefused(f"{path} cannot be opened: {error}; give another folder") from error
        ends_at = time.monotonic() + TAKING_S
        while not self._try():
            if time.monotonic() > ends_at:
                pid = os.pread(self._file.fileno(), 32, 0).decode(errors="replace").strip() or "unknown"
                self._file.close()
                raise FolderRefused(
                    f"the run in {folder} already has a coordinator, process {pid}; wait for that run, end it, "
                    "or give another folder"
                )
            time.sleep(0.02)
        with contextlib.suppress(OSError):  # who has it is for people; a full disk does not take it
            self._write_pid(f"{os.getpid()}\n".encode())

    def _write_pid(self, text: bytes) -> None:
        # Over what is there: a file that was cut first would need room that may be gone.
        os.pwrite(self._file.fileno(), text, 0)
        os.ftruncate(self._file.fileno(), len(text))

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def close(self) -> None:
        self._file.close()
