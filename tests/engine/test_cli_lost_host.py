"""The coordinator's host is lost: workers of other hosts leave what they hold there, and the run goes on from it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from paceline.control.exit_codes import HALTED
from paceline.testing import netlab
from paceline.testing.counting import Counting
from paceline.testing.netlab import Netlab
from tests.engine.host_runs import (
    Run,
    faults_of,
    final_counts,
    finish,
    kill_all,
    newest,
    pids_on,
    run_over,
    wait_until,
)

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or ""),
    pytest.mark.timeout(300),  # several hosts begin and end their processes more than once
]


def resume_command(output: str) -> list[str]:
    """What a person would copy."""
    (line,) = [line for line in output.splitlines() if "paceline run --resume" in line]
    words = shlex.split(line)
    assert words[:1] == ["paceline"]
    return words[1:]


def go_on(run: Run, output: str, host: int, *others: tuple[int, str]) -> None:
    """By the command that was printed; others join again, and all samples count."""
    run.folder = run.place / "there" / "counted"
    held = newest(run.folder)
    assert faults_of(held) == []
    again = run.start(run.lab.hosts[host], *resume_command(output))
    wait_until(lambda: run.steps() > held.operation, again)
    joined = [run.join(number, folder, by=host) for number, folder in others]
    wait_until(lambda: len(run.ranks()) == 1 + len(others), again, *joined)
    reached = run.steps()
    wait_until(lambda: run.steps() > reached + 5, again, *joined)
    (run.place / "enough").touch()
    for process in (again, *joined):
        finish(process)
    last = newest(run.folder)
    assert faults_of(last) == []
    assert len(final_counts(last)) == 1
    assert last.epoch * 96 + last.position > held.epoch * 96 + held.position


def test_workers_of_other_hosts_leave_what_they_hold_and_the_run_goes_on_there(tmp_path: Path) -> None:
    """Three hosts; all processes of the first are killed at once."""
    with run_over(3, tmp_path) as run:
        head = run.run("-n", "1")
        wait_until(lambda: 0 in run.ranks(), head)
        guests: list[subprocess.Popen[bytes]] = []
        for number, folder in ((1, "there"), (2, "elsewhere")):
            guests.append(run.join(number, folder))
            wait_until(lambda: len(run.ranks()) == 1 + len(guests), head, *guests)
        reached = run.steps()
        wait_until(lambda: run.steps() > reached + 10, head, *guests)
        kill_all(pids_on(run.lab.hosts[0]))
        recorded = run.steps()
        first, _ = (finish(guest, HALTED) for guest in guests)
        for folder in ("there", "elsewhere"):
            held = newest(tmp_path / folder / "counted")
            assert faults_of(held) == []
            assert held.operation >= recorded  # nothing that was recorded is lost
        go_on(run, first, 1, (2, "elsewhere"))


def test_workers_that_wait_for_a_host_whose_cable_is_cut_halt_too(tmp_path: Path) -> None:
    """Nobody tells them that it is gone: they wait in the middle of an operation."""
    with run_over(2, tmp_path) as run:
        head = run.run("-n", "1")
        wait_until(lambda: 0 in run.ranks(), head)
        guest = run.join(1, "there")
        wait_until(lambda: len(run.ranks()) == 2, head, guest)
        reached = run.steps()
        wait_until(lambda: run.steps() > reached + 10, head, guest)
        run.lab.hosts[0].cut()
        output = finish(guest, HALTED)
        kill_all(pids_on(run.lab.hosts[0]))
        go_on(run, output, 1)


def test_a_group_that_works_without_the_coordinators_host_ends_at_a_clean_point(tmp_path: Path) -> None:
    """The run's host has no worker left: those of the other hosts go on for a while without noticing."""
    with run_over(3, tmp_path) as run:
        head = run.run("-n", "1", "--restarts", "0")
        wait_until(lambda: 0 in run.ranks(), head)
        guests: list[subprocess.Popen[bytes]] = []
        for number, folder in ((1, "there"), (2, "elsewhere")):
            guests.append(run.join(number, folder))
            wait_until(lambda: len(run.ranks()) == 1 + len(guests), head, *guests)
        agents = {member.agent for member in run.ranks().values()}
        first = next(member for member in run.ranks().values() if member.rank == 0)
        kill_all([first.pid])
        wait_until(lambda: len(run.ranks()) == 2 and len(agents) == 3, head, *guests)
        kill_all(pids_on(run.lab.hosts[0]))
        outputs = [finish(guest, HALTED) for guest in guests]
        one, other = (newest(tmp_path / folder / "counted") for folder in ("there", "elsewhere"))
        assert (one.operation, final_counts(one)) == (other.operation, final_counts(other))
        go_on(run, outputs[0], 1)


