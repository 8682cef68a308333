"""What there is to say of how a run's batches are divided: the last change and its reason, and hosts whose workers are
in each other's way."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.reader import EventRow
from paceline.watch import words

CROWDED = 0.2  # of its time a worker waits for a processor


def last_change(event: EventRow) -> str:
    """shares since 12:31:02: 16:16 became 21:11: 1f00ab12 takes 61 ms for 16 samples, 22ab0134 32 ms for 16 samples"""
    return words.one_line(f"shares since {words.clock(event.time)}: {words.with_short_ids(event.text)}", 300)


def crowded(members: Iterable[MemberRow]) -> list[str]:
    """A sentence for each host whose workers wait for its processors."""
    by_host: dict[str, list[MemberRow]] = {}
    for member in members:
        if not member.fate and member.rank >= 0:
            by_host.setdefault(member.host, []).append(member)
    found = []
    for host, workers in by_host.items():
        waited = fmean(worker.starved for worker in workers)
        if waited < CROWDED:
            continue
        name, part = words.one_line(host, 40), f"{waited:.0%} of the time"
        if len(workers) > 1:
            found.append(
                f"{name} is slow because its {len(workers)} workers share its cores: they wait {part} for one; start "
                "fewer of them there, or with fewer threads"
            )
        else:
            found.append(f"{name} is slow because something else uses its cores: its worker waits {part} for one")
    return found
