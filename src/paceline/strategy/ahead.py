"""The rows of the next batch, had while this one is computed, or with the answer to its update.

Where servers are far (on other hosts), a round trip and the bulk of the rows are worth hiding behind the computing:

    ask       on the training thread, when the rows of this batch are there; the rest happens on a thread of its own,
              over connections of its own
    refresh   rides on the request that makes the update (or pushes the lease): each server is told which rows were
              asked of it and how far its tables were then (`PulledPart.stamps`), and answers with those that changed
    since take      when the next batch begins: its rows, without another word to the servers

Where they are near, they compete with the workers for the same cores: nothing is hidden, and looking twice costs more
than it saves. There all rows of the next batch are asked for with the update (`Along`); that saves the round trip.

Contract
- Rows are given only if they are what a pull at that moment would have to see: in step, those of exactly that step,
  with the same bits; with leases, those that see all leases which the bound asks for.
- No row is made for a batch that may never come: what has none is read as it would begin.
- One try: what is refused, lost or late is dropped, and pulled when it is needed. So is everything that was asked for
  in the background when the placement changes (stamps are those of one server, in one tenure), and anything when a
  group is bound, or another batch comes.
- The training thread waits for a request under way for `PATIENCE_S` at most, and looks whether that is worth it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

import msgspec
import torch

from paceline.errors import PacelineError
from paceline.server.client import GroupClient
from paceline.server.errand import Errand
from paceline.server.messages import Need, ServerRequest
from paceline.server.parcels import Packing, Parcel, Partitions, Refresh, TableRows
from paceline.server.scratch import Scratch
from paceline.server.spec import TableSpec
from paceline.strategy.row_cache import RowCache
from paceline.strategy.row_pull import PulledPart, RowPull

logger = logging.getLogger("paceline.strategy")

TRY_S = 10.0
PATIENCE_S = 2.0
_SLICE_S = 0.05
_CLOSE_S = 2.0

Ids = Mapping[str, torch.Tensor]


class GivenUp(PacelineError):
    """Nobody wants these rows any more."""


class Ahead:
    """The rows of one batch. `raw` are its ids as they came, by table; `now` is when they will be used; `need` what
    they are known to have seen, when they are there."""

    def __init__(self, raw: Ids, need: Need, now: int) -> None:
        self.raw = raw
        self.need = need
        self.now = now
        self.is_given_up = False
        self.ids: dict[str, torch.Tensor] = {}  # each once, in order
        self.rows: dict[str, torch.Tensor] = {}
        self.pulled: dict[str, torch.Tensor] = {}  # the positions of those that no cache had, where there is one

    def look_up(self, specs: Mapping[str, TableSpec], caches: Mapping[str, RowCache]) -> dict[str, torch.Tensor]:
        """The ids, each once, that have to be pulled."""
        missing: dict[str, torch.Tensor] = {}
        for name, ids in self.raw.items():
            unique = self.ids[name] = missing[name] = torch.unique(ids.reshape(-1).to(torch.int64))
            if name in caches:
                self.rows[name] = torch.empty((len(unique), specs[name].dim), dtype=specs[name].torch_dtype)
                self.pulled[name] = caches[name].take(unique, self.now, self.rows[name])
                missing[name] = unique[self.pulled[name]]
        return missing

    def fill(self, found: Mapping[str, torch.Tensor]) -> None:
        for name, rows in found.items():
            if name in self.pulled:
                self.rows[name].index_copy_(0, self.pulled[name], rows)
            else:
                self.rows[name] = rows

    def suffices_for(self, need: Need) -> bool:
        mine = self.need
        return (mine.step, mine.epoch) == (need.step, need.epoch) and mine.prefix >= need.prefix


class Along(Ahead):
    """Those that come with the answer to the update."""

    def __init__(self, raw: Ids, need: Need, now: int) -> None:
        super().__init__(raw, need, now)
        self.pull: RowPull | None = None
        self.is_there = False

    def pack(self, request: ServerRequest, parcel: Parcel) -> Parcel:
        """The parcel, which also asks for the rows."""
        assert self.pull is not None
        asked = self.pull.pack(request)
        wants = tuple(
            TableRows(one.table, one.ids + len(parcel.tensors), one.rows + len(parcel.wanted))
            for one in asked.detail.row_wants
        )
        detail = msgspec.structs.replace(parcel.detail, row_wants=wants, makes_rows=asked.detail.makes_rows)
        return Parcel(detail, [*parcel.tensors, *asked.tensors], [*parcel.wanted, *asked.wanted])

    def arrived(self, need: Need) -> None:
        assert self.pull is not None
        self.fill(self.pull.found())
        self.is_there, self.need = True, need


class Early(Ahead):
    """Those that are pulled in the background."""

    def __init__(self, raw: Ids, need: Need, now: int) -> None:
        super().__init__(raw, need, now)
        self.done = threading.Event()
        self.parts: list[PulledPart] = []
        self._answers: list[tuple[PulledPart, Parcel]] = []

    def is_of(self, version: int) -> bool:
        """Whether all of it was asked for by this placement."""
        return all(part.version == version for part in self.parts)

    def pack(self, request: ServerRequest, parcel: Parcel, scratch: Scratch) -> Parcel:
        """The parcel, which also asks this server for what has changed of the rows that it gave."""
        part = self._part_for(request)
        if part is None or part.stamps is None:
            return parcel
        packing = Packing()
        packing.tensors = list(parcel.tensors)
        refreshes = tuple(
            Refresh(one.table, packing.add(scratch.put(one.ids)), since)
            for one, since in zip(part.asked, part.stamps.tolist(), strict=True)
        )
        detail = msgspec.structs.replace(parcel.detail, refreshes=refreshes)
        packed = Parcel(detail, packing.tensors, parcel.wanted)
        self._answers.append((part, packed))
        return packed

    def _part_for(self, request: ServerRequest) -> PulledPart | None:
        """The same server, by the same placement, for all that it was asked for."""
        for part in self.parts:
            if part.version == request.version and part.ranges <= set(request.ranges):
                return part
        return None

    def refresh(self, need: Need) -> int:
        """Take in what the servers said; how many rows that were."""
        left = {(id(part), one.table) for part in self.parts for one in part.asked}
        count = 0
        for part, parcel in self._answers:
            if parcel.answer is None:
                continue
            asked = {one.table: one for one in part.asked}
            for rows in parcel.answer.detail.rows:
                changed, values = parcel.answer.tensors[rows.ids], parcel.answer.tensors[rows.rows]
                at = asked[rows.table].at
                places = changed if at is None else at[changed]
                if rows.table in self.pulled:
                    places = self.pulled[rows.table][places]
                self.rows[rows.table].index_copy_(0, places, values)
                left.discard((id(part), rows.table))
                count += len(places)
        self._answers = []
        if left:
            self.is_given_up = True
        self.need = need
        return count


class Lookout:
    """The thread that asks. One batch at a time."""

    def __init__(
        self,
        client: GroupClient,
        specs: Mapping[str, TableSpec],
        partitions: Partitions,
        caches: Mapping[str, RowCache],
    ) -> None:
        self._client = client.twin(self._check)
        self._specs = specs
        self._partitions = partitions
        self._caches = caches
        self._scratch = Scratch(self._client)
        self._jobs: queue.SimpleQueue[Early | None] = queue.SimpleQueue()
        self._present: Early | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rows", daemon=True)
        self._thread.start()

    def ask(self, early: Early) -> None:
        self._jobs.put(early)

    def wait(self, early: Early, look: Callable[[], object]) -> bool:
        """Until it is there, or given up; `look` may raise."""
        waited_s = 0.0
        while not early.done.wait(_SLICE_S):
            look()
            waited_s += _SLICE_S
            if waited_s >= PATIENCE_S:
                early.is_given_up = True
                return False
        return not early.is_given_up

    def _check(self) -> None:
        if self._present is None or self._present.is_given_up:
            raise GivenUp("the next batch is another one")

    def _run(self) -> None:
        while (early := self._jobs.get()) is not None:
            self._present = early
            try:
                if not early.is_given_up:
                    self._pull(early)
            except Exception as error:  # whatever it is: who needs the rows asks for them again, and is told
                early.is_given_up = True
                level = logging.DEBUG if isinstance(error, PacelineError | TimeoutError) else logging.WARNING
                logger.log(level, "the rows of the next batch were not pulled ahead: %r", error)
            finally:
                early.done.set()

    def _pull(self, early: Early) -> None:
        missing = early.look_up(self._specs, self._caches)
        self._scratch.reset()
        pull = RowPull(missing, self._specs, self._partitions, self._scratch, make=False, stamped=True)
        first = self._partitions.first
        errand = Errand(range(first, first + self._partitions.count), pull=early.need)
        self._client.run(errand, pull.pack, "pulling rows ahead", TRY_S, is_enough=lambda: True)
        early.parts = [part for part in pull.parts if part.asked]
        stamps = [int(stamp) for part in early.parts if part.stamps is not None for stamp in part.stamps]
        if not errand.is_done or min(stamps, default=0) < 0:
            early.is_given_up = True
            return
        early.fill(pull.found())

    def close(self) -> None:
        if (present := self._present) is not None:
            present.is_given_up = True
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # else it may be writing to the memory that would be gone
            self._client.close()
