"""What kill -9 of one of three workers costs, under Paceline, torchrun and torchft.

A model of 4 million parameters is trained with momentum SGD, two loader workers each (worker.py). One worker is killed
at a random moment of a step; its replacement takes part before the next kill. The systems take turns in blocks, each
block a run of its own.

- gap: from the kill until all survivors have committed a step in which the dead worker had no part. Under torchrun,
  which starts all workers anew, until all of the new ones have committed a step.
- next commit: from the kill until all survivors have committed any step; the dead worker may have done its part in it.
- dropped: steps that a survivor had done or had under way and that do not count in the end; again: steps that it
  computed more than once and that count. Both are the most of any survivor.
- samples: under Paceline those lost or repeated, by the audit of run.db and by the workers' notes; under torchft those
  of the survivors' dropped steps (the dead worker's own are lost besides); under torchrun those to be done again.

A system that is not installed is skipped, with the reason. Every wait is bounded; nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Skipped, Target, median
from benchmarks.outages.systems import SYSTEMS, Fleet, Line, Outage, Paceline, System, TorchftTuned, lives
from benchmarks.outages.worker import WORKERS

SETTLED_STEPS = 10  # of all workers together, before a kill
START_S = 60.0


# -- one kill ----------------------------------------------------------------------------------------------------------


def wait_settled(fleet: Fleet, after: float) -> dict[int, list[Line]]:
    """Until three workers have trained together for a while."""

    def settled() -> dict[int, list[Line]] | None:
        workers = {pid: [line for line in lines if line.time > after] for pid, lines in fleet.living().items()}
        full = [pid for pid, lines in workers.items() if _num_last_full(lines) >= SETTLED_STEPS]
        return workers if len(full) == len(workers) == WORKERS else None

    found: dict[int, list[Line]] = fleet.wait(settled, START_S, f"{WORKERS} workers to train together")
    return found


def _num_last_full(lines: list[Line]) -> int:
    count = 0
    for line in reversed(lines):
        if line.size != WORKERS or not line.counts:
            break
        count += 1
    return count


def step_seconds(workers: dict[int, list[Line]]) -> list[float]:
    """Between steps that follow each other with all workers there."""
    return [
        second.time - first.time
        for lines in workers.values()
        for first, second in itertools.pairwise(lines)
        if first.size == second.size == WORKERS and second.counts and second.step == first.step + 1
    ]


def one_kill(system: System, fleet: Fleet, rng: random.Random, after: float, deadline_s: float) -> dict[str, Any]:
    workers = wait_settled(fleet, after)
    seconds = step_seconds(workers)
    victim = rng.choice(sorted(workers))
    survivors = [pid for pid in workers if pid != victim]
    time.sleep(rng.uniform(0.0, median(seconds)))
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    record: dict[str, Any] = {"step_s": median(seconds)}

    def recovered() -> bool:
        if not system.keeps_survivors:
            fresh = [lines for pid, lines in fleet.living().items() if pid not in workers and lines]
            return len(fresh) == WORKERS
        if not all(lives(pid) for pid in survivors):
            return True
        lines = fleet.lines()
        return all(any(_is_without(line, killed) for line in lines[pid]) for pid in survivors)

    try:
        fleet.wait(recovered, deadline_s, "the survivors to go on")
    except Outage as error:
        return record | {"recovered": False, "reason": str(error), "killed": killed}
    kept = sum(map(lives, survivors))
    record |= {"killed": killed, "pids_kept": kept}
    if not system.keeps_survivors:
        fresh = [lines for pid, lines in fleet.lines().items() if pid not in workers and lines]
        done = max(line.step for lines in workers.values() for line in lines)
        gap = max(lines[0].time for lines in fresh) - killed
        return record | {"recovered": True, "gap_s": gap, "next_s": gap, "dropped": done, "again": 0}
    if kept < len(survivors):
        return record | {"recovered": False, "reason": f"{len(survivors) - kept} of the survivors ended too"}
    return record | _of_survivors([fleet.lines()[pid] for pid in survivors], killed)


def _is_without(line: Line, killed: float) -> bool:
    return line.time > killed and line.counts and line.size < WORKERS


def _of_survivors(survivors: list[list[Line]], killed: float) -> dict[str, Any]:
    ends = [next(line for line in lines if _is_without(line, killed)) for lines in survivors]
    gap_end = max(line.time for line in ends)
    next_end = max(next(line.time for line in lines if line.time > killed and line.counts) for lines in survivors)
    dropped, again, samples = [], [], 0
    for lines in survivors:
        before = max((line.step for line in lines if line.time <= killed and line.counts), default=0)
        around = [line for line in lines if killed < line.time <= gap_end]
        first = next(line.step for line in around if line.counts)
        dropped.append(sum(not line.counts for line in around) + max(0, before + 1 - first))
        again.append(sum(line.attempts > 1 for line in around if line.counts))
        samples += sum(len(line.samples) for line in around if not line.counts)
    return {
        "recovered": True,
        "gap_s": gap_end - killed,
        "next_s": next_end - killed,
        "dropped": max(dropped),
        "again": max(again),
        "samples_dropped": samples,
    }


# -- blocks and the table ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def block_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(dir=keep)).resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="paceline-outages-") as name:
            yield Path(name)


def one_block(system: System, num_kills: int, options: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Kills in one run; in a second one after a kill that the first did not survive."""
    records: list[dict[str, Any]] = []
    endings: list[dict[str, Any]] = []
    while len(records) < num_kills and time.monotonic() < options.ends_at:
        with block_folder(options.keep) as folder:
            fleet = Fleet(folder, options.batch, system.path, system.environment)
            try:
                system.start(fleet)
                after = 0.0
                while len(records) < num_kills and time.monotonic() < options.ends_at:
                    record = one_kill(system, fleet, rng, after, options.deadline)
                    records.append(record)
                    _print_kill(system, len(records), num_kills, record)
                    if not record["recovered"]:
                        break
                    after = time.monotonic()
                    system.replace(fleet, 0)
                if records[-1]["recovered"]:
                    wait_settled(fleet, after)
            except Outage as error:
                print(f"{system.name}: {error}", flush=True)
                records.append({"recovered": False, "reason": str(error), "before_kill": True})
            finally:
                try:
                    endings.append(system.end(fleet))
                finally:
                    fleet.close()
    return {"kills": records, "endings": endings}


