"""Ratings that users gave to items: matrix factorisation with a small network on top, on tables without a vocabulary.

    python examples/ratings.py                                             on ratings that it makes up
    python examples/ratings.py --file u.data                               MovieLens 100K, or a .inter file of RecBole
    paceline run -n 2 --servers 1 examples/ratings.py --strategy hybrid    the tables on a server

Users and items are whatever the file calls them: a row of a table appears when its id is first seen.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

COLUMNS = ("user", "item", "rating")


class Ratings(nn.Module):
    """The mean, what is special about the user and the item, and how well the two fit."""

    def __init__(self, mean: float, dim: int) -> None:
        super().__init__()
        self.mean = mean
        self.users, self.items = (paceline.nn.Embedding(dim, scale=0.1) for _ in range(2))
        self.user_bias, self.item_bias = (paceline.nn.Embedding(1, init="zeros") for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(3 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        user, item = self.users(users), self.items(items)
        product = user * item
        bias = self.user_bias(users) + self.item_bias(items)
        fit = product.sum(1, keepdim=True) + self.mlp(torch.cat([user, item, product], 1))
        ratings: torch.Tensor = self.mean + bias + fit
        return ratings.squeeze(1)

    def ids_of(self, users: torch.Tensor, items: torch.Tensor) -> dict[paceline.nn.Table, torch.Tensor]:
        """Which rows a batch needs."""
        return {self.users: users, self.user_bias: users, self.items: items, self.item_bias: items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="user, item and rating, separated by tabs")
    parser.add_argument("--strategy", choices=["allreduce", "server", "hybrid"], default="allreduce")
    parser.add_argument("--consistency", default="sync", help="with --strategy server: sync, bounded:K or async")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-2, help="the first learning rate; it falls to 0")
    parser.add_argument("--decay", type=float, default=2.0, help="how strongly rows are drawn to zero")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # a second one costs more than it does in such small batches
    lines = options.file.open(encoding="utf-8", errors="replace") if options.file else made_up()
    train_set, valid_set = split(*read(lines))
    model = Ratings(train_set.tensors[2].mean().item(), options.dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=options.decay)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.0, options.epochs * math.ceil(len(train_set) / options.batch)
    )
    session = paceline.Session(
        model,
        optimizer,
        schedule,
        data=train_set,
        global_batch=options.batch,
        strategy=options.strategy,
        consistency=options.consistency,
    )

    # Rows of the next batch are pulled while this one is computed.
    session.prefetch(lambda batch: model.ids_of(batch[0], batch[1]))

    def loss_fn(users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(users, items), ratings)

    def validate(users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"error": loss_fn(users, items, ratings)}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            schedule.step()
        rmse = math.sqrt(session.evaluate(validate, valid_set, batch=4096)["error"])
        if session.is_main:
            print(f"epoch {epoch.number}: loss {loss:.4f}, held-out RMSE {rmse:.4f}", flush=True)


# -- data ------------------------------------------------------------------------------------------------------------


def read(lines: Iterable[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users, items and ratings. Without a header they are the first three columns, as in MovieLens' u.data; with one,
    as in RecBole's `user_id:token item_id:token rating:float`, whichever columns begin with these words."""
    users, items, ratings = [], [], []
    places = [0, 1, 2]
    for number, line in enumerate(lines):
        fields = line.rstrip("\r\n").split("\t")
        if number == 0 and ":" in line:
            places = [next((at for at, name in enumerate(fields) if name.startswith(word)), -1) for word in COLUMNS]
            if -1 in places:
                raise SystemExit(f"the header {line.strip()!r} has no column that begins with each of {COLUMNS}")
            continue
        if not line.strip():
            continue
        try:
            user, item, rating = (fields[at] for at in places)
            ratings.append(float(rating))
        except (IndexError, ValueError):
            raise SystemExit(f"line {number + 1} has no user, item and rating: {line.strip()!r}") from None
        users.append(id_of(user))
        items.append(id_of(item))
    if not ratings:
        raise SystemExit("the file has no ratings")
    return torch.tensor(users), torch.tensor(items), torch.tensor(ratings)


def id_of(name: str) -> int:
    """Numbers are their own ids; other names have one that is the same on all machines."""
    if name.isdecimal() and len(name) < 19:
        return int(name)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def split(users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor) -> tuple[TensorDataset, TensorDataset]:
    """A tenth of the ratings is held out: by a hash of the pair, so it is the same one everywhere and for good."""
    mixed = users.numpy().view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + items.numpy().view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    is_held_out = torch.from_numpy((mixed >> np.uint64(32)) % np.uint64(10) == 0)
    parts = [TensorDataset(users[part], items[part], ratings[part]) for part in (~is_held_out, is_held_out)]
    if not all(map(len, parts)):
        raise SystemExit(f"{len(ratings)} ratings are too few to hold some of them out")
    return parts[0], parts[1]


def made_up(num_users: int = 100, num_items: int = 80, num_ratings: int = 6000) -> Iterator[str]:
    """Users who like what is like them, in MovieLens' form."""
    random = np.random.default_rng(0)
    users, items = random.normal(size=(num_users, 2)), random.normal(size=(num_items, 2))
    quality = random.normal(size=num_items) * 0.5
    for pair in random.choice(num_users * num_items, num_ratings, replace=False):
        user, item = divmod(int(pair), num_items)
        liking = 3.5 + quality[item] + 0.7 * users[user] @ items[item] + 0.3 * random.normal()
        yield f"{user * 7919}\titem {item}\t{min(5, max(1, round(liking)))}\t0"


if __name__ == "__main__":
    main()
