"""All real machines together through random fault schedules; and that the simulator sees what is wrong in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.control.messages.plan import Plan, PlanStart
from paceline.testing.joint import Violation, World
from paceline.testing.joint.mutation import SOUND, Mutation
from paceline.testing.joint.processes import SimulatedProcess
from paceline.testing.joint.themes import everything, themes_of
from paceline.testing.joint.truth import OperationResult, SimulatedBatch, SimulatedState, Truth, after
from paceline.testing.joint.world import MODES
from paceline.testing.simulate import table_of
from tests.control.mutations import MUTATIONS

SCHEDULES = 1_000  # `make simulate` runs a hundred thousand
BLOCKS = 10
MOST_TRIES = 600


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_an_invariant(block: int) -> None:
    size = SCHEDULES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        World(seed).run()


# Each of these once broke an invariant; what the machines did wrong has a test of its own where it belongs.
ONCE_BROKEN = [30259, 31862, 53869, 58522, 62067, 67198, 72000, 72057, 80232, 93102]


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_a_schedule_that_once_broke_an_invariant_does_not_any_more(seed: int) -> None:
    World(seed).run()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_simulator_sees_a_fault_in_what_production_runs(mutation: Mutation) -> None:
    for seed in range(MOST_TRIES):
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


def test_no_server_is_killed_while_another_is_about_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two copies nothing may be lost while one server dies at a time: the schedule must keep to that itself."""
    allowed: list[bool] = []
    kill = World.kill

    def look_and_kill(world: World, process: SimulatedProcess, how: str) -> None:
        if process.is_server and process.alive and how == "was killed":
            allowed.append(world.faults._may_die())
        kill(world, process, how)

    def begin(world: World) -> None:
        world.faults.are_over = False
        world.faults._kill_when_answered = True  # whoever answers while a backup has yet to take what it did

    monkeypatch.setattr(World, "kill", look_and_kill)
    for seed in range(6):
        world = World(seed, SOUND._replace(num_replicas=2), calm=True, mode="sync")
        world.after(1.5, begin, world)
        world.run()
    assert allowed
    assert not any(allowed)


def test_what_one_that_was_given_up_has_done_is_of_the_history_that_goes_on_from_its_checkpoint() -> None:
    truth = Truth(length=8)
    truth.issued(Plan(1, PlanStart.FOUND, ()))
    first = SimulatedBatch(0, 0, 4)
    done = after(SimulatedState(1, 0, 0, 0, 0, 0), OperationResult(1, 1, first, False))
    truth.applied_apart(done, OperationResult(1, 1, first, False))
    truth.published("A", done)
    truth.issued(Plan(2, PlanStart.FOUND, (), base=1))
    truth.founded(2, done)
    truth.applied("B", done._replace(lineage=2, applied=2), OperationResult(2, 2, SimulatedBatch(0, 4, 4), False))
    truth.ended(2, 2)
    truth.applied_apart(done._replace(lineage=2, applied=2), OperationResult(2, 2, SimulatedBatch(0, 0, 4), False))
    truth.ended(2, 2)  # and nothing that it does later takes the place of what counts


def test_what_is_sent_over_a_cable_that_is_cut_for_a_while_arrives_in_order() -> None:
    world = World(1, calm=True, mode="async")
    sender, receiver = list(world.servers)[:2] if len(world.servers) > 1 else [*world.servers, *world.workers][:2]
    heard: list[int] = []

    class Ear:
        def receive(self, action: Callable[..., None], *arguments: object) -> None:
            action(*arguments)

        def hear(self, number: int) -> None:
            heard.append(number)

    ear = Ear()
    world.cut(0.37, (sender, receiver))
    for number in range(40):
        world.after(number * 0.02, world.send_in_order, sender, receiver, "forth", ear.hear, number)
    world.run()
    assert heard == list(range(40))


def test_all_modes_and_numbers_of_replicas_and_themes_come_up() -> None:
    worlds = [World(seed) for seed in range(400)]
    found = {(world.mode, world.num_replicas) for world in worlds if world.is_served}
    assert found >= {(mode, replicas) for mode in MODES if mode != "allreduce" for replicas in (1, 2, 3)}
    for mode in MODES:
        drawn = [world.faults.theme for world in worlds if world.mode == mode]
        assert all(theme in drawn for theme in [everything(mode), *themes_of(mode).values()]), mode


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
