"""A run over several hosts of a `Netlab`, by the commands that a person types; for tests and measurements.

    with Netlab(2) as lab, Fleet(lab.hosts, folder, [script]) as fleet:
        fleet.run(workers=1)                       # paceline run on the first host
        fleet.wait_for_workers(1)
        fleet.join(1, workers=2)                   # paceline invite there, paceline join on the second
        fleet.wait_for_workers(3)
        os.kill(fleet.workers()[0].pid, signal.SIGKILL)

`COUNTING` is a script whose model counts its own samples in its weights: a sample that was lost or counted twice shows
in what each worker writes at the end, whatever the run's own record says.

Invariant: after `close` none of the commands is left, nor, when the lab closes, anything that they started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.control.journal.journal import JournalError, MemberRow
from paceline.control.journal.reader import RunReader
from paceline.testing.netlab import Host
from paceline.watch.audit import Audit, audit

NAME = "fleet"
PATIENCE_S = 120.0
_LOOK_S = 0.02

# Arguments: the folder, seconds of each step. A worker writes each step that it has committed to steps-PID, and at the
# end how often it has counted each sample to counts-PID: least, most, epochs. The file `enough` ends the run.
COUNTING = """
import os, pathlib, sys, time
import torch, paceline
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
folder, step_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
NUM, BATCH = 256, 16
counts = torch.nn.Parameter(torch.zeros(NUM))
model = torch.nn.Module()
model.counts = counts
optimizer = torch.optim.SGD(model.parameters(), lr=BATCH)
session = paceline.Session(model, optimizer, data=TensorDataset(torch.arange(NUM)), global_batch=BATCH)
def loss_fn(numbers):
    time.sleep(step_s)
    return -counts[numbers].mean()
epochs = 0
with open(folder / f"steps-{os.getpid()}", "w", buffering=1) as steps:
    for epoch in session.epochs(100_000):
        for batch in epoch:
            session.step(loss_fn, batch)
            print(time.monotonic(), session.steps, session.world_size, file=steps)
        if session.should_stop(float("inf") if (folder / "enough").exists() else -float(session.steps), patience=0):
            break
epochs = session.steps * BATCH // NUM
(folder / f"counts-{os.getpid()}").write_text(f"{counts.min().item()} {counts.max().item()} {epochs}")
"""


class FleetStep(NamedTuple):
    """A step that a worker has committed: when (time.monotonic), which, and with how many workers."""

    at: float
    number: int
    size: int


class Fleet:
    """`arguments` are the script and what it is given; the run's folder is `folder / "runs"`."""

    def __init__(self, hosts: Sequence[Host], folder: Path, arguments: Sequence[str]) -> None:
        self._hosts = hosts
        self.folder = folder
        self._arguments = arguments
        self._commands: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    @classmethod
    def counting(cls, hosts: Sequence[Host], folder: Path, *, step_s: float = 0.02) -> Fleet:
        """With the script that counts."""
        script = folder / "counting.py"
        script.write_text(COUNTING)
        return cls(hosts, folder, [str(script), str(folder), str(step_s)])

    # -- commands ----------------------------------------------------------------------------------------------------

    def run(self, workers: int, *options: str) -> subprocess.Popen[bytes]:
        own = ("--plain", *self._where(), "--listen", self._hosts[0].address)
        return self._start(0, "run", "-n", str(workers), *own, *options, *self._arguments)

    def join(self, host: int, workers: int, *options: str) -> subprocess.Popen[bytes]:
        invite = self._start(0, "invite", *self._where())
        try:
            code = invite.wait(PATIENCE_S)
        finally:
            log = self._logs[self._commands.index(invite)]
            self._forget(invite)
        if code != 0:
            raise AssertionError(f"paceline invite exited with {code}: {log.read_text()}")
        own = ("-n", str(workers), "--folder", str(self.folder / f"guest{host}"))
        return self._start(host, "join", log.read_text().split()[-1], *own, *options, *self._arguments)

    def finish(self) -> None:
        """Let the counting script end, wait for all commands, and raise for one that did not end well."""
        (self.folder / "enough").touch()
        for command in self._commands:
            command.wait(PATIENCE_S)
        for command, log in zip(self._commands, self._logs, strict=True):
            if command.returncode != 0:
                raise AssertionError(f"{log.name} exited with {command.returncode}: {self.tails()}")

    def _where(self) -> tuple[str, ...]:
        return ("--folder", str(self.folder / "runs"), "--name", NAME)

    def _start(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{arguments[0]}-{len(self._logs)}-{time.monotonic_ns()}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            command = self._hosts[host].popen(
                [sys.executable, "-m", "paceline", *arguments], env=environment, stdout=output, stderr=output
            )
        self._commands.append(command)
        self._logs.append(log)
        return command

    def _forget(self, command: subprocess.Popen[bytes]) -> None:
        index = self._commands.index(command)
        del self._commands[index], self._logs[index]
        if command.poll() is None:
            command.kill()
            command.wait()

    # -- looking -----------------------------------------------------------------------------------------------------

    def reader(self) -> RunReader:
        return RunReader(self.folder / "runs" / NAME)

    def workers(self) -> list[MemberRow]:
        """Those that take part now, by rank."""
        try:
            with self.reader() as reader:
                living = [row for row in reader.members() if row.rank >= 0 and not row.fate and not row.is_server]
        except JournalError:
            return []
        return sorted(living, key=lambda row: row.rank)

    def wait_for_workers(self, number: int, without: Sequence[int] = ()) -> list[MemberRow]:
        """Until just so many take part, none of them a process of `without`, and each has done a step."""

        def ready() -> list[MemberRow]:
            found = self.workers()
            if len(found) != number or any(row.pid in without for row in found):
                return []
            return found if all(self.steps_of(row.pid) for row in found) else []

        found: list[MemberRow] = self.wait_for(ready, f"{number} workers at work")
        return found

    def steps_of(self, pid: int) -> list[FleetStep]:
        """What a worker of the counting script has committed so far."""
        try:
            lines = (self.folder / f"steps-{pid}").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        rows = [line.split() for line in lines if line.endswith("\n")]
        return [FleetStep(float(at), int(number), int(size)) for at, number, size in rows]

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}: {self.tails()}")
            ended = [command.args for command in self._commands if command.poll() is not None]
            if ended:
                raise AssertionError(f"{ended} ended while {what} was waited for: {self.tails()}")
            time.sleep(_LOOK_S)
        return found

    def counts(self) -> list[tuple[float, float, int]]:
        """What each worker that came to the end has counted: least, most, and how often it should be."""
        rows = [path.read_text().split() for path in sorted(self.folder.glob("counts-*"))]
        return [(float(least), float(most), int(epochs)) for least, most, epochs in rows]

    def audit(self) -> Audit:
        with self.reader() as reader:
            facts = reader.status().facts
            return audit(reader.steps(), int(facts["dataset_length"]), int(facts["global_batch"]))

    def tails(self, num_lines: int = 30) -> str:
        """The last lines of each command."""
        texts = (f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-num_lines:]) for log in self._logs)
        return "\n".join(texts)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        for command in self._commands:
            command.kill()
            command.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
