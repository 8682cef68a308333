"""Play random schedules of faults on real runs: `python -m paceline.testing.chaos --minutes 10 --seed 1000`.

Results are added to FOLDER/results.jsonl; seeds that are in it are skipped, so a long run can be made in parts. The
logs and the run folder of a failure stay below FOLDER/failed. The exit code is 1 if there was a violation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.testing import netlab
from paceline.testing.chaos.drawing import draw
from paceline.testing.chaos.playing import Played, play
from paceline.testing.chaos.schedule import MUTATION, Mode, Schedule, parse
from paceline.testing.chaos.shrinking import shrink
from paceline.testing.chaos.summing import ResultsFile, ScheduleResult, table

_COMMAND = "python -m paceline.testing.chaos"


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and take down what was started
    results = ResultsFile(options.folder / "results.jsonl")
    if options.table:
        print("\n".join(table(results.read())))
        return 0
    failed: list[ScheduleResult] = []
    played: list[ScheduleResult] = []
    until = time.monotonic() + options.minutes * 60
    for schedule in _chosen(options, results):
        if played and time.monotonic() > until:
            break
        result = _play_one(schedule, options)
        results.add(result)
        played.append(result)
        _tell(result, len(played), until)
        if result.violations:
            failed.append(result)
    if not played:
        print(f"nothing to do: all of these seeds are in {results.path}")
    if options.schedule is None:
        print("\n".join(table(played)), flush=True)
    for result in failed:
        print(f"\nagain: {_command(result.schedule)}\n" + "\n".join(f"  {text}" for text in result.violations))
        print(f"  kept: {result.kept}", flush=True)
        if options.shrink:
            _shrink(parse(result.schedule), options)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no schedule after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds; 0 for as many as there is time for")
    parser.add_argument("--mode", type=Mode, choices=list(Mode), help="only this mode")
    parser.add_argument("--hosts", type=int, default=4, help="at most so many hosts")
    parser.add_argument("--schedule", type=parse, help="play this schedule, as a failure prints it")
    parser.add_argument("--times", type=int, default=1, help="play --schedule so often")
    parser.add_argument("--patience", type=float, default=1.0, help="multiply all bounds of time, for a slow machine")
    parser.add_argument("--shrink", action="store_true", help="look for a shorter schedule that fails too")
    parser.add_argument("--folder", type=Path, default=Path("chaos"), help="where results and failures are kept")
    parser.add_argument("--table", action="store_true", help="print what the results so far come to, and end")
    return parser.parse_args()


def _chosen(options: argparse.Namespace, results: ResultsFile) -> Iterator[Schedule]:
    if options.schedule is not None:
        yield from itertools.repeat(options.schedule, options.times)
        return
    reason = netlab.why_unavailable()
    if reason is not None and options.hosts > 1:
        print(f"one host only: {reason}", file=sys.stderr)
    most_hosts = options.hosts if reason is None else 1
    seeds = range(options.seed, options.seed + options.seeds) if options.seeds else itertools.count(options.seed)
    done = results.done()
    for seed in seeds:
        schedule = draw(seed, most_hosts=most_hosts, mode=options.mode, has_root=os.geteuid() == 0)
        if str(schedule) not in done:
            yield schedule


def _play_one(schedule: Schedule, options: argparse.Namespace) -> ScheduleResult:
    place = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    try:
        played = play(schedule, place / "run", patience=options.patience)
        return ScheduleResult.of(played, _keep(played, place, options.folder) if played.violations else "")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _keep(played: Played, place: Path, folder: Path) -> str:
    kept = folder / "failed" / f"seed-{played.schedule.seed}-{time.strftime('%H%M%S')}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(place / "run", kept, symlinks=True, ignore_dangling_symlinks=True)
    text = "\n".join([_command(str(played.schedule)), *played.violations])
    (kept / "violations.txt").write_text(text + "\n")
    return str(kept.resolve())


def _tell(result: ScheduleResult, number: int, until: float) -> None:
    faults = ", ".join(result.acted) or "no fault"
    verdict = "ok" if not result.violations else f"VIOLATED: {result.violations[0]}"
    left_min = max(0.0, until - time.monotonic()) / 60
    shape = result.schedule.partition(":")[0]
    print(f"{number}. {shape}: {faults}: {result.seconds:.0f} s, {verdict} ({left_min:.0f} min left)", flush=True)


def _shrink(schedule: Schedule, options: argparse.Namespace) -> None:
    def fails(smaller: Schedule) -> bool:
        # A fault that depends on luck is tried more than once.
        found = any(_play_one(smaller, options).violations for _ in range(2))
        print(f"  {'fails too' if found else 'does not fail'}: {smaller}", flush=True)
        return found

    print(f"  shrunk: {_command(str(shrink(schedule, fails)))}", flush=True)


def _command(schedule: str) -> str:
    wrong = os.environ.get(MUTATION)
    before = f"{MUTATION}={wrong} " if wrong else ""
    return f"{before}{_COMMAND} --schedule {shlex.quote(schedule)}"


if __name__ == "__main__":
    sys.exit(main())
