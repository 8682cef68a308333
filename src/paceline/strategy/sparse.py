"""The rows of tables in a step: given to the modules in the forward pass, their gradients taken after the backward one.

A module asks for the rows of the ids it got, each once. They are leaves of the graph of that call; after backward each
has the gradient of its rows. Ids that several calls had (micro-batches, a table used twice) are added up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.nn.embedding import Table
from paceline.server.merging import merged
from paceline.server.messages import Need
from paceline.server.parcels import TableSettings
from paceline.server.spec import TableSpec

RowGradients = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by table: ids that differ, and their gradients

_KINDS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adamw"}


IdsOf = Callable[[Any], Mapping[Table, torch.Tensor]]


class Upcoming(NamedTuple):
    """The batch after this one, and what its rows must have seen, if that is not what the next step asks for."""

    batch: Any
    need: Need | None = None


class RowSource(Protocol):
    def pull(self, wanted: Mapping[str, torch.Tensor], *, make: bool) -> dict[str, torch.Tensor]:
        """The rows of these ids, of several tables at once; new tensors."""


@runtime_checkable
class FarSource(Protocol):
    """One to which it is far: it can be asked for rows while others are computed with."""

    def ask_ahead(self, ids: Mapping[str, torch.Tensor], need: Need | None) -> None: ...

    def take_ahead(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """What was asked for last: ids, each once and in order, and their rows; None if it has to be pulled."""


class Sparse:
    """The tables of a model, by name; empty for most models. `source` is where their rows are."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        optimizers: Sequence[torch.optim.Optimizer],
        seed: int,
    ) -> None:
        self.modules = dict(tables)
        self._places = {name: _place_of(name, table, optimizers) for name, table in tables.items()}
        self.specs = tuple(_spec_of(name, table, self._places[name], seed) for name, table in tables.items())
        self.source: RowSource | None = None
        self._tape: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._is_recording = False
        self._ready: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # rows that were pulled ahead
        self._ids_of: IdsOf | None = None
        self._looks_ahead = True
        self.upcoming: Callable[[], Upcoming | None] | None = None  # the batch after the one that is computed
        self._ahead: Any = None  # the batch whose rows were asked for ahead
        self._names = {id(table): name for name, table in tables.items()}
        for name, table in tables.items():
            table.attach(_Handle(self, name))

    def prefetch(self, ids_of: IdsOf, *, ahead: bool) -> None:
        """Which ids a batch will ask for; whether to ask for them while the batch before is computed."""
        self._ids_of, self._looks_ahead = ids_of, ahead

    def settings(self) -> tuple[TableSettings, ...]:
        """What the groups of the tables say now."""
        return tuple(TableSettings(name, _plain(place.group)) for name, place in self._places.items())

    # -- the modules' side -------------------------------------------------------------------------------------------

    def rows(self, name: str, table: Table, ids: torch.Tensor) -> torch.Tensor:
        if self.source is None:
            raise RuntimeError(
                f"table {name!r} has its rows on servers: it can be used from the first epoch on until the "
                "session is closed"
            )
        is_trained = self._is_recording and torch.is_grad_enabled() and table.weight.requires_grad
        found = self._ready_rows(name, ids) if is_trained else None
        if found is None:
            found = self.source.pull({name: ids}, make=is_trained)[name]
        if is_trained:
            found.requires_grad_()
            self._tape.append((name, ids, found))
        return found

    def _ready_rows(self, name: str, ids: torch.Tensor) -> torch.Tensor | None:
        """The rows of these ids, if all of them are here."""
        if name not in self._ready or not len(self._ready[name][0]):
            return None
        known, rows = self._ready[name]
        if len(known) == len(ids) and torch.equal(known, ids):
            return rows.detach()
        at = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        return rows[at] if torch.equal(known[at], ids) else None

    # -- the strategy's side -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An attempt at a step begins."""
        self._tape.clear()
        self._found.clear()
        self._ready.clear()

    def prepare(self, batch: Any) -> None:
        """Have the rows of all tables that a batch will ask for, at once: they were asked for ahead, or are now."""
        if self._ids_of is None or self.source is None or batch is None:
            return
        if self._ahead is batch and isinstance(self.source, FarSource):
            self._ahead = None
            if (found := self.source.take_ahead()) is not None:
                self._ready = found
                return
        wanted = {name: torch.unique(ids.reshape(-1).to(torch.int64)) for name, ids in self._ids_in(batch).items()}
        rows = self.source.pull(wanted, make=True) if wanted else {}
        self._ready = {name: (ids, rows[name]) for name, ids in wanted.items()}

    def look_ahead(self) -> None:
        """Ask for the rows of the next batch, if it is known which that is."""
        if self._ids_of is None or not self._looks_ahead or not isinstance(self.source, FarSource):
            return
        following = self.upcoming() if self.upcoming is not None else None
        if following is None or following.batch is None or following.batch is self._ahead:
            return
        if wanted := self._ids_in(following.batch):
            self._ahead = following.batch
            self.source.ask_ahead(wanted, following.need)

    def _ids_in(self, batch: Any) -> dict[str, torch.Tensor]:
        assert self._ids_of is not None
        found = {}
        for table, ids in self._ids_of(batch).items():
            if id(table) not in self._names:
                raise ValueError(f"prefetch named {table}, which is no table of this session's model")
            found[self._names[id(table)]] = ids
        return found

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Calls in here are those whose gradients count."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False
            self._tape.clear()

    def collect(self) -> None:
        """After a backward pass: take the gradients."""
        for name, ids, rows in self._tape:
            if rows.grad is not None:
                self._found.setdefault(name, []).append((ids, rows.grad))
                rows.grad = None
        self._tape.clear()

    def finish(self) -> RowGradients:
        return {name: merged(pairs) for name, pairs in self._found.items()}


