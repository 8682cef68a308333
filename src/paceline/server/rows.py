"""A sparse table: rows that appear when they are first seen, each with the state of its optimizer.

Which ids are a server's own is not the table's business: the value a row begins with depends on the seed, the name of
the table and the id alone, so any server could have made it.

Promises:
- A call that raises has changed nothing: neither a row, nor a sighting, nor the version. (Not so with a `MemoryError`:
  ids that wait for a row may have been counted, and of the rows to evict some may be gone. No row is ever half made.)
- `version` grows with each push, and each row remembers the version of its last change. It is an int64 and does not
  wrap around: a million pushes a second would take 292,000 years.
- A row costs its numbers and its state (`row_bytes`), 8 bytes for its version, 8 for its id, and 8 to 19 in the index.
  Memory grows by slabs of at most 65,536 rows and is not given back: evicted rows make room for others.

Ids of one call must differ; the caller has joined equal ones. That is not checked: of equal ids in one push only one
would count. One thread at a time may use a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from paceline.server import row_optimizers
from paceline.server.admission import WaitingIds
from paceline.server.chunk import Chunk
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
    def __init__(self, spec: TableSpec) -> None:
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
        self._waiting = WaitingIds(spec.admit_after) if spec.admit_after else None
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
        columns = [self._rows, self._versions, *self._state.values()]
        waiting = self._waiting.num_bytes if self._waiting is not None else 0
        return sum(column.num_bytes for column in columns) + self._index.num_bytes + waiting

    def pull(self, ids: torch.Tensor, *, make: bool = True, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows [n, dim] of these ids, written to `out` where that is given. What has no row is given with its
        initial value, and gets one if `make`, unless it has not been seen often enough."""
        if out is None:
            out = torch.empty((len(ids), self.spec.dim), dtype=self.spec.torch_dtype)
        else:
            self._check_rows(out, len(ids), "out")
        slots = self._find_or_make(ids) if make else self._index.find(ids).numpy()
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
                slots, grads = slots[present], grads[torch.from_numpy(present)]
        self._version += 1
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
        if len(present):
            self._index.remove(ids[torch.from_numpy(present)])
            self._version_array[slots[present]] = -1
            self._version += 1
            self._evicted_version = self._version

    def changed_since(self, ids: torch.Tensor, version: int) -> torch.Tensor:
        """True where a row is another one than at that version: pushed, loaded, or evicted. Of an id without a row,
        which could have been evicted, it is said if any row was."""
        slots = self._index.find(ids).numpy()
        changed = np.full(len(slots), version < self._evicted_version)
        present = np.flatnonzero(slots >= 0)
        changed[present] = self._version_array[slots[present]] > version
        return torch.from_numpy(changed)

    def evict(self, older_than_version: int) -> int:
        """Drop the rows that were neither pushed, loaded nor made at this version or later, and the ids that wait for
        a row and were not seen since; the number of rows. (A pull alone keeps no row.)"""
        if self._waiting is not None:
            self._waiting.forget(older_than_version)
        num_rows = 0
        for start in range(0, self._index.num_slots, SLAB):
            versions = self._version_array[start : min(start + SLAB, self._index.num_slots)]
            old = np.flatnonzero((versions >= 0) & (versions < older_than_version))
            if len(old):
                if num_rows == 0:
                    self._version += 1
                    self._evicted_version = self._version
                self._index.remove(self._index.keys_of(torch.from_numpy(old + start)))
                versions[old] = -1
                num_rows += len(old)
        return num_rows

    def export(self, chunk_rows: int = SLAB) -> Iterator[Chunk]:
        """All rows, in the order of their slots, so many at a time (or fewer, where rows were evicted). Each chunk is
        what the table holds when it is asked for; a row that is made, or evicted and made again, between two chunks may
        be missing. Ids that wait for a row are not exported."""
        if chunk_rows < 1:
            raise ValueError(f"chunk_rows={chunk_rows}; use 1 row or more")
        start = 0
        while start < self._index.num_slots:
            versions = self._version_array[start : min(start + chunk_rows, self._index.num_slots)]
            slots = np.flatnonzero(versions >= 0) + start
            if len(slots):
                yield Chunk(
                    ids=self._index.keys_of(torch.from_numpy(slots)),
                    rows=self._rows.gather(slots),
                    state={name: column.gather(slots) for name, column in self._state.items()},
                    versions=torch.from_numpy(self._version_array[slots]),
                )
            start += chunk_rows

    def load(self, chunk: Chunk) -> None:
        """Take these rows over with their state and versions, in place of any that are here; `version` becomes at
        least the highest of theirs. Versions of two tables count separately: a copy that somebody made of a row of the
        one cannot be asked after in the other."""
        self._check_chunk(chunk)
        if not len(chunk):
            return
        self._grow(len(chunk))
        slots = self._index.add(chunk.ids).numpy()
        self._rows.scatter(slots, chunk.rows.contiguous())
        for name, column in self._state.items():
            column.scatter(slots, chunk.state[name].contiguous())
        self._version_array[slots] = chunk.versions.numpy()
        self._version = max(self._version, int(chunk.versions.max()))

    def _find_or_make(self, ids: torch.Tensor) -> Slots:
        """The slot of each id, -1 where it has no row because it was not seen often enough."""
        slots: Slots = self._index.find(ids).numpy()
        missing = np.flatnonzero(slots < 0)
        if len(missing) and self._waiting is not None:
            admitted = self._waiting.see(ids[torch.from_numpy(missing)], self._version)
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
        return slots

    def _grow(self, num_rows: int) -> None:
        num_slots = max(self._index.num_slots, len(self) + num_rows)
        for column in [self._rows, self._versions, *self._state.values()]:
            column.grow(num_slots)

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
        if mine != theirs or chunk.versions.shape != (num_rows,) or chunk.versions.dtype != torch.int64:
            raise ValueError(
                f"table {spec.name!r} holds {_listed(mine)}; the chunk of {num_rows} rows holds {_listed(theirs)}, "
                f"and versions {_described(chunk.versions)}; load it into a table of the spec it was exported from"
            )
        if num_rows and int(chunk.versions.min()) < 0:
            raise ValueError(
                f"table {spec.name!r}: a chunk has a row of version {int(chunk.versions.min())}; use 0 or more"
            )

    def _parts(self) -> dict[str, Column]:
        return {"rows": self._rows, **self._state}


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}" + ("" if tensor.is_contiguous() else ", not contiguous")


def _listed(parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in parts.items())
