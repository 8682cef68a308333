"""Workers and servers on different hosts, with TLS between them: a run comes to what one process comes to."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.control.journal.journal import JournalError, MemberRow
from paceline.control.journal.reader import RunReader
from paceline.control.shell.ticket import read_access
from paceline.testing import netlab
from paceline.testing.netlab import Netlab
from tests.engine.host_runs import start_on, wait_until

pytestmark = pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")

SCRIPT = """
import json, os, pathlib, sys, time, torch, paceline
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
torch.manual_seed(1)
place, epochs, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randint(0, 300, (90, 3), generator=generator), torch.randn(90, generator=generator))
model = torch.nn.Sequential(paceline.nn.EmbeddingBag(8, mode="sum", scale=0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = paceline.Session(model, optimizer, data=data, global_batch=16, seed=2, strategy="server")
def loss_fn(ids, y):
    time.sleep(0.01 if epochs > 1000 else 0.0)
    return ((model(ids)[:, 0] - y) ** 2).mean()
with session:
    for epoch in session.epochs(epochs):
        for batch in epoch:
            session.step(loss_fn, batch)
        is_enough = epochs > 1000 and (place / "enough").exists()
        if session.should_stop(float("inf") if is_enough else -float(session.steps), patience=0):
            break
    with torch.no_grad():
        rows = model[0](torch.arange(300)[:, None]).tolist()
found = {"steps": session.steps, "rows": rows, "weight": model[1].weight.tolist(), "bias": model[1].bias.tolist()}
(place / f"{name}.json").write_text(json.dumps(found))
"""
STEPS = -(-90 // 16)


def members_of(folder: Path) -> list[MemberRow]:
    try:
        with RunReader(folder) as reader:
            return [member for member in reader.members() if not member.fate]
    except JournalError:
        return []


def is_at_work(folder: Path, num_hosts: int) -> bool:
    """Whether every host has a worker with a rank and a server with ranges, and nothing moves."""
    members = members_of(folder)
    ranks = [member.rank for member in members if member.rank >= 0]
    servers = [member for member in members if member.is_server and member.ranges and not member.arriving]
    return len(ranks) == len(servers) == num_hosts


@pytest.mark.hosts
def test_workers_and_servers_on_two_hosts_come_to_what_one_process_comes_to(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "here" / "two"
    here = ("--folder", str(tmp_path / "here"), "--name", "two")
    with Netlab(2) as lab, contextlib.ExitStack() as stack:

        def start(host: int, *arguments: str) -> subprocess.Popen[bytes]:
            process = start_on(lab.hosts[host], *arguments)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        own = ("--plain", *here, "--listen", lab.hosts[0].address, "-n", "1", "--servers", "1")
        run = start(0, "run", *own, str(script), str(tmp_path), "1000000", "first")
        wait_until(lambda: is_at_work(folder, 1), run)
        assert read_access(folder).ticket.tls
        code = start(0, "invite", *here).communicate(timeout=60)[0].decode().split()[-1]
        there = ("--folder", str(tmp_path / "there"), "-n", "1", "--servers", "1")
        join = start(1, "join", code, *there, str(script), str(tmp_path), "1000000", "second")
        wait_until(lambda: is_at_work(folder, 2), run, join)
        (tmp_path / "enough").touch()
        for process in (run, join):
            output = process.communicate(timeout=60)[0].decode()
            assert process.returncode == 0, output
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert first == second
    command = [sys.executable, str(script), str(tmp_path), str(first["steps"] // STEPS), "alone"]
    subprocess.run(command, check=True, timeout=60)
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert first["steps"] == alone["steps"]
    for name in ("rows", "weight", "bias"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(alone[name]), rtol=2e-4, atol=2e-5)
