"""The random numbers under which a sample is fetched: they depend on (seed, epoch, sample) and on nothing else.

So augmentation gives the same sample whoever fetches it, in whichever batch, process or machine. Covered are the
global generators of Python (`random`), numpy (`np.random.*`) and torch on the CPU. A generator that a dataset makes for
itself is its own affair.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_for_sample(seed: int, epoch: int, index: int) -> None:
    """Set the global generators of this process. Use it inside `generators_kept`."""
    digest = hashlib.blake2b(b"paceline sample %d %d %d" % (seed, epoch, index), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    # Not torch.manual_seed, which costs a hundred times as much because it seeds all accelerators too.
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little"))


States = tuple[Any, Any, torch.Tensor]


def generator_states() -> States:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def have_drawn(before: States) -> bool:
    """Whether the global generators are not as they were."""
    of_python, of_numpy, of_torch = generator_states()
    return not (
        of_python == before[0] and all(map(np.array_equal, of_numpy, before[1])) and torch.equal(of_torch, before[2])
    )


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Put the global generators back to where they were, also after an error."""
    of_python, of_numpy, of_torch = generator_states()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
