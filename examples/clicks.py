"""Which advertisements are clicked: a wide and deep model on rows in the shape of Criteo's click data (a label, 13
counts and 26 categories; separated by tabs or commas; any count or category may be missing).

    python examples/clicks.py                                          on rows that it makes up
    python examples/clicks.py --file train.txt --tables each           a table for each category
    paceline run -n 2 --servers 2 --replicas 2 examples/clicks.py --strategy hybrid

A category's value is known by a hash of it, which is its id in a table: there is no vocabulary to build.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

NUM_COUNTS, NUM_CATEGORIES = 13, 26


class WideAndDeep(nn.Module):
    """Wide: a weight for each value of each category. Deep: a network on their embeddings and the counts."""

    def __init__(self, dim: int, *, is_shared: bool) -> None:
        super().__init__()
        self.wide = paceline.nn.Embedding(1, init="zeros")
        # Ids differ between categories, so that one table can hold all of them.
        self.deep = nn.ModuleList(
            paceline.nn.Embedding(dim, scale=0.05) for _ in range(1 if is_shared else NUM_CATEGORIES)
        )
        self.mlp = nn.Sequential(
            nn.Linear(2 * NUM_COUNTS + NUM_CATEGORIES * dim, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, counts: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        embedded = [table(ids).flatten(1) for table, ids in self._columns(categories)]
        deep: torch.Tensor = self.mlp(torch.cat([counts, *embedded], 1))
        logits: torch.Tensor = self.wide(categories).sum(1) + deep
        return logits.squeeze(1)

    def _columns(self, categories: torch.Tensor) -> Iterator[tuple[paceline.nn.Table, torch.Tensor]]:
        yield from zip(self.deep, [categories] if len(self.deep) == 1 else categories.unbind(1), strict=True)

    def ids_of(self, categories: torch.Tensor) -> dict[paceline.nn.Table, torch.Tensor]:
        """Which rows a batch needs."""
        return {self.wide: categories, **dict(self._columns(categories))}

    def optimizers(self, rate: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """Rare values learn fast by Adagrad; the network is trained by Adam."""
        tables = [*self.wide.parameters(), *self.deep.parameters()]
        return torch.optim.Adagrad(tables, lr=10 * rate), torch.optim.Adam(self.mlp.parameters(), lr=rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="label, I1 to I13, C1 to C26; with or without a header")
    parser.add_argument("--strategy", choices=["allreduce", "server", "hybrid"], default="allreduce")
    parser.add_argument("--consistency", default="sync", help="with --strategy server: sync, bounded:K or async")
    parser.add_argument("--tables", choices=["shared", "each"], default="shared", help="one for all, or one each")
    parser.add_argument("--epochs", type=int, default=10, help="at most; it stops when validation gets no better")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a second one costs more than it does in such small batches
    train_set, valid_set = split(*read(options.file.open(encoding="utf-8") if options.file else made_up()))
    model = WideAndDeep(options.dim, is_shared=options.tables == "shared")
    session = paceline.Session(
        model,
        *model.optimizers(options.rate),
        data=train_set,
        global_batch=options.batch,
        strategy=options.strategy,
        consistency=options.consistency,
    )

    # Rows of the next batch are pulled while this one is computed.
    session.prefetch(lambda batch: model.ids_of(batch[1]))

    def loss_fn(counts: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(counts, categories), labels)

    def validate(counts: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
        logits = model(counts, categories)
        logloss = F.binary_cross_entropy_with_logits(logits, labels)
        return {"logloss": logloss, "logits": paceline.Every(logits), "labels": paceline.Every(labels)}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            session.step(loss_fn, batch)
        scores = session.evaluate(validate, valid_set, batch=4096)
        if session.is_main:
            auc = area_under_curve(scores["logits"], scores["labels"])
            print(f"epoch {epoch.number}: validation logloss {scores['logloss']:.4f}, AUC {auc:.4f}", flush=True)
        if session.should_stop(scores["logloss"], patience=1):
            break


def area_under_curve(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """How often a click is ranked above a row without one; equal ones count as half."""
    _, where, sizes = torch.unique(logits, return_inverse=True, return_counts=True)
    ranks = (sizes.cumsum(0) - (sizes - 1) / 2)[where]
    clicks = float(labels.sum())
    above = float(ranks[labels > 0].sum()) - clicks * (clicks + 1) / 2
    return above / max(1.0, clicks * (len(labels) - clicks))


# -- data ------------------------------------------------------------------------------------------------------------


def read(lines: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, categories and labels. A count is its logarithm, and whether it is missing; a category is an id, also
    where it is missing."""
    counts, categories, labels = [], [], []
    for number, line in enumerate(lines, 1):
        fields = line.rstrip("\r\n").split("\t" if "\t" in line else ",")
        if number == 1 and fields[0] == "label":
            continue
        if len(fields) != 1 + NUM_COUNTS + NUM_CATEGORIES:
            raise SystemExit(f"line {number} has {len(fields)} fields; it should have label, I1 to I13 and C1 to C26")
        labels.append(float(fields[0]))
        counts.append([float(field) if field else np.nan for field in fields[1 : 1 + NUM_COUNTS]])
        categories.append([id_of(column, value) for column, value in enumerate(fields[1 + NUM_COUNTS :])])
    if not labels:
        raise SystemExit("the file has no rows")
    numbers = torch.tensor(counts)
    logarithms = (numbers.sign() * numbers.abs().log1p()).nan_to_num(0.0)
    return torch.cat([logarithms, numbers.isnan().float()], 1), torch.tensor(categories), torch.tensor(labels)


@functools.lru_cache(1 << 20)
def id_of(column: int, value: str) -> int:
    """The same on all machines."""
    return int.from_bytes(hashlib.blake2b(f"{column} {value}".encode(), digest_size=8).digest(), "little", signed=True)


def split(*columns: torch.Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Rows are in the order of time: the last fifth is for validation."""
    cut = len(columns[0]) * 4 // 5
    if cut == 0:
        raise SystemExit(f"{len(columns[0])} rows are too few to validate with some of them")
    return TensorDataset(*(column[:cut] for column in columns)), TensorDataset(*(column[cut:] for column in columns))


def made_up(num_rows: int = 8000) -> Iterator[str]:
    """Rows in which some values draw clicks, and two categories do so together."""
    random = np.random.default_rng(0)
    values = random.integers(0, 40, size=(num_rows, NUM_CATEGORIES))
    counts = random.geometric(0.05, size=(num_rows, NUM_COUNTS))
    appeal = random.normal(size=(4, 40))
    logit = appeal[np.arange(4), values[:, :4]].sum(1) + np.log1p(counts[:, 0]) - 3.0
    logit += 2.0 * ((values[:, 4] + values[:, 5]) % 2)
    labels = random.random(num_rows) < 1 / (1 + np.exp(-logit))
    missing = random.random((num_rows, NUM_COUNTS + NUM_CATEGORIES)) < 0.1
    for row in range(num_rows):
        fields = [*map(str, counts[row]), *(f"{value:08x}" for value in values[row])]
        kept = ["" if is_missing else field for field, is_missing in zip(fields, missing[row], strict=True)]
        yield "\t".join([str(int(labels[row])), *kept])


if __name__ == "__main__":
    main()