class _Handle:
    """One table, as its module and the copies of that know it; also when the session is over, if rows are left."""

    def __init__(self, sparse: Sparse, name: str) -> None:
        self._sparse = sparse
        self._name = name

    def rows(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        return self._sparse.rows(self._name, table, ids)


class _Place(NamedTuple):
    """Which group of which optimizer a table is in. Loading a state puts other dicts in the place of the groups."""

    optimizer: torch.optim.Optimizer
    number: int

    @property
    def group(self) -> dict[str, object]:
        found: dict[str, object] = self.optimizer.param_groups[self.number]
        return found


def _place_of(name: str, table: Table, optimizers: Sequence[torch.optim.Optimizer]) -> _Place:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            if any(parameter is table.weight for parameter in group["params"]):
                if type(optimizer).__name__ not in _KINDS:
                    raise ValueError(
                        f"table {name!r} is in {type(optimizer).__name__}, which has no rule for rows; "
                        f"use one of {', '.join(_KINDS)}"
                    )
                return _Place(optimizer, number)
    raise ValueError(f"table {name!r} is in no optimizer; give its weight to one: it stands for the rows")


def _spec_of(name: str, table: Table, place: _Place, seed: int) -> TableSpec:
    optimizer, group = place.optimizer, place.group
    kind = _KINDS[type(optimizer).__name__]
    return TableSpec(
        name=name,
        dim=table.dim,
        dtype=str(table.weight.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        seed=seed,
        init=table.init,
        scale=table.scale,
        optimizer=kind,  # type: ignore[arg-type]
        rowwise=table.rowwise,
        momentum=kind == "sgd" and bool(group.get("momentum")),
        amsgrad=bool(group.get("amsgrad")),
        admit_after=table.admit_after,
        evict_after=table.evict_after,
    )


def _plain(group: Mapping[str, object]) -> dict[str, float | int | bool | tuple[float, ...] | None]:
    """The settings of a group that a message can carry."""
    found: dict[str, float | int | bool | tuple[float, ...] | None] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, list):
            value = tuple(value)
        if value is None or isinstance(value, bool | int | float) or (key == "betas" and isinstance(value, tuple)):
            found[key] = value
    return found
