"""Parameters on servers, as one worker sees them: connected, loaded, gathered; what is lost is told.

Updates are made from here in two ways: in steps of all workers (`served_steps.py`), or each worker for itself, lease
by lease (`served_leases.py`).

Invariant: pulled values land beside the present ones, and are swapped in when all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.control.leases.lease_set import LeaseSet, lease_set
from paceline.control.messages import losses
from paceline.server.applied import AppliedLeases
from paceline.server.client import GroupClient
from paceline.server.dense import OptimizerSettings, settings_of
from paceline.server.errand import Errand
from paceline.server.layout import RangeLayout, lay_out
from paceline.server.messages import CommitStep, Load, Need, ServerRequest, Spans
from paceline.server.parcels import Detail, Packing, Parcel
from paceline.strategy.base import BindPoint, StrategyHost
from paceline.strategy.flats import Flats
from paceline.strategy.replicated import in_order
from paceline.strategy.served_rows import ServedRows
from paceline.strategy.served_state import ServedState
from paceline.strategy.sparse import Sparse
from paceline.watch import spans
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Endpoint

OTHERS_S = 2.0  # for the main worker to load what was lost


class ServedParameters:
    """`parameters` are the dense ones that are on servers; none in a hybrid, where only the rows of tables are."""

    def __init__(
        self,
        sparse: Sparse,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
        host: StrategyHost,
        *,
        has_dense: bool,
    ) -> None:
        self.sparse = sparse
        self.host = host
        self.has_dense = has_dense
        self._optimizers = optimizers
        self.layout: RangeLayout = lay_out(parameters if has_dense else {}, optimizers, has_tables=bool(sparse.specs))
        for section in self.layout.sections:  # refuses what cannot be cut, by name
            optimizer = optimizers[section.optimizer]
            settings_of(optimizer, optimizer.param_groups[section.group])
        self._client: GroupClient | None = None
        self._patience: dict[int, Deadline] = {}  # by the version in which something was lost
        self._forgone: tuple[int, set[int]] = (0, set())  # updates of which this worker has told, and of which founding
        self._applied = AppliedLeases()
        self._is_orphaned = False
        self._kept = ServedState(self.layout, sparse, optimizers)
        self.point = BindPoint()  # where this worker stands
        self.making: CommitStep | None = None  # the step that counts, and that servers may not have made yet
        self.num_leases = 0  # of an epoch, where leases are done

    def connect(self, endpoint: Endpoint) -> GroupClient:
        """Make the way to the servers: before the first group is attached."""
        self._client = client = GroupClient(endpoint, check=self.host.check_wait)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns that schedules come before steps
        client.on_empty = self._load_empty
        self.flats = Flats(self.layout, client)
        self.rows = ServedRows(self.layout, self.sparse, client)
        self.sparse.source = self.rows
        return client

    @property
    def client(self) -> GroupClient:
        if self._client is None:
            raise RuntimeError("this strategy keeps parameters on servers, and is not connected to any")
        return self._client

    @property
    def waited_s(self) -> float:
        """How long servers have been waited for."""
        return self._client.waited_s if self._client is not None else 0.0

    def stand_at(self, point: BindPoint) -> None:
        self.point = point
        self.move_on(point.step)

    def move_on(self, number: int) -> None:
        """The update of this number is known of."""
        self._kept.now = max(self._kept.now, number)

    # -- requests ----------------------------------------------------------------------------------------------------

    def run(self, what: str, pack: Callable[[ServerRequest], Parcel], **content: Any) -> Errand:
        """Have all ranges do something; returns when they have."""
        errand = Errand(range(self.layout.num_ranges), **content)
        before = spans.mark("servers")
        self.client.run(errand, pack, what)
        spans.mark(before)
        return errand

    def pull(self, need: Need, what: str, is_enough: Callable[[], bool] | None = None) -> bool:
        """Have the servers' values here; False if the caller gave way first."""
        errand = Errand(range(self.layout.num_ranges), pull=need, notes=True)
        before = spans.mark("servers")
        self.client.run(errand, self.pack_values, what, is_enough=is_enough)
        spans.mark(before)
        self.tell_forgone(errand.forgone)
        if not errand.is_done:
            return False
        self.swap(errand)
        self.rely_on(need)
        return True

    def rely_on(self, need: Need) -> None:
        """What is here suffices for this; rows are pulled by it too."""
        self.rows.need = need
        self._applied.rely_on(need)

    def swap(self, errand: Errand) -> None:
        self.flats.swap()
        self._applied.took(errand.records)

    def pack_values(self, request: ServerRequest) -> Parcel:
        wanted = Packing()
        return Parcel(Detail(wants=self.flats.next_values(request.ranges, wanted)), [], wanted.tensors)

    def section_settings(self) -> tuple[OptimizerSettings, ...]:
        return tuple(
            settings_of(self._optimizers[one.optimizer], self._optimizers[one.optimizer].param_groups[one.group])
            for one in self.layout.sections
        )

    # -- losses ------------------------------------------------------------------------------------------------------

    def _load_empty(self, empty: set[int]) -> None:
        """Ranges without a state: at the beginning, or lost since. The main worker loads them. It may be waiting for
        the others, who do it then: all have the same."""
        placement = self.client.placement
        lost = {number for number in empty if placement.ranges[number].origin > placement.began}
        mine = {number for number in empty if self.host.is_loader() or (number in lost and self._has_waited(number))}
        kept = self.host.recall(self.has_dense) if lost & mine else 0
        loads: dict[Load, set[int]] = {}
        for number in mine:
            done = self._applied_to(number, is_lost=number in lost)
            record = (done.epoch, done.prefix, tuple(sorted(done.beyond)))
            load = Load(placement.ranges[number].origin, number in lost, self.point.step, *record, self.num_leases)
            loads.setdefault(load, set()).add(number)
        if lost & mine:
            self._tell_loss(lost & mine, kept)
        for load, numbers in loads.items():
            self.client.run(Errand(numbers, push=load), self._kept.pack_load, f"loading {len(numbers)} ranges")

    def _has_waited(self, number: int) -> bool:
        origin = self.client.placement.ranges[number].origin
        patience = self._patience.setdefault(origin, Deadline(OTHERS_S, "the main worker to load what was lost"))
        return patience.expired()

    def _applied_to(self, number: int, *, is_lost: bool) -> LeaseSet:
        """What has been applied to a range as this worker loads it: values of parameters are those that it has, rows
        those of the checkpoint."""
        if is_lost and number < len(self.layout.spans):
            return self._applied.to(number)
        return self._kept.leases.get(number, LeaseSet())

    def _tell_loss(self, numbers: set[int], kept: int) -> None:
        """Of steps it is known here which are lost; of leases the servers say so when they count as done."""
        why = self._kept.describe_loss(numbers, self.point.step)
        updates = range(kept + 1, self.point.step + 1)
        if why and (updates or self.num_leases):
            self.host.tell(losses.KIND, losses.named(() if self.num_leases else updates, why))

    def tell_forgone(self, forgone: Mapping[int, Spans]) -> None:
        """Updates that count, and that ranges which were restored never got. Servers say so again and again; the main
        worker tells of each once, and whoever follows it begins anew."""
        if not forgone or not self.host.is_loader():
            return
        began = self.client.placement.began
        told = self._forgone[1] if self._forgone[0] == began else set()
        numbers = losses.numbers_of(span for spans in forgone.values() for span in spans) - told
        self._forgone = (began, told | numbers)
        if numbers:
            why = f"they were done, but {len(forgone)} ranges, which were lost and restored, never got them"
            self.host.tell(losses.KIND, losses.named(numbers, why))

    # -- state -------------------------------------------------------------------------------------------------------

    def begun_in(self, epoch: int) -> LeaseSet:
        """The leases of an epoch that a checkpoint had, where the run began with one."""
        begun = self._kept.begun()
        return begun if begun.epoch == epoch else LeaseSet(epoch)

    def begin_after(self, done: LeaseSet) -> None:
        """The run began with a checkpoint that had these steps, which count as leases."""
        for number in range(self.layout.num_ranges):
            self._kept.leases[number] = self._kept.leases.get(number, LeaseSet()).joined(done)

    def gift(self) -> dict[str, Any]:
        """All is on servers, but for what the run began with: whoever comes says the same of it."""
        leases = {
            str(number): (done.epoch, done.prefix, sorted(done.beyond)) for number, done in self._kept.leases.items()
        }
        return {"leases": leases} if leases else {}

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        spec = next(spec for spec in self.sparse.specs if spec.name == name)
        return in_order(self._gather()["tables"][name], spec)

    @property
    def gathered_step(self) -> int:
        """The newest step that servers had made in the last full state."""
        return self._kept.gathered_step

    def full_state(self) -> dict[str, Any]:
        state = self._gather()
        if not self.has_dense:
            del state["optimizers"], state["values"]
        return state

    def be_orphaned(self) -> int:
        """The coordinator is gone for good. From now on a full state is what the servers that are left have, with the
        step that this worker was about to make, whose number this is; 0 if there is none."""
        self._is_orphaned = True
        if self._client is not None:  # else this worker was being started, and holds nothing
            self._client.hang_up()
        return self.making.step if self.making is not None else 0

    def _gather(self) -> dict[str, Any]:
        making = self.making if self._is_orphaned else None
        state = self._kept.gather(self.client, self.point.step, orphaned=self._is_orphaned, commit=making)
        self.tell_forgone(self._kept.forgone)
        return state

    def load(self, part: Mapping[str, Any]) -> None:
        self._kept.tables = dict(part.get("tables", {}))
        self._kept.leases = {int(key): lease_set(*value) for key, value in part.get("leases", {}).items()}
        self._kept.counts = {int(key): dict(value) for key, value in part.get("counts", {}).items()}

    def close(self) -> None:
        self.sparse.source = None
        if self._client is not None:
            self.rows.close()
            self._client.close()
