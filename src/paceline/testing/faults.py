"""Faults that a test injects: at a step of a script, at a declared point of the code, in the bits of a tensor.

At a step. What `kill`, `stop`, `slow` and `hold` make is called with the session, in the body of the loop or in the
loss function, and acts once, on one worker (or all):

    strike = faults.kill(worker=1, at_step=50)
    for batch in epoch:
        session.step(loss_fn, batch)
        strike(session)

At a point of the code (`paceline.fault_points`), until the end of a block or, with `arm`, of the process:

    with faults.full_disk(folder): ...
    with faults.traffic(faults.nth(7, faults.die)): ...     # at the seventh time that bytes are sent or received
    faults.arm(partial.NAMING, faults.nth(1, faults.die))   # before the next checkpoint has its name

In a tensor. `flip_bit` strikes in the steps of an optimizer; a replica of a model then differs by one bit:

    faults.flip_bit(optimizer, "gradient", at_step=5)

Processes are killed and stopped from outside by whoever started them (`Crew`, `Rehearsal`), hosts cut off by `Netlab`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from paceline.control.shell import client
from paceline.custody.partial import FREE_BYTES
from paceline.fault_points import FaultPoint
from paceline.testing.eventually import eventually
from paceline.wire import connection
from paceline.wire.card import THIS_HOST
from paceline.wire.memory import AVAILABLE_BYTES

if TYPE_CHECKING:
    import torch

    from paceline.train.session import Session

P = ParamSpec("P")
R = TypeVar("R")
Who = int | Literal["main", "all"]
Where = Literal["parameter", "optimizer", "gradient"]


# -- what a fault does -------------------------------------------------------------------------------------------------


def die() -> None:
    """As by `kill -9`: this process does nothing more."""
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    """Until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(error: BaseException) -> NoReturn:
    raise error


