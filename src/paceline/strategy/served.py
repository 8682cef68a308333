"""Parameters on servers: every worker hands in its gradients, the servers add them up and make the update.

    hand_in   gradients and rows are *staged* on the servers, which keep them until they are told that the step counts
    decide    all workers know from the header that it does, and with which factor: that is the *commit*
    apply     tell the servers, and pull what came of it; whoever comes first makes it happen, for the others it is done

With `dense` being None the dense parameters are on servers too, else that aggregation has them, and only the rows of
tables are on servers (hybrid). `recall` brings back what the newest checkpoint has of tables, and of optimizers if it
is told so, after a loss.

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
from paceline.placement.placement import Placement
from paceline.server.client import GroupClient
from paceline.server.dense import settings_of
from paceline.server.errand import Errand
from paceline.server.layout import Layout, lay_out
from paceline.server.messages import Commit, Fence, Load, Need, Request, Stage
from paceline.server.parcels import Detail, Packing, Parcel, Slice, Squares, UpdateSettings
from paceline.strategy.aggregation import Aggregation, Standing
from paceline.strategy.collector import Collector, Store
from paceline.strategy.flats import Flats
from paceline.strategy.header import Rows
from paceline.strategy.numerics import Examined
from paceline.strategy.served_rows import ServedRows
from paceline.strategy.served_state import ServedState
from paceline.strategy.sparse import RowGradients, Sparse
from paceline.wire import decoding
from paceline.wire.deadline import Deadline

logger = logging.getLogger("paceline.strategy")

PLACEMENT_S = 60.0
OTHERS_S = 2.0  # for the main worker to load what was lost

Tell = Callable[[str, str], None]


class Served:
    def __init__(
        self,
        sparse: Sparse,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
        tell: Tell,
        recall: Callable[[bool], None],
        dense: Aggregation | None = None,
    ) -> None:
        self._sparse = sparse
        self._optimizers = optimizers
        self._dense = dense
        self._tell = tell
        self._recall = recall
        served = {} if dense is not None else dict(parameters)
        self.layout: Layout = lay_out(served, optimizers, has_tables=bool(sparse.specs))
        for section in self.layout.sections:  # refuses what cannot be cut, by name
            optimizer = optimizers[section.optimizer]
            settings_of(optimizer, optimizer.param_groups[section.group])
        self._client: GroupClient | None = None
        self._group: Group | None = None
        self._rank = 0
        self._size = 1
        self._handed_in = 0  # the last step
        self._patience: dict[int, Deadline] = {}  # by the version in which something was lost
        self._standing = Standing()
        self._commit: Commit | None = None

    def connect(self, client: GroupClient) -> None:
        """The way to the servers is there: before the first group is bound."""
        self._client = client
        client.on_empty = self._load_empty
        self._flats = Flats(self.layout, client)
        self._rows = ServedRows(self.layout, self._sparse, client)
        self._state = ServedState(self.layout, self._sparse, self._optimizers, client)
        self._sparse.source = self._rows

    @property
    def client(self) -> GroupClient:
        if self._client is None:
            raise RuntimeError("this strategy keeps parameters on servers, and is not connected to any")
        return self._client

    # -- who takes part ----------------------------------------------------------------------------------------------

    def lay_out(self, group: Group | None, trained: Mapping[str, torch.Tensor], standing: Standing) -> Store:
        self._group = group
        self._rank, self._size = (group.rank, group.size) if group is not None else (0, 1)
        if standing.generation == self._standing.generation:  # other parameters are trained from now on
            standing = standing._replace(step=max(standing.step, self._standing.step))
        self._standing = standing
        what = f"finding the servers (generation {standing.generation})"
        self.client.wait_for_founding(standing.founding, Deadline(PLACEMENT_S, what))
        if standing.generation:
            settling = decode(standing.settling)
            self._run(
                f"beginning generation {standing.generation}",
                lambda _: Parcel(),
                commit=settling,
                push=Fence(standing.generation),
            )
        self._rows.need = Need(step=standing.step)
        if self._dense is not None:
            return self._dense.lay_out(group, trained, standing)
        self._flats.take_over(trained)
        return self._flats

    def _load_empty(self, empty: set[int]) -> None:
        """Ranges without a state: at the beginning, or lost since. The main worker loads them. It may be waiting for
        the others, who do it then: all have the same."""
        placement = self.client.placement
        by_origin: dict[int, set[int]] = {}
        for number in empty:
            by_origin.setdefault(placement.ranges[number].origin, set()).add(number)
        for origin, numbers in by_origin.items():
            is_lost = origin > placement.began
            patience = self._patience.setdefault(origin, Deadline(OTHERS_S, "the main worker to load what was lost"))
            if self._rank == 0 or (is_lost and patience.expired()):
                self._load(numbers, origin, is_lost=is_lost)

    def _load(self, numbers: set[int], origin: int, *, is_lost: bool) -> None:
        push = Load(origin, is_lost, step=self._standing.step)
        errand = Errand(numbers, push=push)
        if is_lost:
            self._recall(self._dense is None)
            text = self._state.describe_loss(numbers, self._standing.step)
            self._tell("lost updates", text)
        self.client.run(errand, self._state.pack_load, f"loading {len(numbers)} ranges")

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
        push = Stage(self._standing.generation, step, self._rank)

        def pack(request: Request) -> Parcel:
            packing = Packing()
            dense = () if self._dense is not None else self._flats.gradients(request.ranges, packing)
            return Parcel(Detail(dense=dense, rows=self._rows.pack(request.ranges, packing)), packing.tensors)

        self._run(f"step {step}: handing in gradients", pack, push=push)

    def squares(self, rows: Rows) -> float:
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

            def pack(request: Request, asked: list[tuple[tuple[int, ...], torch.Tensor]] = asked) -> Parcel:
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
        self._commit = Commit(
            self._standing.generation, step, self._size, factor, msgspec.Raw(msgspec.msgpack.encode(settings))
        )
        return encode(self._commit)

    def _section_settings(self) -> tuple[Any, ...]:
        return tuple(
            settings_of(self._optimizers[one.optimizer], self._optimizers[one.optimizer].param_groups[one.group])
            for one in self.layout.sections
        )

    def apply(self) -> None:
        commit, self._commit = self._commit, None
        assert commit is not None
        if self._dense is not None:
            self._dense.apply()
        self._standing = self._standing._replace(step=commit.step)
        self._rows.need = Need(step=commit.step)

        def pack(request: Request) -> Parcel:
            wanted = Packing()
            wants = () if self._dense is not None else self._flats.next_values(request.ranges, wanted)
            return Parcel(Detail(wants=wants), [], wanted.tensors)

        self._run(f"step {commit.step}: the update", pack, commit=commit, pull=Need(step=commit.step))
        if self._dense is None:
            self._flats.swap()

    def _run(self, what: str, pack: Callable[[Request], Parcel], **content: Any) -> None:
        self.client.run(Errand(range(self.layout.num_ranges), **content), pack, what)

    # -- state -------------------------------------------------------------------------------------------------------

    def gift(self) -> dict[str, Any]:
        return {}  # it is on servers

    def full_state(self) -> dict[str, Any]:
        state = self._state.gather(self._standing.step)
        if self._dense is not None:
            del state["optimizers"]
        return state

    def load_tables(self, tables: Mapping[str, Any]) -> None:
        self._state.tables = dict(tables)

    def placement(self) -> Placement:
        return self.client.placement

    def close(self) -> None:
        if self._dense is not None:
            self._dense.close()
        self._sparse.source = None


def encode(commit: Commit) -> str:
    """A commit as text, for the book of the training."""
    return msgspec.msgpack.encode(commit).hex()


def decode(text: str) -> Commit | None:
    return decoding.decode(bytes.fromhex(text), Commit) if text else None
