"""Trains digits.py on three workers, kills one of them with -9, lets one join, and shows that nothing was lost.

python examples/elastic.py
python examples/elastic.py --picture docs/elastic.svg     # draws it, too
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import elastic_picture

from paceline.control.journal.journal import JournalError, MemberRow
from paceline.control.journal.reader import RunReader, StepRecord
from paceline.watch.audit import audit, history_of

EXAMPLE = Path(__file__).with_name("digits.py")
PATIENCE_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="train without pauses once the newcomer takes part")
    parser.add_argument("--picture", type=Path, help="draw the loss and who took part into this SVG file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as place:
        folder, hurry = Path(place) / "demo", Path(place) / "hurry"
        command = [sys.executable, "-m", "paceline", "run", "-n", "3", "--folder", place, "--name", "demo"]
        script = [str(EXAMPLE), "--epochs", "16", "--pause", "0.06", "--hurry", str(hurry)]
        agent = subprocess.Popen([*command, *script])
        try:
            killed_at, victim = kill_one(agent, folder)
            wait_until(agent, lambda: has_joined(folder, victim), "a newcomer to take part")
            if options.short:
                hurry.touch()
            code = agent.wait(PATIENCE_S)
        finally:
            agent.kill()
            agent.wait()
        return code or show(folder, killed_at, options.picture)


def kill_one(agent: subprocess.Popen[bytes], folder: Path) -> tuple[float, MemberRow]:
    """Kill the worker of the last rank when the training is on its way."""
    wait_until(agent, lambda: len(seated(folder)) == 3 and num_steps(folder) > 40, "the training to begin")
    victim = max(seated(folder), key=lambda member: member.rank)
    print(f"\n>>> kill -9 {victim.pid} (worker {victim.member[:8]}, rank {victim.rank})\n", flush=True)
    killed_at = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    return killed_at, victim


def has_joined(folder: Path, victim: MemberRow) -> bool:
    present = seated(folder)
    return len(present) == 3 and victim.member not in {member.member for member in present}


def show(folder: Path, killed_at: float, picture: Path | None = None) -> int:
    with RunReader(folder) as reader:
        steps, status, plans = history_of(reader.steps()), reader.status(), reader.plans()
        accuracy = [metric.value for metric in reader.metrics() if metric.name == "accuracy"][-1]
    if picture is not None:
        picture.write_text(elastic_picture.draw(steps, plans, killed_at))
    facts = status.facts
    result = audit(steps, int(facts["dataset_length"]), int(facts["global_batch"]))
    usual_s = statistics.median(step.seconds for step in steps)
    print(f"\nValidation accuracy {accuracy:.3f} after {len(steps)} steps.")
    print("Samples:", "; ".join(result.summary) + ".")
    print(
        f"From the kill to the next step of the survivors: {outage_s(steps, killed_at) * 1e3:.0f} ms "
        f"(a step takes {usual_s * 1e3:.0f} ms)."
    )
    return 0 if result.is_exact else 1


def outage_s(steps: list[StepRecord], killed_at: float) -> float:
    """From the kill to the first step that was done without the victim."""
    generation = max(step.generation for step in steps if step.time <= killed_at)
    return min(step.time for step in steps if step.generation > generation) - killed_at


def seated(folder: Path) -> list[MemberRow]:
    try:
        with RunReader(folder) as reader:
            return [member for member in reader.members() if member.rank >= 0 and not member.fate]
    except JournalError:  # not there yet
        return []


def num_steps(folder: Path) -> int:
    with RunReader(folder) as reader:
        return len(reader.steps())


def wait_until(agent: subprocess.Popen[bytes], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if agent.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
