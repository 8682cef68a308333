"""Embeddings without a fixed vocabulary: any int64 is an id, and a row appears when its id is first seen.

    users = paceline.nn.Embedding(16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

To an optimizer, a table is one parameter without elements: the group that it is in says by which rule, with which
learning rate and so on, its rows are updated. Rows of which a batch has no id are not touched by an update: they do
not decay, and momentum does not move them (as in `torch.optim.SparseAdam`).

Where the rows are is the strategy's affair: on every worker ("allreduce", or alone), or on servers ("hybrid",
"server"). Without a session a module has initial rows of its own. A copy of a module sees the same rows as the module,
now and later; a pickled one does not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from paceline.checkpoint.weights import plain_name

Init = Literal["normal", "uniform", "zeros"]


class RowLookup(Protocol):
    """Where a module gets its rows; the strategy's."""

    def rows(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids, which differ; with a gradient to be had if gradients are being recorded."""


class Table(nn.Module):
    """What Embedding and EmbeddingBag have in common.

    >>> users = paceline.nn.Embedding(16, name="users", rowwise=True, evict_after=100_000)

    - `name` is that of the table, by default where the module is in the model. Equal names are one table.
    - `rowwise` keeps one second moment for each row (Adagrad, Adam) instead of one for each element.
    - `admit_after`: an id gets a row of its own only after it has been in so many updates.
    - `evict_after`: a row is dropped, with its optimizer state, when so many updates (steps, or leases) came without
      it. Its id begins anew.
    - `cache`: a worker uses a row again for so many steps without asking servers for it.

    With any of the last three, the training is another one than that of a plain table."""

    weight: nn.Parameter

    def __init__(
        self,
        dim: int,
        *,
        name: str = "",
        init: Init = "normal",
        scale: float | None = None,
        rowwise: bool = False,
        admit_after: int = 0,
        evict_after: int = 0,
        cache: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim={dim!r}: a row has 1 number or more")
        if type(evict_after) is not int or evict_after < 0:
            raise ValueError(f"evict_after={evict_after!r} must be 0 (never) or a number of updates")
        if cache < 0:
            raise ValueError(f"cache={cache} must be 0 (never) or more steps")
        self.dim = dim
        self.table_name = name
        self.init: Init = init
        self.scale = (1.0 if init == "normal" else dim**-0.5) if scale is None else scale
        self.rowwise = rowwise
        self.admit_after = admit_after
        self.evict_after = evict_after
        self.cache = cache
        self.weight = nn.Parameter(torch.empty((0, dim), dtype=dtype))
        self._source: list[RowLookup] = []  # in a list: a source is no part of the model

    def attach(self, source: RowLookup) -> None:
        """Get rows from there from now on."""
        self._source = [source]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied._source = list(self._source)
        return copied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """The weight has no elements, but it tells of which kind the rows are that were saved with it."""
        saved = state_dict.get(f"{prefix}weight")
        if isinstance(saved, torch.Tensor) and saved.shape != self.weight.shape:
            name, error_msgs = self.table_name or prefix.rstrip("."), others[-1]
            error_msgs.append(
                f"table {name!r} has rows of {self.dim} numbers, but what is loaded has rows of {saved.shape[-1]}: "
                f"make it with dim={saved.shape[-1]}, or begin anew"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def rows_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that these ids have, each once, and for each id the number of its row there."""
        if ids.dtype != torch.int64:
            if ids.is_floating_point() or ids.is_complex() or ids.dtype in (torch.bool, torch.uint64):
                raise TypeError(f"{self._described()}: ids are {ids.dtype}; give int64")
            ids = ids.to(torch.int64)
        unique, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        if not self._source:
            from paceline.nn.alone import OwnRows

            self.attach(OwnRows())
        return self._source[0].rows(self, unique), inverse.view(ids.shape)

    def _described(self) -> str:
        return f"{type(self).__name__} {self.table_name!r}" if self.table_name else type(self).__name__

    def extra_repr(self) -> str:
        return f"dim={self.dim}, rows of any id"


class Embedding(Table):
    """Like `torch.nn.Embedding`, for any int64 id: a row appears when its id is first seen.

    >>> users = paceline.nn.Embedding(16)
    >>> rows = users(torch.tensor([3, 2**40]))  # 2 rows of 16 numbers
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, where = self.rows_of(ids)
        return F.embedding(where, rows)


class EmbeddingBag(Table):
    """Like `torch.nn.EmbeddingBag`, for any int64 id. `mode` says how the rows of a bag become one: "sum", "mean" or
    "max".

    >>> words = paceline.nn.EmbeddingBag(16, mode="sum")
    >>> rows = words(torch.tensor([5, 6, 7]), offsets=torch.tensor([0, 2]))  # of the bags (5, 6) and (7)
    """

    def __init__(self, dim: int, *, mode: Literal["sum", "mean", "max"] = "mean", **options: Any) -> None:
        super().__init__(dim, **options)
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode={mode!r}: use 'sum', 'mean' or 'max'")
        self.mode = mode

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, where = self.rows_of(ids)
        return F.embedding_bag(where, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights)


def tables_in(model: nn.Module) -> Iterator[tuple[str, Table]]:
    """All tables of a model by name, in the order in which they were registered.

    >>> for name, table in paceline.nn.tables_in(model):
    ...     print(name, table.dim)
    """
    for path, module in model.named_modules():
        if isinstance(module, Table):
            yield module.table_name or plain_name(path) or "table", module
