"""What a checkpoint says of itself: `manifest.json`.

One JSON object. Its last field is the SHA-256 of all bytes before that field, so a changed byte anywhere in the file is
seen, also one that JSON would forgive. The manifest holds the checksums of the other files, whose names are fixed: no
path is ever taken from a manifest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from paceline.errors import CheckpointError, CorruptCheckpoint

FORMAT = 2
MAX_BYTES = 1 << 30
_END = ',"checksum":"{}"}}\n'
_END_BYTES = len(_END.format("0" * 64))


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`model` gives each name of the state_dict, in order, the name of its tensor in the file of weights, or None for
    a value that is no tensor and stands in `extra`. `state`, `extra` and `plan` are documents of `tree`."""

    format: int
    run: str
    step: int
    operation: int
    epoch: int
    position: int
    written_at: str
    paceline: str
    torch: str
    files: dict[str, FileRecord]
    plan: Any
    model: list[tuple[str, str | None]]
    extra: Any
    state: Any


def encode(manifest: Manifest) -> bytes:
    text = json.dumps(msgspec.structs.asdict(manifest), default=msgspec.structs.asdict, allow_nan=False)
    body = text[:-1].encode()
    return body + _END.format(hashlib.sha256(body).hexdigest()).encode()


def decode(raw: bytes, *, verify: bool = True) -> Manifest:
    body, end = raw[:-_END_BYTES], raw[-_END_BYTES:]
    if verify and end != _END.format(hashlib.sha256(body).hexdigest()).encode():
        raise CorruptCheckpoint("its checksum does not match: bytes were changed or lost")
    try:
        fields = json.loads(raw)
        found = fields.get("format")
        if found != FORMAT:
            raise CheckpointError(
                f"format {found!r}, and this version of Paceline reads {FORMAT}; use the version that wrote it "
                f"({fields.get('paceline')!r})"
            )
        return msgspec.convert(fields, Manifest)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"not a manifest: {error}") from error
