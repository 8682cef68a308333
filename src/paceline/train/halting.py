"""What a worker does when the coordinator is gone for good: it halts, and leaves what it holds on its own host.

Without a coordinator a group that works goes on working, but nobody can join, leave or recover. A coordinator that
died is started again within seconds by its agent; when its whole host is gone, nobody does that. So a worker that
joined from another host waits `PATIENCE_S` for a word of it. After that

- a group that still works, and has nobody on the coordinator's host, agrees on the end in its headers;
- one that does not get on is given up: whom it waits for is on the host that is gone, most likely, be it a worker or
  a server;
- whoever waits for a plan waits no longer, also one that has no state yet: to start it again would not help.

Then one worker of each host writes a checkpoint of the last operation that it applied, into the folder of the run on
that host. The run can go on from there (`paceline run --resume`); nothing is lost but what no worker of that host had
applied. What servers hold is had from whoever is left: of each range a primary or a backup, which makes the step that
this worker was about to make.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint import Contents, files
from paceline.control.machines.lost_head import OrphanMove, Sight, decide, has_seat_on
from paceline.control.machines.member_events import GroupBroke, StopRun
from paceline.control.shell.ticket import Ticket
from paceline.custody import names
from paceline.custody.partial import sweep
from paceline.custody.shelf import RetentionRules, Shelf
from paceline.errors import Orphaned, PacelineError
from paceline.wire.descriptors import Fd, creating

if TYPE_CHECKING:
    from paceline.train.joining import Joined

logger = logging.getLogger("paceline.train")

PATIENCE_S = 30.0  # of who joined from another host
OWN_PATIENCE_S = 120.0  # on the coordinator's host, where its agent starts it again
ASKED_PATIENCE_S = 15.0  # of who was asked to go: nobody else can let it go
QUIET_S = 2.0  # a coordinator that is at work is heard of more often
GATHER_S = 30.0  # for what servers hold
LOCK = ".halt.lock"
_LOCK_S = 120.0
_LOOK_S = 0.5


class Halting:
    """Looks on, on a thread of its own, from when the coordinator was not heard of for `patience_s` until `close`."""

    def __init__(self, ticket: Ticket | None) -> None:
        self._host = ticket.host if ticket is not None else ""
        self.is_guest = ticket is not None and ticket.guest
        self.patience_s = patience_of(ticket)
        self._joined: Joined | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._gather_by = 0.0
        self._is_asked = False
        self.has_halted = False

    def connect(self, joined: Joined) -> None:
        self._joined = joined

    def is_due(self) -> bool:
        """Whether the coordinator is taken for lost."""
        return self._joined is not None and self._joined.client.unheard_s() > self.patience_s

    def is_quiet(self) -> bool:
        """Whether the coordinator stands still, or is cut off, just now."""
        return self._joined is not None and self._joined.client.unheard_s() > QUIET_S

    def begin(self) -> None:
        """The coordinator was not heard of for `patience_s`."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="paceline-halting", daemon=True)
            self._thread.start()

    def hurry(self) -> None:
        """This worker was asked to go. If there is no coordinator to let it go, the agent has given it up."""
        if self._joined is not None and self._joined.watchdog is not None:
            self._is_asked = True
            self.patience_s = min(self.patience_s, ASKED_PATIENCE_S)
            self._joined.membership.patience_s = self.patience_s
            self.begin()

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            sight = self._look()
            if sight.unheard_s < self.patience_s and not self._is_asked:
                return  # it is back
            self._act(decide(sight, self.patience_s))

    def _look(self) -> Sight:
        assert self._joined is not None
        client, standing = self._joined.client, self._joined.membership.standing()
        plan = client.look(lambda machine: machine.plan)
        return Sight(
            unheard_s=client.unheard_s(),
            stood_s=time.monotonic() - standing.since if standing is not None else 0.0,
            has_plan=plan is not None,
            is_with_head=has_seat_on(plan, self._host),
            is_asked=self._is_asked,
        )

    def _act(self, move: OrphanMove) -> None:
        assert self._joined is not None
        client = self._joined.client
        plan = client.look(lambda machine: machine.plan)
        if move is OrphanMove.STOP and not client.look(lambda machine: machine.stop_asked):
            logger.warning("the coordinator is not heard of any more: the run ends at the next clean point")
            client.post(StopRun())
        elif move is OrphanMove.BREAK and plan is not None:
            logger.warning("the coordinator is not heard of any more, and this group does not get on: it is given up")
            client.post(GroupBroke(plan.generation))

    def halt(self, orphaned: Orphaned, leave_behind: Callable[[], Path | None]) -> None:
        """Leave what this worker holds on its host, and say where."""
        self._gather_by = time.monotonic() + GATHER_S
        try:
            path = leave_behind()
            held = f"what this worker holds is in {path}" if path is not None else "it has trained nothing yet"
        except (PacelineError, OSError) as error:
            held = f"what this worker holds could not be saved: {error}"
        print(f"paceline: {orphaned}\npaceline: {held}", file=sys.stderr, flush=True)
        self.has_halted = True

    def check_wait(self, waited_s: float) -> None:
        """Raise if servers have been waited for so long that they must be on the host that is lost."""
        if not self._gather_by and waited_s > self.patience_s and self.is_due():
            raise Orphaned(
                "the coordinator and servers that hold a part of the model have been silent for "
                f"{waited_s:.0f} s; most likely their host is lost"
            )

    def check(self) -> None:
        """Raise if servers are waited for in vain."""
        if self._gather_by and time.monotonic() > self._gather_by:
            raise Orphaned(
                f"servers that had a part of it did not answer for {GATHER_S:g} s; were they on the host that is lost? "
                "A checkpoint of all of it is in the run's own folder only"
            )

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def patience_of(ticket: Ticket | None) -> float:
    """How long a worker of this host waits for a coordinator that is not heard of."""
    return PATIENCE_S if ticket is not None and ticket.guest else OWN_PATIENCE_S


def write_held(folder: Path, contents: Contents, rules: RetentionRules) -> Path:
    """Write what a worker holds, unless another one of this host has written as much; where it is. `CheckpointError` or
    `OSError` where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / LOCK):
        found = names.find(folder)
        if found and found[0].operation >= contents.operation:
            return found[0].path
        sweep(folder)
        path = files.write(folder, contents)
        with contextlib.suppress(OSError):
            Shelf(folder, rules).tidy({}, published=contents.operation)
        return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One worker of this host at a time; the kernel lets go for one that dies."""
    with creating:
        lock = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        ends_at = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_at:
                    raise TimeoutError(f"another worker has held {path} for {_LOCK_S:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        lock.close()
