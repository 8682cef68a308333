"""What a benchmark measures: sizes, contenders and how often. Nothing here starts a process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.cli.bench.errors import BadInput

ALGORITHMS = ("auto", "direct", "ring", "tree", "hierarchical")
TENSORS = ("arena", "ordinary")
PACELINE = "paceline"
GLOO = "gloo"
SIZES = "1KB,64KB,1MB,16MB,100MB"
NONE = "none"
FLOAT32_BYTES = 4
# Up to here the filled-in numbers of all ranks have a sum that float32 holds exactly.
MAX_RANKS = 64
NUM_WARMUPS = 3

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
# (up to so many bytes, iterations): small operations vary more and cost less.
_ITERATIONS = ((16 * 2**10, 300), (256 * 2**10, 200), (4 * 2**20, 100), (32 * 2**20, 21))
_ITERATIONS_BEYOND = 7


@dataclass(frozen=True)
class Contender:
    """One line of the table. A peer has one choice each: its own algorithm, on ordinary memory."""

    library: str
    algorithm: str = "default"
    tensors: str = "ordinary"

    @property
    def label(self) -> str:
        if self.library == PACELINE:
            return f"{PACELINE} {self.algorithm}, {self.tensors}"
        return self.library


@dataclass(frozen=True, kw_only=True)
class AllReducePlan:
    """All that decides a run, checked."""

    num_ranks: int
    num_rounds: int
    num_threads: int
    sizes: tuple[int, ...]
    contenders: tuple[Contender, ...]

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            raise BadInput(f"--ranks {self.num_ranks}: give a number from 2 to {MAX_RANKS}")
        if self.num_rounds < 1:
            raise BadInput(f"--rounds {self.num_rounds}: give 1 or more")
        if self.num_threads < 1:
            raise BadInput(f"--threads {self.num_threads}: give 1 or more")
        if not self.sizes:
            raise BadInput("--sizes is empty: give sizes such as 1KB,64KB,1MB")
        if not self.contenders:
            raise BadInput("nothing to measure: name an algorithm with --algorithms, or another library beside it")

    @property
    def libraries(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(contender.library for contender in self.contenders))


def parse_size(text: str) -> int:
    """The bytes of '64KB', '1MB', '512B'; 1 KB is 1024 bytes."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?B)", text.strip(), flags=re.IGNORECASE | re.ASCII)
    if found is None:
        raise BadInput(f"--sizes: '{text}' is not a size; write it like 512B, 64KB, 1MB or 2GB")
    num_bytes = int(found[1]) * _UNITS[found[2].upper()]
    if num_bytes == 0 or num_bytes % FLOAT32_BYTES:
        raise BadInput(f"--sizes: '{text}' is not a whole number of float32; give a multiple of 4 bytes above 0")
    return num_bytes


def format_size(num_bytes: int) -> str:
    for unit, factor in reversed(_UNITS.items()):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    raise AssertionError("every size is a multiple of 1 byte")


def parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_size(part) for part in _split(text)))


def parse_names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names in 'a,b' without repeats, each one of `known`; 'none' stands for the empty choice."""
    names = tuple(dict.fromkeys(_split(text)))
    if names == (NONE,):
        return ()
    for name in names:
        if name not in known:
            raise BadInput(f"{option}: '{name}' is unknown; choose from {', '.join(known)}")
    if not names:
        raise BadInput(f"{option} is empty; choose from {', '.join(known)}")
    return names


def contenders_of(algorithms: Sequence[str], tensors: Sequence[str], peers: Sequence[str]) -> tuple[Contender, ...]:
    ours = [Contender(PACELINE, algorithm, kind) for algorithm in algorithms for kind in tensors]
    return (*ours, *(Contender(peer) for peer in peers))


def num_iterations(num_bytes: int) -> int:
    return next((count for limit, count in _ITERATIONS if num_bytes <= limit), _ITERATIONS_BEYOND)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
