"""All-reduce between hosts: how close the ring comes to its bound, and what the hierarchy gains.

Hosts are network namespaces joined by links of 1 Gbit/s (needs root).

    bound of a ring over N hosts: 2 (N-1)/N * size / B, with B the rate of one plain TCP stream on the same link,
    measured in the same run between the same hosts.
"""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Skipped, Target, median
from paceline.collective import Group
from paceline.testing import netlab
from paceline.testing.crew import Crew

MB = 1 << 20
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
    rate = median(rates)
    bound = 2 * 3 / 4 * num_bytes / rate
    for name, found in times.items():
        middle = median(found)
        rows.append(
            {"what": f"4 hosts, {name}", "ms": middle * 1e3, "range_ms": [min(found) * 1e3, max(found) * 1e3]}
            | {"compared with": f"ring bound at {rate * 8 / 1e9:.3f} Gbit/s", "ratio": bound / middle}
        )
    return rows


def measure_hierarchy(lab: netlab.Netlab, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {"hierarchical": [], "ring": [], "tree": []}
    with Crew(4, hosts="aabb", lab=lab.hosts) as crew:
        for _ in range(rounds):
            for algorithm, found in times.items():
                found.append(seconds(crew, algorithm, num_bytes))
    medians = {name: median(found) for name, found in times.items()}
    return [
        {"what": f"2 hosts x 2 ranks, {name}", "ms": middle * 1e3}
        | {"range_ms": [min(times[name]) * 1e3, max(times[name]) * 1e3]}
        | {"compared with": "flat ring", "ratio": medians["ring"] / middle}
        for name, middle in medians.items()
    ]


def measure_choice(lab: netlab.Netlab, layout: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """How much slower `auto` is than the best fixed algorithm, at each size."""
    rows = []
    with Crew(len(layout), hosts=layout, lab=lab.hosts) as crew:
        names = ["ring", "tree", "hierarchical"] if layout != "abcd" else ["ring", "tree"]
        for num_bytes in (kilobytes << 10 for kilobytes in sizes):
            repeats = rounds if num_bytes > MB else rounds * 10
            times: dict[str, list[float]] = {name: [] for name in [*names, "auto"]}
            for _ in range(repeats if num_bytes < 50 * MB else 3):
                for name, found in times.items():
                    found.append(seconds(crew, name, num_bytes))
            medians = {name: median(found) for name, found in times.items()}
            best = min(names, key=lambda name: medians[name])
            took = crew.run(chosen, num_bytes)[0]
            rows.append(
                {"what": f"{layout}, {num_bytes >> 10} KB, auto ({took})", "ms": medians["auto"] * 1e3}
                | {"range_ms": [min(times["auto"]) * 1e3, max(times["auto"]) * 1e3]}
                | {"compared with": f"best fixed ({best}: {medians[best] * 1e3:.3f} ms)"}
                | {"ratio": medians["auto"] / medians[best]}
            )
    return rows


def measure(options: argparse.Namespace) -> Found:
    if why := netlab.why_unavailable():
        raise Skipped(f"it needs hosts in network namespaces: {why}")
    torch.set_num_threads(1)
    num_bytes = options.megabytes * MB
    with netlab.Netlab(4, rate=options.rate) as lab:
        rows = measure_ring(lab, num_bytes, options.rounds) + measure_hierarchy(lab, num_bytes, options.rounds)
        for layout in ("abcd", "aabb"):
            rows += measure_choice(lab, layout, options.sizes, options.rounds)
    table = Table("what", "ms", "compared with", "ratio", title=f"float32 sum over links of {options.rate}")
    for row in rows:
        table.add_row(row["what"], f"{row['ms']:.2f}", row["compared with"], f"{row['ratio']:.3f}")
    return Found({"rate": options.rate, "rows": rows}, [table])


def ratio_of(what: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: next(float(row["ratio"]) for row in record["rows"] if row["what"] == what)


BENCHMARK = Benchmark(
    __doc__,
    "network",
    measure,
    targets=[
        Target("ring over 4 hosts, part of its bound", "one TCP stream", ratio_of("4 hosts, ring"), at_least=0.95),
        Target("the same with TLS", "one TCP stream", ratio_of("4 hosts, ring, TLS"), at_least=0.9),
        Target(
            "hierarchy, 2 hosts with 2 processes each, times as fast",
            "the flat ring",
            ratio_of("2 hosts x 2 ranks, hierarchical"),
            at_least=1.2,
        ),
    ],
    options=[
        Option("--rounds", 5, quick=1),
        Option("--rate", "1gbit", quick="1gbit"),
        Option("--megabytes", 25, quick=1, help="of the tensor, for the ring and the hierarchy"),
        Option("--sizes", [1, 16, 64, 256, 1024, 4096, 16384, 102400], quick=[64], help="KB, for what auto chooses"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
