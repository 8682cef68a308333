"""All-reduce between hosts: how close the ring comes to its bound, and what the hierarchy gains.

Hosts are network namespaces joined by links of 1 Gbit/s (needs root). Prints a table, keeps
benchmarks/results/network.json.

    bound of a ring over N hosts: 2 (N-1)/N * size / B, with B the rate of one plain TCP stream on the same link,
    measured in the same run between the same hosts.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.collective import Group
from paceline.testing import netlab
from paceline.testing.crew import Crew

MB = 1 << 20
RESULTS = Path(__file__).parent / "results" / "network.json"
PORT = 7077


def time_all_reduce(group: Group, algorithm: str, num_bytes: int) -> tuple[float, float]:
    tensor = group.empty((num_bytes // 4,)).fill_(group.rank)
    group.barrier()
    entered = time.perf_counter()
    group.all_reduce(tensor, algorithm=algorithm)
    left = time.perf_counter()
    assert float(tensor[-1]) == sum(range(group.size))
    return entered, left


def time_stream(group: Group, num_bytes: int) -> float:
    """Rank 0 sends to the last rank over a plain TCP connection; the receiver's seconds from first to last byte asked
    for."""
    last = group.size - 1
    address = (group.cards[0].address[0], PORT)
    if group.rank == 0:
        with socket.create_server(address) as server:
            group.barrier()
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(num_bytes))
        return 0.0
    group.barrier()
    if group.rank != last:
        return 0.0
    with socket.create_connection(address, timeout=60) as connection:
        into = memoryview(bytearray(1 << 20))
        received, began = 0, time.perf_counter()
        while received < num_bytes:
            received += connection.recv_into(into)
        return time.perf_counter() - began


def chosen(group: Group, num_bytes: int) -> str:
    return group.model.choose(num_bytes)


def seconds(crew: Crew, algorithm: str, num_bytes: int) -> float:
    times = crew.run(time_all_reduce, algorithm, num_bytes)
    return float(max(left for _, left in times) - max(entered for entered, _ in times))


def measure_ring(lab: netlab.Netlab, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with Crew(4, hosts="abcd", lab=lab.hosts) as plain, Crew(4, hosts="abcd", lab=lab.hosts, tls=True) as tls:
        crews = {"ring": plain, "ring, TLS": tls}
        times: dict[str, list[float]] = {name: [] for name in crews}
        rates: list[float] = []
        for _ in range(rounds):
            rates.append(num_bytes / max(plain.run(time_stream, num_bytes)))
            for name, crew in crews.items():
                times[name].append(seconds(crew, "ring", num_bytes))
    rate = statistics.median(rates)
    bound = 2 * 3 / 4 * num_bytes / rate
    for name, found in times.items():
        median = statistics.median(found)
        rows.append(
            {"what": f"4 hosts, {name}", "ms": median * 1e3, "range_ms": [min(found) * 1e3, max(found) * 1e3]}
            | {"compared with": f"ring bound at {rate * 8 / 1e9:.3f} Gbit/s", "ratio": bound / median}
        )
    return rows


def measure_hierarchy(lab: netlab.Netlab, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {"hierarchical": [], "ring": [], "tree": []}
    with Crew(4, hosts="aabb", lab=lab.hosts) as crew:
        for _ in range(rounds):
            for algorithm, found in times.items():
                found.append(seconds(crew, algorithm, num_bytes))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return [
        {"what": f"2 hosts x 2 ranks, {name}", "ms": median * 1e3}
        | {"range_ms": [min(times[name]) * 1e3, max(times[name]) * 1e3]}
        | {"compared with": "flat ring", "ratio": medians["ring"] / median}
        for name, median in medians.items()
    ]


def measure_choice(lab: netlab.Netlab, layout: str, rounds: int) -> list[dict[str, Any]]:
    """How much slower `auto` is than the best fixed algorithm, at each size."""
    rows = []
    with Crew(len(layout), hosts=layout, lab=lab.hosts) as crew:
        names = ["ring", "tree", "hierarchical"] if layout != "abcd" else ["ring", "tree"]
        for num_bytes in (1 << 10, 1 << 14, 1 << 16, 1 << 18, MB, 4 * MB, 16 * MB, 100 * MB):
            repeats = rounds if num_bytes > MB else rounds * 10
            times: dict[str, list[float]] = {name: [] for name in [*names, "auto"]}
            for _ in range(repeats if num_bytes < 50 * MB else 3):
                for name, found in times.items():
                    found.append(seconds(crew, name, num_bytes))
            medians = {name: statistics.median(found) for name, found in times.items()}
            best = min(names, key=lambda name: medians[name])
            took = crew.run(chosen, num_bytes)[0]
            rows.append(
                {"what": f"{layout}, {num_bytes >> 10} KB, auto ({took})", "ms": medians["auto"] * 1e3}
                | {"range_ms": [min(times["auto"]) * 1e3, max(times["auto"]) * 1e3]}
                | {"compared with": f"best fixed ({best}: {medians[best] * 1e3:.3f} ms)"}
                | {"ratio": medians["auto"] / medians[best]}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    why = netlab.why_unavailable()
    if why is not None:
        sys.exit(f"this benchmark needs hosts in network namespaces: {why}")
    torch.set_num_threads(1)
    with netlab.Netlab(4, rate=options.rate) as lab:
        rows = measure_ring(lab, 25 * MB, options.rounds) + measure_hierarchy(lab, 25 * MB, options.rounds)
        for layout in ("abcd", "aabb"):
            rows += measure_choice(lab, layout, options.rounds)
    table = Table("what", "ms", "compared with", "ratio", title=f"float32 sum over links of {options.rate}")
    for row in rows:
        table.add_row(row["what"], f"{row['ms']:.2f}", row["compared with"], f"{row['ratio']:.3f}")
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rate": options.rate, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
