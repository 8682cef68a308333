"""What the hosts print: the table of links, what `auto` would choose, and which links are slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.table import Table

from paceline.cli.bench.allreduce.plan import format_size
from paceline.cli.bench.allreduce.report import digits
from paceline.cli.bench.links.measure import LinkFigures

SLOW_PART = 0.5  # of the bandwidth of the fastest link
FAR_TIMES, FAR_MS = 4.0, 1.0  # the latency of the nearest link, and so much more

Pair = tuple[int, int]


def tables(figures: LinkFigures) -> list[Table]:
    links = Table(title="from row to column: ms one way, MB/s", title_justify="left")
    links.add_column("")
    for name in figures.names:
        links.add_column(name, justify="right")
    for sender, name in enumerate(figures.names):
        links.add_row(name, *(_cell(figures, sender, receiver) for receiver in range(len(figures.names))))
    choices = Table(
        "all-reduce of", "auto chooses", "ms, by its model", title="one worker a host", title_justify="left"
    )
    for choice in figures.choices:
        choices.add_row(format_size(choice.num_bytes), choice.algorithm, digits(choice.seconds * 1e3))
    return [links, choices]


def _cell(figures: LinkFigures, sender: int, receiver: int) -> str:
    if sender == receiver:
        return ""
    return f"{digits(figures.latency_ms[sender][receiver])} ms, {digits(figures.mb_per_s[sender][receiver])} MB/s"


def notes(figures: LinkFigures) -> list[str]:
    """A line for each host all of whose links are slow, and for each slow link besides."""
    slow, far = slow_links(figures), far_links(figures)
    fastest, nearest = max(_values(figures.mb_per_s)), min(_values(figures.latency_ms))
    lines = [f"slow: {_named(figures, places)}, {text}" for places, text in _grouped(figures, slow, fastest)]
    lines += [
        f"far: {figures.names[a]} -> {figures.names[b]}, {digits(figures.latency_ms[a][b])} ms; the nearest link has "
        f"{digits(nearest)} ms"
        for a, b in far
    ]
    if slow:
        lines.append("an all-reduce goes at the pace of its slowest link")
    return lines or ["no link is much slower than the others"]


def slow_links(figures: LinkFigures) -> list[Pair]:
    fastest = max(_values(figures.mb_per_s))
    return [(a, b) for a, b in _pairs(figures) if figures.mb_per_s[a][b] < SLOW_PART * fastest]


def far_links(figures: LinkFigures) -> list[Pair]:
    nearest = min(_values(figures.latency_ms))
    return [(a, b) for a, b in _pairs(figures) if figures.latency_ms[a][b] > max(FAR_TIMES * nearest, nearest + FAR_MS)]


def slow_hosts(figures: LinkFigures, slow: Sequence[Pair]) -> list[int]:
    """Those whose links are all slow, where others have links that are not."""
    hosts = [host for host in range(len(figures.names)) if all(pair in slow for pair in _links_of(figures, host))]
    return hosts if len(hosts) < len(figures.names) else []


def record(figures: LinkFigures) -> dict[str, Any]:
    slow = slow_links(figures)
    named = [[figures.names[a], figures.names[b]] for a, b in slow]
    return {**msgspec.to_builtins(figures), "slow": named}


def _grouped(figures: LinkFigures, slow: Sequence[Pair], fastest: float) -> list[tuple[Pair | int, str]]:
    hosts = slow_hosts(figures, slow)
    groups: list[tuple[Pair | int, list[Pair]]] = [(host, _links_of(figures, host)) for host in hosts]
    groups += [((a, b), [(a, b)]) for a, b in slow if a not in hosts and b not in hosts]
    found = []
    for place, pairs in groups:
        best = max(figures.mb_per_s[a][b] for a, b in pairs)
        found.append((place, f"{digits(best)} MB/s, {best / fastest:.2f} of the fastest link"))
    return found


def _named(figures: LinkFigures, place: Pair | int) -> str:
    if isinstance(place, int):
        return f"every link of {figures.names[place]}"
    return " -> ".join(figures.names[host] for host in place)


def _pairs(figures: LinkFigures) -> list[Pair]:
    return list(itertools.permutations(range(len(figures.names)), 2))


def _links_of(figures: LinkFigures, host: int) -> list[Pair]:
    return [pair for pair in _pairs(figures) if host in pair]


def _values(rows: Sequence[Sequence[float]]) -> list[float]:
    """Those of links: a host has none with itself."""
    return [value for a, row in enumerate(rows) for b, value in enumerate(row) if a != b]
