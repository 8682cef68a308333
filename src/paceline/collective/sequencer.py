"""The single numbered sequence of a group's operations on one member, and what an error in one of them means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from paceline.collective.base import Operation
from paceline.collective.health import Health
from paceline.collective.lane import DONE, Handle, Lane
from paceline.collective.neighbourhood import MAX_SIGNATURE_BYTES
from paceline.collective.signature import Signature, encode
from paceline.errors import DeadlineExceeded, GroupError
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import name_of

_MAX_CACHED = 1024

Body = Callable[[Operation], None]


class Key(NamedTuple):
    """What an operation is, from its caller's arguments. A plain tuple of the same fields will do where time
    counts."""

    operation: str
    reduction: str = ""
    dtype: torch.dtype | None = None
    shape: Sequence[int] = ()
    root: int = -1
    algorithm: str = ""
    sizes: tuple[int, ...] = ()


class Sequencer:
    """Runs each operation in its turn, under a deadline, with a number and a signature that all members compare."""

    def __init__(self, health: Health, *, timeout_s: float) -> None:
        self._health = health
        self.timeout_s = timeout_s
        self._number = 0
        self._lane = Lane(f"paceline-{health.name}")
        self._signatures: dict[tuple[Any, ...], tuple[Signature, bytes, str]] = {}

    def operate(self, key: Key | tuple[Any, ...], body: Body, async_op: bool, timeout_s: float | None) -> Handle:
        signature, encoded, name = self._signatures.get(key) or self._sign(Key(*key))
        limit_s = self.timeout_s if timeout_s is None else timeout_s

        def job(may_spin: bool) -> None:
            if self._health.failure is not None:
                raise self._health.error(name)
            deadline = Deadline(limit_s, name)
            try:
                number = self._number = self._number + 1
                self._health.enter(number, signature)
                body(Operation(number, signature, encoded, deadline, may_spin))
            except GroupError:
                raise
            except BaseException as error:
                end_group(self._health, name, error)
                raise
            finally:
                self._health.leave()

        if async_op:
            return self._lane.submit(name, job)
        self._lane.run(name, job)
        return DONE

    def together(self, name: str, job: Callable[[], None], async_op: bool) -> Handle:
        """Run a job that operates, with no other operation between its own."""

        def whole(_: bool) -> None:
            if self._health.failure is not None:
                raise self._health.error(name)
            try:
                job()
            except GroupError:
                raise
            except BaseException as error:
                end_group(self._health, name, error)
                raise

        if async_op:
            return self._lane.submit(name, whole)
        self._lane.run(name, whole)
        return DONE

    def _sign(self, key: Key) -> tuple[Signature, bytes, str]:
        signature = Signature(
            key.operation,
            key.reduction,
            name_of(key.dtype) if key.dtype is not None else "",
            tuple(key.shape),
            key.root,
            key.algorithm,
            key.sizes,
        )
        encoded = encode(signature)
        if len(encoded) > MAX_SIGNATURE_BYTES:
            raise ValueError(
                f"{key.operation} over {len(signature.sizes)} sizes has a description that is too long to compare"
            )
        if len(self._signatures) >= _MAX_CACHED:
            self._signatures.clear()
        found = self._signatures[key] = (signature, encoded, str(signature))
        return found

    def disown(self) -> None:
        self._lane.disown()

    def close(self) -> None:
        self._lane.close()


def end_group(health: Health, operation: str, error: BaseException) -> None:
    """An operation that stopped halfway leaves members out of step: no later one could be right. If it stopped
    because the group was closed under it (by a signal handler, say), that is what its caller is told."""
    if health.failure is not None and isinstance(error, OSError | ValueError):
        raise health.error(operation) from error
    why = (
        str(error)
        if isinstance(error, DeadlineExceeded)
        else f"{operation} stopped with {type(error).__name__}: {error}"
    )
    health.fail("aborted", f"on {health.describe(health.rank)}, {why}", health.rank)


@contextlib.contextmanager
def ending_group(health: Health, operation: str) -> Iterator[None]:
    if health.failure is not None:
        raise health.error(operation)
    try:
        yield
    except GroupError:
        raise
    except BaseException as error:
        end_group(health, operation, error)
        raise
