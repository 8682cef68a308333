"""When a worker runs out of memory: how that is known, how much it computes at a time from then on, and what is given
back before it tries again."""

from __future__ import annotations

import gc

import torch

from paceline.errors import PacelineError

_SAID = ("can't allocate memory", "not enough memory", "out of memory")


_PATIENCE = 100  # steps that went well, before more is tried


class MemoryLimit:
    """`limit` is the most samples of one call, 0 for all. It is halved each time that memory does not suffice, and
    doubled after a number of steps in which it did: another process may have taken it for a while. Each time that more
    turns out to be too much, it takes twice as many steps until more is tried again."""

    def __init__(self) -> None:
        self.limit = 0
        self._num_good = 0
        self._has_risen = False  # and nothing is known of that yet
        self._patience = _PATIENCE

    def lower(self, error: Exception, tried: int, fewest: int) -> None:
        """So many at a time were too many. Not for ever: what does not fit alone will never."""
        if tried <= fewest:
            error.add_note(f"memory does not suffice for {tried} of this worker's samples at a time")
            raise error
        if self._has_risen:
            self._patience *= 2
            self._has_risen = False
        self.limit = max(fewest, tried // 2)
        self._num_good = 0

    def sufficed(self, samples: int) -> None:
        """For a step of so many samples."""
        self._has_risen = False
        if not self.limit:
            return
        self._num_good += 1
        if self._num_good >= self._patience:
            self._num_good = 0
            self._has_risen = True
            self.limit = self.limit * 2 if self.limit * 2 < samples else 0


def is_exhausted(error: BaseException) -> bool:
    """Whether an exception means that there was not enough memory, of whatever device."""
    if isinstance(error, PacelineError):
        return False  # shared memory, of which smaller pieces need as much
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no type of its own.
    return type(error) is RuntimeError and any(words in str(error) for words in _SAID)


def release(error: BaseException) -> None:
    """Let go of what the failed attempt held: its traceback keeps every frame, and with them the activations."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
