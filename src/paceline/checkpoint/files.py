"""Checkpoints on disk.

    <folder>/step-000000123-op-130/
        model.safetensors     the weights under their state_dict names, for any safetensors reader
        state.safetensors     all other tensors
        manifest.json         everything else, and the checksums

Promises:
- A checkpoint is complete or absent: it is written into a partial folder (`partial`), every file and the folder are
  synced, and one rename gives it its name. Whatever ends the writing leaves the older checkpoints as they are.
- One changed byte in any file is detected by `read`, and so is a missing or a shorter file.
- A write that fails leaves no partial folder. A full disk is a `DiskFull`, before the first byte where that is known.
- Reading runs no code of the file, opens no file but those three, and takes memory in proportion to their size.

Tied weights are stored once; the other names are in the manifest and in the metadata of `model.safetensors`.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import tensorfile, tree
from paceline.checkpoint.manifest import FileRecord, Manifest
from paceline.custody import names as checkpoint_names
from paceline.custody.names import MANIFEST, MAX_OPERATION, MODEL, STATE
from paceline.custody.partial import Partial, free_bytes
from paceline.errors import CheckpointError, CorruptCheckpoint, DiskFull
from paceline.wire.descriptors import Fd, creating

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds. `model` is a state_dict; `state` and `plan` are trees, `plan` without tensors.
    The versions and the time are those of the writing, and empty before."""

    run: str
    step: int
    operation: int
    epoch: int
    position: int
    model: Mapping[str, Any]
    state: Any = None
    plan: Any = None
    paceline_version: str = ""
    torch_version: str = ""
    written_at: str = ""

    def __post_init__(self) -> None:
        if type(self.run) is not str or not self.run:
            raise ValueError(f"run={self.run!r} must be the name of the run, a text")
        for field, highest in (
            ("step", MAX_OPERATION),
            ("operation", MAX_OPERATION),
            ("epoch", 1 << 62),
            ("position", 1 << 62),
        ):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= highest:
                raise ValueError(f"{field}={value!r} must be a whole number from 0 to {highest}")


class Skipped(NamedTuple):
    path: Path
    reason: str


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Contents taken apart: documents are finished, tensors are still those of the caller, each one once."""

    contents: Contents
    names: list[tuple[str, str | None]]
    extra: Any
    state: Any
    plan: Any
    model_tensors: dict[str, torch.Tensor]
    state_tensors: dict[str, torch.Tensor]


def prepare(contents: Contents) -> Prepared:
    """Raises `TypeError`, naming the place, for what cannot be saved."""
    names: list[tuple[str, str | None]] = []
    model_tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    ties = tree.Ties()
    for name, value in contents.model.items():
        if type(name) is not str or name == tensorfile.RESERVED:
            raise TypeError(f"model: {name!r} cannot be the name of a weight; use a text other than that")
        if not isinstance(value, torch.Tensor):
            extra[name] = value
            names.append((name, None))
            continue
        if problem := tensorfile.why_not(value):
            raise TypeError(f"model.{name}: {problem}")
        stored = ties.first_name(value, name)
        if stored == name:
            model_tensors[name] = value
        names.append((name, stored))
    flattener = tree.Flattener()
    state, extra_document = flattener.add(contents.state), flattener.add(extra, "model")
    plan, plan_tensors = tree.flatten(contents.plan)
    if plan_tensors:
        raise TypeError(f"plan.{next(iter(plan_tensors))}: a plan holds plain data only; put tensors into the state")
    return Prepared(
        contents=contents,
        names=names,
        extra=extra_document,
        state=state,
        plan=plan,
        model_tensors=model_tensors,
        state_tensors=flattener.tensors,
    )


def write(folder: Path, contents: Contents) -> Path:
    """Write a checkpoint and publish it; returns its path. One of the same operation is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = write_partial(folder, prepare(contents))
    return publish(partial, folder, contents.step, contents.operation)


