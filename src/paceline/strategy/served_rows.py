"""The rows of tables that are on servers, as a worker pulls and pushes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.server.client import GroupClient
from paceline.server.errand import Errand
from paceline.server.layout import Layout
from paceline.server.messages import Need, Request
from paceline.server.parcels import Detail, Packing, Parcel, Rows
from paceline.server.scratch import Scratch
from paceline.strategy.row_cache import RowCache
from paceline.strategy.sparse import RowGradients, Sparse


class ServedRows:
    """`need` is what a pull must see. `num_asked` and `num_pulled` count rows: those that were asked for in training,
    each once a batch, and those of them that had to be pulled."""

    def __init__(self, layout: Layout, sparse: Sparse, client: GroupClient) -> None:
        self._client = client
        self._partitions = layout.partitions
        self._specs = {spec.name: spec for spec in sparse.specs}
        self.need = Need()
        self._pulled = Scratch(client)
        self._pushed = Scratch(client)
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._caches = {
            spec.name: RowCache(spec.dim, spec.torch_dtype, sparse.modules[spec.name].cache)
            for spec in sparse.specs
            if sparse.modules[spec.name].cache
        }
        self._clock = 0  # steps or leases of this worker
        self.num_asked = self.num_pulled = 0

    # -- pull --------------------------------------------------------------------------------------------------------

    def pull(self, wanted: Mapping[str, torch.Tensor], *, make: bool) -> dict[str, torch.Tensor]:
        if not make:
            return self._pull(wanted, make=False)
        found: dict[str, torch.Tensor] = {}
        missing: dict[str, torch.Tensor] = {}
        for name, ids in wanted.items():
            if name in self._caches:
                spec = self._specs[name]
                found[name] = torch.empty((len(ids), spec.dim), dtype=spec.torch_dtype)
                missing[name] = self._caches[name].take(ids, self._clock, found[name])
        asked = {name: ids[missing[name]] if name in missing else ids for name, ids in wanted.items()}
        self.num_asked += sum(map(len, wanted.values()))
        self.num_pulled += sum(map(len, asked.values()))
        for name, rows in self._pull(asked, make=True).items():
            if name in missing:
                found[name][missing[name]] = rows
                self._caches[name].put(asked[name], rows, self._clock)
            else:
                found[name] = rows
        return found

    def _pull(self, wanted: Mapping[str, torch.Tensor], *, make: bool) -> dict[str, torch.Tensor]:
        assert self._partitions is not None
        found = {
            name: torch.empty((len(ids), self._specs[name].dim), dtype=self._specs[name].torch_dtype)
            for name, ids in wanted.items()
        }
        homes = {name: self._partitions.of(ids) for name, ids in wanted.items()}
        landed: list[tuple[str, torch.Tensor | None, torch.Tensor]] = []
        self._pulled.reset()

        def pack(request: Request) -> Parcel:
            packing, outputs, wants = Packing(), Packing(), []
            for name, ids in wanted.items():
                mine = self._mask(homes[name], request.ranges)
                asked = self._pulled.put(ids if mine is None else ids[mine])
                if len(asked):
                    out = self._pulled.empty((len(asked), self._specs[name].dim), self._specs[name].torch_dtype)
                    wants.append(Rows(name, packing.add(asked), outputs.add(out)))
                    landed.append((name, mine, out))
            return Parcel(Detail(row_wants=tuple(wants), makes_rows=make), packing.tensors, outputs.tensors)

        first = self._partitions.first
        errand = Errand(range(first, first + self._partitions.count), pull=self.need)
        self._client.run(errand, pack, f"pulling rows of {', '.join(wanted)}")
        for name, mine, out in landed:
            if mine is None:
                found[name].copy_(out)
            else:
                found[name][mine] = out
        return found

    def _mask(self, homes: torch.Tensor, ranges: Sequence[int]) -> torch.Tensor | None:
        """Which of the ids are in these ranges; None for all."""
        assert self._partitions is not None
        first, count = self._partitions.first, self._partitions.count
        mine = torch.zeros(count, dtype=torch.bool)
        mine[[number - first for number in ranges if number >= first]] = True
        return None if bool(mine.all()) else mine[homes - first]

    # -- push --------------------------------------------------------------------------------------------------------

    def keep(self, rows: RowGradients) -> None:
        """Have the gradients where servers can read them, until the next step."""
        self._kept = []
        self._clock += 1
        if self._partitions is None:
            return
        self._pushed.reset()
        for name, (ids, gradients) in rows.items():
            self._kept.append((name, ids, gradients, self._partitions.of(ids)))

    def pack(self, ranges: Sequence[int], packing: Packing) -> tuple[Rows, ...]:
        found = []
        for name, ids, gradients, homes in self._kept:
            mine = self._mask(homes, ranges)
            part = ids if mine is None else ids[mine]
            if len(part):
                values = gradients if mine is None else gradients[mine]
                found.append(Rows(name, packing.add(self._pushed.put(part)), packing.add(self._pushed.put(values))))
        return tuple(found)
