"""Workers of unequal speed with a parameter server, beside the sum of what each does alone.

A small CNN is trained by workers that the kernel gives
0.6, 0.6 and 0.15 of a core; the server has the rest. Each alone is a plain PyTorch loop under the same quota while the
others rest, measured in the same round. Leases are of as many samples as a batch alone. All at once: the plain loops
beside each other, which is what this machine can do with all of them busy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import nn

from benchmarks.common import Benchmark, Found, Option, Skipped, Target, interleave, median, spread
from benchmarks.common.figures import tell
from benchmarks.common.models import plain_step, small_cnn
from benchmarks.common.slowness import Quota, quota_obstacle
from paceline.control.machines.coordinator_events import RunSettings
from paceline.data.loader import LoaderOptions
from paceline.testing.crew import Crew
from paceline.testing.rehearsal import Rehearsal, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

SPEEDS = (0.6, 0.6, 0.15)
CONSISTENCIES = ("async", "bounded:4")
ALONE, AT_ONCE = "sum of each alone", "all at once, no communication"
BATCH = 32
WARM = 10


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return small_cnn(batch_norm=False), torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))


def alone(_: None, seconds: float) -> float:
    """Samples a second of a plain loop."""
    model, x, y = model_and_batch()
    step = plain_step(model, x, y)
    done, began = 0, 0.0
    while done <= WARM or time.monotonic() - began < seconds:
        if done == WARM:
            began = time.monotonic()
        step()
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
    settings = RunSettings(wanted=len(SPEEDS), servers=1)
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


def measure(options: argparse.Namespace) -> Found:
    if obstacle := quota_obstacle():
        raise Skipped(f"it slows workers down by quotas of the kernel: {obstacle}")
    seconds = options.seconds
    ways = {
        ALONE: functools.partial(each_alone, seconds, at_once=False),
        AT_ONCE: functools.partial(each_alone, seconds, at_once=True),
        **{consistency: functools.partial(together, consistency, seconds) for consistency in CONSISTENCIES},
    }
    rates = interleave(ways, options.rounds, tell)
    speeds = " : ".join(map(str, SPEEDS))
    table = Table("", "samples/s", f"of the {ALONE} (lowest-highest)")
    table.title = f"workers with {speeds} of a core, medians of {options.rounds} rounds"
    parts = {name: [rate / one for rate, one in zip(found, rates[ALONE], strict=True)] for name, found in rates.items()}
    for name, found in rates.items():
        table.add_row(name, f"{median(found):,.0f}", spread(parts[name], ".3f"))
    medians = {name: median(found) for name, found in parts.items()}
    record = {"speeds": SPEEDS, "batch": BATCH, "samples_per_s": rates, "of_sum_alone": medians}
    return Found(record, [table])


BENCHMARK = Benchmark(
    __doc__,
    "server-unequal",
    measure,
    targets=[
        Target(
            "asynchronous, part of the sum of each alone",
            "twice what equal batches allow: 3 x 0.15 of 1.35",
            lambda record: float(record["of_sum_alone"]["async"]),
            at_least=0.67,
        )
    ],
    options=[
        Option("--rounds", 5, quick=1),
        Option("--seconds", 8.0, quick=3.0, help="of each measurement"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