def write_partial(folder: Path, prepared: Prepared, between: Callable[[], None] = lambda: None) -> Partial:
    """Write and sync everything, but not under its name yet. What `between` raises ends the writing."""
    layouts = _layouts(prepared)
    # The manifest's size is known only with the checksums in it; their place holders are as long as they are.
    sizes = {name: FileRecord(num_bytes=layout.num_bytes, sha256="0" * 64) for name, layout in layouts.items()}
    needed_bytes = sum(record.num_bytes for record in sizes.values())
    needed_bytes += len(manifests.encode(_manifest(prepared, sizes)))
    try:
        if needed_bytes > (room_bytes := free_bytes(folder)):
            raise DiskFull(folder, needed_bytes, room_bytes)
        partial = Partial(folder)
        try:
            records = {}
            for name, layout in layouts.items():
                records[name] = _write_tensors(partial, name, layout, between)
            _write_manifest(partial, manifests.encode(_manifest(prepared, records)))
        except BaseException:
            partial.remove()
            raise
        return partial
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(folder, needed_bytes, free_bytes(folder)) from error
        raise CheckpointError(
            f"cannot write a checkpoint of {needed_bytes:,} bytes in {folder}: {error.strerror or error}; check that "
            "the folder is there, may be written, and is not over a limit"
        ) from error


class InMemory:
    """The files of a checkpoint, made of a snapshot when they are read: for who has no room to write them. What
    `between` raises ends the making."""

    is_lasting = False  # the snapshot's memory is that of the next one too

    def __init__(self, prepared: Prepared, between: Callable[[], None]) -> None:
        self._layouts = _layouts(prepared)
        records = {}
        for name, layout in self._layouts.items():
            checksum = hashlib.sha256()
            for piece in tensorfile.pieces(layout):
                between()
                checksum.update(piece)
            records[name] = FileRecord(num_bytes=layout.num_bytes, sha256=checksum.hexdigest())
        self._manifest = manifests.encode(_manifest(prepared, records))

    def sizes(self) -> dict[str, int]:
        sizes = {name: layout.num_bytes for name, layout in self._layouts.items()}
        return {**sizes, MANIFEST: len(self._manifest)}

    def pieces(self, name: str) -> Iterator[memoryview]:
        if name == MANIFEST:
            yield memoryview(self._manifest)
        else:
            yield from tensorfile.pieces(self._layouts[name])


def _layouts(prepared: Prepared) -> dict[str, tensorfile.FileLayout]:
    aliases = {name: stored for name, stored in prepared.names if stored is not None and stored != name}
    return {
        MODEL: tensorfile.lay_out(prepared.model_tensors, aliases),
        STATE: tensorfile.lay_out(prepared.state_tensors, {}),
    }


def publish(partial: Partial, folder: Path, step: int, operation: int) -> Path:
    try:
        return checkpoint_names.publish(partial, folder, step, operation)
    except OSError as error:
        partial.remove()
        final = checkpoint_names.path_of(folder, step, operation)
        raise CheckpointError(f"cannot give the checkpoint its name {final}: {error.strerror or error}") from error


def _write_tensors(
    partial: Partial, name: str, layout: tensorfile.FileLayout, between: Callable[[], None]
) -> FileRecord:
    fd = partial.create(name)
    try:
        checksum = tensorfile.write(fd.fileno(), layout, between)
        os.fsync(fd.fileno())
    finally:
        fd.close()
    return FileRecord(num_bytes=layout.num_bytes, sha256=checksum)


def _write_manifest(partial: Partial, raw: bytes) -> None:
    fd = partial.create(MANIFEST)
    try:
        left = memoryview(raw)
        while len(left):
            left = left[os.write(fd.fileno(), left) :]
        os.fsync(fd.fileno())
    finally:
        fd.close()


