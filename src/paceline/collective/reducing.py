"""The all-reduce of a group: by the algorithm that was asked for, or by the one that its cost model finds fastest.

Which model that is, the members settle when the group forms, as `agreement` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.collective import ring, tree
from paceline.collective.agreement import Course, agreed, decode_model, encode_model, fits, word_of
from paceline.collective.arguments import as_flat, flat
from paceline.collective.base import Operation, Path
from paceline.collective.choice import CostModel, candidates, possible
from paceline.collective.direct import Direct
from paceline.collective.forming import Parts
from paceline.collective.hierarchical import Hierarchical
from paceline.collective.lane import Handle
from paceline.collective.probe import probe
from paceline.collective.reductions import Reduction, find
from paceline.collective.sequencer import Key
from paceline.collective.signature import AGREE, PROBE, SHOW, chosen
from paceline.wire.deadline import Deadline

_MAX_CACHED = 1024

Operate = Callable[..., Handle]  # as `Sequencer.operate`
Algorithm = Callable[[Operation, torch.Tensor, Reduction], None]
# What to combine by, how to move it, and the key that the operation is signed with: it names what `auto` chose.
Reducer = tuple[Reduction, Algorithm, tuple[Any, ...]]


class AllReducer:
    def __init__(self, parts: Parts, hosts: Sequence[Sequence[int]], path: Path, operate: Operate) -> None:
        self._rank, self._size = parts.rank, len(parts.cards)
        self._hosts, self._path, self._operate = hosts, path, operate
        self._empty = functools.partial(parts.arena.empty, dtype=torch.float32)
        self.model = CostModel({candidates(hosts)[0]: ((1, 0.0),)})
        self._algorithms: dict[str, Algorithm] = {
            "ring": functools.partial(ring.all_reduce, parts.links),
            "tree": functools.partial(tree.all_reduce, parts.links),
            "hierarchical": Hierarchical(parts.links, parts.local, parts.arena, hosts).all_reduce,
        }
        if len(hosts) == 1:
            self._algorithms["direct"] = Direct(parts.local, parts.arena).all_reduce
        self._reducers: dict[tuple[Any, ...], Reducer] = {}

    def all_reduce(self, key: tuple[Any, ...], tensor: torch.Tensor, async_op: bool, timeout_s: float | None) -> Handle:
        reduction, reduce, signed = self._reducers.get(key) or self._choose_reducer(key, tensor)

        def body(operation: Operation) -> None:
            if (data := as_flat(tensor)) is not None:
                reduce(operation, data, reduction)
            else:
                with flat(tensor) as copy:
                    reduce(operation, copy, reduction)

        return self._operate(signed, body, async_op, timeout_s)

    def _choose_reducer(self, key: tuple[Any, ...], tensor: torch.Tensor) -> Reducer:
        """How to reduce tensors like this one; looked up once for each type, shape, reduction and algorithm."""
        _, op, dtype, _, _, algorithm, _ = key
        reduction = find(op, dtype)
        if algorithm != "auto" and algorithm not in self._algorithms:
            raise ValueError(
                f"algorithm {algorithm!r} does not work for {len(self._hosts)} host(s); "
                f"choose auto or one of: {', '.join(possible(self._hosts))}"
            )
        name, signed = algorithm, key
        if algorithm == "auto":
            name = self.model.choose(tensor.nbytes)
            signed = (*key[:5], chosen(name), key[6])
        reduce = self._algorithms[name]
        if self._size == 1 or tensor.numel() == 0:
            reduce = self._meet_only
        if len(self._reducers) >= _MAX_CACHED:
            self._reducers.clear()
        found = self._reducers[key] = (reduction, reduce, signed)
        return found

    def _meet_only(self, operation: Operation, *_: object) -> None:
        """Nothing to reduce; but whoever has something else in mind is found out."""
        if self._size > 1:
            self._path.barrier(operation)

    # -- when the group forms ----------------------------------------------------------------------------------------

    def settle_model(self, model: CostModel | None, deadline: Deadline) -> None:
        """Come to a cost model that all members have; returns when all of them are here."""
        names = candidates(self._hosts)
        if len(names) == 1:
            self._operate(Key("barrier", "", None, (), -1), self._meet_only, False, _left_s(deadline))
            return
        own = model if model is not None and fits(model, names) else None
        encoded = encode_model(own) if own is not None else None
        word = torch.tensor(word_of(self._rank, self._size, encoded), dtype=torch.int64)
        self.all_reduce((AGREE, "max", word.dtype, word.shape, -1, "tree", ()), word, False, _left_s(deadline))
        course, source, num_bytes = agreed(word.tolist(), self._size)
        if course is Course.PROBE:
            self.model = probe(functools.partial(self._probe_once, deadline), self._empty, names)
        elif course is Course.TAKE:
            shown = torch.zeros(num_bytes, dtype=torch.uint8)
            if source == self._rank and encoded is not None:
                shown.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
            key = Key(SHOW, "", shown.dtype, shown.shape, source)
            self._operate(key, lambda run: self._path.broadcast(run, shown, source), False, _left_s(deadline))
            self.model = decode_model(shown.numpy().tobytes(), names)
        elif own is not None:
            self.model = own

    def _probe_once(self, deadline: Deadline, tensor: torch.Tensor, op: str, algorithm: str) -> None:
        self.all_reduce((PROBE, op, tensor.dtype, tensor.shape, -1, algorithm, ()), tensor, False, _left_s(deadline))


def _left_s(deadline: Deadline) -> float:
    return max(0.001, deadline.remaining_s())