def _print_kill(system: System, number: int, num_kills: int, record: dict[str, Any]) -> None:
    if record["recovered"]:
        said = f"gap {record['gap_s'] * 1e3:.0f} ms (next commit {record['next_s'] * 1e3:.0f} ms)"
        said += f", step {record['step_s'] * 1e3:.0f} ms, dropped {record['dropped']}, again {record['again']}"
    else:
        said = f"not recovered: {record['reason']}"
    print(f"{time.strftime('%H:%M:%S')} {system.name}: kill {number} of {num_kills} in this block: {said}", flush=True)


def summarize(system: System, blocks: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    records = [record for block in blocks for record in block["kills"]]
    kills = [record for record in records if not record.get("before_kill")]
    good = [record for record in kills if record["recovered"]]
    endings = [ending for block in blocks for ending in block["endings"] if ending]
    row: dict[str, Any] = {
        "system": system.name,
        "kills": len(kills),
        "recovered": len(good),
        "failed_otherwise": len(records) - len(kills),
        "blocks": blocks,
    }
    if not good:
        return row
    extra = [record["gap_s"] - record["step_s"] for record in good]
    for name, values in [
        ("gap", [record["gap_s"] for record in good]),
        ("next", [record["next_s"] for record in good]),
        ("gap_minus_step", extra),
    ]:
        row |= {f"{name}_median_s": median(values), f"{name}_worst_s": max(values)}
    dropped = sum(record["dropped"] for record in good)
    if isinstance(system, Paceline):
        samples = sum(ending["samples_wrong"] for ending in endings)
        row["processes_left"] = sum(ending["processes_left"] for ending in endings)
    else:
        samples = sum(record.get("samples_dropped", record["dropped"] * batch) for record in good)
    return row | {
        "step_median_s": median(record["step_s"] for record in good),
        "dropped_per_kill": dropped / len(good),
        "again_per_kill": sum(record["again"] for record in good) / len(good),
        "survivors_kept": sum(record["pids_kept"] for record in good) / (len(good) * (WORKERS - 1)),
        "samples": samples,
    }


def tabulate(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        *("system", "kills", "recov- ered", "gap, ms (worst)", "minus one step", "next commit", "step"),
        *("dropped a kill", "again a kill", "pids kept", "samples"),
        title="kill -9 of one of 3 workers",
    )
    for row in rows:
        if "gap_median_s" not in row:
            table.add_row(row["system"], str(row.get("kills", 0)), "0", row.get("skipped", "none recovered"))
            continue
        times = [
            f"{row[f'{name}_median_s'] * 1e3:.0f} ({row[f'{name}_worst_s'] * 1e3:.0f})"
            for name in ("gap", "gap_minus_step", "next")
        ]
        table.add_row(
            *(row["system"], str(row["kills"]), str(row["recovered"]), *times, f"{row['step_median_s'] * 1e3:.0f}"),
            *(f"{row['dropped_per_kill']:.2f}", f"{row['again_per_kill']:.2f}"),
            *(f"{row['survivors_kept']:.0%}", str(row["samples"])),
        )
    return table


def measure(options: argparse.Namespace) -> Found:
    options.ends_at = time.monotonic() + options.minutes * 60
    amounts = {"torchrun": options.torchrun_kills, "torchft": options.slow_kills}
    systems = {name: SYSTEMS[name](options.torchft_path) for name in options.systems}
    missing = {name: reason for name, system in systems.items() if (reason := system.reason_missing())}
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}", flush=True)
    if len(missing) == len(systems):
        raise Skipped("none of the systems is here")
    num_blocks = max(1, math.ceil(options.kills / options.block))
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    rng = random.Random(options.seed)
    for number in range(num_blocks):
        for name, system in systems.items():
            total = amounts.get(name, options.kills)
            share = total * (number + 1) // num_blocks - total * number // num_blocks
            if name not in missing and share:
                blocks[name].append(one_block(system, share, options, rng))
    rows = [
        {"system": system.name, "skipped": f"skipped: {missing[name]}"}
        if name in missing
        else summarize(system, blocks[name], options.batch)
        for name, system in systems.items()
    ]
    settings = {"batch": options.batch, "deadline_s": options.deadline, "seed": options.seed}
    return Found({"settings": settings, "rows": rows}, [tabulate(rows)])


