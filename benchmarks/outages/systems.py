"""The systems that are compared: how their workers are started, replaced and ended.

A `Fleet` holds the processes of one run and reads what its workers note; after `close` nothing of it is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import paceline
from benchmarks.common.ports import free_port
from benchmarks.outages.worker import LENGTH, WORKERS
from paceline.control.journal.reader import RunReader
from paceline.watch.audit import audit

WORKER = Path(__file__).with_name("worker.py")
LOOK_S = 0.02
TOKEN = "PACELINE_BENCHMARK_TOKEN"


class Line(NamedTuple):
    """What a worker noted after a step."""

    time: float
    step: int
    size: int
    counts: bool
    attempts: int
    epoch: int
    samples: tuple[int, ...]


class Outage(Exception):
    """A system did not get to where it should; the message says what was waited for."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Fleet:
    """The processes of one block: known by a token in their environment, all gone after `close`."""

    def __init__(self, folder: Path, batch: int, extra_path: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.batch = batch
        self._token = secrets.token_hex(8)
        sources = [str(Path(paceline.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        search = os.pathsep.join(path for path in [extra_path, *sources] if path)
        own = {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", TOKEN: self._token}
        self._environment = {**os.environ, **own, **environment}
        self.children: list[subprocess.Popen[bytes]] = []
        self._known: dict[int, tuple[int, list[Line]]] = {}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"output-{len(self.children)}.txt").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.children.append(child)
        return child

    def worker(self, system: str, *more: str) -> list[str]:
        return [str(WORKER), system, str(self.folder), "--batch", str(self.batch), *more]

    def lines(self) -> dict[int, list[Line]]:
        """What each worker that ever was has noted, by process id."""
        for path in self.folder.glob("*.log"):
            pid = int(path.stem)
            position, lines = self._known.get(pid, (0, []))
            with path.open("rb") as file:
                file.seek(position)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    position += len(raw)
                    lines.append(_parse(raw.decode()))
            self._known[pid] = position, lines
        return {pid: lines for pid, (_, lines) in self._known.items()}

    def living(self) -> dict[int, list[Line]]:
        return {pid: lines for pid, lines in self.lines().items() if lives(pid)}

    def wait(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        ends_at = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > ends_at:
                raise Outage(f"waited {timeout_s:.0f} s in vain for {what}")
            time.sleep(LOOK_S)
        return found

    def left(self) -> list[int]:
        """Everything that was started here, directly or not, and lives."""
        mark = f"{TOKEN}={self._token}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes() and lives(int(entry.name)):
                        found.append(int(entry.name))
        return found

    def close(self) -> None:
        ends_at = time.monotonic() + 20.0
        while (pids := self.left()) and time.monotonic() < ends_at:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for child in self.children:
            child.kill()
            child.wait()


def _parse(text: str) -> Line:
    at, step, size, counts, attempts, epoch, *samples = text.split()
    numbers = tuple(map(int, samples[0].split(","))) if samples else ()
    return Line(float(at), int(step), int(size), counts == "1", int(attempts), int(epoch), numbers)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- the systems -------------------------------------------------------------------------------------------------------


class System:
    """How workers are started, replaced and ended; the rest is the same for all."""

    name = ""
    keeps_survivors = True

    environment: dict[str, str] = {}

    def __init__(self, torchft_path: str) -> None:
        self.path = ""

    def reason_missing(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        return ""

    def start(self, fleet: Fleet) -> None:
        raise NotImplementedError

    def replace(self, fleet: Fleet, victim: int) -> None:
        """Where nobody else does, start a worker in place of the dead one."""

    def end(self, fleet: Fleet) -> dict[str, Any]:
        """Let the run end in order, if it can; what can be said of its samples."""
        return {}


class Paceline(System):
    name = "Paceline"

    def start(self, fleet: Fleet) -> None:
        command = ["-m", "paceline.cli.main", "run", "-n", str(WORKERS), "--restarts", "1000", "--plain"]
        fleet.start(*command, "--folder", "runs", "--name", "block", *fleet.worker("paceline"))

    def end(self, fleet: Fleet) -> dict[str, Any]:
        os.kill(fleet.children[0].pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            fleet.children[0].wait(30.0)
        found: dict[str, Any] = {"exit_code": fleet.children[0].poll(), "processes_left": len(fleet.left())}
        with RunReader(fleet.folder / "runs" / "block") as reader:
            audited = audit(reader.steps(), LENGTH, fleet.batch)
            events = Counter(event.kind for event in reader.events())
        spans = [span for epoch in audited.epochs for span in (*epoch.missing, *epoch.twice, *epoch.outside)]
        noted = Counter(
            (line.epoch, number) for lines in fleet.lines().values() for line in lines for number in line.samples
        )
        repeated = sum(count - 1 for count in noted.values())
        found |= {"audit": list(audited.summary), "details": list(audited.details), "events": dict(events)}
        return found | {"samples_noted_twice": repeated, "samples_wrong": sum(map(len, spans)) + repeated}


class Torchrun(System):
    name = "torchrun, DDP"
    keeps_survivors = False
    # Without it workers that were started again find the addresses of the dead in the store, and fail again and again.
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(self, fleet: Fleet) -> None:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
        fleet.start(*command, *fleet.worker("torchrun"))


class Torchft(System):
    name = "torchft"
    lighthouse_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()

    def __init__(self, torchft_path: str) -> None:
        self.path = torchft_path

    def reason_missing(self) -> str:
        search = os.pathsep.join(path for path in (self.path, os.environ.get("PYTHONPATH", "")) if path)
        tried = subprocess.run(
            [sys.executable, "-c", "import torchft"],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if tried.returncode == 0:
            return ""
        reason = (tried.stderr.strip().splitlines() or ["import failed"])[-1]
        return f"{reason} (pip install torchft-nightly, or --torchft-path)"

    def start(self, fleet: Fleet) -> None:
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        script = fleet.folder / "lighthouse.py"  # it takes its options from a script's command line only
        script.write_text("import sys; from torchft._torchft import lighthouse_main; sys.exit(lighthouse_main())\n")
        options = ["--bind", f"[::]:{port}", "--min_replicas", str(WORKERS - 1), *self.lighthouse_options]
        fleet.start(str(script), *options)
        self._ranks: dict[int, int] = {}
        for rank in range(WORKERS):
            self._add(fleet, rank)

    def _add(self, fleet: Fleet, rank: int) -> None:
        more = ["--rank", str(rank), "--lighthouse", self._address, *self.worker_options]
        self._ranks[fleet.start(*fleet.worker("torchft", *more)).pid] = rank

    def replace(self, fleet: Fleet, victim: int) -> None:
        time.sleep(1.0)
        for pid, rank in list(self._ranks.items()):
            if not lives(pid):
                del self._ranks[pid]
                self._add(fleet, rank)


class TorchftTuned(Torchft):
    name = "torchft, tuned"
    lighthouse_options = ("--join_timeout_ms", "1000", "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "50")
    worker_options = ("--gloo-timeout-s", "2", "--heartbeat-ms", "10")


SYSTEMS: dict[str, type[System]] = {
    "paceline": Paceline,
    "torchrun": Torchrun,
    "torchft": Torchft,
    "torchft-tuned": TorchftTuned,
}
