"""A server does everything once, on a few numbers, before it says that it is ready.

What a process does for the first time is slow: the first optimizer of torch imports its compiler, which takes a second
or more of processor time, and kernels, decoders and tables cost some milliseconds each. A server that is brought up
does it all for the first time at once, while those who feed it, and so every worker, wait for it to acknowledge what
they sent. Here nobody waits yet.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec
import torch

from paceline.server.dense import ELEMENTWISE, OptimizerSettings
from paceline.server.messages import (
    Acknowledged,
    ApplyLease,
    CommitStep,
    Forward,
    ServerAnswer,
    ServerRequest,
    StageStep,
)
from paceline.server.parcels import (
    Detail,
    Making,
    Packing,
    Parcel,
    Partitions,
    Slice,
    TableRows,
    TableSettings,
    UpdateSettings,
)
from paceline.server.row_optimizers import Hyper
from paceline.server.spec import TableSpec
from paceline.server.store import TensorStore
from paceline.wire.decoding import decode

logger = logging.getLogger("paceline.server")

_SIZE, _DIM = 64, 4
_RULES: tuple[Literal["sgd", "adagrad", "adam", "adamw"], ...] = ("sgd", "adagrad", "adam", "adamw")  # of tables


def warm_up() -> None:
    """Live the life of a server with every optimizer; nothing is left of it. What cannot be done here (there may be no
    room for tables) is said when it is asked for: it is no reason not to serve."""
    lives = [(OptimizerSettings(kind, {"lr": 0.1}), torch.float32, False) for kind in ELEMENTWISE]
    lives += [
        (OptimizerSettings("Adam", {"lr": 0.1}), torch.float64, False),
        (OptimizerSettings("SGD", {"lr": 0.1}), torch.float32, True),
    ]
    for settings, dtype, has_tables in lives:
        try:
            _live(settings, dtype, has_tables=has_tables)
        except Exception as error:  # whatever it is, it is of the trial, and its tensors are gone with it
            logger.info("%s could not be tried before it is needed: %s", settings.optimizer, error)
    for message in (ServerRequest(1, (0,)), Forward(1, 1, (0,)), ServerAnswer(1), Acknowledged(1)):
        decode(msgspec.msgpack.encode(message), type(message))


def _live(section: OptimizerSettings, dtype: torch.dtype, *, has_tables: bool) -> None:
    """One range of parameters, and one with rows of tables if there are any: loaded, updated in both ways, pulled,
    exported, and brought up elsewhere."""
    store, ranges = TensorStore(), [0, 1] if has_tables else [0]
    rules = _RULES if has_tables else ()
    values = torch.zeros(_SIZE, dtype=dtype)
    specs = tuple(TableSpec(name=rule, dim=_DIM, optimizer=rule) for rule in rules)
    packing = Packing()
    makes = (Making(packing.slice(0, values), 0),)
    detail = Detail(makes=makes, sections=(section,), tables=specs)
    if has_tables:
        detail = msgspec.structs.replace(detail, partitions=Partitions(1, 1))
    store.load(ranges, Parcel(decode(msgspec.msgpack.encode(detail), Detail), packing.tensors))
    hyper = {name: value for name, value in section.values.items() if name in Hyper.__struct_fields__}
    tables = tuple(TableSettings(spec.name, hyper) for spec in specs)
    settings = UpdateSettings((section,), tables)
    for step in (1, 2):
        for rank in (0, 1):
            store.stage(ranges, StageStep(1, step, rank), _push(dtype, rules))
        store.commit(ranges, CommitStep(1, step, 2, 0.5, settings))
        store.apply(ranges, ApplyLease(0, step, 2 + step, 0.5, settings), _push(dtype, rules))
    store.pull(ranges, Parcel(Detail(exports=True)))
    store.stage(ranges, StageStep(1, 3, 0), _push(dtype, rules))
    other = TensorStore()
    for number in ranges:
        other.restore(number, store.snapshot(number))
    other.stage(ranges, StageStep(1, 3, 1), _push(dtype, rules))
    other.commit(ranges, CommitStep(1, 3, 2, 0.5, settings))
    for number in ranges:
        other.forget(number)


def _push(dtype: torch.dtype, rules: tuple[str, ...]) -> Parcel:
    packing, wanted = Packing(), Packing()
    ids = packing.add(torch.arange(8))
    gradients = packing.add(torch.ones(8, _DIM))
    dense = (packing.slice(0, torch.ones(_SIZE, dtype=dtype)),)
    detail = Detail(
        dense=dense,
        rows=tuple(TableRows(rule, ids, gradients) for rule in rules),
        wants=(Slice(0, wanted.add(torch.zeros(_SIZE, dtype=dtype)), 0, _SIZE),),
        row_wants=tuple(TableRows(rule, ids, wanted.add(torch.zeros(8, _DIM))) for rule in rules),
    )
    return Parcel(decode(msgspec.msgpack.encode(detail), Detail), packing.tensors, wanted.tensors)
