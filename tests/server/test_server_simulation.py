"""The server group's machines through random fault schedules; and that the simulator sees what is wrong."""

from __future__ import annotations

import pytest

from paceline.testing.serving import ServingWorld, Violation
from paceline.testing.serving.mutations import MUTATIONS, Mutation

SCHEDULES = 700  # `make simulate` runs many more
BLOCKS = 10
MOST_TRIES = 1_000


def run(seed: int, mutation: Mutation) -> Violation | None:
    try:
        ServingWorld(seed, mutation).run()
    except Violation as violation:
        return violation
    return None


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_an_invariant(block: int) -> None:
    size = SCHEDULES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        ServingWorld(seed).run()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_simulator_sees_a_fault_in_the_machines(mutation: Mutation) -> None:
    for seed in range(MOST_TRIES):
        violation = run(seed, mutation)
        if violation is not None:
            assert f"--part servers --seed {seed}" in " ".join(violation.__notes__)
            return
    pytest.fail(f"{MOST_TRIES} schedules, and nobody noticed that a machine {mutation.name}")


def test_a_seed_replays_the_same_schedule() -> None:
    ends = set()
    for _ in range(2):
        world = ServingWorld(17)
        world.run()
        logs = [sorted(server.store.logs.items()) for server in world.servers.values()]
        ends.add((world.now, world.newest.version, repr(logs)))
    assert len(ends) == 1


def test_all_modes_and_numbers_of_replicas_come_up() -> None:
    worlds = [ServingWorld(seed) for seed in range(60)]
    assert {(world.mode, world.num_replicas) for world in worlds} >= {
        (mode, replicas) for mode in ("steps", "leases", "bounded") for replicas in (1, 2, 3)
    }