def _manifest(prepared: Prepared, records: dict[str, FileRecord]) -> Manifest:
    contents = prepared.contents
    return Manifest(
        format=manifests.FORMAT,
        run=contents.run,
        step=contents.step,
        operation=contents.operation,
        epoch=contents.epoch,
        position=contents.position,
        written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        paceline=paceline.__version__,
        torch=torch.__version__,
        files=records,
        plan=prepared.plan,
        model=prepared.names,
        extra=prepared.extra,
        state=prepared.state,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, *, verify: bool = True) -> Contents:
    """The checkpoint in this folder (or behind this link). Without `verify`, checksums are not compared."""
    path = path.resolve()
    manifest = read_manifest(path, verify=verify)
    model_tensors = _read_tensors(path, MODEL, manifest, verify)
    state_tensors = _read_tensors(path, STATE, manifest, verify)
    try:
        extra = tree.unflatten(manifest.extra, state_tensors)
        model = {name: extra[name] if stored is None else model_tensors[stored] for name, stored in manifest.model}
        state = tree.unflatten(manifest.state, state_tensors)
        plan = tree.unflatten(manifest.plan, {})
        return Contents(
            run=manifest.run,
            step=manifest.step,
            operation=manifest.operation,
            epoch=manifest.epoch,
            position=manifest.position,
            model=model,
            state=state,
            plan=plan,
            paceline_version=manifest.paceline,
            torch_version=manifest.torch,
            written_at=manifest.written_at,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"{path / MANIFEST}: {error}") from error


def read_manifest(path: Path, *, verify: bool = True) -> Manifest:
    """What a checkpoint says of itself, without its tensors."""
    name = path / MANIFEST
    fd = _open(name)
    try:
        num_bytes = os.fstat(fd.fileno()).st_size
        if num_bytes > manifests.MAX_BYTES:
            raise CorruptCheckpoint(f"{name}: {num_bytes:,} bytes are more than a manifest may have")
        manifest = manifests.decode(os.pread(fd.fileno(), num_bytes, 0), verify=verify)
    except CheckpointError as error:
        raise type(error)(f"{name}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {name}: {error.strerror or error}") from error
    finally:
        fd.close()
    named = checkpoint_names.NAME.fullmatch(path.name)
    if named and (int(named[1]), int(named[2])) != (manifest.step, manifest.operation):
        raise CorruptCheckpoint(
            f"{name}: it is of step {manifest.step}, operation {manifest.operation}, but its folder's name says another"
        )
    return manifest


def _read_tensors(path: Path, name: str, manifest: Manifest, verify: bool) -> dict[str, torch.Tensor]:
    record = manifest.files.get(name)
    if record is None:
        raise CorruptCheckpoint(f"{path / MANIFEST}: it has no entry for {name}")
    fd = _open(path / name)
    try:
        num_bytes = os.fstat(fd.fileno()).st_size
        if num_bytes != record.num_bytes:
            raise CorruptCheckpoint(f"it has {num_bytes:,} bytes where {record.num_bytes:,} were written")
        tensors, checksum = tensorfile.read(fd.fileno(), checksum=verify)
        if verify and checksum != record.sha256:
            raise CorruptCheckpoint("its checksum does not match: bytes were changed")
        return tensors
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path / name}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path / name}: {error.strerror or error}") from error
    finally:
        fd.close()


def _open(path: Path) -> Fd:
    try:
        with creating:
            # Not blocking: a pipe under this name must not hold the reader.
            fd = Fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(os.fstat(fd.fileno()).st_mode):
        fd.close()
        raise CorruptCheckpoint(f"{path} is not a file")
    return fd


def newest_good(folder: Path) -> tuple[Contents | None, list[Skipped]]:
    """The newest checkpoint that can be read, None if there is none, and which were skipped and why."""
    skipped: list[Skipped] = []
    for found in checkpoint_names.find(folder):
        try:
            return read(found.path), skipped
        except CheckpointError as error:
            skipped.append(Skipped(found.path, str(error)))
    return None, skipped
