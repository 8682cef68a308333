"""Parameters on servers: every worker hands in its gradients, the servers add them up and make the update.

    hand_in   gradients and rows are *staged* on the servers, which keep them until they are told that the step counts
    decide    all workers know from the header that it does, and with which factor: that is the *commit*
    apply     tell the servers, and pull what came of it; whoever comes first makes it happen, for the others it is done

With `dense` being None the dense parameters are on servers too, else that aggregation has them, and only the rows of
tables are on servers (hybrid). `recall` brings back what the newest checkpoint has of tables, and of optimizers if it
is told so, after a loss, and gives the number of its last update; `is_loader` says whether this worker loads what is
empty.

Invariants
- A step is committed only after all workers have staged it, and everybody who lives and knows that it counts says so
  before it stages the next one. So a death in between loses nothing, and nothing is applied twice.
- Gradients stay where they are until their step is committed, or until servers were told that it never will be (the
  *fence*, when a group is bound): servers read them where they lie.
- Pulled values land beside the present ones, and are swapped in when all are there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from paceline.collective import Group
from paceline.control.leases.lease_set import LeaseSet, lease_set
from paceline.control.messages import losses
from paceline.server.applied import AppliedLeases
from paceline.server.client import GroupClient
from paceline.server.dense import OptimizerSettings, Value, settings_of
from paceline.server.errand import Errand
from paceline.server.layout import RangeLayout, lay_out
from paceline.server.messages import ApplyLease, CommitStep, Fence, Load, Need, ServerRequest, Spans, StageStep
from paceline.server.parcels import Detail, Packing, Parcel, Slice, Squares, UpdateSettings
from paceline.strategy.aggregation import Aggregation, BindPoint
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.flats import Flats
from paceline.strategy.header import HeaderRows
from paceline.strategy.numerics import Examined
from paceline.strategy.replicated import in_order
from paceline.strategy.served_rows import ServedRows
from paceline.strategy.served_state import ServedState
from paceline.strategy.sparse import RowGradients, Sparse
from paceline.watch import spans
from paceline.wire import decoding
from paceline.wire.deadline import Deadline

logger = logging.getLogger("paceline.strategy")

PLACEMENT_S = 60.0
OTHERS_S = 2.0  # for the main worker to load what was lost

Tell = Callable[[str, str], None]


class ServerAggregation:
    def __init__(
        self,
        sparse: Sparse,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
        tell: Tell,
        recall: Callable[[bool], int],
        is_loader: Callable[[], bool],
        dense: Aggregation | None = None,
    ) -> None:
        self._sparse = sparse
        self._optimizers = optimizers
        self._dense = dense
        self._tell = tell
        self._recall = recall
        self._is_loader = is_loader
        served = {} if dense is not None else dict(parameters)
        self.layout: RangeLayout = lay_out(served, optimizers, has_tables=bool(sparse.specs))
        for section in self.layout.sections:  # refuses what cannot be cut, by name
            optimizer = optimizers[section.optimizer]
            settings_of(optimizer, optimizer.param_groups[section.group])
        self._client: GroupClient | None = None
        self._group: Group | None = None
        self._rank = 0
        self._size = 1
        self._handed_in = 0  # the last step
        self._patience: dict[int, Deadline] = {}  # by the version in which something was lost
        self._standing = BindPoint()
        self._forgone: tuple[int, set[int]] = (0, set())  # updates of which this worker has told, and of which founding
        self._applied = AppliedLeases()
        self.num_leases = 0  # of an epoch, where leases are done
        self._commit: CommitStep | None = None
        self._making: CommitStep | None = None  # the step that counts, and that servers may not have made yet
        self._is_orphaned = False
        self._state = ServedState(self.layout, sparse, optimizers)

    def connect(self, client: GroupClient) -> None:
        """The way to the servers is there: before the first group is bound."""
        self._client = client
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns that schedules come before steps
        client.on_empty = self._load_empty
        self._flats = Flats(self.layout, client)
        self._rows = ServedRows(self.layout, self._sparse, client)
        self._sparse.source = self._rows

    @property
    def client(self) -> GroupClient:
        if self._client is None:
            raise RuntimeError("this strategy keeps parameters on servers, and is not connected to any")
        return self._client

    # -- who takes part ----------------------------------------------------------------------------------------------

    def lay_out(self, group: Group | None, trained: Mapping[str, torch.Tensor], standing: BindPoint) -> GradientStore:
        self._group = group
        self._rank, self._size = (group.rank, group.size) if group is not None else (0, 1)
        if standing.generation == self._standing.generation:  # other parameters are trained from now on
            standing = standing._replace(step=max(standing.step, self._standing.step))
        self._standing = standing
        self._state.now = max(self._state.now, standing.step)
        what = f"finding the servers (generation {standing.generation})"
        self.client.wait_for_founding(standing.founding, Deadline(PLACEMENT_S, what))
        if standing.generation:
            self._fence(standing)
        self._making = None
        self._rows.forget_ahead()
        self._rows.need = Need(step=standing.step)
        if self._dense is not None:
            return self._dense.lay_out(group, trained, standing)
        self._flats.take_over(trained)
        return self._flats

    def _fence(self, standing: BindPoint) -> None:
        """Have the servers done with earlier generations. The last step that counts is made everywhere; the next one is
        either made nowhere, or, where a worker that is gone had begun to commit it, of that attempt everywhere."""
        generation = standing.generation
        settling = decode(standing.settling)
        if settling is not None:
            settling = msgspec.structs.replace(settling, by=generation)
        everything = range(self.layout.num_ranges)
        errand = Errand(everything, commit=settling, push=Fence(generation, standing.step + 1))
        self.client.run(errand, _nothing_to_pack, f"beginning generation {generation}")
        if errand.counted is not None:
            counted = msgspec.structs.replace(errand.counted, by=generation)
            what = f"completing step {counted.step} of generation {counted.generation}"
            self.client.run(Errand(everything, commit=counted), _nothing_to_pack, what)

    def _load_empty(self, empty: set[int]) -> None:
        """Ranges without a state: at the beginning, or lost since. The main worker loads them. It may be waiting for
        the others, who do it then: all have the same."""
        placement = self.client.placement
        lost = {number for number in empty if placement.ranges[number].origin > placement.began}
        mine = {number for number in empty if self._is_loader() or (number in lost and self._has_waited(number))}
        kept = self._recall(self._dense is None) if lost & mine else 0
        loads: dict[Load, set[int]] = {}
        for number in mine:
            done = self._applied_to(number, is_lost=number in lost)
            record = (done.epoch, done.prefix, tuple(sorted(done.beyond)))
            load = Load(placement.ranges[number].origin, number in lost, self._standing.step, *record, self.num_leases)
            loads.setdefault(load, set()).add(number)
        if lost & mine:
            self._tell_loss(lost & mine, kept)
        for load, numbers in loads.items():
            self.client.run(Errand(numbers, push=load), self._state.pack_load, f"loading {len(numbers)} ranges")

    def _has_waited(self, number: int) -> bool:
        origin = self.client.placement.ranges[number].origin
        patience = self._patience.setdefault(origin, Deadline(OTHERS_S, "the main worker to load what was lost"))
        return patience.expired()

    def _applied_to(self, number: int, *, is_lost: bool) -> LeaseSet:
        """What has been applied to a range as this worker loads it: values of parameters are those that it has, rows
        those of the checkpoint."""
        if is_lost and number < len(self.layout.spans):
            return self._applied.to(number)
        return self._state.leases.get(number, LeaseSet())

    def _tell_loss(self, numbers: set[int], kept: int) -> None:
        """Of steps it is known here which are lost; of leases the servers say so when they count as done."""
        why = self._state.describe_loss(numbers, self._standing.step)
        updates = range(kept + 1, self._standing.step + 1)
        if why and (updates or self.num_leases):
            self._tell(losses.KIND, losses.named(() if self.num_leases else updates, why))

    def _tell_forgone(self, forgone: Mapping[int, Spans]) -> None:
        """Updates that count, and that ranges which were restored never got. Servers say so again and again; the main
        worker tells of each once, and whoever follows it begins anew."""
        if not forgone or not self._is_loader():
            return
        began = self.client.placement.began
        told = self._forgone[1] if self._forgone[0] == began else set()
        numbers = losses.numbers_of(span for spans in forgone.values() for span in spans) - told
        self._forgone = (began, told | numbers)
        if numbers:
            why = f"they were done, but {len(forgone)} ranges, which were lost and restored, never got them"
            self._tell(losses.KIND, losses.named(numbers, why))

    # -- a step ------------------------------------------------------------------------------------------------------

    def hand_in(self, step: int, rows: RowGradients, examined: Examined) -> None:
        for _, gradients in rows.values():
            examined.look_finite(gradients.reshape(-1))
        if self._dense is not None:
            self._dense.hand_in(step, {}, examined)
        if not examined.finite:
            return  # the header says so, and the step does not count
        self._handed_in = step
        self._rows.keep(rows)
        push = StageStep(self._standing.generation, step, self._rank)

        def pack(request: ServerRequest) -> Parcel:
            packing = Packing()
            dense = () if self._dense is not None else self._flats.gradients(request.ranges, packing)
            return Parcel(Detail(dense=dense, rows=self._rows.pack(request.ranges, packing)), packing.tensors)

        self._run(f"step {step}: handing in gradients", pack, push=push)

    def squares(self, rows: HeaderRows) -> float:
        """The main worker asks the servers and tells the others: when it knows, one of them may commit the step, and
        what was staged is gone."""
        total = self._dense.squares(rows) if self._dense is not None else 0.0
        served = torch.zeros(1, dtype=torch.float64)
        if self._rank == 0:
            served += self._ask_for_squares()
        if self._group is not None:
            self._group.all_reduce(served)
        return total + float(served)

    def _ask_for_squares(self) -> float:
        key = Squares(self._standing.generation, self._handed_in, self._size)
        while True:
            asked: list[tuple[tuple[int, ...], torch.Tensor]] = []

            def pack(request: ServerRequest, asked: list[tuple[tuple[int, ...], torch.Tensor]] = asked) -> Parcel:
                out = torch.zeros(len(request.ranges), dtype=torch.float64)
                asked.append((request.ranges, out))
                return Parcel(Detail(squares=key), [], [out])

            self._run("adding up the norm of the gradients", pack, pull=Need(step=self._standing.step))
            if sum(len(ranges) for ranges, _ in asked) == self.layout.num_ranges:
                return float(sum(out.sum() for _, out in sorted(asked, key=lambda one: one[0])))
            # Some were asked twice, because they moved meanwhile: what they said may be counted twice.

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        unused: tuple[Slice, ...] = ()
        if self._dense is not None:
            self._dense.decide(step, factor, collector, used)
        else:
            unused = self._flats.unused(used)
        settings = UpdateSettings(self._section_settings(), self._sparse.settings(), unused)
        self._commit = CommitStep(
            self._standing.generation, step, self._size, factor, msgspec.Raw(msgspec.msgpack.encode(settings))
        )
        return encode(self._commit)

    def _section_settings(self) -> tuple[OptimizerSettings, ...]:
        return tuple(
            settings_of(self._optimizers[one.optimizer], self._optimizers[one.optimizer].param_groups[one.group])
            for one in self.layout.sections
        )

    def apply(self) -> None:
        commit, self._commit = self._commit, None
        assert commit is not None
        self._making = commit
        if self._dense is not None:
            self._dense.apply()
        self._standing = self._standing._replace(step=commit.step)
        self._state.now = commit.step
        self._rows.need = Need(step=commit.step)

        pack = self._rows.with_ahead(self._pack_values if self._dense is None else _nothing_to_pack)
        errand = self._run(f"step {commit.step}: the update", pack, commit=commit, pull=Need(step=commit.step))
        self._tell_forgone(errand.forgone)
        self._rows.came_ahead(Need(step=commit.step))
        if self._dense is None:
            self._flats.swap()
        self._making = None

    def _run(self, what: str, pack: Callable[[ServerRequest], Parcel], **content: Any) -> Errand:
        errand = Errand(range(self.layout.num_ranges), **content)
        before = spans.mark("servers")
        self.client.run(errand, pack, what)
        spans.mark(before)
        return errand

    # -- leases ------------------------------------------------------------------------------------------------------

    def begun_in(self, epoch: int) -> LeaseSet:
        """The leases of an epoch that a checkpoint had, where the run began with one."""
        begun = self._state.begun()
        return begun if begun.epoch == epoch else LeaseSet(epoch)

    def begin_after(self, done: LeaseSet) -> None:
        """The run began with a checkpoint that had these steps, which count as leases."""
        for number in range(self.layout.num_ranges):
            self._state.leases[number] = self._state.leases.get(number, LeaseSet()).joined(done)

    def pull(self, need: Need, gives_way: Callable[[], bool] | None = None) -> bool:
        """Have the servers' values here; False if the caller gave way first."""
        errand = Errand(range(self.layout.num_ranges), pull=need, notes=True)
        before = spans.mark("servers")
        self.client.run(errand, self._pack_values, f"pulling parameters for {_described(need)}", is_enough=gives_way)
        spans.mark(before)
        self._tell_forgone(errand.forgone)
        if not errand.is_done:
            return False
        self._swap(errand)
        self.rely_on(need)
        return True

    def rely_on(self, need: Need) -> None:
        """What is here suffices for this; rows are pulled by it too."""
        self._rows.need = need
        self._applied.rely_on(need)

    def push(self, push: ApplyLease, rows: RowGradients, used: Sequence[bool], lr_factor: float = 1.0) -> None:
        """Have a lease applied, with learning rates times `lr_factor`, and the values after it here."""
        self._rows.keep({} if push.is_void else rows)
        self._state.now = max(self._state.now, push.number)
        sections, tables = self._section_settings(), self._sparse.settings()
        if lr_factor != 1.0:
            sections = tuple(msgspec.structs.replace(one, values=_slowed(one.values, lr_factor)) for one in sections)
            tables = tuple(msgspec.structs.replace(one, values=_slowed(one.values, lr_factor)) for one in tables)
        settings = UpdateSettings(sections, tables, self._flats.unused(used))
        push = msgspec.structs.replace(push, settings=msgspec.Raw(msgspec.msgpack.encode(settings)))

        def pack(request: ServerRequest) -> Parcel:
            packing, wanted = Packing(), Packing()
            dense = () if request.push is None else self._flats.gradients(request.ranges, packing)
            detail = Detail(
                dense=dense,
                rows=() if request.push is None else self._rows.pack(request.ranges, packing),
                wants=self._flats.next_values(request.ranges, wanted),
            )
            return Parcel(detail, packing.tensors, wanted.tensors)

        what = f"epoch {push.epoch}, lease {push.lease}: pushing gradients"
        errand = Errand(range(self.layout.num_ranges), push=push, pull=Need(), notes=True)
        before = spans.mark("servers")
        self.client.run(errand, self._rows.with_ahead(pack), what)
        spans.mark(before)
        self._tell_forgone(errand.forgone)
        self._rows.came_ahead()
        self._swap(errand)

    def _swap(self, errand: Errand) -> None:
        self._flats.swap()
        self._applied.took(errand.records)

    def _pack_values(self, request: ServerRequest) -> Parcel:
        wanted = Packing()
        return Parcel(Detail(wants=self._flats.next_values(request.ranges, wanted)), [], wanted.tensors)

    # -- state -------------------------------------------------------------------------------------------------------

    def gift(self) -> dict[str, Any]:
        """All is on servers, but for what the run began with: whoever comes says the same of it."""
        leases = {
            str(number): (done.epoch, done.prefix, sorted(done.beyond)) for number, done in self._state.leases.items()
        }
        return {"leases": leases} if leases else {}

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        spec = next(spec for spec in self._sparse.specs if spec.name == name)
        return in_order(self._gather()["tables"][name], spec)

    @property
    def gathered_step(self) -> int:
        """The newest step that servers had made in the last full state."""
        return self._state.gathered_step

    def full_state(self) -> dict[str, Any]:
        state = self._gather()
        if self._dense is not None:
            del state["optimizers"], state["values"]
        return state

    def be_orphaned(self) -> int:
        """The coordinator is gone for good. From now on a full state is what the servers that are left have, with the
        step that this worker was about to make, whose number this is; 0 if there is none."""
        self._is_orphaned = True
        if self._client is not None:  # else this worker was being started, and holds nothing
            self._client.hang_up()
        return self._making.step if self._making is not None else 0

    def _gather(self) -> dict[str, Any]:
        making = self._making if self._is_orphaned else None
        state = self._state.gather(self.client, self._standing.step, orphaned=self._is_orphaned, commit=making)
        self._tell_forgone(self._state.forgone)
        return state

    def load(self, part: Mapping[str, Any]) -> None:
        self._state.tables = dict(part.get("tables", {}))
        self._state.leases = {int(key): lease_set(*value) for key, value in part.get("leases", {}).items()}
        self._state.counts = {int(key): dict(value) for key, value in part.get("counts", {}).items()}

    def close(self) -> None:
        if self._dense is not None:
            self._dense.close()
        if self._client is not None:
            self._rows.close()
        self._sparse.source = None


def _slowed(values: dict[str, Value], factor: float) -> dict[str, Value]:
    rate = values.get("lr")
    return {**values, "lr": rate * factor} if isinstance(rate, float | int) else values


def _nothing_to_pack(_: ServerRequest) -> Parcel:
    return Parcel()


def _described(need: Need) -> str:
    return f"epoch {need.epoch}" + (f" with all leases below {need.prefix}" if need.prefix else "")


def encode(commit: CommitStep) -> str:
    """A commit as text, for the book of the training."""
    return msgspec.msgpack.encode(commit).hex()


def decode(text: str) -> CommitStep | None:
    return decoding.decode(bytes.fromhex(text), CommitStep) if text else None
