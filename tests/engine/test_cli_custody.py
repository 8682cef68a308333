"""Checkpoints and logs of a run over several hosts: they are in the run's own folder, whoever is rank 0."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.testing import netlab
from tests.engine.host_runs import (
    BATCH,
    LENGTH,
    faults_of,
    final_counts,
    finish,
    newest,
    operations_in,
    run_over,
    wait_until,
)

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or ""),
    pytest.mark.timeout(300),  # several hosts begin and end their processes more than once
]


def test_checkpoints_and_logs_reach_the_runs_folder_where_rank_0_is_on_another_host(tmp_path: Path) -> None:
    with run_over(2, tmp_path, every=5) as run:
        head = run.run("-n", "1", "--restarts", "0")
        wait_until(lambda: 0 in run.ranks(), head)
        guest = run.join(1, "there")
        first = wait_until(lambda: run.ranks() if len(run.ranks()) == 2 else None, head, guest)[0]
        os.kill(first.pid, signal.SIGKILL)
        main = wait_until(lambda: run.ranks() if len(run.ranks()) == 1 else None, head, guest)[0]
        assert main.agent != first.agent
        reached = run.steps()
        wait_until(lambda: operations_in(run.folder)[-1] > reached + 10, head, guest)
        assert faults_of(newest(run.folder)) == []
        rank_0 = run.command("logs", "0")
        assert f"a line of {tmp_path.name}" in rank_0
        (tmp_path / "enough").touch()
        finish(guest)
        finish(head)
        last = newest(run.folder)
        assert faults_of(last) == []
        assert last.position in (0, LENGTH)
        assert len(final_counts(last)) == 1
        logs = run.command("logs")
        assert sum("/w0] the last line" in line for line in logs.splitlines()) == 1
        assert not list((tmp_path / "there" / "counted" / "checkpoints").iterdir())

        (tmp_path / "enough").unlink()
        again = run.run("-n", "1", "--resume")
        wait_until(lambda: run.steps() > last.operation + 5, again)
        (tmp_path / "enough").touch()
        finish(again)
        later = newest(run.folder)
        assert faults_of(later) == []
        assert later.operation > last.operation
        assert later.epoch * LENGTH + later.position > last.epoch * LENGTH + last.position + 4 * BATCH


def test_a_run_that_has_lost_all_its_workers_is_founded_on_another_host_from_the_runs_own_checkpoint(
    tmp_path: Path,
) -> None:
    with run_over(2, tmp_path, every=5) as run:
        head = run.run("-n", "1", "--restarts", "0")
        wait_until(lambda: run.folder.exists() and operations_in(run.folder), head)
        first = run.ranks()[0]
        os.kill(first.pid, signal.SIGSTOP)  # it is joined while nobody can give the state away
        guest = run.join(1, "there")
        wait_until(lambda: [member for member in run.members() if member.agent != first.agent], head, guest)
        saved = operations_in(run.folder)[-1]
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: 0 in run.ranks() and run.ranks()[0].agent != first.agent, head, guest)
        wait_until(lambda: operations_in(run.folder)[-1] > saved + 5, head, guest)
        (tmp_path / "enough").touch()
        finish(guest)
        finish(head)
        assert faults_of(newest(run.folder)) == []
        assert len(final_counts(newest(run.folder))) == 1
