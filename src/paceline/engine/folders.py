"""The folders of runs: `<folder>/<name>` holds one run's database, logs and checkpoints.

An agent claims its folder by a lock for as long as it lives; the kernel lets go of it however the agent ends. A name
that is in use, or was used before, is not given to a second run by accident.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.control.journal.folder import LOCK_FILE, FolderLock
from paceline.control.journal.journal import DATABASE, Journal
from paceline.control.journal.labels import write_started
from paceline.control.journal.reader import RunReader
from paceline.control.machines.reopening import reopened
from paceline.custody import names
from paceline.errors import RunRefused
from paceline.wire.descriptors import Fd, creating

AGENT_LOCK = "agent.lock"
LOGS = "logs"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ClaimedFolder:
    """A claimed folder."""

    def __init__(self, folder: Path, lock: Fd, *, is_resumed: bool = False) -> None:
        self.folder = folder
        self.is_resumed = is_resumed
        self.logs = folder / LOGS
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self._lock = lock
        self._started: dict[str, list[int]] = {}

    @property
    def name(self) -> str:
        return self.folder.name

    def note_start(self, label: str, pid: int) -> None:
        """Write down which process runs in a slot, for commands that name workers and servers as the output does.
        Raises `OSError` if that cannot be; the next call writes all of it."""
        self._started.setdefault(label, []).append(pid)
        write_started(self.folder, self._started)

    def close(self) -> None:
        self._lock.close()


def claim(root: Path, name: str, *, resume: bool = False) -> ClaimedFolder:
    """The folder of a new run of this name, or of the one that is to go on."""
    if not NAME.fullmatch(name):
        raise RunRefused(f"--name {name!r} cannot be a folder's name; use letters, digits, and . _ - between them")
    folder = root / name
    if resume and not was_used(folder):
        raise RunRefused(f"there is no run {name!r} in {root} to resume; {_names(root)}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunRefused(f"the folder {folder} cannot be made: {error}; give another one with --folder") from error
    lock = _try_lock(folder / AGENT_LOCK)
    try:
        if lock is None or is_live(folder):
            raise RunRefused(
                f"the run {name!r} in {root} is in use; if it is just ending, try again in a moment; else end it "
                "(paceline stop) or choose another --name"
            )
        if was_used(folder) and not resume:
            raise RunRefused(
                f"the name {name!r} was used before in {root}; go on with that run (--resume), or choose another --name"
            )
        folder.chmod(0o700)
        return ClaimedFolder(folder.resolve(), lock, is_resumed=resume)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def claim_for_guest(root: Path, name: str) -> ClaimedFolder:
    """A folder for the workers that join a run from here; a second one where the run itself lives here too."""
    name = NAME.match(name)[0] if NAME.match(name) else "joined"  # type: ignore[index]
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        with contextlib.suppress(RunRefused):
            return claim(root, candidate)
        number += 1
        if number > 1000:
            raise RunRefused(f"there are a thousand folders {name}-... in {root}; give another --folder")


def new_name(root: Path, stem: str) -> str:
    """A name that is not used yet: what runs, and when."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"
    name = f"{stem[:60]}-{time.strftime('%m%d-%H%M%S')}"
    number = 1
    while (root / name).exists():
        number += 1
        name = f"{stem[:60]}-{time.strftime('%m%d-%H%M%S')}-{number}"
    return name


def was_used(folder: Path) -> bool:
    """Whether there is a run here that can go on: its database, or what its workers left when its host was lost."""
    return (folder / DATABASE).exists() or bool(names.find(folder / names.FOLDER))


def newest(root: Path) -> str:
    """The run that was written last."""
    used = [folder for folder in root.glob("*") if folder.is_dir() and was_used(folder)]
    marks = [(folder, folder / DATABASE if (folder / DATABASE).exists() else folder / names.FOLDER) for folder in used]
    runs = [(mark.stat().st_mtime, folder.name) for folder, mark in marks]
    if not runs:
        raise RunRefused(f"there is no run in {root} to resume; start one without --resume, or give --folder")
    return max(runs)[1]


def reopen(folder: Path) -> None:
    """Let a run that is over or was interrupted go on: its former members are gone for good, its history stays."""
    with contextlib.closing(FolderLock(folder)), contextlib.closing(Journal(folder)) as journal:
        remembered = journal.remembered()
        if remembered:
            with RunReader(folder) as reader:
                applied = reader.status().applied
            journal.commit({**reopened(remembered, applied)})


# -- finding runs ----------------------------------------------------------------------------------------------------


def is_live(folder: Path) -> bool:
    """Whether a coordinator works in this folder."""
    path = folder / LOCK_FILE
    if not path.exists():
        return False
    lock = _try_lock(path)
    if lock is not None:
        lock.close()
    return lock is None


def runs_in(root: Path) -> Iterator[Path]:
    for database in sorted(root.glob(f"*/{DATABASE}")):
        yield database.parent


def find(root: Path, name: str, *, or_newest: bool = False) -> Path:
    """The run of this name; without one, the only run that is going on, or, if none is, the newest."""
    if name:
        if not (root / name / DATABASE).exists():
            raise RunRefused(f"there is no run {name!r} in {root}; {_names(root)}")
        return root / name
    live = [folder for folder in runs_in(root) if is_live(folder)]
    if len(live) == 1:
        return live[0]
    if live:
        names = ", ".join(folder.name for folder in live)
        raise RunRefused(f"several runs are going on in {root}: {names}; say which with --name")
    if or_newest and any(was_used(folder) for folder in runs_in(root)):
        return root / newest(root)
    raise RunRefused(f"no run is going on in {root}; {_names(root)}")


def _names(root: Path) -> str:
    names = [folder.name for folder in runs_in(root)]
    return f"runs there: {', '.join(names)}" if names else "it holds no runs; is --folder right?"


def _try_lock(path: Path) -> Fd | None:
    """The lock, or None if somebody has it."""
    with creating:
        lock = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        lock.close()
        return None