def row_of(record: dict[str, Any], system: type[System]) -> dict[str, Any]:
    return next((row for row in record["rows"] if row["system"] == system.name), {})


def kills_not_survived(record: dict[str, Any]) -> float | None:
    row = row_of(record, Paceline)
    return float(row["kills"] - row["recovered"]) if "kills" in row else None


def samples_wrong(record: dict[str, Any]) -> float | None:
    row = row_of(record, Paceline)
    return float(row["samples"]) if "samples" in row else None


def gap_of_torchft(record: dict[str, Any]) -> float | None:
    ours, theirs = (row_of(record, system).get("gap_median_s") for system in (Paceline, TorchftTuned))
    return ours / theirs if ours and theirs else None


BENCHMARK = Benchmark(
    __doc__,
    "outages",
    measure,
    targets=[
        Target("kills that Paceline does not survive", "torchft by default: 1 of 10", kills_not_survived, at_most=0.0),
        Target("samples lost or repeated by Paceline", "one plain process", samples_wrong, at_most=0.0),
        Target("median gap, in times of it", "torchft tuned to 50 ms, same run", gap_of_torchft, at_most=1.0),
    ],
    options=[
        Option("--kills", 50, quick=1, help="under Paceline and torchft, tuned"),
        Option("--slow-kills", 20, quick=1, help="under torchft with default settings (5 s each)"),
        Option("--torchrun-kills", 5, quick=1),
        Option("--block", 10, quick=1, help="of --kills, before the next system's turn"),
        Option("--systems", list(SYSTEMS), quick=list(SYSTEMS), choices=list(SYSTEMS)),
        Option("--batch", 144, quick=144, help="samples of a step over all workers"),
        Option("--deadline", 70.0, quick=70.0, help="seconds to recover from a kill"),
        Option("--minutes", 90.0, quick=3.0, help="start no kill after this time"),
        Option("--torchft-path", "", quick="", help="where torchft is installed, if not here"),
        Option("--keep", None, quick=None, help="keep the folders of all runs in this one"),
        Option("--seed", 0, quick=0),
    ],
)
