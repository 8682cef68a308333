"""The process of a server, as an agent starts it: joins the run of its ticket, holds ranges, goes when it is let go.

SIGTERM asks to leave: the ranges move to other servers first. The death of the process that started it ends it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from paceline.control.shell import ticket as tickets

if TYPE_CHECKING:
    from paceline.control.shell.ticket import Ticket

LOOK_S = 0.5
NO_TICKET = 2

_asked_to_leave = threading.Event()


def _end(_: int, __: FrameType | None) -> None:
    """Nothing is held here yet. Where Python swallows the exit (in a callback of torch, say), it is still known."""
    _asked_to_leave.set()
    sys.exit(0)


def _leave(_: int, __: FrameType | None) -> None:
    _asked_to_leave.set()


def main() -> int:
    # Before the heavy imports: until then a request to leave would look like a death.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's affair
    ticket = tickets.inherited()
    if ticket is None:
        print("a server is started by paceline run --servers, not by hand: it has no ticket", file=sys.stderr)
        return NO_TICKET
    logging.basicConfig(level=logging.INFO, format="%(asctime)s server: %(message)s")
    parent = os.pidfd_open(os.getppid())
    return _serve(ticket, parent)


def _serve(ticket: Ticket, parent: int) -> int:
    from paceline.server.member import ServerProcess
    from paceline.server.warming import warm_up

    warm_up()
    signal.signal(signal.SIGTERM, _leave)
    if _asked_to_leave.is_set():
        return 0
    process = ServerProcess(ticket)
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    try:
        while process.verdict is None:
            if poll.poll(LOOK_S * 1000) and not process.wait(1.0):
                return 0  # nobody is left to serve
            if _asked_to_leave.is_set():
                process.leave()
            process.tell()
            process.check_deserted()
        return process.exit_code()
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