# Like the script of the other tests, with parameters in several ranges and rows on servers. In the host of this address
# a worker stands still for a while, in the moment in which all know that its step counts and servers do not.
SERVED = """
import os, pathlib, sys, time, torch, paceline
from paceline.strategy.served_steps import ServerSteps
from paceline.testing.counting import Counting
from paceline.train import halting
from paceline.train.saving import Checkpoints
halting.PATIENCE_S, halting.GATHER_S = 8.0, 20.0
torch.set_num_threads(1)
place, (strategy, consistency, holder) = pathlib.Path(sys.argv[1]), sys.argv[2].split("/")
case = Counting(length=96, batch=8, seed=3, has_table=True).in_ranges(6)
model = case.model()
session = paceline.Session(
    model, case.optimizer(model), data=case.data(), global_batch=case.batch, seed=case.seed, strategy=strategy,
    consistency=consistency, checkpoints=Checkpoints(every_s=None),
)
apply = ServerSteps.apply
def hold(served):
    if (place / "hold").exists():
        (place / "holds").touch()
        while not (place / "go").exists():
            time.sleep(0.01)
    apply(served)
if os.environ["HOST"] == holder:
    ServerSteps.apply = hold
def loss_fn(numbers):
    time.sleep(0.01)
    return -model(numbers).mean()
with session:
    for epoch in session.epochs(100_000):
        for batch in epoch:
            session.step(loss_fn, batch)
        if session.should_stop(float("inf") if (place / "enough").exists() else -float(session.steps), patience=0):
            break
"""
SERVED_CASE = Counting(length=96, batch=8, seed=3, has_table=True).in_ranges(6)
REPLICATED = ("--servers", "2", "--replicas", "2")


def num_copies(run: Run, agent: str) -> int:
    return sum(row.ranges + row.backups for row in run.members() if row.is_server and row.agent == agent)


@pytest.mark.parametrize(
    ("mode", "holds"),
    [("server/sync", False), ("server/sync", True), ("hybrid/sync", True), ("server/async", False)],
)
def test_copies_of_what_servers_held_on_the_lost_host_are_saved(tmp_path: Path, mode: str, holds: bool) -> None:
    """Every range has a copy on each of two hosts. Who `holds` was about to make a step."""
    leased = mode.endswith("async")
    with Netlab(2) as lab:
        strategy = f"{mode}/{lab.hosts[1].address if holds else ''}"
        with contextlib.closing(Run(lab, tmp_path, strategy, text=SERVED)) as run:
            head = run.run("-n", "1", *REPLICATED)
            here = wait_until(lambda: run.ranks().get(0), head).agent
            guest = run.join(1, "there", "--servers", "2")
            both = wait_until(lambda: ranks if len(ranks := run.ranks()) == 2 else None, head, guest)
            (there,) = {row.agent for row in both.values()} - {here}
            num_ranges = sum(row.ranges for row in run.members())
            wait_until(lambda: num_copies(run, there) == num_ranges, head, guest)
            reached = run.steps()
            wait_until(lambda: run.steps() > reached + 10, head, guest)
            if holds:
                (tmp_path / "hold").touch()
                wait_until((tmp_path / "holds").exists, head, guest)
            kill_all(pids_on(lab.hosts[0]))
            recorded = run.steps()
            (tmp_path / "go").touch()
            output = finish(guest, HALTED)
            assert " --servers 2 --replicas 2 " in output
            held = newest(tmp_path / "there" / "counted")
            assert SERVED_CASE.faults_of_checkpoint(held, leased=leased) == []
            assert held.operation >= recorded
            run.folder = tmp_path / "there" / "counted"
            again = run.start(lab.hosts[1], *resume_command(output))
            wait_until(lambda: run.steps() > held.operation + 5, again)
            (tmp_path / "enough").touch()
            finish(again)
            assert SERVED_CASE.faults_of_checkpoint(newest(run.folder), leased=leased) == []


