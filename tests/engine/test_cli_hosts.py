"""A run over two hosts, by the commands that a person types: invite on one, join on the other, and a cut cable."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.testing import netlab
from paceline.testing.netlab import Host, Netlab
from paceline.watch.audit import audit, history_of
from tests.engine.host_runs import start_on, wait_until

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
for epoch in session.epochs(10_000):
    for batch in epoch:
        session.step(loss_fn, batch)
    if session.should_stop(float("inf") if enough.exists() else -float(session.steps), patience=0):
        break
"""


def ranks_at_work(place: Path) -> list[int]:
    try:
        with RunReader(place / "here" / "two") as reader:
            return sorted(member.rank for member in reader.members() if member.rank >= 0 and not member.fate)
    except JournalError:
        return []


class Pair:
    """A run on the first of two hosts that the second joins, both with one worker; made in steps, to be made beside
    another."""

    def __init__(self, hosts: Sequence[Host], place: Path, stack: contextlib.ExitStack) -> None:
        self.first, self.second = hosts
        self.place = place
        self._stack = stack
        self._here = ("--folder", str(place / "here"), "--name", "two")
        script = place / "train.py"
        script.write_text(SCRIPT)
        self._script = (str(script), str(place / "enough"))
        own = ("--plain", *self._here, "--listen", self.first.address)
        self.run = self._start(self.first, "run", "-n", "1", *own, *self._script)

    def invite(self) -> None:
        wait_until(lambda: ranks_at_work(self.place) == [0], self.run)
        self._invite = self._start(self.first, "invite", *self._here)

    def let_join(self) -> None:
        code = self._invite.communicate(timeout=60)[0].decode().split()[-1]
        there = ("--folder", str(self.place / "there"))
        self.join = self._start(self.second, "join", code, "-n", "1", *there, *self._script)

    def wait(self) -> None:
        wait_until(lambda: ranks_at_work(self.place) == [0, 1], self.run, self.join)

    def _start(self, host: Host, *arguments: str) -> subprocess.Popen[bytes]:
        process = start_on(host, *arguments)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """For each test two hosts of its own, all at work; most of the time that takes, one core would have been idle."""
    with Netlab(4) as lab, contextlib.ExitStack() as stack:
        joined = Pair(lab.hosts[:2], tmp_path_factory.mktemp("joined"), stack)
        cut = Pair(lab.hosts[2:], tmp_path_factory.mktemp("cut"), stack)
        for pair in (joined, cut):
            pair.invite()
        for pair in (joined, cut):
            pair.let_join()
        for pair in (joined, cut):
            pair.wait()
        yield {"joined": joined, "cut": cut}


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


def test_another_host_joins_by_an_invitation(pairs: dict[str, Pair]) -> None:
    pair = pairs["joined"]
    finish(pair.place, pair.run)
    pair.join.communicate(timeout=60)
    assert pair.join.returncode == 0
    check_samples(pair.place)


def test_a_cut_cable_costs_the_workers_behind_it_and_nothing_else(pairs: dict[str, Pair]) -> None:
    pair = pairs["cut"]
    pair.second.cut()
    try:
        wait_until(lambda: ranks_at_work(pair.place) == [0], pair.run)
        finish(pair.place, pair.run)
    finally:
        pair.second.mend()
        pair.join.kill()
        pair.join.wait()
    check_samples(pair.place)
