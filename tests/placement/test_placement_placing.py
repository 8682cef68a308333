"""Where the ranges should be: on distinct servers and hosts, evenly, and mostly where they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.placement.placing import Homes, Site, place

NUM_EACH = 16  # ranges a server: from there on the loads are even
MANY = settings(max_examples=40, deadline=None)


@st.composite
def sites(draw: st.DrawFn, fewest: int = 1) -> dict[str, Site]:
    hosts = draw(st.lists(st.sampled_from("xyz"), min_size=fewest, max_size=5))
    return {f"s{number}": Site(draw(st.sampled_from([0.5, 1.0, 2.0])), host) for number, host in enumerate(hosts)}


def weights_for(sites: dict[str, Site], pick: list[int]) -> list[float]:
    """Enough ranges for all servers, also for the weakest."""
    smallest = min(site.capacity for site in sites.values()) / sum(site.capacity for site in sites.values())
    count = round(NUM_EACH / smallest)
    return [float(pick[number % len(pick)]) for number in range(count)]


def moved(before: list[Homes], after: list[Homes]) -> int:
    return sum(one[0] != other[0] for one, other in zip(before, after, strict=True))


WEIGHTS = st.lists(st.integers(1, 4), min_size=1, max_size=7)


@MANY
@given(sites(), WEIGHTS, st.integers(1, 3))
def test_every_range_has_one_primary_and_its_backups_on_other_servers(
    group: dict[str, Site], pick: list[int], num_replicas: int
) -> None:
    for homes in place([float(weight) for weight in pick], group, num_replicas):
        assert len(homes) == min(num_replicas, len(group))
        assert len(set(homes)) == len(homes)
        assert group.keys() >= set(homes)


@MANY
@given(sites(), WEIGHTS, st.integers(2, 3))
def test_backups_are_on_other_hosts_while_there_are_some(
    group: dict[str, Site], pick: list[int], num_replicas: int
) -> None:
    num_hosts = len({site.host for site in group.values()})
    for homes in place([float(weight) for weight in pick], group, num_replicas):
        assert len({group[home].host for home in homes}) == min(num_hosts, len(homes))


@MANY
@given(sites(fewest=2), WEIGHTS, st.integers(2, 3))
def test_backups_go_to_another_host_when_one_comes(group: dict[str, Site], pick: list[int], num_replicas: int) -> None:
    """Also those that have been with their primary on the only host that there was."""
    weights = [float(weight) for weight in pick]
    first = {name: site for name, site in group.items() if site.host == group["s0"].host}
    before = place(weights, first, num_replicas)
    after = place(weights, group, num_replicas, before)
    num_hosts = len({site.host for site in group.values()})
    for homes in after:
        assert len({group[home].host for home in homes}) == min(num_hosts, len(homes))
    assert place(weights, group, num_replicas, after) == after


@MANY
@given(sites(), WEIGHTS)
def test_each_server_has_its_part(group: dict[str, Site], pick: list[int]) -> None:
    weights = weights_for(group, pick)
    homes = place(weights, group, 1)
    total = sum(site.capacity for site in group.values())
    for name, site in group.items():
        load = sum(weight for weight, home in zip(weights, homes, strict=True) if home[0] == name)
        part = sum(weights) * site.capacity / total
        assert abs(load - part) <= max(0.1 * part, max(weights))


@MANY
@given(sites(fewest=2), WEIGHTS, st.integers(1, 3))
def test_the_same_input_gives_the_same_answer_and_what_is_placed_stays(
    group: dict[str, Site], pick: list[int], num_replicas: int
) -> None:
    weights = weights_for(group, pick)
    homes = place(weights, group, num_replicas)
    assert homes == place(weights, dict(reversed(group.items())), num_replicas)
    assert homes == place(weights, group, num_replicas, homes)


@MANY
@given(sites(fewest=2), WEIGHTS)
def test_who_comes_takes_its_part_and_nothing_else_moves_much(group: dict[str, Site], pick: list[int]) -> None:
    newcomer = max(group)
    before_sites = {name: site for name, site in group.items() if name != newcomer}
    weights = weights_for(group, pick)
    before = place(weights, before_sites, 1)
    after = place(weights, group, 1, before)
    part = group[newcomer].capacity / sum(site.capacity for site in group.values())
    assert moved(before, after) <= 1.6 * part * len(weights) + 2


@MANY
@given(sites(fewest=2), WEIGHTS)
def test_who_goes_leaves_its_part_and_nothing_else_moves_much(group: dict[str, Site], pick: list[int]) -> None:
    gone = max(group)
    weights = weights_for(group, pick)
    before = place(weights, group, 1)
    after = place(weights, {name: site for name, site in group.items() if name != gone}, 1, before)
    orphans = sum(homes[0] == gone for homes in before)
    assert orphans <= moved(before, after) <= 1.3 * orphans + 2


def test_there_must_be_a_server_and_as_many_homes_as_ranges() -> None:
    with pytest.raises(ValueError, match="no server"):
        place([1.0], {}, 1)
    with pytest.raises(ValueError, match="2 ranges have homes, but there are 1"):
        place([1.0], {"a": Site(1.0, "x")}, 1, [("a",), ("a",)])
