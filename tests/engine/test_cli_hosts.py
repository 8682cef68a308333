"""A run over two hosts, by the commands that a person types: invite on one, join on the other, and a cut cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.control.journal import JournalError
from paceline.control.reader import RunReader
from paceline.testing import netlab
from paceline.testing.netlab import Host, Netlab
from paceline.watch.audit import audit, history_of

pytestmark = pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")

SCRIPT = """
import sys, time, pathlib, torch, torch.nn.functional as F, paceline
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
x = torch.randn(203, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = paceline.Session(model, optimizer, data=data, global_batch=16)
enough = pathlib.Path(sys.argv[1])
def loss_fn(x, y):
    time.sleep(0.01)
    return F.cross_entropy(model(x), y)
for epoch in session.epochs(1000):
    for batch in epoch:
        session.step(loss_fn, batch)
    if session.should_stop(float("inf") if enough.exists() else -float(session.steps), patience=0):
        break
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
    with Netlab(2) as lab:
        yield lab


def paceline(host: Host, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", *arguments]
    return host.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_until(condition: Callable[[], Any], *processes: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        assert all(process.poll() is None for process in processes), "a command ended too early"
        time.sleep(0.05)
    return found


def ranks_at_work(place: Path) -> list[int]:
    try:
        with RunReader(place / "here" / "two") as reader:
            return sorted(member.rank for member in reader.members() if member.rank >= 0 and not member.fate)
    except JournalError:
        return []


@contextlib.contextmanager
def two_hosts_at_work(lab: Netlab, place: Path) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A run on the first host that the second has joined, both with one worker."""
    first, second = lab.hosts
    script = place / "train.py"
    script.write_text(SCRIPT)
    here, enough = ("--folder", str(place / "here"), "--name", "two"), str(place / "enough")
    run = paceline(first, "run", "-n", "1", "--plain", *here, "--host", first.address, str(script), enough)
    try:
        wait_until(lambda: ranks_at_work(place) == [0], run)
        code = paceline(first, "invite", *here).communicate(timeout=60)[0].decode().split()[-1]
        join = paceline(second, "join", code, "-n", "1", "--folder", str(place / "there"), str(script), enough)
        try:
            wait_until(lambda: ranks_at_work(place) == [0, 1], run, join)
            yield run, join
        finally:
            join.kill()
            join.communicate()
    finally:
        run.kill()
        run.communicate()


def finish(place: Path, process: subprocess.Popen[bytes]) -> None:
    (place / "enough").touch()
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 0, output


def check_samples(place: Path) -> None:
    with RunReader(place / "here" / "two") as reader:
        facts = reader.status().facts
        assert {len(plan.members) for plan in reader.plans()} == {1, 2}
        found = audit(history_of(reader.steps()), int(facts["dataset_length"]), int(facts["global_batch"]))
    assert found.is_exact


def test_another_host_joins_by_an_invitation(lab: Netlab, tmp_path: Path) -> None:
    with two_hosts_at_work(lab, tmp_path) as (run, join):
        finish(tmp_path, run)
        join.communicate(timeout=60)
        assert join.returncode == 0
    check_samples(tmp_path)


def test_a_cut_cable_costs_the_workers_behind_it_and_nothing_else(lab: Netlab, tmp_path: Path) -> None:
    with two_hosts_at_work(lab, tmp_path) as (run, _):
        lab.hosts[1].cut()
        try:
            wait_until(lambda: ranks_at_work(tmp_path) == [0], run)
            finish(tmp_path, run)
        finally:
            lab.hosts[1].mend()
    check_samples(tmp_path)
