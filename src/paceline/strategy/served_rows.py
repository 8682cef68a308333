"""The rows of tables that are on servers, as a worker pulls and pushes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.server.client import GroupClient
from paceline.server.errand import Errand
from paceline.server.layout import RangeLayout
from paceline.server.messages import Need, ServerRequest
from paceline.server.parcels import Packing, Parcel, TableRows
from paceline.server.scratch import Scratch
from paceline.strategy.ahead import Along, Early, Lookout
from paceline.strategy.row_cache import RowCache
from paceline.strategy.row_pull import RowPull, mask_of
from paceline.strategy.sparse import RowGradients, Sparse
from paceline.watch import spans


class ServedRows:
    """`need` is what a pull must see. `num_asked` and `num_pulled` count rows: those that were asked for in training,
    each once a batch, and those of them that had to be pulled."""

    def __init__(self, layout: RangeLayout, sparse: Sparse, client: GroupClient) -> None:
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
        self._asked_again = Scratch(client)
        self._lookout: Lookout | None = None
        self._ahead: Along | Early | None = None
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
        self._pulled.reset()
        pull = RowPull(wanted, self._specs, self._partitions, self._pulled, make=make)
        first = self._partitions.first
        errand = Errand(range(first, first + self._partitions.count), pull=self.need)
        before = spans.mark("servers")
        self._client.run(errand, pull.pack, f"pulling rows of {', '.join(wanted)}")
        spans.mark(before)
        return pull.found()

    # -- ahead -------------------------------------------------------------------------------------------------------

    def ask_ahead(self, ids: Mapping[str, torch.Tensor], need: Need | None) -> None:
        """Have the rows of these ids when the next batch begins, which will want them by this need (of leases), or by
        that of the next step."""
        assert self._partitions is not None
        self.forget_ahead()
        if self._client.is_near:
            self._ahead = Along(ids, need or self.need, self._clock + 1)
            return
        if self._lookout is None:
            self._lookout = Lookout(self._client, self._specs, self._partitions, self._caches)
        self._ahead = Early(ids, need or self.need, self._clock + 1)
        self._lookout.ask(self._ahead)

    def forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.is_given_up = True
            self._ahead = None

    def with_ahead(self, pack: Callable[[ServerRequest], Parcel]) -> Callable[[ServerRequest], Parcel]:
        """The same parcels for an errand to all ranges, which also ask for rows of the next batch: for all of them, or
        for those that have changed since they were pulled."""
        ahead = self._ahead if isinstance(self._ahead, Along) else self._have_early()
        self._asked_again.reset()
        if isinstance(ahead, Along):
            assert self._partitions is not None
            missing = ahead.look_up(self._specs, self._caches)
            ahead.pull = RowPull(missing, self._specs, self._partitions, self._asked_again, make=False)
            return lambda request: ahead.pack(request, pack(request))
        if isinstance(ahead, Early):
            return lambda request: ahead.pack(request, pack(request), self._asked_again)
        return pack

    def came_ahead(self, need: Need | None = None) -> None:
        """The errand with those parcels is done: rows are as of this step; of leases they have seen no fewer than those
        that are known to be done."""
        ahead = self._ahead
        if isinstance(ahead, Along):
            ahead.arrived(need or Need(epoch=self.need.epoch, prefix=max(self.need.prefix, self.need.settled)))
        elif isinstance(ahead, Early):
            self.num_pulled += ahead.refresh(need or ahead.need)
            if ahead.is_given_up or not ahead.is_of(self._client.placement.version):
                self.forget_ahead()

    def _have_early(self) -> Early | None:
        """What was asked for in the background, if it came; what did not is dropped."""
        early = self._ahead
        if not isinstance(early, Early):
            return None
        assert self._lookout is not None
        if self._lookout.wait(early, self._client.check) and early.is_of(self._client.placement.version):
            return early
        self.forget_ahead()
        return None

    def take_ahead(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
        """The ids, each once, and the rows that were asked for ahead; None if they are not what is needed now."""
        ahead = self._ahead if isinstance(self._ahead, Along) and self._ahead.is_there else self._have_early()
        self._ahead = None
        if ahead is None or not ahead.suffices_for(self.need):
            return None
        for name, ids in ahead.ids.items():
            self.num_asked += len(ids)
            pulled = ahead.pulled.get(name)
            self.num_pulled += len(ids if pulled is None else pulled)
            if pulled is not None:
                self._caches[name].put(ids[pulled], ahead.rows[name][pulled], self._clock)
        return {name: (ids, ahead.rows[name]) for name, ids in ahead.ids.items()}

    def close(self) -> None:
        self.forget_ahead()
        if self._lookout is not None:
            self._lookout.close()
            self._lookout = None

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

    def pack(self, ranges: Sequence[int], packing: Packing) -> tuple[TableRows, ...]:
        found = []
        if self._partitions is None:
            return ()
        for name, ids, gradients, homes in self._kept:
            mine = mask_of(self._partitions, homes, ranges)
            part = ids if mine is None else ids[mine]
            if len(part):
                values = gradients if mine is None else gradients[mine]
                found.append(
                    TableRows(name, packing.add(self._pushed.put(part)), packing.add(self._pushed.put(values)))
                )
        return tuple(found)
