"""Servers that make an update from the gradients of one worker, lease by lease: consistency "async" and "bounded:K".

    begin(lease)   which lease the next gradients are of
    decide         the gradients are good, and are multiplied by this
    apply          push them, and have the values after that update here

No group is attached: nobody is met. One lease is one update, and counts once on every range, whoever pushes it and
however often. `void` pushes one whose gradients are not finite: it counts, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from paceline.collective import Group
from paceline.server.dense import Value
from paceline.server.messages import ApplyLease, Need, ServerRequest
from paceline.server.parcels import Detail, Packing, Parcel, UpdateSettings
from paceline.strategy.base import BindPoint, StrategyState
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.header import HeaderRows
from paceline.strategy.numerics import Examined
from paceline.strategy.served import ServedParameters
from paceline.strategy.served_steps import PLACEMENT_S
from paceline.strategy.sparse import RowGradients
from paceline.wire.deadline import Deadline


class ServerLeases:
    """Learning rates are multiplied with `lr_factor`."""

    def __init__(self, served: ServedParameters) -> None:
        self.served = served
        self.lr_factor = 1.0
        self._lease = ApplyLease(0, 0, 0)
        self._computed: RowGradients = {}
        self._used: Sequence[bool] = ()

    @property
    def state(self) -> StrategyState:
        return self.served

    def attach(self, group: Group | None, trained: Mapping[str, torch.Tensor], point: BindPoint) -> GradientStore:
        assert group is None
        served = self.served
        served.stand_at(point)
        served.client.wait_for_founding(point.founding, Deadline(PLACEMENT_S, "finding the servers"))
        served.rows.forget_ahead()
        served.rows.need = Need()
        served.flats.take_over(trained)
        return served.flats

    def begin(self, epoch: int, lease: int, number: int) -> None:
        self._lease = ApplyLease(epoch, lease, number)

    def pull(self, need: Need, gives_way: Callable[[], bool] | None = None) -> bool:
        """Have the servers' values here; False if the caller gave way first."""
        leases = f" with all leases below {need.prefix}" if need.prefix else ""
        return self.served.pull(need, f"pulling parameters for epoch {need.epoch}{leases}", gives_way)

    def exchange(self, step: int, rows: RowGradients, examined: Examined) -> None:
        for _, gradients in rows.values():
            examined.look(gradients.reshape(-1))
        self._computed = rows

    def squares(self, rows: HeaderRows) -> float:
        return rows.total("squares")

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        self._lease = msgspec.structs.replace(self._lease, scale=factor)
        self._used = used
        return ""

    def apply(self) -> None:
        self._push(self._lease, self._computed)

    def void(self) -> None:
        self._used = ()
        self._push(msgspec.structs.replace(self._lease, is_void=True), {})

    def _push(self, push: ApplyLease, rows: RowGradients) -> None:
        served = self.served
        served.rows.keep(rows)
        served.move_on(push.number)
        sections, tables = served.section_settings(), served.sparse.settings()
        if self.lr_factor != 1.0:
            sections = tuple(msgspec.structs.replace(one, values=self._slowed(one.values)) for one in sections)
            tables = tuple(msgspec.structs.replace(one, values=self._slowed(one.values)) for one in tables)
        unused = served.flats.unused(self._used) if not push.is_void else ()
        settings = UpdateSettings(sections, tables, unused)
        push = msgspec.structs.replace(push, settings=settings)

        def pack(request: ServerRequest) -> Parcel:
            packing, wanted = Packing(), Packing()
            is_pushed = request.push is not None
            detail = Detail(
                dense=served.flats.gradients(request.ranges, packing) if is_pushed else (),
                rows=served.rows.pack(request.ranges, packing) if is_pushed else (),
                wants=served.flats.next_values(request.ranges, wanted),
            )
            return Parcel(detail, packing.tensors, wanted.tensors)

        what = f"epoch {push.epoch}, lease {push.lease}: pushing gradients"
        errand = served.run(what, served.rows.with_ahead(pack), push=push, pull=Need(), notes=True)
        served.tell_forgone(errand.forgone)
        served.rows.came_ahead()
        served.swap(errand)

    def _slowed(self, values: dict[str, Value]) -> dict[str, Value]:
        rate = values.get("lr")
        return {**values, "lr": rate * self.lr_factor} if isinstance(rate, float | int) else values

    def close(self) -> None:
        self.served.close()
