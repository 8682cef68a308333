"""A run over several hosts of a lab, by the commands that a person types, with a model that counts its samples."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import Contents, find, newest_good
from paceline.control.journal.journal import JournalError, MemberRow
from paceline.control.journal.reader import RunReader
from paceline.testing.eventually import eventually
from paceline.testing.netlab import Host, Netlab

WAIT_S = 120.0
LENGTH, BATCH = 96, 8

# The weight of a sample is the number of updates that had it.
SCRIPT = """
import json, pathlib, sys, time, torch, paceline
from paceline.train import halting, membership, sources
from paceline.train.saving import Checkpoints
# A test need not wait as long as people do.
halting.PATIENCE_S = halting.GATHER_S = 8.0
membership.NEWCOMER_S = sources.FIRST_S = 12.0
torch.set_num_threads(1)
place, strategy, every = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        return torch.tensor(index)
class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = torch.nn.Parameter(torch.zeros(96))
model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
settings = Checkpoints(every_s=None, every_steps=every or None)
session = paceline.Session(
    model, optimizer, data=Numbers(), global_batch=8, seed=3, strategy=strategy, checkpoints=settings
)
print("a line of", place.name, flush=True)
def loss_fn(numbers):
    time.sleep(0.01)
    return -model.counts[numbers].mean()
with session:
    for epoch in session.epochs(100_000):
        for batch in epoch:
            session.step(loss_fn, batch)
        if session.should_stop(float("inf") if (place / "enough").exists() else -float(session.steps), patience=0):
            break
print("the last line", flush=True)
"""


def faults_of(contents: Contents) -> list[str]:
    """Where the weights of a checkpoint do not count the samples that its cursor says."""
    counts = contents.model["counts"]
    expected = contents.epoch * LENGTH + contents.position
    faults = [] if float(counts.sum()) == expected else [f"{float(counts.sum())} samples where {expected} are due"]
    off = [number for number, count in enumerate(counts.tolist()) if count not in (contents.epoch, contents.epoch + 1)]
    return faults + [f"sample {number} counts {counts[number]} in epoch {contents.epoch}" for number in off]


def newest(folder: Path) -> Contents:
    contents, skipped = newest_good(folder / "checkpoints")
    assert contents is not None
    assert not skipped
    return contents


def operations_in(folder: Path) -> list[int]:
    return sorted(found.operation for found in find(folder / "checkpoints"))


class Run:
    """A run on the first host of a lab, in `head`; others join with folders of their own."""

    def __init__(
        self, lab: Netlab, place: Path, strategy: str = "allreduce", every: int = 0, text: str = SCRIPT
    ) -> None:
        self.lab = lab
        self.place = place
        self._stack = contextlib.ExitStack()
        script = place / "train.py"
        script.write_text(text)
        self.script = (str(script), str(place), strategy, str(every))
        self.folder = place / "head" / "counted"

    def close(self) -> None:
        self._stack.close()

    def start(self, host: Host, *arguments: str) -> subprocess.Popen[bytes]:
        process = start_on(host, *arguments)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def run(self, *options: str, host: int = 0, folder: str = "head") -> subprocess.Popen[bytes]:
        self.folder = self.place / folder / "counted"
        own = ("--folder", str(self.place / folder), "--name", "counted", "--listen", self.lab.hosts[host].address)
        return self.start(self.lab.hosts[host], "run", "--plain", *own, *options, *self.script)

    def join(self, host: int, folder: str, *options: str, by: int = 0) -> subprocess.Popen[bytes]:
        invite = ("invite", "--folder", str(self.folder.parent), "--name", self.folder.name)
        code = self.start(self.lab.hosts[by], *invite).communicate(timeout=WAIT_S)[0].decode().split()[-1]
        there = ("--folder", str(self.place / folder))
        return self.start(self.lab.hosts[host], "join", code, *there, *options, *self.script)

    def command(self, *arguments: str, host: int = 0) -> str:
        own = ("--folder", str(self.folder.parent), "--name", self.folder.name)
        process = self.start(self.lab.hosts[host], *arguments, *own)
        output = process.communicate(timeout=WAIT_S)[0].decode()
        assert process.returncode == 0, output
        return output

    def members(self) -> list[MemberRow]:
        try:
            with RunReader(self.folder) as reader:
                return [member for member in reader.members() if not member.fate]
        except JournalError:
            return []

    def ranks(self) -> dict[int, MemberRow]:
        return {member.rank: member for member in self.members() if member.rank >= 0}

    def steps(self) -> int:
        try:
            with RunReader(self.folder) as reader:
                return reader.status().applied
        except JournalError:
            return 0


@contextlib.contextmanager
def run_over(
    num_hosts: int, place: Path, strategy: str = "allreduce", every: int = 0, text: str = SCRIPT
) -> Iterator[Run]:
    with Netlab(num_hosts) as lab, contextlib.closing(Run(lab, place, strategy, every, text)) as run:
        yield run


def start_on(host: Host, *arguments: str) -> subprocess.Popen[bytes]:
    """A command that a person types there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOST": host.address}
    command = [sys.executable, "-m", "paceline", *arguments]
    return host.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_until(condition: Callable[[], Any], *processes: subprocess.Popen[bytes]) -> Any:
    """As `eventually`, while these commands go on."""

    def look() -> Any:
        found = condition()
        for process in () if found else processes:
            if process.poll() is not None:
                assert process.stdout is not None
                raise AssertionError(f"a command ended too early: {process.stdout.read().decode()}")
        return found

    return eventually(look, "the run to come so far", timeout_s=WAIT_S, look_s=0.05)


def finish(process: subprocess.Popen[bytes], code: int = 0) -> str:
    output = str(process.communicate(timeout=WAIT_S)[0].decode())
    assert process.returncode == code, output
    return output


def kill_all(pids: list[int]) -> None:
    """At once, as far as that is possible: none of them sees another one's end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids_on(host: Host) -> list[int]:
    """Of all processes in a host's network."""
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, check=True, timeout=WAIT_S)
    return [int(word) for word in listed.stdout.split()]


def final_counts(contents: Contents) -> list[float]:
    counts: torch.Tensor = contents.model["counts"]
    return sorted(set(counts.tolist()))