@pytest.mark.parametrize("strategy", ["allreduce", "server"])
def test_a_worker_that_was_just_started_halts_too(tmp_path: Path, strategy: str) -> None:
    """It waits for its first plan, and has nothing to leave. To start it again and again would help nobody."""
    with run_over(2, tmp_path, strategy) as run:
        head = run.run("-n", "1", *(("--servers", "1") if strategy == "server" else ()))
        wait_until(lambda: 0 in run.ranks(), head)
        guest = run.join(1, "there", "--restarts", "1000")
        wait_until(lambda: len(run.ranks()) == 2, head, guest)
        own = run.ranks()[1].pid
        kill_all([own, *pids_on(run.lab.hosts[0])])
        output = finish(guest, HALTED)
        assert "it has trained nothing yet" in output
        assert "nothing could be saved on this machine" in output


def test_workers_that_cannot_gather_what_servers_held_say_so(tmp_path: Path) -> None:
    """The only server was on the host that is lost."""
    with run_over(2, tmp_path, strategy="server") as run:
        head = run.run("-n", "1", "--servers", "1")
        wait_until(lambda: 0 in run.ranks(), head)
        guest = run.join(1, "there")
        wait_until(lambda: len(run.ranks()) == 2, head, guest)
        reached = run.steps()
        wait_until(lambda: run.steps() > reached + 5, head, guest)
        kill_all(pids_on(run.lab.hosts[0]))
        output = finish(guest, HALTED)
        assert "what this worker holds could not be saved" in output
        assert "nothing could be saved on this machine" in output
        assert "paceline run --resume" not in output


@pytest.mark.parametrize("cuts", [False, True])
def test_a_guest_with_servers_only_serves_who_saves_and_then_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    """One host has workers, another one a server, which has the only copy that is left."""
    with Netlab(3) as lab, contextlib.closing(Run(lab, tmp_path, "server/sync/", text=SERVED)) as run:
        monkeypatch.setenv("PYTHONPATH", with_short_patience(tmp_path))
        head = run.run("-n", "1", *REPLICATED)
        here = wait_until(lambda: run.ranks().get(0), head).agent
        code = run.command("invite", "--uses", "2").split()[-1]
        servers = run.start(lab.hosts[2], "join", code, "--folder", str(tmp_path / "far"), "-n", "0", "--servers", "2")
        guest = run.start(lab.hosts[1], "join", code, "--folder", str(tmp_path / "there"), *run.script)
        wait_until(lambda: len(run.ranks()) == 2, head, guest, servers)
        num_ranges = sum(row.ranges for row in run.members())
        wait_until(lambda: num_copies(run, here) == num_ranges, head, guest, servers)
        wait_until(lambda: sum(row.backups for row in run.members()) == num_ranges, head, guest, servers)
        reached = run.steps()
        wait_until(lambda: run.steps() > reached + 10, head, guest, servers)
        if cuts:
            lab.hosts[0].cut()  # so that nobody tells the other hosts of these deaths
        kill_all(pids_on(lab.hosts[0]))
        recorded = run.steps()
        assert "paceline run --resume" in finish(guest, HALTED)
        held = newest(tmp_path / "there" / "counted")
        assert SERVED_CASE.faults_of_checkpoint(held, leased=False) == []
        assert held.operation >= recorded
        output = finish(servers, HALTED)
        assert "there were servers only on this machine" in output
        assert "paceline run --resume" not in output


def with_short_patience(place: Path) -> str:
    """A path of modules for processes that do not wait as long for a lost host as people would."""
    inside = place / "inside"
    inside.mkdir()
    (inside / "sitecustomize.py").write_text(
        "from paceline.control.machines import lost_head\nlost_head.DESERTED_S = 15.0\n"
    )
    return os.pathsep.join(filter(None, (str(inside), os.environ.get("PYTHONPATH", ""))))
