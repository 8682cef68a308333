"""How parameters are cut: every element is in one range, and everybody cuts alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server import layout as layouts
from paceline.server.layout import RangeLayout, lay_out
from paceline.server.parcels import Partitions

Sizes = list[tuple[int, int, bool]]  # of each parameter: how many elements, in which group, whether in float64

sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


def cut(drawn: Sizes, *, has_tables: bool = False) -> tuple[RangeLayout, dict[str, torch.Tensor]]:
    parameters = {
        f"p{number}": torch.nn.Parameter(torch.zeros(size, dtype=torch.float64 if is_double else torch.float32))
        for number, (size, _, is_double) in enumerate(drawn)
    }
    groups: list[list[torch.Tensor]] = [[], [], []]
    for parameter, (_, group, _) in zip(parameters.values(), drawn, strict=True):
        groups[group].append(parameter)
    first = torch.optim.SGD([{"params": groups[0]}, {"params": groups[1]}], lr=0.1)
    optimizers: list[torch.optim.Optimizer] = [first]
    if groups[2]:
        optimizers.append(torch.optim.Adam(groups[2]))
    return lay_out(parameters, optimizers, has_tables=has_tables), dict(parameters)


@settings(max_examples=80, deadline=None)
@given(sizes, st.integers(5, 60), st.integers(60, 200))
def test_every_element_is_in_one_range_of_bounded_size(drawn: Sizes, fewest: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "FEWEST_ELEMENTS", fewest)
        patch.setattr(layouts, "MOST_ELEMENTS", most)
        found, parameters = cut(drawn)
        again, _ = cut(drawn)
    assert found.spans == again.spans
    assert found.weights == again.weights
    covered: set[tuple[int, int]] = set()
    for name, parameter in parameters.items():
        spans = found.spans_of(name)
        assert sum(length for _, _, length in spans) == parameter.numel()
        places = {(number, at) for number, start, length in spans for at in range(start, start + length)}
        assert not places & covered
        covered |= places
    for number, span in enumerate(found.spans):
        assert 0 < span.stop - span.start <= most
        assert {(number, at) for at in range(span.stop - span.start)} <= covered, "nothing but parameters"
    assert len(covered) == sum(parameter.numel() for parameter in parameters.values())
    itemsizes = [found.sections[span.section].dtype.itemsize for span in found.spans]
    assert found.weights == tuple(
        (span.stop - span.start) * size for span, size in zip(found.spans, itemsizes, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(sizes, st.data())
def test_a_part_of_a_parameter(drawn: Sizes, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "FEWEST_ELEMENTS", 17)
        found, parameters = cut(drawn)
    name = data.draw(st.sampled_from(sorted(parameters)))
    size = parameters[name].numel()
    stop = data.draw(st.integers(0, size))
    start = data.draw(st.integers(0, stop))
    whole = [(number, at) for number, first, length in found.spans_of(name) for at in range(first, first + length)]
    spans = found.spans_of(name, start, stop)
    part = [(number, at) for number, first, length in spans for at in range(first, first + length)]
    assert part == whole[start:stop]


def test_parts_that_are_none_and_names_that_nobody_has() -> None:
    found, _ = cut([(10, 0, False)])
    with pytest.raises(ValueError, match="p0 has 10 elements; 4 to 11 is no part of it"):
        found.spans_of("p0", 4, 11)
    with pytest.raises(ValueError, match="there is no parameter 'q'"):
        found.spans_of("q")


def test_a_parameter_in_no_optimizer_is_named() -> None:
    lost = torch.nn.Parameter(torch.zeros(2))
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"layer\.weight is trained, but in no optimizer"):
        lay_out({"layer.weight": lost}, [other], has_tables=False)


def test_tables_come_after_the_dense_ranges() -> None:
    found, _ = cut([(10, 0, False), (10, 1, False)], has_tables=True)
    assert found.partitions == Partitions(2, layouts.NUM_PARTITIONS)
    assert found.num_ranges == len(found.weights) == 2 + layouts.NUM_PARTITIONS
    assert [found.partitions.has(number) for number in (1, 2, 65, 66)] == [False, True, True, False]


@pytest.mark.parametrize("count", [1, 2, 64])
def test_ids_of_any_kind_are_spread_over_the_partitions(count: int) -> None:
    partitions = Partitions(5, count)
    for ids in (torch.arange(4096), torch.arange(4096) * 1024, torch.tensor([-(2**63), 2**63 - 1, 0, -1])):
        homes = partitions.of(ids)
        assert bool(((homes >= 5) & (homes < 5 + count)).all())
        if len(ids) > 4:
            assert homes.bincount(minlength=5 + count)[5:].max() < 3 * 4096 / count
