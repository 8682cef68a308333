"""What a cache of rows saves and costs, and what pulling the rows of the next batch ahead gains. Two workers, two
servers and a model of clicks whose ids follow Zipf's law (1.05), by `strategy="hybrid"`.

Cache: the same training, on the same samples in the same order, without a cache and with rows that are used again for
up to 8 steps. Rows are counted after each batch's ids were made unique. The loss is that of samples held out, when the
training is done.

Ahead: the ways to get rows take turns, block by block, in one run: table by table as the model asks, all tables at once
before the model is called, and all at once while the batch before is computed. A figure is the median over steps; a
ratio the median over rounds of the ratios of the blocks' medians.

With `--round-trip-ms` servers are taken to be on other hosts, and each exchange with them takes that much longer, in
which nobody computes; rows are pulled ahead in the background then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from benchmarks.common import Benchmark, Found, Option, Target, median, ratio
from paceline.control.machines.coordinator_events import RunSettings
from paceline.server.client import GroupClient
from paceline.strategy.served_rows import ServedRows
from paceline.testing.rehearsal import Died, Rehearsal
from paceline.train.session import Session

ZIPF = 1.05
NUM_WORKERS = NUM_SERVERS = 2
NUM_FIELDS = 8
STALENESS = 8
WAYS = ("as asked", "at once", "ahead")
WAIT_S = 1800.0


class Plan(NamedTuple):
    """`vocabulary` is that of each field."""

    batch: int
    steps: int
    dim: int
    width: int
    vocabulary: int
    epochs: int = 1
    cache: int = 0
    rounds: int = 0
    block: int = 0
    round_trip_s: float = 0.0


# -- what is trained ---------------------------------------------------------------------------------------------------


def clicks(num: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of each field by Zipf's law, and a click that depends on what each is like, and on two of them together."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(num, NUM_FIELDS, generator=generator, dtype=torch.float64)
    ranks = (1 - drawn * (1 - vocabulary ** (1 - ZIPF))) ** (1 / (1 - ZIPF))
    ids = ranks.long().clamp_(1, vocabulary) + torch.arange(NUM_FIELDS) * 10**9
    appeal = torch.sin(ids.double() * 12.9898) * 1.2
    logit = appeal.sum(1) / 2 + torch.sin((ids[:, 0] % 97 + ids[:, 1] % 89).double()) - 0.5
    labels = torch.rand(num, generator=generator, dtype=torch.float64) < logit.sigmoid()
    return ids, labels.float()


class Model(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.wide = paceline.nn.Embedding(1, init="zeros", cache=plan.cache)
        self.deep = paceline.nn.Embedding(plan.dim, scale=0.05, cache=plan.cache)
        inputs = NUM_FIELDS * plan.dim
        self.mlp = nn.Sequential(nn.Linear(inputs, plan.width), nn.ReLU(), nn.Linear(plan.width, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.wide(ids).sum(1) + self.mlp(self.deep(ids).flatten(1))
        return logits.squeeze(1)


def go_far(round_trip_s: float) -> None:
    """Have this worker's servers on other hosts, as far as it can tell."""
    exchange = GroupClient._exchange

    def slow(client: GroupClient, *arguments: Any) -> None:
        time.sleep(round_trip_s)
        exchange(client, *arguments)

    GroupClient._exchange = slow  # type: ignore[assignment, method-assign]
    GroupClient.is_near = property(lambda _: False)  # type: ignore[assignment, method-assign]


def train(plan: Plan) -> dict[str, Any]:
    if plan.round_trip_s:
        go_far(plan.round_trip_s)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(plan)
    tables = [*model.wide.parameters(), *model.deep.parameters()]
    optimizers = torch.optim.Adagrad(tables, lr=0.05), torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    data = TensorDataset(*clicks(plan.batch * plan.steps, plan.vocabulary, 0))
    held_out = TensorDataset(*clicks(20_000, plan.vocabulary, 1))
    session = Session(model, *optimizers, data=data, global_batch=plan.batch, strategy="hybrid")

    def loss_fn(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(ids), labels)

    def get_rows(way: str) -> None:
        whole = {model.wide: 0, model.deep: 0} if way != "as asked" else {}
        session.prefetch(lambda batch: {table: batch[at] for table, at in whole.items()}, ahead=way == "ahead")

    get_rows("at once")
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with session:
        for epoch in session.epochs(plan.epochs):
            began = time.monotonic()
            for number, batch in enumerate(epoch):
                session.step(loss_fn, batch)
                now = time.monotonic()
                if plan.rounds:
                    turn, at = divmod(number, plan.block)
                    _note(seconds, turn, at, now - began)
                    if at == plan.block - 1:
                        get_rows(_way_of(turn + 1))
                    elif number == 0:
                        get_rows(_way_of(0))
                began = now
        score = session.evaluate(lambda ids, labels: {"loss": loss_fn(ids, labels)}, held_out, batch=4096)["loss"]
        source = session._parts.updater.gradients.sparse.source
        assert isinstance(source, ServedRows)
    return {"loss": score, "asked": source.num_asked, "pulled": source.num_pulled, "seconds": seconds}


def _way_of(turn: int) -> str:
    """Forwards in one round, backwards in the next, so that what slowly changes falls on all alike."""
    around, at = divmod(turn, len(WAYS))
    return WAYS[at] if around % 2 == 0 else WAYS[-1 - at]