def be_busy(seconds: float) -> None:
    """Hold the interpreter's lock all the time: no other thread of this process runs."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        sum(range(10_000_000))  # one call of C


def nth(number: int, action: Callable[[], None]) -> Callable[..., None]:
    """An action that waits for its number-th call."""
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            action()

    return count


# -- at a step ---------------------------------------------------------------------------------------------------------


class StepFault:
    """Acts once, when this worker has done `at_step` steps. `worker` is the number that it has in its `Rehearsal`, and
    elsewhere its rank at that moment. With `once`, a file that is made then, it acts once in all processes: those that
    come later find the file. Can be pickled before it has acted."""

    def __init__(self, action: Callable[[], None], worker: Who, at_step: int, once: Path | None = None) -> None:
        self._action = action
        self._worker = worker
        self._at_step = at_step
        self._once = once
        self._is_done = False

    def __call__(self, session: Session) -> None:
        if self._is_done or session.steps != self._at_step or not self._hits(session):
            return
        self._is_done = True
        if self._once is not None:
            try:
                self._once.touch(exist_ok=False)
            except FileExistsError:
                return
        self._action()

    def _hits(self, session: Session) -> bool:
        if self._worker == "main":
            return session.is_main
        from paceline.testing import rehearsal

        number = rehearsal.worker_number() if rehearsal.is_here() else session.rank
        return self._worker in ("all", number)


def kill(*, worker: Who, at_step: int, once: Path | None = None) -> StepFault:
    return StepFault(die, worker, at_step, once)


def stop(*, worker: Who, at_step: int) -> StepFault:
    return StepFault(stand_still, worker, at_step)


def slow(*, worker: Who, at_step: int, seconds: float, is_busy: bool = False) -> StepFault:
    """It sleeps, or it `is_busy` with something that lets no other thread run."""
    return StepFault(partial(be_busy if is_busy else time.sleep, seconds), worker, at_step)


def hold(path: Path, *, at_step: int, worker: Who = "all") -> StepFault:
    """It waits for as long as there is a file of this name."""
    return StepFault(partial(wait_while, path), worker, at_step)


def wait_while(path: Path) -> None:
    eventually(lambda: not path.exists(), f"{path} is removed")


# -- at a point of the code --------------------------------------------------------------------------------------------


def arm(point: FaultPoint[P, R], action: Callable[P, R | None]) -> None:
    """For the rest of this process."""
    point.action = action


@contextlib.contextmanager
def armed(point: FaultPoint[P, R], action: Callable[P, R | None]) -> Iterator[None]:
    before = point.action
    point.action = action
    try:
        yield
    finally:
        point.action = before


@contextlib.contextmanager
def full_disk(folder: Path, free_bytes: int = 0) -> Iterator[None]:
    """Only so much is free in this folder and in those below it; files of other folders are written as ever."""
    with armed(FREE_BYTES, lambda path: free_bytes if path.is_relative_to(folder) else None):
        yield


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """The folder is a disk of this size ("16m") that can really be full (`fill`). `PermissionError` where it cannot be
    mounted: that needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "paceline", str(folder)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        raise PermissionError(f"cannot mount a small disk here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(filler: Path) -> Path:
    """Write this file until the disk is full, to the last byte; removing it makes room again."""
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass
    return filler


@contextlib.contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Only so much is available to this process, as far as it can see."""
    with armed(AVAILABLE_BYTES, lambda: num_bytes):
        yield


@contextlib.contextmanager
def on_host(name: str) -> Iterator[None]:
    """This process takes itself for one of another machine: it shares no memory with those of this one."""
    with armed(THIS_HOST, lambda: name):
        yield


@contextlib.contextmanager
def lost(kind: str, member: Callable[[str], bool] = lambda _: True) -> Iterator[None]:
    """What these members of this process say to the coordinator in messages of one kind never leaves them."""
    with armed(client.SAYING, lambda name, said: said == kind and member(name)):
        yield


@contextlib.contextmanager
def traffic(action: Callable[[int], None]) -> Iterator[None]:
    """Do this whenever bytes are about to be sent (so many) or received (0) on a connection that was made in this
    block. It may sleep, raise an OSError (the connection breaks) or end the process. TLS is left alone."""
    with armed(connection.OPENING, partial(_watched, action, 0)):
        yield


@contextlib.contextmanager
def damaged(least_bytes: int) -> Iterator[None]:
    """One bit of every piece of at least so many bytes changes on its way, on a connection that was made here."""
    with armed(connection.OPENING, partial(_watched, lambda _: None, least_bytes)):
        yield


def _watched(action: Callable[[int], None], damage_bytes: int, sock: socket.socket) -> socket.socket | None:
    return None if isinstance(sock, ssl.SSLSocket) else _WatchedSocket(sock, action, damage_bytes)


class _WatchedSocket(socket.socket):
    def __init__(self, sock: socket.socket, action: Callable[[int], None], damage_bytes: int) -> None:
        family, kind, number = sock.family, sock.type, sock.proto
        super().__init__(family, kind, number, fileno=sock.detach())
        self._action = action
        self._damage_bytes = damage_bytes

    def sendmsg(self, pieces: Sequence[memoryview], *others: Any) -> int:  # type: ignore[override]
        self._action(sum(map(len, pieces)))
        if self._damage_bytes:
            pieces = [_with_another_bit(one) if len(one) >= self._damage_bytes else one for one in pieces]
        return super().sendmsg(pieces, *others)

    def recv_into(self, *arguments: Any) -> int:
        self._action(0)
        return super().recv_into(*arguments)


def _with_another_bit(piece: memoryview) -> memoryview:
    """In the first byte: what is not sent at once is sent again as it is."""
    return memoryview(bytes([piece[0] ^ 1]) + piece[1:])


# -- in a tensor -------------------------------------------------------------------------------------------------------


def flip_bit(
    optimizer: torch.optim.Optimizer, where: Where, *, at_step: int, parameter: int = 0, element: int = 0, bit: int = 0
) -> None:
    """In one step of this optimizer, counted from 1 and from now on: in the reduced gradient before it, or in the
    parameter or the optimizer's state after it. Only the optimizer that itself makes the step can be hit: with
    parameters on servers that is one of a server."""
    strike = nth(at_step, lambda: _flip(optimizer, where, parameter, element, bit))
    register = optimizer.register_step_pre_hook if where == "gradient" else optimizer.register_step_post_hook
    register(lambda *_: strike())


def _flip(optimizer: torch.optim.Optimizer, where: Where, parameter: int, element: int, bit: int) -> None:
    chosen = [one for group in optimizer.param_groups for one in group["params"]][parameter]
    match where:
        case "gradient":
            flip(chosen.grad, element, bit)
        case "parameter":
            flip(chosen, element, bit)
        case "optimizer":
            flip(_state(optimizer, chosen), element, bit)


def _state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """What it keeps of as many elements as the parameter has; the first in order of names."""
    kept = sorted(optimizer.state[parameter].items())
    found: torch.Tensor = next(value for _, value in kept if getattr(value, "shape", None) == parameter.shape)
    return found


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """One bit of one element, where the tensor lies."""
    import torch

    width = 8 * tensor.element_size()
    if not 0 <= bit < width:
        raise ValueError(f"bit={bit}: an element of {tensor.dtype} has bits 0 to {width - 1}")
    as_bytes = tensor.detach().view(-1).view(torch.uint8)
    as_bytes[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
