"""What a script on torch.distributed sees when something goes wrong: torch's own types, with our message.

    torch.distributed.DistBackendError
    ├── PeerLost        also paceline.errors.PeerLost: `member`, `rank`, `died`
    ├── Mismatch        also paceline.errors.Mismatch
    ├── Aborted         also paceline.errors.GroupAborted, GroupClosed
    ├── OutOfMemory     also paceline.errors.OutOfSharedMemory, MemoryError
    ├── TimedOut        also paceline.errors.DeadlineExceeded, TimeoutError
    └── WrongCall       also ValueError, TypeError: an argument; nothing was sent
    torch.distributed.DistStoreError
    └── StoreFailed     the store is gone, or somebody did not come to it (`store.torch_store`)
    torch.distributed.DistNetworkError
    └── Unreachable     a member could not be reached, or did not prove that it belongs here

So `except RuntimeError`, `except torch.distributed.DistBackendError` and `except paceline.errors.PeerLost` all work.
In an error that passes through a future of DDP only the message survives: torch makes it a RuntimeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from paceline import errors


class TorchPeerLost(errors.PeerLost, dist.DistBackendError):
    pass


class TorchMismatch(errors.Mismatch, dist.DistBackendError):
    pass


class Aborted(errors.GroupAborted, errors.GroupClosed, dist.DistBackendError):
    pass


class TimedOut(errors.DeadlineExceeded, dist.DistBackendError):
    pass


class OutOfMemory(errors.OutOfSharedMemory, dist.DistBackendError):
    pass


class WrongCall(ValueError, TypeError, dist.DistBackendError):
    pass


class Unreachable(dist.DistNetworkError):
    pass


def translate(error: BaseException) -> BaseException:
    """The same error as torch would have it; itself if it is none of ours."""
    if isinstance(error, dist.DistError):
        return error
    if isinstance(error, errors.PeerLost):
        return TorchPeerLost(str(error), member=error.member, rank=error.rank, died=error.died)
    if isinstance(error, errors.Mismatch):
        return TorchMismatch(str(error), is_internal=error.is_internal)
    if isinstance(error, errors.GroupError):
        return Aborted(str(error))
    if isinstance(error, errors.DeadlineExceeded):
        return TimedOut(f"{error} (the timeout of this group or call)")
    if isinstance(error, errors.OutOfSharedMemory):
        return OutOfMemory(str(error))
    if isinstance(error, errors.WireError):
        return Unreachable(str(error))
    if isinstance(error, ValueError | TypeError):
        return WrongCall(str(error))
    return error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        told = translate(error)
        if told is error:
            raise
        raise told.with_traceback(error.__traceback__) from None
