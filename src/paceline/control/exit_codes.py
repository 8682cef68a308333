"""The exit codes of Paceline's processes, in one place: who starts a process and who ends one agree on them.

Commands end with ENDED, FAILED, INCOMPLETE, HALTED, LOST or UNSAVED, with 2 where they were called wrongly, with the
script's own code where only the script failed, and with 128 + n after signal n.
"""

from __future__ import annotations

import signal

ENDED = 0
FAILED = 1
# A coordinator that would be of no use if it were started again: it cannot use its folder or its address.
REFUSED = 2
# A strict run that ended, but without a worker that it was asked to have.
INCOMPLETE = 3
# A coordinator that failed by itself; the run can go on with another.
BROKEN = 70
# A coordinator that cannot work for want of room on its disk.
FULL = 74
# A coordinator that was asked to end before its run did; the run can go on with another.
INTERRUPTED = 75
# A worker that wants to be started again: it made no mistake, the run went on without it.
START_AGAIN = 75
# The coordinator is gone for good. What a worker holds it has left on its host.
HALTED = 76
# The run came to its end, but without updates that were lost for good.
LOST = 77
# The run's last state could not be saved: what follows it would go on with an older model.
UNSAVED = 78


def exit_words(code: int) -> str:
    """How a process ended, as people say it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
