"""The cursor: how many samples of an epoch's order have been committed.

An epoch of `length` samples is taken in global batches; the last one is smaller where the length is no multiple. An
epoch ends when position == length, and the cursor stays there until the next epoch is begun, at (epoch + 1, 0).
"""

from __future__ import annotations

import msgspec


class Cursor(msgspec.Struct, frozen=True):
    """`position` samples of epoch `epoch` are done."""

    epoch: int
    position: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise ValueError(f"epoch={self.epoch}, position={self.position}: a cursor counts from 0")


def advance(cursor: Cursor, count: int, length: int) -> Cursor:
    """The cursor after `count` more samples of an epoch of `length`."""
    position = cursor.position + count
    if count < 0 or position > length:
        raise ValueError(
            f"cannot move by {count} samples from position {cursor.position} of epoch {cursor.epoch}, "
            f"which has {length}"
        )
    return Cursor(cursor.epoch, position)


def is_finished(cursor: Cursor, length: int) -> bool:
    """Whether the cursor stands at the end of its epoch."""
    return cursor.position == length


def next_epoch(cursor: Cursor, length: int) -> Cursor:
    """The beginning of the next epoch; only from the end of this one, so that no sample is lost."""
    if not is_finished(cursor, length):
        raise ValueError(f"epoch {cursor.epoch} is at position {cursor.position} of {length}; finish it first")
    return Cursor(cursor.epoch + 1, 0)


def batch_size(position: int, global_batch: int, length: int) -> int:
    """How many samples the global batch that begins at `position` has; 0 at the end of the epoch."""
    _check_batch(global_batch)
    if not 0 <= position <= length:
        raise ValueError(f"position={position} is not within an epoch of {length} samples")
    return min(global_batch, length - position)


def num_steps(length: int, global_batch: int) -> int:
    """How many global batches an epoch has."""
    _check_batch(global_batch)
    return -(-length // global_batch)


def _check_batch(global_batch: int) -> None:
    if global_batch < 1:
        raise ValueError(f"global_batch={global_batch}: a batch has 1 sample or more")
