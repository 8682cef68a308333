"""The copies of a range, bit for bit: each server of a chaos run writes at its end what it holds, and all are compared.

A copy is named by its range, by the version in which the range's state began, and by what was applied to it. Copies of
the same name must have the same bits, whichever server had them, whether it made the updates itself or was brought up
in the middle. Servers are the product's own: Python imports `sitecustomize` when a process starts, and the one of a
stage (`prepare`) has servers call `_write` before they close.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.fault_points import SERVER_CLOSING

if TYPE_CHECKING:
    import torch

    from paceline.server.service import ServerService
    from paceline.server.store import TensorStore

FOLDER = "PACELINE_CHAOS_COPIES"


class Copy(msgspec.Struct, frozen=True):
    """`applied` is the step, or the leases. `digest` is of the values and all that their optimizers keep."""

    server: str
    number: int
    origin: int
    is_primary: bool
    applied: tuple[Any, ...]
    digest: str

    @property
    def name(self) -> tuple[Any, ...]:
        return self.origin, self.number, self.applied


# -- in the process of the harness -----------------------------------------------------------------------------------


def prepare(place: Path) -> dict[str, str]:
    """What the environment of a stage's commands must say."""
    inside = place / "inside"
    inside.mkdir(parents=True, exist_ok=True)
    (place / "copies").mkdir(exist_ok=True)
    (inside / "sitecustomize.py").write_text("from paceline.testing.chaos import copies\n\ncopies.watch()\n")
    path = os.pathsep.join(filter(None, (str(inside), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, FOLDER: str(place / "copies")}


def read(place: Path) -> list[Copy]:
    lines = (line for path in sorted((place / "copies").glob("*.json")) for line in path.read_bytes().splitlines())
    return [msgspec.json.decode(line, type=Copy) for line in lines]


def differing(copies: Sequence[Copy]) -> Iterator[str]:
    first: dict[tuple[Any, ...], Copy] = {}
    for copy in copies:
        other = first.setdefault(copy.name, copy)
        if other.digest != copy.digest:
            yield (
                f"servers {other.server} and {copy.server} have other bits of range {copy.number}, "
                f"which has the same updates on both ({copy.applied})"
            )


def num_compared(copies: Sequence[Copy]) -> int:
    """Copies of which there is another one."""
    return len(copies) - len({copy.name for copy in copies})


# -- in the process of a server --------------------------------------------------------------------------------------


def watch() -> None:
    """Nothing is imported here, nor changed, that a server would not have imported in the same order."""
    if FOLDER in os.environ and "paceline.server" in sys.orig_argv:
        SERVER_CLOSING.action = _write_all


def _write_all(service: ServerService) -> None:
    with service._changed:
        _write(service, Path(os.environ[FOLDER]))


def _write(service: ServerService, folder: Path) -> None:
    keeper, lines = service._keeper, []
    for number, tenure in sorted(keeper._tenures.items()):
        if tenure.is_complete and tenure.loaded and not tenure.is_lossy and not tenure.staged:
            record = tenure.record()
            applied = (record.step, record.epoch, record.prefix, *record.beyond)
            is_primary = number in keeper.placement.ranges_of.get(keeper.me, ())
            digest = _digest(service.store, number)
            lines.append(msgspec.json.encode(Copy(keeper.me, number, tenure.origin, is_primary, applied, digest)))
    draft = folder / f".{os.getpid()}"
    draft.write_bytes(b"\n".join(lines))
    draft.replace(folder / f"{os.getpid()}.json")


def _digest(store: TensorStore, number: int) -> str:
    found = hashlib.sha256()
    for label, tensor in _tensors(store, number):
        found.update(json.dumps([label, list(tensor.shape), str(tensor.dtype)]).encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def _tensors(store: TensorStore, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """In an order that does not depend on how they came. A row of zeros is one that was looked at and never changed:
    backups do not have it."""
    import torch

    from paceline.server.tables import unpack_chunk

    parcel = store.snapshot(number)
    if number in store.blocks:
        block = store.blocks[number]
        yield "values", block.values
        yield from sorted(block.state().items())
    for packed in parcel.detail.chunks:
        chunk = unpack_chunk(packed, parcel)
        changed = chunk.rows.ne(0).flatten(1).any(1).nonzero().view(-1)
        order = changed[torch.argsort(chunk.ids[changed])]
        yield f"{packed.table} ids", chunk.ids[order]
        yield f"{packed.table} rows", chunk.rows[order]
        for name, value in sorted(chunk.state.items()):
            yield f"{packed.table} {name}", value[order]
