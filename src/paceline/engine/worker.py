"""What a worker of `launch` runs, as a script, by itself: takes its function from one descriptor, calls it, leaves what
came of it in another. It needs nothing but the standard library, so a worker imports only what its function imports.

The task is a pickled (preparation, work): the first for `multiprocessing.spawn.prepare`, the second a pickled
(function, arguments) to be opened after that. The result is a pickled (RETURNED, value) or (RAISED, error, traceback),
where the error is None if it cannot travel. All of it comes from the process that started this one.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import traceback

TASK_VARIABLE = "PACELINE_TASK_FD"
RESULT_VARIABLE = "PACELINE_RESULT_FD"
# Set while the main script is run again to find its functions: a `launch` in it would start workers without end.
IMPORTING_VARIABLE = "PACELINE_IMPORTING_MAIN"
RETURNED, RAISED = "returned", "raised"


def main() -> None:
    task_fd = int(os.environ.pop(TASK_VARIABLE))
    result_fd = int(os.environ.pop(RESULT_VARIABLE))
    for descriptor in (task_fd, result_fd):
        os.set_inheritable(descriptor, False)
    preparation, work = pickle.loads(read(task_fd))
    os.close(task_fd)
    try:
        os.environ[IMPORTING_VARIABLE] = "1"
        multiprocessing.spawn.prepare(preparation)
        del os.environ[IMPORTING_VARIABLE]
        function, arguments = pickle.loads(work)
        write(result_fd, pickle.dumps((RETURNED, function(*arguments))))
    except BaseException as error:
        write(result_fd, _raised(error))
        raise  # the session's own ending, and the log, see it too


def _raised(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).strip()
    try:
        data = pickle.dumps((RAISED, error, text))
        pickle.loads(data)  # an error with a constructor of its own may go in but not come out
        return data
    except Exception:
        return pickle.dumps((RAISED, None, text))


def write(descriptor: int, data: bytes) -> None:
    """All of it, from the beginning."""
    with open(descriptor, "wb", closefd=False) as file:
        file.seek(0)
        file.write(data)


def read(descriptor: int) -> bytes:
    """All of it, without moving the position that another process may share."""
    size = os.fstat(descriptor).st_size
    pieces, at = [], 0
    while at < size and (piece := os.pread(descriptor, size - at, at)):
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose modules are not for the function to find
    main()
