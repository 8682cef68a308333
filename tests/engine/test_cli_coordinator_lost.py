"""A coordinator that does not come back, and one that has forgotten its run: no state is lost, no sample repeated."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from paceline.control.exit_codes import HALTED
from paceline.control.journal.reader import RunReader
from paceline.testing import netlab
from tests.engine.host_runs import (
    Run,
    faults_of,
    final_counts,
    finish,
    newest,
    operations_in,
    pids_on,
    run_over,
    wait_until,
)

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or ""),
    pytest.mark.timeout(300),  # several hosts begin and end their processes more than once
]


def coordinators(run: Run) -> list[int]:
    found = []
    for pid in pids_on(run.lab.hosts[0]):
        with contextlib.suppress(OSError):
            if b"paceline.control.shell.service" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_workers_save_what_they_hold_when_the_coordinator_dies_too_often(tmp_path: Path) -> None:
    with run_over(1, tmp_path) as run:
        head = run.run("-n", "2")
        wait_until(lambda: len(run.ranks()) == 2 and run.steps() > 5, head)
        killed: list[int] = []

        def kill_next() -> bool:
            for pid in coordinators(run):
                if pid not in killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
            return len(killed) >= 11

        wait_until(kill_next, head)
        recorded = run.steps()
        output = finish(head, HALTED)
        assert "the coordinator ended 11 times" in output
        assert "paceline run --resume" in output
        held = newest(run.folder)
        assert faults_of(held) == []
        assert held.operation >= recorded
        again = run.run("-n", "2", "--resume")
        wait_until(lambda: run.steps() > held.operation + 5, again)
        (tmp_path / "enough").touch()
        finish(again)
        last = newest(run.folder)
        assert faults_of(last) == []
        assert len(final_counts(last)) == 1


def test_guests_find_a_coordinator_whose_database_was_deleted(tmp_path: Path) -> None:
    """It listens where the one before did."""
    with run_over(2, tmp_path) as run:
        head = run.run("-n", "1")
        wait_until(lambda: 0 in run.ranks(), head)
        guest = run.join(1, "there")
        wait_until(lambda: len(run.ranks()) == 2 and run.steps() > 5, head, guest)
        everybody = {member.pid for member in run.members()}
        for path in run.folder.glob("run.db*"):
            path.unlink()
        os.kill(coordinators(run)[0], signal.SIGKILL)
        wait_until(lambda: len(run.ranks()) == 2, head, guest)
        before = run.steps()
        wait_until(lambda: run.steps() > before + 5, head, guest)
        assert {member.pid for member in run.members()} == everybody, "somebody was restarted"
        (tmp_path / "enough").touch()
        finish(head)
        finish(guest)
        last = newest(run.folder)
        assert faults_of(last) == []
        assert len(final_counts(last)) == 1


@pytest.mark.parametrize("strategy", ["allreduce", "server"])
def test_a_coordinator_whose_database_was_deleted_goes_on_from_its_workers(tmp_path: Path, strategy: str) -> None:
    """One of two workers is killed with it, so that there is one that could begin anew. Servers go on too."""
    with run_over(1, tmp_path, strategy, every=5) as run:
        head = run.run("-n", "2", *(("--servers", "2") if strategy == "server" else ()))
        wait_until(lambda: len(run.ranks()) == 2 and run.folder.is_dir() and operations_in(run.folder), head)
        before = run.steps()
        servers = {member.pid for member in run.members() if member.is_server}
        workers = {member.pid for member in run.members()} - servers
        (victim,) = [member.pid for member in run.members() if member.rank == 1]
        for path in run.folder.glob("run.db*"):
            path.unlink()
        os.kill(victim, signal.SIGKILL)
        os.kill(coordinators(run)[0], signal.SIGKILL)
        before_it = workers | servers
        wait_until(lambda: len(run.ranks()) == 2 and {member.pid for member in run.members()} != before_it, head)
        assert (workers - {victim}) | servers <= {member.pid for member in run.members()}, "the survivor was restarted"
        wait_until(lambda: run.steps() > before + 5, head)
        (tmp_path / "enough").touch()
        finish(head)
        last = newest(run.folder)
        assert faults_of(last) == []
        assert len(final_counts(last)) == 1
        with RunReader(run.folder) as reader:
            kinds = [event.kind for event in reader.events()]
            assert "adopted" in kinds
            assert not [plan for plan in reader.plans() if plan.start == "found"]
