"""How soon every survivor knows that a member was killed, and how soon a new group of the survivors works.

Prints a table, keeps benchmarks/results/deaths.json. Times are from just before kill -9 to the moment of the
exception (the slowest survivor's), and to the end of the first all-reduce in the new group.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.collective import Group
from paceline.errors import PeerLost
from paceline.testing.crew import Crew, say

RESULTS = Path(__file__).parent / "results" / "deaths.json"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=10, help="for each row")
    options = parser.parse_args()
    table = Table(
        "hosts", "algorithm", "elements", "noticed by all, ms", "new group at work, ms", title="kill -9 of one"
    )
    rows = []
    cases = [("aa", "direct"), ("aaaa", "direct"), ("abcd", "ring"), ("abcd", "tree"), ("aabb", "hierarchical")]
    for layout, algorithm in cases:
        for num_elements in (256, 4 << 20):
            times = [one_death(layout, algorithm, num_elements) for _ in range(options.deaths)]
            noticed, recovered = ([row[k] * 1e3 for row in times] for k in (0, 1))
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
