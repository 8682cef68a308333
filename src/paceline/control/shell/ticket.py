"""How a started process learns of its run, and how a command of the same user finds it.

A `Ticket` holds what it takes to reach the coordinator, the run's secret included. It is handed to a child as an
inherited file descriptor whose number, not its content, stands in the environment; the child reads it once, and its
own children see neither. For commands of the same user the coordinator keeps `access.json` (mode 600) in the run's
folder for as long as it runs.

Invariant: the secret is never in an argument, never in the environment, never in a file that others may read, and
not in the `repr` of a ticket.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

VARIABLE = "PACELINE_TICKET_FD"
ACCESS_FILE = "access.json"

Body = TypeVar("Body")


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a run. `host` is where the coordinator runs, as `this_host` calls it: who is there too meets it at
    `local_name`, everybody else at `address`. `agent` is the id of the agent that started the holder, `capacity` how
    much its workers and servers are said to bear beside others, 0 if nothing was said. `guest` says that the holder's
    agent joined the run: then `folder` is that agent's own, and the run's is where the coordinator is. `replicas` is on
    how many servers each parameter is, `resumed` whether the run was gone on with by `--resume`."""

    run: str
    folder: str
    address: tuple[str, int]
    local_name: str
    host: str
    secret: bytes
    fingerprint: bytes
    tls: bool
    agent: str = ""
    capacity: float = 0.0
    guest: bool = False
    replicas: int = 1
    resumed: bool = False

    def __repr__(self) -> str:
        return f"Ticket(run={self.run!r}, address={self.address!r}, tls={self.tls})"


class Access(msgspec.Struct, frozen=True):
    """What `access.json` holds: the coordinator's process id and a ticket."""

    pid: int
    ticket: Ticket


# -- by descriptor ---------------------------------------------------------------------------------------------------


def hand_over(value: object) -> int:
    """A descriptor from which a child can read this value: give it to `Popen` as `pass_fds`, its number in the
    environment, and close it here when the child has started."""
    descriptor = os.memfd_create("paceline-ticket")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(msgspec.json.encode(value))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def environment_for(descriptor: int, variable: str = VARIABLE, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the child that is given this descriptor."""
    return {**base, variable: str(descriptor)}


def inherited() -> Ticket | None:
    """The ticket that whoever started this process handed over; None if there is none, or it was read before."""
    return take_inherited(VARIABLE, Ticket)


def take_inherited(variable: str, body_type: type[Body]) -> Body | None:
    """What was handed over under this variable, which is gone afterwards, as is the descriptor."""
    number = os.environ.pop(variable, None)
    if number is None:
        return None
    try:
        descriptor = int(number)
        with contextlib.suppress(OSError):  # a pipe has no beginning to go back to
            os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb") as file:
            return msgspec.json.decode(file.read(), type=body_type)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{variable}={number} does not lead to a {body_type.__name__} ({error}); it is set for processes that "
            "Paceline starts, and must not be set or kept by hand"
        ) from error


# -- by file ---------------------------------------------------------------------------------------------------------


def write_access(folder: Path, access: Access) -> None:
    """Atomic: a reader sees the old file, the new one or none."""
    draft = folder / f".{ACCESS_FILE}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(access))
        draft.replace(folder / ACCESS_FILE)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_access(folder: Path) -> Access:
    path = folder / ACCESS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Access)
    except FileNotFoundError as error:
        raise ValueError(
            f"no run is going on in {folder}: there is no {ACCESS_FILE}; check the folder, or start the run"
        ) from error
    except PermissionError as error:
        raise ValueError(f"{path} belongs to another user; only who started the run may command it") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); it is written by another version, or damaged") from error


def remove_access(folder: Path) -> None:
    (folder / ACCESS_FILE).unlink(missing_ok=True)
