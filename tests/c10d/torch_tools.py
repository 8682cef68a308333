"""Programs of Accelerate, Lightning and Transformers on Paceline, against the same on Gloo.

    python -m tests.c10d.torch_tools                               # all, on two and three processes
    python -m tests.c10d.torch_tools --only lightning --sizes 2    # some

Each program of the folder `tools` is run three times: by torchrun, on Gloo; by `paceline run --backend paceline`, as it
is; by torchrun, asking for Paceline itself. What its ranks computed must be the same. Then with a rank that is killed:
both ways on Paceline must fail in time, with an error that names the rank, and leave no process behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.c10d import worlds

PROGRAMS = Path(__file__).with_name("tools")
PACKAGES = ("torch", "accelerate", "lightning", "torchmetrics", "transformers")
LIMIT_S = 300
FAREWELL_S = 5  # for helpers of Python's own, which end when they see that their parent has
DEAD_RANK = 1


class Way(NamedTuple):
    """How a program is started."""

    name: str
    backend: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    def command(self, program: Path, size: int) -> list[str]:
        return [sys.executable, "-m", *self.launcher, str(size), *self._backend_option(), str(program), *self.arguments]

    def _backend_option(self) -> tuple[str, ...]:
        return ("--backend", self.backend) if self.launcher[0] == "paceline" else ()


TORCHRUN = ("torch.distributed.run", "--nproc-per-node")
GLOO = Way("gloo", "gloo", TORCHRUN)
UNCHANGED = Way("paceline run", "paceline", ("paceline", "run", "--plain", "-n"))
EXPLICIT = Way("asked for", "paceline", TORCHRUN, ("paceline",))


class Ran(NamedTuple):
    code: int
    output: str
    folder: Path
    seconds: float

    def results(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / f"results-{rank}.pt", weights_only=False)
        return found


def run(way: Way, program: Path, size: int, folder: Path, dead_rank: int | None = None) -> Ran:
    """Until its end or the limit, and nothing of it may be left."""
    folder.mkdir()
    environment = os.environ | {
        "TOOL_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HUB_OFFLINE": "1",
    }
    if dead_rank is not None:
        environment["TOOL_DEATH"] = str(dead_rank)
    began = time.monotonic()
    with (folder / "output").open("w+") as output:
        launcher = subprocess.Popen(
            way.command(program, size),
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        left = left_behind(f"TOOL_FOLDER={folder}", 0 if code == -signal.SIGALRM else FAREWELL_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
        output.seek(0)
        text = output.read()
    if left:
        raise AssertionError(f"after {LIMIT_S} s, or after the end, there were processes left: {left}\n{text[-5000:]}")
    return Ran(code, text, folder, time.monotonic() - began)


def left_behind(setting: str, patience_s: float) -> list[int]:
    ends_at = time.monotonic() + patience_s
    while (found := processes_with(setting)) and time.monotonic() < ends_at:
        time.sleep(0.1)
    return found


def processes_with(setting: str) -> list[int]:
    """Those that were started with this in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            settings = place.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is somebody else's
            continue
        if setting.encode() in settings:
            found.append(int(place.parent.name))
    return found


def check_results(way: Way, ran: Ran, expected: Ran, size: int) -> None:
    for rank in range(size):
        found, wanted = ran.results(rank), expected.results(rank)
        assert found.pop("backend") == way.backend, f"it ran on another backend than {way.backend}"
        assert wanted.pop("backend") == "gloo"
        worlds.assert_same(found, wanted, f"rank {rank}")


def check_death(way: Way, ran: Ran) -> None:
    assert ran.code != 0, "it ended as if nothing had happened"
    assert re.search(rf"PeerLost.*\(rank {DEAD_RANK}\) died", ran.output), "no error names the rank that died"
    if way is UNCHANGED:
        assert f"w{DEAD_RANK} (process " in ran.output
        assert "was killed by SIGKILL" in ran.output


def check(program: Path, size: int, folder: Path) -> bool:
    """Whether all went well; says what did not."""
    expected = run(GLOO, program, size, folder / "gloo")
    if expected.code:
        print(f"{program.stem}, {size} processes, {GLOO.name}: exit code {expected.code}\n{expected.output[-5000:]}")
        return False
    is_well = True
    for way in (UNCHANGED, EXPLICIT):
        for is_death in (False, True):
            what = f"{program.stem}, {size} processes, {way.name}{', a rank killed' if is_death else ''}"
            ran: Ran | None = None
            try:
                place = folder / f"{way.name}{'-death' if is_death else ''}".replace(" ", "-")
                ran = run(way, program, size, place, DEAD_RANK if is_death else None)
                if is_death:
                    check_death(way, ran)
                else:
                    assert ran.code == 0, f"exit code {ran.code}"
                    check_results(way, ran, expected, size)
                print(f"{what}: well ({ran.seconds:.0f} s)", flush=True)
            except AssertionError as error:
                is_well = False
                print(f"{what}: {error}\n{ran.output[-5000:] if ran else ''}", flush=True)
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description="Accelerate, Lightning and Transformers on Paceline")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", default="", metavar="REGEX")
    arguments = parser.parse_args()
    print(", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES))
    programs = [path for path in sorted(PROGRAMS.glob("*_*.py")) if path.stem != "tool_program"]
    failed = []
    for program in programs:
        if not re.search(arguments.only, program.stem):
            continue
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory(prefix="paceline-tools-") as folder:
                if not check(program, size, Path(folder)):
                    failed.append(f"{program.stem} on {size}")
    print(f"failed: {', '.join(failed)}" if failed else "all is well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
