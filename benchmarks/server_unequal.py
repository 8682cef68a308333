"""Workers of unequal speed with a parameter server, beside the sum of what each does alone.

Prints a table, keeps benchmarks/results/server-unequal.json. A small CNN is trained by workers that the kernel gives
0.6, 0.6 and 0.15 of a core; the server has the rest. Each alone is a plain PyTorch loop under the same quota while the
others rest, measured in the same round. Leases are of as many samples as a batch alone. All at once: the plain loops
beside each other, which is what this machine can do with all of them busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from paceline.cli.bench import machine
from paceline.control.coordinator_events import Settings
from paceline.data.loader import LoaderOptions
from paceline.testing.crew import Crew
from paceline.testing.rehearsal import Rehearsal, say
from paceline.testing.slowness import Quota, quota_obstacle
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

RESULTS = Path(__file__).parent / "results" / "server-unequal.json"
SPEEDS = (0.6, 0.6, 0.15)
CONSISTENCIES = ("async", "bounded:4")
ALONE, AT_ONCE = "sum of each alone", "all at once, no communication"
BATCH = 32
WARM = 10


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return model, torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))


def alone(_: None, seconds: float) -> float:
    """Samples a second of a plain loop."""
    model, x, y = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    done, began = 0, 0.0
    while done <= WARM or time.monotonic() - began < seconds:
        if done == WARM:
            began = time.monotonic()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done += 1
    return (done - WARM) * BATCH / (time.monotonic() - began)


def train(consistency: str) -> None:
    """Until somebody ends it."""
    model, x, y = model_and_batch()
    session = Session(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        data=range(BATCH * 10**6),
        global_batch=BATCH,
        strategy="server",
        consistency=consistency,
        loader=LoaderOptions(collate_fn=lambda samples: (x[: len(samples)], y[: len(samples)])),
        checkpoints=Checkpoints(every_s=None),
    )
    for epoch in session.epochs(1):
        for batch in epoch:
            session.step(lambda x, y: F.cross_entropy(model(x), y), batch)
            say(time.monotonic())


@contextlib.contextmanager
def quotas(pids: Sequence[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for pid, speed in zip(pids, SPEEDS, strict=True):
            quota = stack.enter_context(Quota())
            quota.limit(speed)
            quota.add(pid)
        yield


def each_alone(seconds: float, *, at_once: bool) -> float:
    with Crew(len(SPEEDS), form=False, timeout_s=300.0) as crew, quotas([crew.pid(n) for n in range(crew.size)]):
        turns = [list(range(crew.size))] if at_once else [[rank] for rank in range(crew.size)]
        rates: list[float] = []
        for ranks in turns:
            crew.start(alone, seconds, ranks=ranks)
            rates += crew.finish(ranks)
    return sum(rates)


def together(consistency: str, seconds: float) -> float:
    settings = Settings(wanted=len(SPEEDS), servers=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        Rehearsal(train, consistency, workers=len(SPEEDS), folder=Path(folder), settings=settings) as run,
        quotas([worker.pid for worker in run.workers]),
    ):
        for number in range(len(SPEEDS)):
            run.wait_said(number, WARM, timeout_s=120.0)
        begin = time.monotonic()
        run.wait_for(lambda: time.monotonic() - begin > seconds, timeout_s=seconds + 60.0)
        end = time.monotonic()
        # Of each from lease to lease, as of the plain loops: where the window begins and ends would be half a lease.
        rate = 0.0
        for number in range(len(SPEEDS)):
            times = [at for at in run.said(number) if begin <= at < end]
            rate += (len(times) - 1) * BATCH / (times[-1] - times[0])
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if obstacle := quota_obstacle():
        raise SystemExit(f"no quotas: {obstacle}")
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        rates.setdefault(ALONE, []).append(each_alone(options.seconds, at_once=False))
        rates.setdefault(AT_ONCE, []).append(each_alone(options.seconds, at_once=True))
        for consistency in CONSISTENCIES:
            rates.setdefault(consistency, []).append(together(consistency, options.seconds))
    speeds = " : ".join(map(str, SPEEDS))
    table = Table("", "samples/s", f"of the {ALONE} (lowest-highest)")
    table.title = f"workers with {speeds} of a core, medians of {options.rounds} rounds"
    parts = {name: [rate / one for rate, one in zip(found, rates[ALONE], strict=True)] for name, found in rates.items()}
    for name, found in rates.items():
        part = parts[name]
        told = f"{statistics.median(part):.3f} ({min(part):.3f}-{max(part):.3f})"
        table.add_row(name, f"{statistics.median(found):,.0f}", told)
    Console(width=120).print(table)
    record = {"machine": machine.describe(), "speeds": SPEEDS, "batch": BATCH, "samples_per_s": rates}
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
