"""Codes that people copy from one machine to another: how to reach a process, as one line of text. Its prefix says what
it is for, a checksum shows that it was cut or changed on the way. It holds a secret: hand it over like a password."""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import ClassVar, Self

import msgspec

from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.decoding import decode
from paceline.wire.dialing import dial
from paceline.wire.handshake import Credentials

_SUM_BYTES = 4


class AccessCode(msgspec.Struct, frozen=True, array_like=True):
    """A kind of code has a `PREFIX`, and `WHAT` errors call it; it may hold more."""

    PREFIX: ClassVar[str]
    WHAT: ClassVar[str]

    address: tuple[str, int]
    secret: bytes
    fingerprint: bytes
    tls: bool

    def encode(self) -> str:
        packed = msgspec.msgpack.encode(self)
        checked = packed + zlib.crc32(packed).to_bytes(_SUM_BYTES, "big")
        return self.PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """`ValueError` for anything else than a whole code of this kind."""
        text = text.strip()
        if not text.startswith(cls.PREFIX):
            raise ValueError(f"this is not {cls.WHAT}: it does not start with {cls.PREFIX}; copy the whole line")
        encoded = text.removeprefix(cls.PREFIX)
        try:
            checked = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            if zlib.crc32(checked[:-_SUM_BYTES]).to_bytes(_SUM_BYTES, "big") != checked[-_SUM_BYTES:]:
                raise ValueError("its sum is wrong")
            return decode(checked[:-_SUM_BYTES], cls)
        except (binascii.Error, ValueError, msgspec.DecodeError) as error:
            raise ValueError(
                f"{cls.WHAT} was cut or changed on its way ({error}); copy the whole line again"
            ) from error

    def dial(self, mine: Credentials, room: str, deadline: Deadline) -> Connection:
        """The process that the code leads to, and no other; the caller closes the connection."""
        return dial(mine, self.address, room, deadline=deadline, tls=self.tls, pin=self.fingerprint)
