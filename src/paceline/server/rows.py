"""A sparse table: rows that appear when they are first seen, each with the state of its optimizer.

Which ids are a server's own is not the table's business: the value a row begins with depends on the seed, the name of
the table and the id alone, so any server could have made it.

Promises:
- A call that raises has changed nothing: neither a row, nor a sighting, nor the version. (Not so with a `MemoryError`:
  ids that wait for a row may have been counted. No row is ever half made.)
- `version` grows with each push, load and eviction, and each row remembers the version of its last change. It is this
  table's own: rows that come from another one have changed. It is an int64 and does not wrap around: a million pushes
  a second would take 292,000 years.
- A row costs its numbers and its state (`row_bytes`), 8 bytes for its version, 8 for its id, 8 for its age with
  `evict_after`, and 8 to 19 in the index. Memory grows by slabs of at most 65,536 rows and is not given back: evicted
  rows make room for others.
- A row that is old (`ages`) is none, for every call; `len` and what it takes may count it for a while.

Ids of one call must differ; the caller has joined equal ones. That is not checked: of equal ids in one push only one
would count. One thread at a time may use a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from paceline.server import row_optimizers
from paceline.server.admission import WaitingIds
from paceline.server.ages import Ages, Clocks
from paceline.server.chunk import Chunk, WaitingChunkIds
from paceline.server.index import MAX_KEYS, KeyIndex
from paceline.server.initial import InitialRows
from paceline.server.memory import SLAB, Column, Slots
from paceline.server.row_optimizers import Hyper
from paceline.server.spec import TableSpec
from paceline.wire.memory import total_bytes

# Rows updated together take about this much: enough that calls cost little, so few that they stay in the cache until
# they are written back.
_UPDATE_BYTES = 2**22


class RowTable:
    """`clocks` say how far the ranges are that the ids are in; whoever makes updates moves them on."""

    def __init__(self, spec: TableSpec, clocks: Clocks | None = None) -> None:
        self.spec = spec
        widths = row_optimizers.state_widths(spec)
        self._row_bytes = spec.dim * spec.torch_dtype.itemsize + sum(widths.values()) * spec.math_dtype.itemsize
        # Addresses for no more rows than the machine could hold; see `Column`.
        max_rows = min(MAX_KEYS, max(SLAB, total_bytes() // self._row_bytes))
        what = f"the rows of table {spec.name!r}"
        self._rows = Column(width=spec.dim, dtype=spec.torch_dtype, max_slots=max_rows, what=what)
        self._state = {
            name: Column(width=width, dtype=spec.math_dtype, max_slots=max_rows, what=what)
            for name, width in widths.items()
        }
        # -1 where a slot is free.
        self._versions = Column(width=1, dtype=torch.int64, max_slots=max_rows, what=what)
        self._version_array: npt.NDArray[np.int64] = self._versions.tensor.view(-1).numpy()
        self._index = KeyIndex()
        self._initial = InitialRows(spec)
        clocks = clocks if clocks is not None else Clocks()
        self._waiting = WaitingIds(spec.admit_after, spec.evict_after, clocks) if spec.admit_after else None
        self._ages = Ages(spec.evict_after, clocks, max_rows, what) if spec.evict_after else None
        self._update_rows = max(1, _UPDATE_BYTES // (spec.dim * spec.math_dtype.itemsize))
        self._version = 0
        self._evicted_version = -1

    def __len__(self) -> int:
        return len(self._index)

    @property
    def version(self) -> int:
        return self._version

    @property
    def row_bytes(self) -> int:
        """What rows and their state take."""
        return len(self) * self._row_bytes

    @property
    def num_bytes(self) -> int:
        """What everything takes: also the index, versions, free slots, and ids that wait for a row."""
        waiting = self._waiting.num_bytes if self._waiting is not None else 0
        return sum(column.num_bytes for column in self._columns()) + self._index.num_bytes + waiting

    def pull(self, ids: torch.Tensor, *, make: bool = True, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows [n, dim] of these ids, written to `out` where that is given. What has no row is given with its
        initial value, and gets one if `make`, unless it has not been seen often enough."""
        if out is None:
            out = torch.empty((len(ids), self.spec.dim), dtype=self.spec.torch_dtype)
        else:
            self._check_rows(out, len(ids), "out")
        # Ids that must be seen more often first are counted by pushes, which all replicas get.
        slots = self._find_or_make(ids) if make and self._waiting is None else self._find(ids)
        # Of a slot -1 the first row is read, which is overwritten then.
        self._rows.gather(slots, out)
        missing = torch.from_numpy(np.flatnonzero(slots < 0))
        if len(missing):
            out[missing] = self._initial.of(ids[missing])
        return out

    def push(self, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, step: int) -> None:
        """Update the rows of these ids with their gradients [n, dim]; `step` is the number of this update of the whole
        table, from 1. Gradients of ids that have not been seen often enough are dropped."""
        self._check_rows(grads, len(ids), "grads")
        self._check_finite(ids, grads)
        row_optimizers.check(self.spec, hyper, step)
        slots = self._find_or_make(ids)
        if self._waiting is not None:
            present = np.flatnonzero(slots >= 0)
            if len(present) < len(slots):
                chosen = torch.from_numpy(present)
                slots, ids, grads = slots[present], ids[chosen], grads[chosen]
        self._version += 1
        if self._ages is not None:
            self._ages.touch(slots, ids, step)
        for start in range(0, len(slots), self._update_rows):
            stop = start + self._update_rows
            self._update(slots[start:stop], grads[start:stop], hyper, step)

    def check(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """Raise what a push of these would raise on their account."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"table {self.spec.name!r}: ids are {_described(ids)}; they must be a list of int64")
        self._check_rows(grads, len(ids), "grads")
        self._check_finite(ids, grads)

    def check_settings(self, hyper: Hyper, step: int) -> None:
        """Raise what a push with these would raise on their account."""
        row_optimizers.check(self.spec, hyper, step)

    def drop(self, ids: torch.Tensor) -> None:
        """Forget the rows of these ids, which belong to another table from now on."""
        slots = self._index.find(ids).numpy()
        present = np.flatnonzero(slots >= 0)
        self._remove(slots[present], ids[torch.from_numpy(present)])
        if self._waiting is not None:
            self._waiting.drop(ids)

    def changed_since(self, ids: torch.Tensor, version: int) -> torch.Tensor:
        """True where a row is another one than at that version: pushed, loaded, or evicted. Of an id without a row,
        which could have been evicted, it is said if any row was."""
        slots = self._find(ids, evicts=True)
        changed = np.full(len(slots), version < self._evicted_version)
        present = np.flatnonzero(slots >= 0)
        changed[present] = self._version_array[slots[present]] > version
        return torch.from_numpy(changed)

    def sweep(self) -> int:
        """Clear away old rows in the next part of the table, as part of every update; how many."""
        if self._ages is None:
            return 0
        slots = self._ages.next_part(self._index.num_slots)
        if self._waiting is not None:
            self._waiting.sweep()
        slots = slots[self._version_array[slots] >= 0]
        ids = self._index.keys_of(torch.from_numpy(slots))
        old = self._ages.are_old(slots, ids)
        self._remove(slots[old], ids[torch.from_numpy(old)])
        return int(old.sum())

    def export(
        self, chunk_rows: int = SLAB, choose: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    ) -> Iterator[Chunk]:
        """All rows, in the order of their slots, so many at a time (or fewer, where rows were evicted); those that are
        true in what `choose` gives for their ids, if it gives anything. Each chunk is what the table holds when it is
        asked for; a row that is made, or evicted and made again, between two chunks may be missing. Ids that wait for a
        row are not among them."""
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows={chunk_rows}; use 1 row or more")
        start = 0
        while start < self._index.num_slots:
            versions = self._version_array[start : min(start + chunk_rows, self._index.num_slots)]
            slots = np.flatnonzero(versions >= 0) + start
            ids = self._index.keys_of(torch.from_numpy(slots))
            if choose is not None and (chosen := choose(ids)) is not None:
                slots, ids = slots[chosen.numpy()], ids[chosen]
            idle = None
            if self._ages is not None:
                young = ~self._ages.are_old(slots, ids)
                slots, ids = slots[young], ids[torch.from_numpy(young)]
                idle = torch.from_numpy(self._ages.idle(slots, ids))
            if len(slots):
                yield Chunk(
                    ids=ids,
                    rows=self._rows.gather(slots),
                    state={name: column.gather(slots) for name, column in self._state.items()},
                    idle=idle,
                )
            start += chunk_rows

    def load(self, chunk: Chunk) -> None:
        """Take these rows over with their state, in place of any that are here. They have been idle for as long as they
        had been where they come from; not at all, if nobody counted."""
        self._check_chunk(chunk)
        if not len(chunk):
            return
        self._grow(len(chunk))
        slots = self._index.add(chunk.ids).numpy()
        self._rows.scatter(slots, chunk.rows.contiguous())
        for name, column in self._state.items():
            column.scatter(slots, chunk.state[name].contiguous())
        self._version += 1
        self._version_array[slots] = self._version
        if self._ages is not None:
            idle = chunk.idle.numpy() if chunk.idle is not None else np.zeros(len(chunk), dtype=np.int64)
            self._ages.put(slots, chunk.ids, idle)

    def all_ids(self) -> list[torch.Tensor]:
        """Of all rows, old ones too, and of what waits for one; some at a time."""
        found = []
        for start in range(0, self._index.num_slots, SLAB):
            versions = self._version_array[start : min(start + SLAB, self._index.num_slots)]
            found.append(self._index.keys_of(torch.from_numpy(np.flatnonzero(versions >= 0) + start)))
        if self._waiting is not None:
            found.append(self._waiting.all_ids())
        return found

    def waiting(self) -> WaitingChunkIds | None:
        """The ids that wait for a row, if any does."""
        return self._waiting.export() if self._waiting is not None and len(self._waiting) else None

    def load_waiting(self, waiting: WaitingChunkIds) -> None:
        """Have these wait here; where none has to, their next sighting makes a row."""
        if self._waiting is not None:
            self._waiting.load(waiting)

    def _find(self, ids: torch.Tensor, *, evicts: bool = False) -> Slots:
        """The slot of each id, -1 where it has no row, or an old one."""
        slots: Slots = self._index.find(ids).numpy()
        if self._ages is not None:
            at = np.flatnonzero(slots >= 0)
            at = at[self._ages.are_old(slots[at], ids[torch.from_numpy(at)])]
            if evicts:
                self._remove(slots[at], ids[torch.from_numpy(at)])
            slots[at] = -1
        return slots

    def _remove(self, slots: Slots, ids: torch.Tensor) -> None:
        if len(slots):
            self._index.remove(ids)
            self._version_array[slots] = -1
            self._version += 1
            self._evicted_version = self._version

    def _find_or_make(self, ids: torch.Tensor) -> Slots:
        """The slot of each id, -1 where it has no row because it was not seen often enough."""
        slots = self._find(ids, evicts=True)
        missing = np.flatnonzero(slots < 0)
        if len(missing) and self._waiting is not None:
            admitted = self._waiting.see(ids[torch.from_numpy(missing)])
            missing = missing[admitted.numpy()]
        if len(missing):
            slots[missing] = self._make(ids[torch.from_numpy(missing)])
        return slots

    def _make(self, ids: torch.Tensor) -> Slots:
        self._grow(len(ids))
        num_used = self._index.num_slots
        slots: Slots = self._index.add(ids).numpy()
        self._rows.scatter(slots, self._initial.of(ids))
        # A slot that nobody had before is zero.
        reused = slots[slots < num_used]
        if len(reused):
            for column in self._state.values():
                column.tensor[torch.from_numpy(reused)] = 0
        self._version_array[slots] = self._version
        if self._ages is not None:
            self._ages.touch(slots, ids)
        return slots

    def _grow(self, num_rows: int) -> None:
        num_slots = max(self._index.num_slots, len(self) + num_rows)
        for column in self._columns():
            column.grow(num_slots)

    def _columns(self) -> list[Column]:
        ages = [self._ages.column] if self._ages is not None else []
        return [self._rows, self._versions, *ages, *self._state.values()]

    def _update(self, slots: Slots, grads: torch.Tensor, hyper: Hyper, step: int) -> None:
        math_dtype = self.spec.math_dtype
        rows = self._rows.gather(slots)
        state = {name: column.gather(slots) for name, column in self._state.items()}
        exact = rows.to(math_dtype)
        row_optimizers.update(self.spec, exact, grads.to(math_dtype), state, hyper, step)
        self._rows.scatter(slots, exact.to(rows.dtype))
        for name, column in self._state.items():
            column.scatter(slots, state[name])
        self._version_array[slots] = self._version

    def _check_rows(self, rows: torch.Tensor, num_rows: int, what: str) -> None:
        spec = self.spec
        if rows.dtype != spec.torch_dtype or rows.shape != (num_rows, spec.dim) or not rows.is_contiguous():
            raise ValueError(
                f"table {spec.name!r}: {what} is {_described(rows)}; "
                f"for {num_rows} ids it must be {spec.torch_dtype} of shape {(num_rows, spec.dim)}, contiguous"
            )

    def _check_finite(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        # A sum is not finite if any of them is not; if only the sum overflowed, they are looked at one by one.
        if not torch.isfinite(grads.sum()):
            wrong = torch.nonzero(~torch.isfinite(grads).all(dim=1))
            if len(wrong):
                raise ValueError(
                    f"table {self.spec.name!r}: the gradient of id {int(ids[wrong[0, 0]])} is not finite (of "
                    f"{len(wrong)} in this push); nothing was updated. Lower the learning rate, or clip gradients"
                )

    def _check_chunk(self, chunk: Chunk) -> None:
        spec, num_rows = self.spec, len(chunk)
        mine = {
            name: (column.tensor.dtype, (num_rows, column.tensor.shape[1])) for name, column in self._parts().items()
        }
        theirs = {
            name: (value.dtype, tuple(value.shape)) for name, value in {"rows": chunk.rows, **chunk.state}.items()
        }
        if mine != theirs or (chunk.idle is not None and chunk.idle.shape != (num_rows,)):
            raise ValueError(
                f"table {spec.name!r} holds {_listed(mine)}; the chunk of {num_rows} rows holds {_listed(theirs)}; "
                "load it into a table of the spec it was exported from"
            )

    def _parts(self) -> dict[str, Column]:
        return {"rows": self._rows, **self._state}


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}" + ("" if tensor.is_contiguous() else ", not contiguous")


def _listed(parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in parts.items())