def _note(seconds: dict[str, list[list[float]]], turn: int, at: int, took: float) -> None:
    blocks = seconds[_way_of(turn)]
    if at == 0:
        blocks.append([])
    if at > 1:  # the first ones still have, or have not yet, what the way before them asked for
        blocks[-1].append(took)


def run(plan: Plan) -> list[dict[str, Any]]:
    settings = RunSettings(
        wanted=NUM_WORKERS, fewest=NUM_WORKERS, most=NUM_WORKERS, servers=NUM_SERVERS, shares=(1,) * NUM_WORKERS
    )
    with (
        tempfile.TemporaryDirectory(prefix="paceline-cache-") as name,
        Rehearsal(train, plan, workers=NUM_WORKERS, folder=Path(name), settings=settings) as rehearsal,
    ):
        results = rehearsal.finish(None, WAIT_S)
    if died := [result for result in results if isinstance(result, Died)]:
        raise RuntimeError(f"a worker did not come to the end: {died}")
    return results


# -- the two questions -------------------------------------------------------------------------------------------------


def compare_caches(plan: Plan) -> dict[str, Any]:
    rows = []
    for cache in (0, STALENESS):
        results = run(plan._replace(cache=cache))
        # Of either table the same ids are asked for, and as many are missing.
        pulled, asked = (sum(result[what] for result in results) // 2 for what in ("pulled", "asked"))
        row_bytes = 4 * (plan.dim + 1)
        loss = results[0]["loss"]
        rows.append({"cache": cache, "asked_rows": asked, "pulled_bytes": pulled * row_bytes, "loss": loss})
        print(f"cache {cache}: {pulled:,} of {asked:,} rows pulled, loss {loss:.5f}", flush=True)
    without, with_cache = rows
    return {
        "rows": rows,
        "fewer_bytes": 1 - with_cache["pulled_bytes"] / without["pulled_bytes"],
        "loss_difference": abs(with_cache["loss"] / without["loss"] - 1),
    }


def compare_ways(plan: Plan) -> dict[str, Any]:
    num_blocks = len(WAYS) * plan.rounds
    results = run(plan._replace(steps=num_blocks * plan.block, epochs=1))
    seconds = results[0]["seconds"]
    medians = {way: [median(block) for block in seconds[way]] for way in WAYS}
    ratios = {way: ratio(medians["ahead"], medians[way]) for way in WAYS}
    return {
        "step_s": {way: median(took for block in seconds[way] for took in block) for way in WAYS},
        "ahead_of": ratios,
        "medians": medians,
    }


def measure(options: argparse.Namespace) -> Found:
    plan = Plan(options.batch, options.steps, options.dim, options.width, options.vocabulary, options.epochs)
    caches = compare_caches(plan)
    plan = plan._replace(rounds=options.rounds, block=options.block, round_trip_s=options.round_trip_ms / 1e3)
    ways = compare_ways(plan)

    table = Table("cache", "pulled", "held-out loss", title="rows pulled, after each batch's ids were made unique")
    for row in caches["rows"]:
        table.add_row(str(row["cache"]), f"{row['pulled_bytes'] / 2**20:.1f} MiB", f"{row['loss']:.5f}")
    fewer, difference = caches["fewer_bytes"], caches["loss_difference"]
    table.caption = f"{fewer:.1%} fewer bytes, losses differ by {difference:.2%}"
    steps = Table("rows are pulled", "ms a step", "ahead : this", title="ways to get rows, in turns")
    for way in WAYS:
        steps.add_row(way, f"{1e3 * ways['step_s'][way]:.2f}", f"{ways['ahead_of'][way]:.3f}")
    return Found({"plan": plan._asdict(), "cache": caches, "ways": ways}, [table, steps])


def check(options: argparse.Namespace) -> str:
    fine = options.rounds >= 1 and options.block >= 4 and options.steps >= 1
    return "" if fine else "--rounds and --steps of 1 or more, --block of 4 or more"


BENCHMARK = Benchmark(
    __doc__,
    "cache",
    measure,
    targets=[
        Target(
            "part of the bytes that a cache saves",
            "the same training without a cache",
            lambda record: float(record["cache"]["fewer_bytes"]),
            at_least=0.3,
        ),
        Target(
            "relative difference of the held-out losses",
            "the same training without a cache",
            lambda record: float(record["cache"]["loss_difference"]),
            at_most=0.01,
        ),
    ],
    options=[
        Option("--batch", 512, quick=64, help="samples of a step, each with 8 ids"),
        Option("--steps", 400, quick=10, help="of an epoch, with and without a cache"),
        Option("--epochs", 1, quick=1, help="with and without a cache"),
        Option("--dim", 16, quick=4),
        Option("--width", 64, quick=8, help="of the network's layer"),
        Option("--vocabulary", 20_000, quick=500, help="of each of 8 fields"),
        Option("--rounds", 12, quick=1, help="of the ways to get rows"),
        Option("--block", 20, quick=4, help="steps of a way at a time"),
        Option("--round-trip-ms", 0.0, quick=0.0, help="to servers, for the ways to get rows"),
    ],
    check=check,
)


if __name__ == "__main__":
    BENCHMARK.main()
