"""The fingerprint tells different data apart and is the same for the same data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.data.dataset import fingerprint
from tests.data.samples import Augmented


@dataclass
class Pair:
    x: torch.Tensor
    y: int


Point = namedtuple("Point", "x y")


class Opaque:
    pass


class Picture:
    """Like an image of a library that is not known here."""

    def __init__(self, value: int) -> None:
        self.kept = np.full((2, 2), value, dtype=np.uint8)
        self.__array_interface__ = self.kept.__array_interface__


SAMPLES: list[tuple[Any, Any]] = [
    (1, 2),
    (1, True),
    (1.0, 1.5),
    (None, 0),
    ("a", "b"),
    (b"a", b"b"),
    ("a", b"a"),
    ((1, 2), (2, 1)),
    ((1, 2), [1, 2]),
    (("ab", "c"), ("a", "bc")),
    (([1], [2, 3]), ([1, 2], [3])),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({1, 2}, {1, 3}),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.tensor(1.0), torch.tensor(2.0)),
    (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)),
    (torch.tensor([1j]).conj(), torch.tensor([1j])),
    (np.zeros(2), np.ones(2)),
    (np.float32(1), np.float32(2)),
    (np.array(["a", 1], dtype=object), np.array(["a", 2], dtype=object)),
    (Point(1, 2), Point(1, 3)),
    (Pair(torch.zeros(1), 1), Pair(torch.ones(1), 1)),
    (Picture(1), Picture(2)),
    (Opaque(), object()),
]


@pytest.mark.parametrize(("one", "other"), SAMPLES, ids=range(len(SAMPLES)))
def test_differs_where_a_sample_differs(one: Any, other: Any) -> None:
    assert fingerprint([one]) == fingerprint([one])
    assert fingerprint([one]) != fingerprint([other])


def test_unknown_objects_count_by_their_type() -> None:
    assert fingerprint([Opaque()]) == fingerprint([Opaque()])


def test_the_order_of_a_dictionary_and_the_layout_of_a_tensor_do_not_count() -> None:
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    square = torch.arange(4.0).reshape(2, 2)
    assert fingerprint([square]) == fingerprint([square.t().contiguous().t()])


def test_length_and_type_count() -> None:
    assert len({fingerprint(dataset) for dataset in ([0] * 5, [0] * 6, (0,) * 5)}) == 3


def test_looks_at_both_ends_of_a_large_dataset() -> None:
    plain = torch.zeros(1000)
    found = {fingerprint(TensorDataset(plain))}
    for index in (0, 999):
        changed = plain.clone()
        changed[index] = 1
        found.add(fingerprint(TensorDataset(changed)))
    assert len(found) == 3


def test_augmented_data_has_one_fingerprint_and_leaves_the_generators_alone() -> None:
    state = torch.get_rng_state()
    fingerprints = {fingerprint(Steady()) for _ in range(3)}
    assert len(fingerprints) == 1
    assert torch.equal(state, torch.get_rng_state())
    assert fingerprint(Steady(), seed=1) not in fingerprints


class Steady(Augmented):
    """Without the process id."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "drawn": super().__getitem__(index)["drawn"]}


def test_is_the_same_in_every_process() -> None:
    script = "from paceline.data.dataset import fingerprint; print(fingerprint([{'a', 'b'}, {'x': 1.5, 'y': [None]}]))"
    path = os.pathsep.join(filter(None, sys.path))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    try:
        found = {process.communicate(timeout=60)[0].strip() for process in started}
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0]
    assert found == {fingerprint([{"a", "b"}, {"x": 1.5, "y": [None]}])}
