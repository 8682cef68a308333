"""A crew of real processes for tests: each one a member, forked from a server that has imported torch already.

    with Crew(4, hosts="aabb") as crew:
        results = crew.run(check_sums, "ring")          # check_sums(group, "ring") in each process
        crew.kill(2)                                    # or stop, resume

A function is named by reference, so it must be importable (a module's own function). Each process forms the crew's
group before its first function, and keeps it for the next; with `hosts` given, members with different letters do not
share memory; with a `Netlab`, letter k lives in its host k.

Invariant: after `close` no process of the crew is left, however it went.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from paceline.collective import Group, meeting
from paceline.collective.meeting import Meeting, Where
from paceline.engine.reaper import stat_of
from paceline.testing.eventually import eventually
from paceline.testing.forking import fork_context
from paceline.testing.netlab import Host, enter

_STOPPED_S = 5.0

Task = Callable[..., Any]


class CrewError(AssertionError):
    """A member raised, died or did not answer; the message holds its traceback."""


class Crew:
    """`size` processes. `form=False` leaves the making of a group to the functions, which are then given None."""

    def __init__(
        self,
        size: int,
        *,
        hosts: str = "",
        lab: Sequence[Host] = (),
        tls: bool = False,
        form: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.size = size
        self._timeout_s = timeout_s
        labels = hosts or "a" * size
        if len(labels) != size:
            raise ValueError(f"hosts={hosts!r} must have a letter for each of {size} processes")
        letters = sorted(set(labels))
        places = [lab[letters.index(label)] if lab else None for label in labels]
        context = fork_context()
        self._meeting = _open_meeting(size, places[0], tls) if form else None
        self.processes = []
        self._pipes: list[Connection] = []
        for rank, (label, place) in enumerate(zip(labels, places, strict=True)):
            ours, theirs = context.Pipe()
            where = Where(tls=tls, host_label="" if lab else label)
            invitation = self._meeting.invitation if self._meeting else ""
            arguments = (theirs, rank, size, invitation, where, place.name if place else "")
            # Not a daemon: those may have no children, and members have loader workers.
            process = context.Process(target=_serve, args=arguments, name=f"member-{rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    # -- work --------------------------------------------------------------------------------------------------------

    def start(self, task: Task, *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        """Let `task(group, *arguments)` run in these processes (all, unless given); `finish` gets the results."""
        for rank in self._these(ranks):
            self._pipes[rank].send((task, arguments))

    def finish(self, ranks: Sequence[int] | None = None, *, timeout_s: float | None = None) -> list[Any]:
        """The results in order of rank; a `CrewError` if one raised, died or took too long."""
        outcomes = self.outcomes(ranks, timeout_s=timeout_s)
        for rank, outcome in zip(self._these(ranks), outcomes, strict=True):
            if isinstance(outcome, Raised):
                raise CrewError(f"rank {rank}: {outcome.error}") from outcome.error
        return outcomes

    def outcomes(self, ranks: Sequence[int] | None = None, *, timeout_s: float | None = None) -> list[Any]:
        """The same, with a `Raised` in place of a result where a member raised."""
        ends_at = time.monotonic() + (timeout_s or self._timeout_s)
        return [self._outcome(rank, ends_at) for rank in self._these(ranks)]

    def run(self, task: Task, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        self.start(task, *arguments, ranks=ranks)
        return self.finish(ranks)

    def hear(self, rank: int, *, timeout_s: float | None = None) -> Any:
        """What the function running in a process said with `say`."""
        value = self._receive(rank, time.monotonic() + (timeout_s or self._timeout_s))
        if isinstance(value, _Said):
            return value.value
        raise CrewError(f"rank {rank} ended where it should have spoken: {value}")

    def _these(self, ranks: Sequence[int] | None) -> Sequence[int]:
        return range(self.size) if ranks is None else ranks

    def _outcome(self, rank: int, ends_at: float) -> Any:
        try:
            value = self._receive(rank, ends_at)
        except CrewError as error:
            return Raised(error)
        if isinstance(value, _Said):
            return Raised(CrewError(f"spoke where it should have ended: {value.value!r}"))
        return value

    def _receive(self, rank: int, ends_at: float) -> Any:
        pipe = self._pipes[rank]
        if not wait([pipe], max(0.0, ends_at - time.monotonic())):
            raise CrewError(f"rank {rank} (pid {self.pid(rank)}) gave no answer in time")
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            raise CrewError(f"rank {rank} died with exit code {self.processes[rank].exitcode}") from None

    # -- faults ------------------------------------------------------------------------------------------------------

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """SIGSTOP, and wait until the process really stands still."""
        os.kill(self.pid(rank), signal.SIGSTOP)
        self._wait_for_state(rank, "T")

    def bury(self, rank: int) -> None:
        """Kill it, and wait until it is dead."""
        self.kill(rank)
        self.processes[rank].join(_STOPPED_S)

    def wait_blocked(self, *ranks: int) -> None:
        """Until each of these waits for something: for another member, as a rule, or for its next function."""
        for rank in ranks:
            self._wait_for_state(rank, "S")

    def _wait_for_state(self, rank: int, state: str) -> None:
        def is_there() -> bool:
            stat = stat_of(self.pid(rank))
            return stat is not None and stat.state == state

        eventually(is_there, f"rank {rank} is in state {state}", look_s=0.001)

    def resume(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGCONT)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        ends_at = time.monotonic() + _STOPPED_S
        for process in self.processes:
            process.join(max(0.0, ends_at - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        if self._meeting:
            self._meeting.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Raised(NamedTuple):
    """What a function raised in a process of the crew."""

    error: BaseException


class _Said:
    def __init__(self, value: Any) -> None:
        self.value = value


_mouth: list[Connection] = []


def say(value: Any) -> None:
    """Tell the test something from inside a running function; `Crew.hear` gets it."""
    _mouth[0].send(_Said(value))


def _open_meeting(size: int, place: Host | None, tls: bool) -> Meeting:
    """In the test's process, but listening where the members can reach it."""
    if place is None:
        return Meeting(size, tls=tls)
    import threading

    made: list[Meeting] = []

    def listen() -> None:
        enter(place.name)
        made.append(Meeting(size, host=place.address, tls=tls))

    # Only this thread changes its network namespace; sockets made in it stay there.
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return made[0]


def _serve(pipe: Connection, rank: int, size: int, invitation: str, where: Where, namespace: str) -> None:
    import torch

    torch.set_num_threads(1)
    _mouth[:] = [pipe]
    if namespace:
        enter(namespace)
    group: Group | None = None
    while (task := _next_task(pipe)) is not None:
        function, arguments = task
        try:
            if group is None and invitation:
                group = meeting.join(invitation, rank, size, where=where, timeout_s=30.0)
            outcome = function(group, *arguments)
        except BaseException as error:
            outcome = Raised(_portable(error))
        pipe.send(outcome)
    if group is not None:
        group.close()


def _next_task(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def _portable(error: BaseException) -> BaseException:
    """The error itself, with its traceback as a note, or a stand-in where it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
        copy.add_note(text)
        return copy
    except Exception:
        return CrewError(text)
