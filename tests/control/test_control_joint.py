"""All real machines together through random fault schedules; and that the simulator sees what is wrong in them."""

from __future__ import annotations

import pytest

from paceline.testing.joint import Violation, World
from paceline.testing.joint.mutations import MUTATIONS, Mutation
from paceline.testing.joint.world import MODES
from paceline.testing.simulate import table_of

SCHEDULES = 240  # `make simulate` runs a hundred thousand
BLOCKS = 4
MOST_TRIES = 400


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_an_invariant(block: int) -> None:
    size = SCHEDULES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        World(seed).run()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_simulator_sees_a_fault_in_what_production_runs(mutation: Mutation) -> None:
    for seed in range(mutation.shows_from, mutation.shows_from + MOST_TRIES):
        if (text := complaint(seed, mutation)) is not None:
            assert f"--seed {seed}" in text
            return
    pytest.fail(f"{MOST_TRIES} schedules, and nobody noticed that a machine {mutation.name}")


def complaint(seed: int, mutation: Mutation) -> str | None:
    try:
        World(seed, mutation).run()
    except Violation as violation:
        return " ".join(violation.__notes__)
    except KeyError:  # a machine that is given nonsense may fall over it
        return f"--seed {seed}"
    return None


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_replays_the_same_schedule(mode: str) -> None:
    ends = set()
    for _ in range(2):
        world = World(17, mode=mode)
        world.run()
        ends.add((world.now, len(world.processes), tuple(sorted(world.faults.tried.items()))))
    assert len(ends) == 1


def test_the_table_shows_what_was_tried_and_what_was_not() -> None:
    world = World(5)
    world.run()
    world.faults.tried[("kill_one", "sync", "running")] += 7
    lines = table_of(world.faults.tried).splitlines()
    line = next(line for line in lines if line.startswith("kill one") and "sync" in line)
    assert "7" in line.split()
    assert "." in line.split()
