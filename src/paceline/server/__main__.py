"""The process that an agent starts for a server: it takes its ticket and stays until it is told to end.

It holds nothing yet. SIGTERM, or the death of the process that started it, ends it with code 0.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from types import FrameType

from paceline.control import ticket as tickets


def main() -> int:
    signal.signal(signal.SIGTERM, _end)
    if tickets.inherited() is None:
        print("a server is started by paceline run --servers, not by hand: it has no ticket", file=sys.stderr)
        return 2
    parent = os.pidfd_open(os.getppid())
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
