"""Results of many seeds: a line of JSON for each in a file that only grows, and what they come to.

Several runners may write into one file at once: a line is written in one piece.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from paceline.testing.chaos.playing import Played
from paceline.testing.chaos.schedule import FaultKind, Mode, parse


class ScheduleResult(msgspec.Struct, frozen=True):
    seed: int
    mode: str
    schedule: str
    violations: list[str]
    acted: list[str]
    skipped: list[str]
    outages: dict[str, float]
    seconds: float
    num_steps: int
    kept: str = ""  # where the logs and the folder of a failure are
    num_copies: int = 0

    @classmethod
    def of(cls, played: Played, kept: str) -> ScheduleResult:
        schedule = played.schedule
        return cls(
            schedule.seed,
            schedule.mode.value,
            str(schedule),
            played.violations,
            played.acted,
            played.skipped,
            {kind: round(gap, 3) for kind, gap in played.outages.items()},
            round(played.seconds, 1),
            played.num_steps,
            kept,
            played.num_copies,
        )


class ResultsFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[ScheduleResult]:
        """All of them; a line that a killed runner left unfinished is none."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_bytes().splitlines():
            try:
                found.append(msgspec.json.decode(line, type=ScheduleResult))
            except msgspec.DecodeError:
                continue
        return found

    def add(self, result: ScheduleResult) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, msgspec.json.encode(result) + b"\n")
        finally:
            os.close(file)

    def done(self) -> set[str]:
        """The schedules that were played: a seed whose schedule has become another one is not among them."""
        return {result.schedule for result in self.read()}


def table(results: Iterable[ScheduleResult]) -> list[str]:
    """Faults by kind and mode, and the outages after them."""
    results = list(results)
    counts = Counter((kind, result.mode) for result in results for kind in result.acted)
    lines = [
        f"{'fault':12}" + "".join(f"{mode.value:>11}" for mode in Mode) + f"{'all':>8}{'median':>10}{'longest':>10}"
    ]
    for kind in FaultKind:
        gaps = [result.outages[kind] for result in results if kind in result.outages]
        row = [counts[kind, mode.value] for mode in Mode]
        shown = f"{statistics.median(gaps):8.2f} s{max(gaps):8.2f} s" if gaps else ""
        lines.append(f"{kind.value:12}" + "".join(f"{count:11}" for count in row) + f"{sum(row):8}{shown}")
    row = [sum(counts[kind, mode.value] for kind in FaultKind) for mode in Mode]
    lines.append(f"{'all':12}" + "".join(f"{count:11}" for count in row) + f"{sum(row):8}")
    lines += _shapes(results)
    lines += _gaps(counts)
    failed = sum(1 for result in results if result.violations)
    minutes = sum(result.seconds for result in results) / 60
    lines.append(
        f"{len(results)} schedules, {minutes:.0f} minutes, {sum(row)} faults, {failed} schedules with violations"
    )
    return lines


def _shapes(results: Sequence[ScheduleResult]) -> list[str]:
    """By hosts, and where there are servers by replicas."""
    schedules = [parse(result.schedule) for result in results]
    hosts = Counter(one.hosts for one in schedules)
    replicas = Counter(one.replicas for one in schedules if one.mode.has_servers)
    num_copies = sum(result.num_copies for result in results)
    return [
        f"schedules by hosts: {_listed(hosts)}",
        f"schedules with servers by replicas: {_listed(replicas)}; {num_copies} copies of ranges compared bit for bit",
    ]


def _gaps(counts: Counter[tuple[str, str]]) -> list[str]:
    """What was not tried yet, a line for each kind of fault."""
    lines = []
    for kind in FaultKind:
        modes = [
            one.value for one in Mode if not counts[kind, one.value] and (one.has_servers or kind != FaultKind.SERVER)
        ]
        if modes:
            lines.append(f"not tried: {kind.value} with {', '.join(modes)}")
    return lines


def _listed(counts: Counter[int]) -> str:
    return ", ".join(f"{counts[number]} with {number}" for number in sorted(counts)) or "none"
