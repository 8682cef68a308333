"""Servers that make an update from the gradients of all workers: `strategy="server"` in step, and `"hybrid"`.

    exchange  gradients and rows are *staged* on the servers, which keep them until they are told that the step counts
    decide    all workers know from the header that it does, and with which factor: that is the *commit*
    apply     tell the servers, and pull what came of it; whoever comes first makes it happen, for the others it is done

With `dense` being None the dense parameters are on servers too, else that strategy has them, and only the rows of
tables are on servers (hybrid).

Invariants
- A step is committed only after all workers have staged it, and everybody who lives and knows that it counts says so
  before it stages the next one. So a death in between loses nothing, and nothing is applied twice.
- Gradients stay where they are until their step is committed, or until servers were told that it never will be (the
  *fence*, when a group is attached): servers read them where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from paceline.collective import Group
from paceline.server.messages import CommitStep, Fence, Need, ServerRequest, StageStep
from paceline.server.parcels import Detail, Packing, Parcel, Slice, Squares, UpdateSettings
from paceline.strategy.base import BindPoint, Strategy, StrategyState
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.header import HeaderRows
from paceline.strategy.numerics import Examined
from paceline.strategy.served import ServedParameters
from paceline.strategy.sparse import RowGradients
from paceline.wire import decoding
from paceline.wire.deadline import Deadline

PLACEMENT_S = 60.0


class ServerSteps:
    def __init__(self, served: ServedParameters, dense: Strategy | None = None) -> None:
        self.served = served
        self._dense = dense
        self._group: Group | None = None
        self._rank = 0
        self._size = 1
        self._staged = 0  # the last step
        self._commit: CommitStep | None = None

    @property
    def state(self) -> StrategyState:
        return self.served

    # -- who takes part ----------------------------------------------------------------------------------------------

    def attach(self, group: Group | None, trained: Mapping[str, torch.Tensor], point: BindPoint) -> GradientStore:
        served = self.served
        self._group = group
        self._rank, self._size = (group.rank, group.size) if group is not None else (0, 1)
        if point.generation == served.point.generation:  # other parameters are trained from now on
            point = point._replace(step=max(point.step, served.point.step))
        served.stand_at(point)
        what = f"finding the servers (generation {point.generation})"
        served.client.wait_for_founding(point.founding, Deadline(PLACEMENT_S, what))
        if point.generation:
            self._fence(point)
        served.making = None
        served.rows.forget_ahead()
        served.rows.need = Need(step=point.step)
        if self._dense is not None:
            return self._dense.attach(group, trained, point)
        served.flats.take_over(trained)
        return served.flats

    def _fence(self, point: BindPoint) -> None:
        """Have the servers done with earlier generations. The last step that counts is made everywhere; the next one is
        either made nowhere, or, where a worker that is gone had begun to commit it, of that attempt everywhere."""
        generation = point.generation
        settling = decode(point.settling)
        if settling is not None:
            settling = msgspec.structs.replace(settling, by=generation)
        fence = Fence(generation, point.step + 1)
        errand = self.served.run(f"beginning generation {generation}", _pack_nothing, commit=settling, push=fence)
        if errand.counted is not None:
            counted = msgspec.structs.replace(errand.counted, by=generation)
            what = f"completing step {counted.step} of generation {counted.generation}"
            self.served.run(what, _pack_nothing, commit=counted)

    # -- a step ------------------------------------------------------------------------------------------------------

    def exchange(self, step: int, rows: RowGradients, examined: Examined) -> None:
        for _, gradients in rows.values():
            examined.look_finite(gradients.reshape(-1))
        if self._dense is not None:
            self._dense.exchange(step, {}, examined)
        if not examined.finite:
            return  # the header says so, and the step does not count
        served = self.served
        self._staged = step
        served.rows.keep(rows)
        push = StageStep(served.point.generation, step, self._rank)

        def pack(request: ServerRequest) -> Parcel:
            packing = Packing()
            dense = () if self._dense is not None else served.flats.gradients(request.ranges, packing)
            return Parcel(Detail(dense=dense, rows=served.rows.pack(request.ranges, packing)), packing.tensors)

        served.run(f"step {step}: handing in gradients", pack, push=push)

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
        served = self.served
        key = Squares(served.point.generation, self._staged, self._size)
        while True:
            asked: list[tuple[tuple[int, ...], torch.Tensor]] = []

            def pack(request: ServerRequest, asked: list[tuple[tuple[int, ...], torch.Tensor]] = asked) -> Parcel:
                out = torch.zeros(len(request.ranges), dtype=torch.float64)
                asked.append((request.ranges, out))
                return Parcel(Detail(squares=key), [], [out])

            served.run("adding up the norm of the gradients", pack, pull=Need(step=served.point.step))
            if sum(len(ranges) for ranges, _ in asked) == served.layout.num_ranges:
                return float(sum(out.sum() for _, out in sorted(asked, key=lambda one: one[0])))
            # Some were asked twice, because they moved meanwhile: what they said may be counted twice.

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        served = self.served
        unused: tuple[Slice, ...] = ()
        if self._dense is not None:
            self._dense.decide(step, factor, collector, used)
        else:
            unused = served.flats.unused(used)
        settings = UpdateSettings(served.section_settings(), served.sparse.settings(), unused)
        self._commit = CommitStep(served.point.generation, step, self._size, factor, settings)
        return encode(self._commit)

    def apply(self) -> None:
        served = self.served
        commit, self._commit = self._commit, None
        assert commit is not None
        served.making = commit
        if self._dense is not None:
            self._dense.apply()
        served.stand_at(served.point._replace(step=commit.step))
        served.rows.need = Need(step=commit.step)
        pack = served.rows.with_ahead(served.pack_values if self._dense is None else _pack_nothing)
        errand = served.run(f"step {commit.step}: the update", pack, commit=commit, pull=Need(step=commit.step))
        served.tell_forgone(errand.forgone)
        served.rows.came_ahead(Need(step=commit.step))
        if self._dense is None:
            served.flats.swap()
        served.making = None

    def close(self) -> None:
        if self._dense is not None:
            self._dense.close()
        self.served.close()


def _pack_nothing(_: ServerRequest) -> Parcel:
    return Parcel()


def encode(commit: CommitStep) -> str:
    """A commit as text, for the book of the training."""
    return msgspec.msgpack.encode(commit).hex()


def decode(text: str) -> CommitStep | None:
    return decoding.decode(bytes.fromhex(text), CommitStep) if text else None
