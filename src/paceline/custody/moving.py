"""Files over a connection: raw bytes whose number both sides know, a piece at a time, and the checksum of what passed.

A piece has `PIECE_S`; a whole file may take as long as it takes. What `between` raises ends the sending; the connection
is then in the middle of a file and of no further use.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator

from paceline.errors import PacelineError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline

PIECE_BYTES = 1 << 20
PIECE_S = 30.0


class CustodyError(PacelineError):
    """What the run's host is to keep cannot be brought there, or fetched from there; the message says what to do."""


class Unreached(CustodyError):
    """The run's host does not answer."""


def nothing() -> None:
    pass


def send(connection: Connection, fd: int, num_bytes: int, what: str, between: Callable[[], None] = nothing) -> str:
    """Send so many bytes of a file; their SHA-256."""
    return send_pieces(connection, read_pieces(fd), num_bytes, what, between)


def read_pieces(fd: int) -> Iterator[memoryview]:
    while piece := os.read(fd, PIECE_BYTES):
        yield memoryview(piece)


def send_pieces(
    connection: Connection,
    pieces: Iterable[memoryview],
    num_bytes: int,
    what: str,
    between: Callable[[], None] = nothing,
) -> str:
    """Send so many bytes, whatever the pieces they come in; their SHA-256."""
    checksum = hashlib.sha256()
    left = num_bytes
    for whole in pieces:
        for begin in range(0, len(whole), PIECE_BYTES):
            piece = whole[begin : begin + min(left, PIECE_BYTES)]
            if not len(piece):
                break
            between()
            checksum.update(piece)
            connection.send_all([piece], Deadline(PIECE_S, f"sending {what}"))
            left -= len(piece)
        if not left:
            break
    if left:
        raise CustodyError(f"{what}: the file ends {left:,} bytes too early; was it changed meanwhile?")
    return checksum.hexdigest()


def receive(connection: Connection, fd: int, num_bytes: int, what: str) -> str:
    """Receive so many bytes into a file; their SHA-256. Where they cannot be written, the rest is received all the
    same, so that the sender can be told why: `OSError` after that."""
    checksum = hashlib.sha256()
    buffer = memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
    problem: OSError | None = None
    left = num_bytes
    while left:
        piece = buffer[: min(left, PIECE_BYTES)]
        connection.receive_all(piece, Deadline(PIECE_S, f"receiving {what}"))
        left -= len(piece)
        checksum.update(piece)
        if problem is None:
            try:
                _write(fd, piece)
            except OSError as error:
                problem = error
    if problem is not None:
        raise problem
    return checksum.hexdigest()


def _write(fd: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(fd, piece) :]
