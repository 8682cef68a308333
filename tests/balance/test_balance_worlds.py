"""When shares change, and when they do not: simulated workers, from seeds."""

from __future__ import annotations

import math
import random
import re
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balance import Balance, StepTiming
from tests.balance.worlds import SAMPLE_S, Seat, World, seats

pytestmark = pytest.mark.timeout(120)

ROTATING = [(1.0, 0.5, 0.25), (0.25, 1.0, 0.5), (0.5, 0.25, 1.0)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_equal_workers_keep_equal_shares(noise: float) -> None:
    for seed in range(40):
        world = World(lambda _: (1.0,) * 4, total=256, noise=noise, hiccups=noise / 5, seed=seed).run(300)
        assert [step for step in world.changes if step > 20] == []


@pytest.mark.parametrize("fixed_s", [0.0, 0.01, 0.03])
def test_unequal_workers_come_close_to_the_best_division_in_a_few_changes(fixed_s: float) -> None:
    for seed in range(40):
        world = World(lambda _: (1.0, 0.5, 0.25), fixed_s=fixed_s, noise=0.03, hiccups=0.01, seed=seed).run(100)
        assert len(world.changes) <= 6
        assert world.changes[0] <= 5
        assert statistics.fmean(world.efficiencies[40:]) > 0.95


def test_a_worker_that_slows_down_is_relieved_within_five_steps_and_gets_its_part_back() -> None:
    for seed in range(40):
        world = World(lambda step: (0.25 if 50 <= step < 100 else 1.0, 1.0), noise=0.02, seed=seed).run(55)
        assert all(50 < change <= 55 for change in world.changes)
        assert world.changes[0] <= 54
        assert re.search(r"became \d+:\d+: w0 takes (3\.[89]|4\.[0-3])x longer than before", world.reasons[0])
        world.run(95)
        assert min(world.efficiencies[55:100]) > 0.9
        assert min(world.efficiencies[105:]) > 0.9


def test_speeds_that_change_all_the_time_are_followed() -> None:
    for seed in range(20):
        world = World(lambda step: ROTATING[step // 200 % 3], noise=0.03, seed=seed).run(1200)
        assert statistics.fmean(world.efficiencies) > 0.95


def test_one_hiccup_changes_nothing() -> None:
    world = World(lambda step: (0.1 if step == 50 else 1.0, 1.0), noise=0.01).run(100)
    assert world.changes == []


# -- a step that costs the same whatever the share ---------------------------------------------------------------------


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    apart=st.floats(0.0, 0.1),
    slope=st.sampled_from([0.0, 0.0, 0.02, 0.04]),
    noise=st.sampled_from([0.0, 0.01, 0.03, 0.05]),
    hiccups=st.sampled_from([0.0, 0.01]),
    workers=st.integers(2, 4),
    seed=st.integers(0, 1 << 30),
)
def test_shares_do_not_run_away_where_the_share_hardly_matters(
    apart: float, slope: float, noise: float, hiccups: float, workers: int, seed: int
) -> None:
    """50 ms a step, `slope` of that by the samples, and one worker that takes up to a tenth longer."""
    speeds = (1.0,) * (workers - 1) + (1.0 / (1.0 + apart),)
    fixed_s, sample_s = 0.05 * (1.0 - slope), 0.05 * slope / 20
    world = World(
        lambda _: speeds,
        total=20 * workers,
        fixed_s=fixed_s,
        sample_s=sample_s,
        noise=noise,
        hiccups=hiccups,
        seed=seed,
    )
    for _ in range(12):
        world.run(50)
        assert all(13 <= share <= 27 for share in world.balance.shares), world.reasons
    assert len(world.changes) <= 4, world.reasons


def test_what_a_change_of_shares_did_not_help_is_remembered() -> None:
    """For as long as the run goes on, and through a worker that is slow for a while."""
    world = World(lambda _: (1.0, 0.9), total=40, fixed_s=0.05, sample_s=0.0, noise=0.01).run(5000)
    assert max(world.balance.shares) <= 24
    slow = World(lambda step: (1.0, 0.5 if step // 300 % 2 else 1.0), total=40, fixed_s=0.05, sample_s=0.0, noise=0.01)
    slow.run(300)
    assert slow.balance.shares == (20, 20)
    # It cannot be known beforehand that fewer samples do not help; it is tried, once.
    assert slow.run(3300).balance.shares[1] >= 10
    assert len(slow.changes) == 1, slow.reasons


def test_a_worker_whose_time_is_all_fixed_takes_what_others_cannot() -> None:
    """One needs 25 ms whatever it gets, the other 2.5 ms a sample: the best are 30 and 10."""
    balance = Balance().seated(seats(2), 40, 1)
    for _ in range(100):
        shares = balance.shares
        balance = balance.observed([StepTiming(shares[0], 0.025), StepTiming(shares[1], 0.0025 * shares[1])], 40, 1)
    assert balance.shares[1] in (9, 10, 11)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    costs=st.lists(st.tuples(st.floats(0.0, 0.05), st.floats(1e-5, 5e-3)), min_size=2, max_size=4),
    noise=st.sampled_from([0.0, 0.03, 0.1]),
    turn=st.sampled_from([1.0, 0.3, 3.0]),
    seed=st.integers(0, 1 << 30),
)
def test_a_reason_is_about_the_change_that_it_is_given_for(
    costs: list[tuple[float, float]], noise: float, turn: float, seed: int
) -> None:
    """Who is said to take longer gets less; who is said to be faster, or to take less time, gets more."""
    chance = random.Random(seed)
    total = 16 * len(costs)
    balance = Balance().seated(seats(len(costs)), total, 1)
    for step in range(150):
        factors = [turn if step > 80 and rank == 0 else 1.0 for rank in range(len(costs))]
        measures = [
            StepTiming(share, (fixed_s + sample_s * share) * factor * max(0.5, chance.gauss(1.0, noise)))
            for share, (fixed_s, sample_s), factor in zip(balance.shares, costs, factors, strict=True)
        ]
        before, balance = balance, balance.observed(measures, total, 1)
        if balance.version != before.version:
            _check_reason(before, balance)


def _check_reason(before: Balance, after: Balance) -> None:
    gains = {worker: b - a for worker, a, b in zip(after.members, before.shares, after.shares, strict=True)}
    listed = [":".join(map(str, shares)) for shares in (before.shares, after.shares)]
    change, _, cause = after.reason.partition(": ")
    assert change == f"{listed[0]} became {listed[1]}"
    if match := re.fullmatch(r"(w\d) takes ([\d.]+)x longer than before", cause):
        assert gains[match[1]] < 0
        assert float(match[2]) > 1.1
    elif match := re.fullmatch(r"(w\d) is ([\d.]+)x as fast as before", cause):
        assert gains[match[1]] > 0
        assert float(match[2]) > 1.1
    else:
        match = re.fullmatch(
            r"(w\d) takes ([\d.]+) (m?s) for (\d+) samples, (w\d) ([\d.]+) (m?s) for (\d+) samples", cause
        )
        assert match is not None, cause
        late, early = (float(match[n]) * (1e-3 if match[n + 1] == "ms" else 1.0) for n in (2, 6))
        assert late >= early
        assert gains[match[1]] < 0 < gains[match[5]]
        shares = dict(zip(before.members, before.shares, strict=True))
        assert (shares[match[1]], shares[match[5]]) == (int(match[4]), int(match[8]))


# -- the state ---------------------------------------------------------------------------------------------------------


def test_every_worker_computes_the_same_also_one_that_got_the_state_on_the_way() -> None:
    worlds = [World(lambda step: ROTATING[step // 50 % 3], noise=0.1, hiccups=0.05, seed=7) for _ in range(2)]
    for _ in range(300):
        for world in worlds:
            world.run(1)
        # As it travels to a newcomer and into a checkpoint.
        worlds[1].balance = msgspec.convert(msgspec.to_builtins(worlds[1].balance), Balance)
        assert worlds[0].balance == worlds[1].balance


# -- who comes and goes ------------------------------------------------------------------------------------------------


def test_newcomers_get_a_first_share_by_what_is_known_of_them() -> None:
    world = World(lambda _: (1.0, 0.5), total=150).run(10)
    assert world.balance.shares == (100, 50)
    first, second = seats(2)

    def share_of(newcomer: Seat, total: int) -> tuple[int, ...]:
        return world.balance.seated([first, second, newcomer], total, 1).shares

    # Declared: the others count as 1 each, at their usual speed, which is that of the slower one of two.
    assert share_of(Seat("new", "x", capacity=2.0), 250) == (100, 50, 100)
    # Tried: seconds a step and a sample.
    assert share_of(Seat("new", "x", tried=(0.0, SAMPLE_S)), 250) == (100, 50, 100)
    # Another one on a host that is known.
    assert share_of(Seat("new", "host0"), 250) == (100, 50, 100)
    # Nothing is known.
    assert share_of(Seat("new", "x"), 200) == (100, 50, 50)


def test_declared_capacities_divide_the_first_batch() -> None:
    declared = [Seat("a", capacity=2.0), Seat("b", capacity=1.0), Seat("c", capacity=1.0)]
    assert Balance().seated(declared, 100, 1).shares == (50, 25, 25)


def test_who_stays_keeps_its_pace_and_a_replaced_worker_that_of_its_host() -> None:
    world = World(lambda _: (1.0, 0.5), total=150).run(10)
    alone = world.balance.seated([seats(2)[1]], 150, 1)
    assert alone.shares == (150,)
    again = alone.seated([seats(2)[1], Seat("other", "host0")], 150, 1)
    assert again.shares == (50, 100)
    assert again.seated([seats(2)[1], Seat("other", "host0")], 150, 1) is again


# -- memory, stragglers, nonsense --------------------------------------------------------------------------------------


def test_a_limit_takes_effect_at_once_and_is_given_as_the_reason() -> None:
    world = World(lambda _: (1.0, 1.0), total=100).run(10)
    balance = world.balance.observed([StepTiming(50, 0.05), StepTiming(50, 0.05, limit=40)], 100, 1)
    assert balance.shares == (60, 40)
    assert balance.reason == "50:50 became 60:40: w1 has memory for 40 samples at a time"
    # Where all limits together are too low, or the others would take much longer, it computes in pieces.
    again = balance.observed([StepTiming(60, 0.06, limit=30), StepTiming(40, 0.04, limit=20)], 100, 1)
    assert again.shares == (50, 50)
    assert world.balance.observed([StepTiming(50, 0.05), StepTiming(50, 0.05, limit=5)], 100, 1).shares == (50, 50)


def test_a_worker_that_costs_more_than_it_gives_is_named_after_a_while() -> None:
    world = World(lambda _: (1.0, 1.0, 0.002), total=100).run(12)
    assert world.balance.shares[2] == 1
    assert world.balance.burden == ""
    world.run(20)
    assert world.balance.burden == "w2"
    assert world.balance.why_burden == "it takes 500 ms for 1 of 100 samples, the others alone 50 ms for all of them"
    # It has recovered.
    better = World(lambda step: (1.0, 1.0, 0.002 if step < 40 else 0.5), total=100).run(60)
    assert better.balance.burden == ""


def test_a_slow_worker_that_helps_is_no_burden() -> None:
    world = World(lambda _: (1.0, 1.0, 0.05), total=100).run(100)
    assert world.balance.burden == ""
    assert world.balance.shares[2] >= 2


def test_what_is_no_measurement_changes_nothing() -> None:
    balance = World(lambda _: (1.0, 0.5)).run(10).balance
    for nonsense in (0.0, -1.0, math.nan, math.inf):
        after = balance.observed([StepTiming(128, nonsense), StepTiming(64, nonsense, reduced_s=nonsense)], 192, 1)
        assert after == balance


def test_nothing_is_decided_before_everybody_was_measured() -> None:
    balance = Balance().seated(seats(2), 100, 1)
    for _ in range(20):
        balance = balance.observed([StepTiming(50, 0.05), StepTiming(50, 0.0)], 100, 1)
    assert balance.shares == (50, 50)


def test_communication_that_nobody_can_help_makes_small_gains_smaller() -> None:
    def shares_with(reduced_s: float) -> tuple[int, ...]:
        balance = Balance().seated(seats(2), 100, 1)
        for _ in range(60):
            measures = [StepTiming(50, 0.050, reduced_s), StepTiming(50, 0.054, reduced_s + 0.004)]
            balance = balance.observed(measures, 100, 1)
        return balance.shares

    assert shares_with(0.0) != (50, 50)
    assert shares_with(0.5) == (50, 50)
