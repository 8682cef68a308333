"""How far a run with servers is, and what is left of it."""

from __future__ import annotations

from pathlib import Path

from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.rehearsal import Rehearsal


def settings_for(workers: int, servers: int, replicas: int = 1) -> RunSettings:
    """Silence is suffered as long as it usually is: less, and a machine that keeps a process waiting for half a second
    would decide how a test ends."""
    return RunSettings(wanted=workers, fewest=1, servers=servers, replicas=replicas)


def steps_of(run: Rehearsal) -> int:
    return max((said[0] for worker in range(len(run.workers)) for said in run.said(worker)), default=0)


def wait_for_steps(run: Rehearsal, count: int) -> None:
    """Until there are these many more."""
    wanted = steps_of(run) + count
    run.wait_for(lambda: steps_of(run) >= wanted)


def check_nothing_left(run: Rehearsal) -> None:
    """Servers end with the run, in order."""
    run.wait_for(lambda: all(server.exit_code is not None for server in run.servers))
    run.wait_for(lambda: run.coordinator.poll() is not None)
    assert run.ticket.local_name not in Path("/proc/net/unix").read_text()


def num_leases(run: Rehearsal) -> int:
    with run.reader() as reader:
        return len(reader.steps())


def wait_for_leases(run: Rehearsal, count: int) -> None:
    """Until these many more are done."""
    wanted = num_leases(run) + count
    run.wait_for(lambda: num_leases(run) >= wanted)
