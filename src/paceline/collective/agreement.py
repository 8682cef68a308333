"""How the members of a new group come to one cost model, whatever each of them brought along.

Survivors of older groups bring models, a newcomer brings none, and two survivors may bring different ones. All put a
word about theirs into one small reduction; nobody leaves it before everybody has come, so it is the barrier that ends
the forming too. What follows is a pure function of the result, so it follows on all members or on none:

    KEEP     all have the same model
    TAKE     the member with the lowest rank that has one shows its model to the others
    PROBE    nobody has one: all measure together

No member acts on a model that the others do not have.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paceline.collective.choice import CostModel
from paceline.wire.decoding import decode

MAX_MODEL_BYTES = 1 << 16
_RANK_SHIFT = 32
_NONE = -1

Word = tuple[int, int, int]


class Course(enum.Enum):
    """What all members of a group do next to have the same model."""

    KEEP = "keep"
    TAKE = "take"
    PROBE = "probe"


class Agreed(NamedTuple):
    """`source` is the rank whose model is taken, in `num_bytes`."""

    course: Course
    source: int = -1
    num_bytes: int = 0


def encode_model(model: CostModel) -> bytes:
    return msgspec.msgpack.encode(model, order="sorted")


def decode_model(data: bytes, algorithms: Sequence[str]) -> CostModel:
    """A model of just these algorithms; `ValueError` for anything else."""
    try:
        model = decode(data, CostModel)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"what was shown as a cost model is none: {error}") from error
    if not fits(model, algorithms):
        raise ValueError(f"a cost model of {sorted(model.points)} was shown where {sorted(algorithms)} can be chosen")
    return model


def fits(model: CostModel, algorithms: Sequence[str]) -> bool:
    """Whether a model can choose among exactly these algorithms."""
    return set(model.points) == set(algorithms) and all(model.points.values())


def word_of(rank: int, size: int, encoded: bytes | None) -> Word:
    """What a member says of its model; of all words the largest numbers count, place by place."""
    if encoded is None or len(encoded) > MAX_MODEL_BYTES:
        return (0, _NONE, -_NONE)
    digest = int.from_bytes(hashlib.sha256(encoded).digest()[:7], "little")
    return ((size - rank) << _RANK_SHIFT | len(encoded), digest, -digest)


def agreed(largest: Sequence[int], size: int) -> Agreed:
    """What follows from the largest of all words."""
    first, digest, negated = largest
    if first == 0:
        return Agreed(Course.PROBE)
    if digest == -negated:
        return Agreed(Course.KEEP)
    return Agreed(Course.TAKE, size - (first >> _RANK_SHIFT), first & ((1 << _RANK_SHIFT) - 1))
