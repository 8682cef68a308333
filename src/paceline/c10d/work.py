"""An operation under way, as torch sees it: `TorchWork` and its future.

`wait` blocks its caller. The future is completed, and callbacks on it called, by a thread that is there for nothing
else, so they may wait for further operations. A failure reaches who waits as an error of `paceline.c10d.errors`. C++
(DDP's reducer) only sees the future; for it a failure must be one of the future itself, and the only way to that from
Python is a callback that raises, so every future is the child of one that is set when the operation ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.c10d import callbacks
from paceline.c10d.calling import seconds
from paceline.c10d.errors import translate, translated
from paceline.collective import Handle

Tensors = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


_Base: Any = dist.Work  # its stubs want other names for what C++ calls by these


class TorchWork(_Base):  # type: ignore[misc]
    def __init__(self, handle: Handle, tensors: Tensors) -> None:
        super().__init__()
        self._handle = handle
        self._tensors = tensors
        self._future: torch.futures.Future[Tensors] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with translated():
            self._handle.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Tensors]:
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            self._future = ended.then(self._deliver)
            if self._handle.done():
                ended.set_result(None)
            else:
                self._handle.add_done_callback(lambda _: callbacks.run(lambda: ended.set_result(None)))
        return self._future

    def _deliver(self, _: object) -> Tensors:
        self.wait()
        return self._tensors

    def is_completed(self) -> bool:
        return self._handle.done()

    def is_success(self) -> bool:
        return self._handle.done() and self._handle.error() is None

    def exception(self) -> BaseException | None:
        error = self._handle.error() if self._handle.done() else None
        return None if error is None else translate(error)

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return int(getattr(self._handle, "source", -1))

    _source_rank = source_rank
