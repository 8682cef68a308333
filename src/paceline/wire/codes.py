"""Codes that people copy from one machine to another: a struct as one line of text. Its prefix says what it is for, a
checksum shows that it was cut or changed on the way."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any, TypeVar

import msgspec

from paceline.wire.decoding import decode

Body = TypeVar("Body")

_SUM_BYTES = 4


def to_code(prefix: str, body: Any) -> str:
    packed = msgspec.msgpack.encode(body)
    checked = packed + zlib.crc32(packed).to_bytes(_SUM_BYTES, "big")
    return prefix + base64.urlsafe_b64encode(checked).decode().rstrip("=")


def from_code(prefix: str, text: str, kind: type[Body], what: str) -> Body:
    """`ValueError` for anything else than a whole code of this prefix; the message calls it `what`."""
    text = text.strip()
    if not text.startswith(prefix):
        raise ValueError(f"this is not {what}: it does not start with {prefix}; copy the whole line")
    encoded = text.removeprefix(prefix)
    try:
        checked = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        if zlib.crc32(checked[:-_SUM_BYTES]).to_bytes(_SUM_BYTES, "big") != checked[-_SUM_BYTES:]:
            raise ValueError("its sum is wrong")
        return decode(checked[:-_SUM_BYTES], kind)
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{what} was cut or changed on its way ({error}); copy the whole line again") from error
