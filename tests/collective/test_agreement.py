"""A new group comes to one cost model, whatever its members brought: what `auto` chooses is the same on all."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.collective import Group
from paceline.collective.agreement import Agreed, Course, agreed, decode_model, encode_model, fits, word_of
from paceline.collective.choice import CostModel, ModelShelf, candidates, hosts_of
from paceline.collective.signature import PROBE, Signature, chosen, is_own_fault
from paceline.errors import Mismatch
from paceline.testing.crew import Crew

SIZES = (1, 100, 5_000, 200_000)


def model_for(algorithms: tuple[str, ...], best: str) -> CostModel:
    """One that prefers an algorithm at every size."""
    return CostModel({name: ((1, 1e-6 if name == best else 1.0),) for name in algorithms})


# -- the decision -----------------------------------------------------------------------------------------------------


def decide(models: list[CostModel | None]) -> Agreed:
    size = len(models)
    words = [
        word_of(rank, size, encode_model(model) if model is not None else None) for rank, model in enumerate(models)
    ]
    return agreed([max(column) for column in zip(*words, strict=True)], size)


A, B = (model_for(("ring", "tree"), best) for best in ("ring", "tree"))


def test_nobody_has_a_model_so_all_probe() -> None:
    assert decide([None, None, None]) == Agreed(Course.PROBE)


def test_all_have_the_same_model_and_keep_it() -> None:
    assert decide([A, A, A]) == Agreed(Course.KEEP)


def test_the_lowest_rank_that_has_a_model_shows_it() -> None:
    assert decide([A, None]) == Agreed(Course.TAKE, 0, len(encode_model(A)))
    assert decide([None, B, A]) == Agreed(Course.TAKE, 1, len(encode_model(B)))
    assert decide([B, A, A]) == Agreed(Course.TAKE, 0, len(encode_model(B)))


@given(st.lists(st.sampled_from([None, A, B, model_for(("ring", "tree"), "none")]), min_size=2, max_size=40))
def test_whatever_members_bring_all_end_with_one_of_the_models_brought(models: list[CostModel | None]) -> None:
    course, source, num_bytes = decide(models)
    if course is Course.PROBE:
        assert models == [None] * len(models)
    elif course is Course.KEEP:
        assert models[0] is not None
        assert all(model == models[0] for model in models)
    else:
        shown = models[source]
        assert shown is not None
        assert all(model is None for model in models[:source])
        assert num_bytes == len(encode_model(shown))


def test_a_model_reads_back_and_nothing_else_does() -> None:
    assert decode_model(encode_model(A), ("tree", "ring")) == A
    for data in (b"", b"\xc1", encode_model(A)[:-1], encode_model(model_for(("direct",), "direct"))):
        with pytest.raises(ValueError, match="cost model"):
            decode_model(data, ("ring", "tree"))
    assert not fits(CostModel({"ring": (), "tree": ((1, 1.0),)}), ("ring", "tree"))


def test_a_member_remembers_a_model_for_each_kind_of_layout() -> None:
    shelf = ModelShelf()
    two_hosts, one_host = [[0], [1]], [[0, 1]]
    assert shelf.get(two_hosts) is None
    shelf.put(A)
    shelf.put(model_for(candidates(one_host), "direct"))
    assert shelf.get(two_hosts) == A
    shelf.put(B)
    assert shelf.get(two_hosts) == B


# -- real groups ------------------------------------------------------------------------------------------------------


def form_with(group: Group, best: list[str], name: str) -> Any:
    """Form another group; what each member brings is named by the algorithm it prefers, "" is nothing."""
    algorithms = candidates(hosts_of(group.cards))
    mine = model_for(algorithms, best[group.rank]) if best[group.rank] else None
    following = Group.form(
        group._parts.endpoint, group.cards, group.rank, name=name, model=mine, timeout_s=20.0, forming_s=20.0
    )
    with following:
        sums = []
        for size in SIZES:
            tensor = torch.full((size,), float(group.rank + 1))
            following.all_reduce(tensor)
            sums.append({float(tensor.min()), float(tensor.max())})
        chose = {following.model.choose(4 * size) for size in SIZES}
        following.barrier()
        return following.model, chose, sums


@pytest.mark.parametrize(
    ("layout", "best", "expected"),
    [
        ("ab", ["ring", "tree"], {"ring"}),
        ("ab", ["tree", ""], {"tree"}),
        ("ab", ["", "ring"], {"ring"}),
        ("abc", ["", "tree", "ring"], {"tree"}),
        ("abc", ["ring", "ring", "ring"], {"ring"}),
        ("aabb", ["ring", "hierarchical", "tree", ""], {"ring"}),
        ("aab", ["", "", "hierarchical"], {"hierarchical"}),
        ("abcde", ["", "", "", "", ""], None),
    ],
)
def test_members_with_different_models_end_with_the_same(
    layout: str, best: list[str], expected: set[str] | None
) -> None:
    total = float(sum(range(1, len(layout) + 1)))
    with Crew(len(layout), hosts=layout) as crew:
        for again in range(2):
            found = crew.run(form_with, best, f"again{again}")
            models = [model for model, _, _ in found]
            assert all(model == models[0] for model in models)
            for _, chose, sums in found:
                assert chose == expected or expected is None
                assert sums == [{total}] * len(SIZES)


def choose_otherwise(group: Group) -> Any:
    """The last rank's model is exchanged behind the group's back."""
    algorithms = candidates(group.hosts)
    group._reducer.model = model_for(algorithms, "ring" if group.rank == group.size - 1 else "tree")
    errors = []
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(1000))
        except Mismatch as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize("layout", ["ab", "abc", "aab"])
def test_members_that_choose_differently_are_told_and_the_script_is_not_blamed(layout: str) -> None:
    with Crew(len(layout), hosts=layout) as crew:
        for errors in crew.run(choose_otherwise):
            assert errors
            for error in errors:
                assert "auto=ring" in str(error)
                assert "auto=tree" in str(error)
                assert "fault of Paceline" in str(error)
                assert "every member must call" not in str(error)
                assert error.is_internal


def test_what_only_a_group_itself_does_is_never_the_scripts_fault() -> None:
    reduced = Signature("all_reduce", "sum", "float32", (4,), -1, chosen("ring"))
    assert is_own_fault(reduced, Signature("all_reduce", "sum", "float32", (4,), -1, chosen("tree")))
    assert is_own_fault(reduced, Signature(PROBE, "max", "float32", (256,), -1, "ring"))
    assert not is_own_fault(reduced, Signature("all_reduce", "sum", "float32", (5,), -1, chosen("tree")))
    assert not is_own_fault(reduced, Signature("all_reduce", "sum", "float32", (4,), -1, "ring"))
    assert not is_own_fault(reduced, Signature("barrier", "", "", ()))


def test_an_internal_mismatch_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(Mismatch("both sides", is_internal=True)))
    assert again.is_internal
    assert str(again) == "both sides"
