"""Training state as JSON and tensors: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import tree


def through_json(value: Any) -> Any:
    document, tensors = tree.flatten(value)
    return tree.unflatten(json.loads(json.dumps(document, allow_nan=False)), tensors)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value all the way down, with NaN equal to itself and the zeros told apart."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(mine, theirs) and same(one[mine], other[theirs]) for mine, theirs in zip(one, other, strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return values


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(st.characters()), st.binary()
)
keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
tensors = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 100).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]),
)
arrays = st.builds(
    lambda shape, dtype: (np.random.rand(*shape) * 100).astype(dtype),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.sampled_from(["<f4", ">f8", "<i8", "|b1", "<c16", "<U7", "<f2", "|S9", "<u4"]),
)
leaves = st.one_of(
    scalars,
    tensors,
    arrays,
    arrays.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    st.sets(keys, max_size=3),
    st.frozensets(keys, max_size=3),
    st.sampled_from([torch.float32, torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu")]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=20,
)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(through_json(value), value)


KINDS = ["map", "dict", "tuple", "set", "frozenset", "tensor", "array", "scalar", "size", "dtype", "device"]
KINDS += ["int", "float", "bytes", "complex"]
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.dictionaries(
            st.sampled_from(KINDS),
            inner,
            min_size=1,
            max_size=1,
        ),
    ),
    max_leaves=12,
)


@given(documents)
@settings(max_examples=300, deadline=None)
def test_any_document_is_a_tree_or_a_value_error(document: Any) -> None:
    with contextlib.suppress(ValueError):
        found = tree.unflatten(document, {"a": torch.zeros(8, dtype=torch.uint8)})
        assert not callable(found) or isinstance(found, torch.dtype)


@pytest.mark.parametrize(
    "document",
    [
        {"array": ["a", "|O8", [1]]},
        {"array": ["a", "<f4", [3]]},
        {"array": ["a", "<f4,<f4", [1]]},
        {"array": ["missing", "<f4", [2]]},
        {"scalar": ["|O8", "AAAAAAAAAAA="]},
        {"tensor": "missing"},
        {"tensor": ["a"]},
        {"dtype": "torch.load"},
        {"device": "no such device"},
        {"dict": [[{"map": {}}, 1]]},
        {"dict": [[1]]},
        {"set": [[1]]},
        {"size": [-1]},
        {"float": "1e5"},
        {"reduce": ["os.system", ["true"]]},
        {"map": {}, "dict": []},
        {},
    ],
)
def test_a_hostile_document_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="the document"):
        tree.unflatten(document, {"a": torch.zeros(8, dtype=torch.uint8)})


@pytest.mark.parametrize("kind", ["list", "tuple", "map", "key"])
def test_a_deep_document_is_refused(kind: str) -> None:
    document: Any = 1
    for _ in range(5000):
        document = (
            [document] if kind == "list" else {"map": {"a": document}} if kind == "map" else {"tuple": [document]}
        )
    with pytest.raises(ValueError, match="nested deeper than 100"):
        tree.unflatten({"dict": [[document, 1]]} if kind == "key" else document, {})


def test_a_tree_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="does it hold itself"):
        tree.flatten({"state": loop})


def test_the_deepest_tree_that_is_written_is_read() -> None:
    value: Any = ()
    for _ in range(tree.MAX_DEPTH - 2):
        value = [value]
    assert same(through_json({("a", (1,)): value}), {("a", (1,)): value})


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Config(dict[str, int]):
    pass


def helper() -> None: ...


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"schedule": {"lr_lambdas": [helper]}},
            r"schedule\.lr_lambdas\[0\]: a function cannot be saved; .*make it again",
        ),
        ({"a": {0: [Colour.RED]}}, r"a\[0\]\[0\]: a member of the enum Colour .* \.value"),
        ({"p": Point(1)}, r"p: a named tuple \(Point\) .*_asdict"),
        ({"c": Config()}, r"c: a Config cannot be saved"),
        ({"m": torch.nn.Linear(1, 1)}, r"m: a Linear cannot be saved; save its state_dict"),
        ({"s": torch.eye(2).to_sparse()}, r"s: a tensor of the layout .*to_dense"),
        ({"e": torch.empty(2, device="meta")}, r"e: a tensor on the meta device"),
        ({"o": np.array([None])}, r"o: numpy values of type object"),
        ({"r": np.zeros(1, dtype=[("a", "<f4")])}, r"r: numpy values of type"),
        ({np.int64(3): 1}, r"the key np\.int64\(3\) of the state: a int64 cannot be a key"),
        ({"x": {frozenset(): 1}}, r"the key frozenset\(\) of x"),
        ({"x": {(1, torch.zeros(1)): 1}}, r"of x: a Tensor cannot be a key"),
        (object(), r"the state: a object cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tree.flatten(value)


def test_dicts_of_other_kinds_come_back_as_dicts() -> None:
    value = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "counter": collections.Counter("aab"),
    }
    assert same(through_json(value), {"ordered": {"b": 1, "a": 2}, "default": {1: [2]}, "counter": {"a": 2, "b": 1}})


def test_one_tensor_stays_one() -> None:
    base = torch.arange(6.0)
    view = base.view(2, 3)
    value = {"a": base, "b": base, "alias": base.view(6), "other view": view, "turned": view.t()}
    _, tensors = tree.flatten(value)
    assert sorted(tensors) == ["a", "other view", "turned"]
    found = through_json(value)
    assert found["a"] is found["b"] is found["alias"]
    assert found["turned"].equal(view.t())


def test_empty_tensors_and_conjugates_are_not_taken_for_each_other() -> None:
    numbers = torch.tensor([1 + 2j])
    value = [torch.empty(0), torch.empty(0), numbers, numbers.conj()]
    _, tensors = tree.flatten(value)
    assert len(tensors) == 4


def test_names_that_would_be_equal_are_told_apart() -> None:
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "__metadata__": torch.tensor(3), 0: None}
    del value[0]
    _, tensors = tree.flatten(value)
    assert sorted(tensors) == ["__metadata__#2", "a.b", "a.b#2"]
    assert same(through_json(value), value)


def test_the_state_of_an_optimizer_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "legacy": np.random.get_state(),
        "best": math.inf,
    }
    found = through_json(state)
    assert same(found, state)
    optimizer.load_state_dict(found["optimizer"])
