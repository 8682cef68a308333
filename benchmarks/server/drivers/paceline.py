"""Paceline's own service and client, over one host's memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.server.drivers.base import LEARNING_RATE, batches, gradients, id_of
from benchmarks.server.plan import DENSE, Plan
from paceline.placement.evolving import start
from paceline.placement.placement import Placement
from paceline.server.client import GroupClient
from paceline.server.dense import OptimizerSettings
from paceline.server.errand import Errand
from paceline.server.layout import MOST_ELEMENTS, NUM_PARTITIONS
from paceline.server.messages import ApplyLease, Load, Need, ServerRequest
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
from paceline.server.scratch import Scratch
from paceline.server.service import ServerService
from paceline.server.spec import TableSpec
from paceline.wire.card import Card
from paceline.wire.decoding import decode
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

_SECRET = b"of a benchmark, on loopback only"
_TABLE = "rows"
_FILL = 1_000_000


class PacelineDriver:
    def obstacle(self) -> str:
        return ""

    def serve(self, plan: Plan, told: Any) -> None:
        torch.set_num_threads(1)
        with Endpoint(Credentials(Identity(), _SECRET, "server")) as endpoint:
            service = ServerService(endpoint, lambda: None)
            card = Card.of(endpoint)
            placement = Placement(1, 1, 1, (card,), start([(card.member,)] * _num_ranges(plan), 1))
            service.adopt(placement)
            self._load(plan, placement)
            told.send(msgspec.msgpack.encode(placement))
            told.recv()
            service.close()

    def _load(self, plan: Plan, placement: Placement) -> None:
        with Endpoint(Credentials(Identity(), _SECRET, "worker")) as endpoint:
            client = GroupClient(endpoint)
            client.adopt(placement)
            numbers = range(_num_ranges(plan))
            client.run(Errand(numbers, push=Load(1)), lambda request: _load_of(plan, request), "loading")
            if plan.work != DENSE:
                worker = _Sparse(plan, client, [])
                for first in range(0, plan.size, _FILL):
                    ranks = np.arange(first, min(first + _FILL, plan.size), dtype=np.int64)
                    worker.pull_ids(torch.from_numpy(id_of(ranks)))
            client.close()

    def worker(self, plan: Plan, address: Any, number: int) -> _Dense | _Sparse:
        torch.set_num_threads(1)
        endpoint = Endpoint(Credentials(Identity(), _SECRET, "worker"))
        client = GroupClient(endpoint)
        client.adopt(decode(address, Placement))
        if plan.work == DENSE:
            return _Dense(plan, client, number)
        return _Sparse(plan, client, [torch.from_numpy(ids) for ids in batches(plan, number)], number)


def _num_ranges(plan: Plan) -> int:
    return -(-plan.size // MOST_ELEMENTS) if plan.work == DENSE else NUM_PARTITIONS


def _load_of(plan: Plan, request: ServerRequest) -> Parcel:
    if plan.work != DENSE:
        spec = TableSpec(name=_TABLE, dim=plan.dim, optimizer="sgd")
        return Parcel(Detail(tables=(spec,), partitions=Partitions(0, NUM_PARTITIONS)))
    packing = Packing()
    makes = []
    for number in request.ranges:
        length = min(MOST_ELEMENTS, plan.size - number * MOST_ELEMENTS)
        makes.append(Making(packing.slice(number, torch.zeros(length)), 0))
    return Parcel(Detail(makes=tuple(makes), sections=(_SGD,)), packing.tensors)


_SGD = OptimizerSettings("SGD", {"lr": LEARNING_RATE})
_SETTINGS = UpdateSettings((_SGD,), (TableSettings(_TABLE, {"lr": LEARNING_RATE}),))


class _Dense:
    """All parameters in one message: gradients are read, and parameters written, where they lie."""

    def __init__(self, plan: Plan, client: GroupClient, number: int) -> None:
        self._plan = plan
        self._client = client
        self._number = number
        self._gradients = client.empty((plan.size,), torch.float32).fill_(1e-3)
        self._values = client.empty((plan.size,), torch.float32)

    def do(self, measure: str, number: int) -> None:
        lease = number * self._plan.num_workers + self._number
        errand = Errand(
            range(_num_ranges(self._plan)), push=ApplyLease(0, lease, lease + 1, 1.0, _SETTINGS), pull=Need()
        )
        self._client.run(errand, self._pack, "push and pull")

    def _pack(self, request: ServerRequest) -> Parcel:
        packing, wanted = Packing(), Packing()
        gradients = torch.split(self._gradients, MOST_ELEMENTS)
        values = torch.split(self._values, MOST_ELEMENTS)
        dense = tuple(packing.slice(number, gradients[number]) for number in request.ranges)
        wants = tuple(wanted.slice(number, values[number]) for number in request.ranges)
        return Parcel(Detail(dense=dense, wants=wants), packing.tensors, wanted.tensors)

    def close(self) -> None:
        self._client.close()


class _Sparse:
    """Ids are made unique here, as the modules do; rows come back for each id that was asked for."""

    def __init__(self, plan: Plan, client: GroupClient, batches: list[torch.Tensor], number: int = 0) -> None:
        self._plan = plan
        self._client = client
        self._batches = batches
        self._number = number
        self._scratch = Scratch(client)
        self._gradients = torch.from_numpy(gradients(plan, number, plan.batch)) if batches else torch.empty(0)

    def do(self, measure: str, number: int) -> None:
        ids, inverse = torch.unique(self._batches[number % len(self._batches)], sorted=False, return_inverse=True)
        if measure == "pull":
            torch.nn.functional.embedding(inverse, self.pull_ids(ids))
        else:
            self._push(ids, inverse, number)

    def pull_ids(self, ids: torch.Tensor) -> torch.Tensor:
        self._scratch.reset()
        asked = self._scratch.put(ids)
        out = self._scratch.empty((len(ids), self._plan.dim), torch.float32)
        detail = Detail(row_wants=(TableRows(_TABLE, 0, 0),))
        errand = Errand(range(NUM_PARTITIONS), pull=Need())
        self._client.run(errand, lambda _: Parcel(detail, [asked], [out]), "pull")
        return out

    def _push(self, ids: torch.Tensor, inverse: torch.Tensor, number: int) -> None:
        self._scratch.reset()
        total = self._scratch.empty((len(ids), self._plan.dim), torch.float32).zero_()
        total.index_add_(0, inverse, self._gradients)
        asked = self._scratch.put(ids)
        lease = number * self._plan.num_workers + self._number
        push = ApplyLease(0, lease, lease + 1, 1.0, _SETTINGS)
        detail = Detail(rows=(TableRows(_TABLE, 0, 1),))
        self._client.run(Errand(range(NUM_PARTITIONS), push=push), lambda _: Parcel(detail, [asked, total]), "push")

    def close(self) -> None:
        self._client.close()
