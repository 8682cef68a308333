"""Descriptors handed to another process of this host over a Unix socket. That it works is what "same host" means."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from paceline.errors import ConnectionLost, ProtocolError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import Fd, creating
from paceline.wire.waiting import READ, WRITE

_MARK = b"F"
_NUMBER = struct.Struct("i")


def send_descriptors(connection: Connection, descriptors: Sequence[Fd], deadline: Deadline) -> None:
    connection.waiter.wait_any([(connection.fileno(), WRITE)], deadline, f"{connection.peer} to take descriptors")
    try:
        socket.send_fds(connection.socket, [_MARK], [owner.fileno() for owner in descriptors])
    except OSError as error:
        raise ConnectionLost(f"{connection.peer} left while descriptors were handed over: {error}") from error


def receive_descriptors(connection: Connection, count: int, deadline: Deadline) -> list[Fd]:
    connection.waiter.wait_any([(connection.fileno(), READ)], deadline, f"descriptors of {connection.peer}")
    try:
        with creating:
            # Not `socket.recv_fds`, which drops the flags that it is given.
            mark, ancillary, flags, _ = connection.socket.recvmsg(
                len(_MARK), socket.CMSG_LEN(count * _NUMBER.size), socket.MSG_CMSG_CLOEXEC
            )
            received = [
                Fd(number)
                for level, kind, data in ancillary
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
                for (number,) in _NUMBER.iter_unpack(data)
            ]
    except OSError as error:
        raise ConnectionLost(f"{connection.peer} left while descriptors were handed over: {error}") from error
    if not mark:
        raise ConnectionLost(f"{connection.peer} left before it handed over its descriptors")
    if mark != _MARK or len(received) != count or flags & socket.MSG_CTRUNC:
        raise ProtocolError(
            f"{connection.peer} handed over other than {count} descriptors ({len(received)} arrived); "
            f"are its or our open files at their limit ({os.sysconf('SC_OPEN_MAX')})?"
        )
    return received
