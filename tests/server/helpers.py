"""A group of servers in threads of this process, whose placements a test makes by hand."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.placement import evolving
from paceline.placement.evolving import Heard
from paceline.placement.placement import Placement, Replicas
from paceline.placement.placing import Site, place
from paceline.server.client import GroupClient
from paceline.server.dense import OptimizerSettings
from paceline.server.errand import Errand
from paceline.server.messages import CommitStep, Load, Need, ServerRequest, StageStep
from paceline.server.parcels import (
    Detail,
    Making,
    Packing,
    Parcel,
    Partitions,
    TableRows,
    TableSettings,
    UpdateSettings,
)
from paceline.server.service import ServerService
from paceline.server.spec import TableSpec
from paceline.wire.card import Card
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

SECRET = b"the secret of a test" * 2
NUM_DENSE, SIZE = 3, 5  # ranges, and elements of each
PARTITIONS = Partitions(NUM_DENSE, 4)
NUM_RANGES = NUM_DENSE + PARTITIONS.count
SECTION = OptimizerSettings("SGD", {"lr": 1.0})
SPEC = TableSpec(name="t", dim=2, init="zeros", optimizer="sgd")
SETTINGS = UpdateSettings((SECTION,), (TableSettings("t", {"lr": 1.0}),))
IDS = torch.arange(30)


@functools.cache
def identity(number: int) -> Identity:
    """Making a key takes a while."""
    return Identity()


class Group:
    """Does what the coordinator does: makes the next placement from what the servers say."""

    def __init__(self, num_servers: int, num_replicas: int, check: Callable[[], None], host_label: str) -> None:
        self._num_replicas = num_replicas
        self._host_label = host_label
        self.services: dict[str, ServerService] = {}
        self.endpoints: dict[str, Endpoint] = {}
        self.placement = Placement()
        self._endpoint = Endpoint(Credentials(identity(-1), SECRET, "worker"))
        self.client = GroupClient(self._endpoint, check=check, on_empty=self.load)
        self.num_loaded = 0
        for _ in range(num_servers):
            self.start()
        self._place(evolving.start(self._goal(), 1))

    def start(self) -> str:
        """One more server; `move` gives it something to do."""
        number = len(self.endpoints)
        endpoint = Endpoint(Credentials(identity(number), SECRET, "server"))
        name = endpoint.credentials.identity.member
        self.endpoints[name] = endpoint
        self.services[name] = ServerService(endpoint, lambda: None)
        return name

    def close(self, name: str) -> None:
        self.services.pop(name).close()
        self.endpoints[name].close()

    def move(self, *leaving: str) -> bool:
        """One step towards where the ranges should be; whether there was anything to do."""
        heard = {}
        for name, service in self.services.items():
            said = service.serving()
            heard[name] = Heard(said.version, frozenset(said.synced), frozenset(said.handed))
        ranges = evolving.evolve(self.placement.ranges, heard, self._goal(*leaving), self.placement.version + 1)
        if ranges == self.placement.ranges:
            return False
        self._place(ranges)
        return True

    def settle(self, *leaving: str) -> None:
        """Move until all is where it should be."""
        deadline = Deadline(20.0, "moving")
        while self.move(*leaving) or not self._is_at_rest(*leaving):
            deadline.check("ranges to arrive")
            threading.Event().wait(0.002)

    def _is_at_rest(self, *leaving: str) -> bool:
        for many, homes in zip(self.placement.ranges, self._goal(*leaving), strict=True):
            backups = {one.server for one in many.backups}
            if (many.primary.server, backups) != (homes[0], set(homes[1:])) or many.joining or many.handing:
                return False
        return True

    def _goal(self, *leaving: str) -> list[tuple[str, ...]]:
        sites = {name: Site(1.0, "host") for name in self.services if name not in leaving}
        return place([1] * NUM_RANGES, sites, self._num_replicas)

    def _place(self, ranges: Sequence[Replicas]) -> None:
        named = {one.server for many in ranges for one in many.everybody()}
        cards = tuple(Card.of(self.endpoints[name], self._host_label) for name in sorted(named))
        self.placement = Placement(self.placement.version + 1, 1, 1, cards, tuple(ranges))
        for service in self.services.values():
            service.adopt(self.placement)
        self.client.adopt(self.placement)

    # -- a worker's part ---------------------------------------------------------------------------------------------

    def load(self, empty: set[int], *, restored: bool = False) -> None:
        self.num_loaded += 1
        origin = self.client.placement.ranges[min(empty)].origin

        def pack(request: ServerRequest) -> Parcel:
            packing = Packing()
            makes = tuple(
                Making(packing.slice(number, torch.zeros(SIZE)), 0) for number in request.ranges if number < NUM_DENSE
            )
            detail = Detail(makes=makes, sections=(SECTION,), tables=(SPEC,), partitions=PARTITIONS)
            return Parcel(detail, packing.tensors)

        self.client.run(Errand(empty, push=Load(origin, restored)), pack, "loading", 20.0)

    def stage(self, step: int, rank: int = 0, gradient: float = 1.0, generation: int = 1) -> None:
        self.push(StageStep(generation, step, rank), IDS, torch.full((len(IDS), 2), gradient), gradient)

    def push_rows(self, step: int, ids: torch.Tensor) -> None:
        """Gradients of 1 for these rows and all dense ranges."""
        self.push(StageStep(1, step, 0), ids, torch.ones(len(ids), 2), 1.0)

    def push(
        self, push: StageStep, ids: torch.Tensor, rows: torch.Tensor, gradient: float = 0.0, table: str = "t"
    ) -> None:
        def pack(request: ServerRequest) -> Parcel:
            packing = Packing()
            dense = tuple(
                packing.slice(number, torch.full((SIZE,), gradient)) for number in request.ranges if number < NUM_DENSE
            )
            mine = torch.isin(PARTITIONS.of(ids.long()), torch.tensor(request.ranges))
            part = (TableRows(table, packing.add(ids[mine]), packing.add(rows[mine])),) if bool(mine.any()) else ()
            return Parcel(Detail(dense=dense, rows=part), packing.tensors)

        self.client.run(Errand(range(NUM_RANGES), push=push), pack, f"pushing step {push.step}", 20.0)

    def commit(self, step: int, num_ranks: int = 1, generation: int = 1) -> None:
        commit = CommitStep(generation, step, num_ranks, 1.0, SETTINGS)
        self.client.run(Errand(range(NUM_RANGES), commit=commit), lambda _: Parcel(), f"committing step {step}", 20.0)

    def values(self, step: int = 0) -> set[float]:
        """All values of all ranges and rows: one, if everything that was pushed was applied everywhere as often."""
        found: dict[int, torch.Tensor] = {}  # of each range what was said last: what is refused is asked for again

        def pack(request: ServerRequest) -> Parcel:
            packing, wanted = Packing(), Packing()
            dense, rows = [], []
            for number in request.ranges:
                if number < NUM_DENSE:
                    found[number] = self.client.empty((SIZE,), torch.float32)
                    dense.append(wanted.slice(number, found[number]))
                else:
                    mine = IDS[PARTITIONS.of(IDS) == number]
                    found[number] = torch.empty((len(mine), 2))
                    rows.append(TableRows("t", packing.add(mine), wanted.add(found[number])))
            detail = Detail(wants=tuple(dense), row_wants=tuple(rows), makes_rows=False)
            return Parcel(detail, packing.tensors, wanted.tensors)

        self.client.run(Errand(range(NUM_RANGES), pull=Need(step=step)), pack, "pulling", 20.0)
        return {value for out in found.values() for value in out.reshape(-1).tolist()}


@contextlib.contextmanager
def group_of(
    num_servers: int, num_replicas: int = 1, *, check: Callable[[], None] = lambda: None, is_far: bool = False
) -> Iterator[Group]:
    """`check` is what the worker calls while it waits. Servers that are `is_far` share no memory with it."""
    group = Group(num_servers, num_replicas, check, "far" if is_far else "")
    try:
        yield group
    finally:
        group.client.close()
        for name in list(group.services):
            group.close(name)
        group._endpoint.close()


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread
