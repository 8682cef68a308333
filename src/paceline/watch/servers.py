"""What there is to say of the servers of a run: in one line, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table
from rich.text import Text

from paceline.control.journal.journal import MemberRow
from paceline.watch import words
from paceline.watch.names import Names

NARROW, VERY_NARROW = 80, 50


def in_one_line(servers: Sequence[MemberRow]) -> str:
    """2 servers, 1.2 M keys, 340 MB, 35% busy, moving 12 ranges

    A range that goes to two servers counts twice."""
    parts = [words.count(len(servers), "server")]
    if num_keys := sum(row.num_keys for row in servers):
        copies = " with copies" if any(row.backups for row in servers) else ""
        parts.append(f"{words.amount(num_keys)} {'key' if num_keys == 1 else 'keys'}{copies}")
    if num_bytes := sum(row.num_bytes for row in servers):
        parts.append(words.size(num_bytes))
    if any(row.ranges for row in servers):
        parts.append(f"{fmean(row.busy for row in servers):.0%} busy")
    if arriving := sum(row.arriving for row in servers):
        parts.append(f"moving {words.count(arriving, 'range')}")
    return ", ".join(parts)


def staleness_of(text: str) -> dict[str, int]:
    """How many pushes were made so many updates after what they were computed with."""
    counts = [int(part) for part in text.split(",") if part]
    return {_bucket(number): count for number, count in enumerate(counts)}


def _bucket(number: int) -> str:
    low, high = (number, number) if number < 2 else (1 << number - 1, (1 << number) - 1)
    return str(low) if low == high else f"{low}-{high}"


def _most_stale(text: str) -> str:
    """Up to how many updates nine tenths of the pushes were behind."""
    counts = staleness_of(text)
    total, seen = sum(counts.values()), 0
    for bucket, count in counts.items():
        seen += count
        if total and seen >= 0.9 * total:
            return f"{bucket} (9 of 10)"
    return words.NOT_KNOWN


def server_table(servers: Sequence[MemberRow], names: Names, width: int, most: int) -> Table:
    """A line for each server up to `most`, those that live first."""
    servers = sorted(servers, key=lambda row: (bool(row.fate), names.short(row.member)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = ["server", "state", "ranges", "keys"]
    if width >= VERY_NARROW:
        columns += ["backups", "memory"]
    if width >= NARROW:
        columns += ["busy", *(["staleness"] if any(row.staleness for row in servers) else []), "host", "pid"]
    on_the_left = ("server", "state", "host")
    for name in columns:
        side = "left" if name in on_the_left else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in servers[:most]:
        cells: dict[str, str | Text] = {
            "server": Text(names.short(row.member)),
            "state": Text(row.fate or row.phase, style="red" if row.fate not in ("", "released") else ""),
            "ranges": f"{row.ranges:,}" + (f" (+{row.arriving:,})" if row.arriving else ""),
            "keys": words.amount(row.num_keys),
            "backups": f"{row.backups:,}",
            "memory": words.size(row.num_bytes),
            "busy": f"{row.busy:.0%}",
            "staleness": _most_stale(row.staleness),
            "host": Text(words.one_line(row.host, 40)),
            "pid": str(row.pid),
        }
        if row.fate:
            cells |= dict.fromkeys(("ranges", "keys", "backups", "memory", "busy"), words.NOT_KNOWN)
        table.add_row(*(cells[name] for name in columns))
    if len(servers) > most:
        table.caption = Text(f"... and {len(servers) - most:,} more", style="dim")
        table.caption_justify = "left"
    return table
