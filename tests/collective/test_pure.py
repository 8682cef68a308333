"""The decisions of the collectives that are pure functions: cuts, orders, trees, the choice of an algorithm."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collective.base import bounds, spans
from paceline.collective.choice import CostModel, candidates, possible
from paceline.collective.linked import binomial, chain
from paceline.collective.links import ring_order
from paceline.collective.signature import Signature, decode, encode


@given(st.integers(0, 10**9), st.integers(1, 100))
def test_bounds_cut_everything_into_nearly_equal_parts(num: int, parts: int) -> None:
    cut = bounds(num, parts)
    assert cut[0][0] == 0
    assert cut[-1][1] == num
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cut))
    sizes = [high - low for low, high in cut]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 10**4), st.integers(0, 10**4), st.integers(1, 500))
def test_spans_cover_a_range_in_order(start: int, length: int, step: int) -> None:
    cut = spans(start, start + length, step)
    assert [k for low, high in cut for k in range(low, high)] == list(range(start, start + length))
    assert all(high - low <= step for low, high in cut)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=30))
def test_a_ring_visits_each_host_once(hosts: list[str]) -> None:
    order = ring_order(hosts)
    assert sorted(order) == list(range(len(hosts)))
    visited = [hosts[rank] for rank in order]
    changes = sum(a != b for a, b in zip(visited, visited[1:] + visited[:1], strict=True))
    assert changes == (len(set(hosts)) if len(set(hosts)) > 1 else 0)


@pytest.mark.parametrize("shape", [binomial, chain])
@given(num=st.integers(1, 200))
def test_trees_reach_everybody_once(shape: object, num: int) -> None:
    assert callable(shape)
    parents = {}
    for position in range(num):
        parent, children = shape(position, num)
        assert (parent is None) == (position == 0)
        for child in children:
            assert child not in parents
            parents[child] = position
            assert shape(child, num)[0] == position
    assert sorted(parents) == list(range(1, num))


@given(num=st.integers(1, 1000))
def test_a_binomial_tree_is_as_deep_as_its_logarithm(num: int) -> None:
    for position in range(num):
        depth, at = 0, position
        while (parent := binomial(at, num)[0]) is not None:
            at, depth = parent, depth + 1
        assert depth <= (num - 1).bit_length()


POINTS = st.lists(
    st.tuples(st.integers(1, 10**8), st.floats(1e-6, 10.0)), min_size=1, max_size=6, unique_by=lambda p: p[0]
)


@given(POINTS, st.integers(0, 10**9))
def test_a_prediction_stays_between_what_was_measured_around_it(
    points: list[tuple[int, float]], num_bytes: int
) -> None:
    ordered = tuple(sorted(points))
    predicted = CostModel({"x": ordered}).predict_s("x", num_bytes)
    around = [s for _, s in ordered]
    assert predicted >= min(around) * (1 - 1e-9)
    if num_bytes <= ordered[-1][0]:
        assert predicted <= max(around) * (1 + 1e-9)


def test_the_choice_changes_where_the_lines_cross() -> None:
    model = CostModel({"ring": ((1000, 1e-3), (1_000_000, 2e-3)), "tree": ((1000, 1e-4), (1_000_000, 2e-2))})
    assert model.choose(10) == "tree"
    assert model.choose(20_000) == "tree"
    assert model.choose(500_000) == "ring"
    assert model.choose(10**9) == "ring"


def test_what_is_measured_can_be_done() -> None:
    for hosts in ([[0, 1]], [[0], [1]], [[0, 1], [2]]):
        assert set(candidates(hosts)) <= set(possible(hosts))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_signature_or_none(data: bytes) -> None:
    decoded = decode(data)
    assert decoded is None or isinstance(decoded, Signature)


def test_text_that_is_not_utf8_is_no_signature() -> None:
    encoded = encode(Signature("all_reduce", "sum", "float32", (1,)))
    assert decode(encoded.replace(b"sum", b"\xff\xff\xff")) is None


def test_a_signature_reads_like_the_call() -> None:
    signature = Signature("all_reduce", "sum", "float32", (2, 3), -1, "ring")
    assert str(signature) == "all_reduce(float32[2, 3], sum, ring)"
    assert decode(encode(signature)) == signature
