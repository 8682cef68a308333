"""The control machines through thousands of random fault schedules; and that the simulator sees what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.control.coordinator import Coordinator
from paceline.control.member_events import Done, Swap
from paceline.control.messages import Phase, Start
from paceline.control.surveys import UNREACHABLE
from paceline.testing.simulation import Violation, World
from paceline.testing.simulation.groups import SimulatedGroup
from paceline.testing.simulation.mutations import MUTATIONS, SOUND, Mutation
from paceline.testing.simulation.worker import Worker
from paceline.testing.simulation.world import Agent

SCHEDULES = 800  # `make simulate` runs a hundred thousand, `make soak` the next ones
BLOCKS = 4
MOST_TRIES = 3_000


def run(seed: int, mutation: Mutation) -> Violation | None:
    try:
        World(seed, mutation).run()
    except Violation as violation:
        return violation
    return None


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_an_invariant(block: int) -> None:
    size = SCHEDULES // BLOCKS
    for seed in range(block * size, (block + 1) * size):
        World(seed).run()


@pytest.mark.soak
@pytest.mark.parametrize("block", range(BLOCKS, 12))
def test_no_schedule_breaks_an_invariant_for_longer(block: int) -> None:
    test_no_schedule_breaks_an_invariant(block)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_simulator_sees_a_fault_in_the_machines(mutation: Mutation) -> None:
    for seed in range(MOST_TRIES):
        violation = run(seed, mutation)
        if violation is not None:
            assert f"--seed {seed}" in " ".join(violation.__notes__)
            return
    pytest.fail(f"{MOST_TRIES} schedules, and nobody noticed that a machine {mutation.name}")


def test_a_seed_replays_the_same_schedule() -> None:
    ends = set()
    for _ in range(2):
        world = World(17)
        world.run()
        ends.add((world.now, len(world.workers)))
    assert len(ends) == 1


@pytest.mark.parametrize("seed", range(20))
def test_who_wants_to_leave_leaves_and_who_comes_gets_a_seat(seed: int) -> None:
    world = World(seed, calm=True)
    for _ in range(2):
        world.after(0.0, world.agents["a"].start)
    world.after(1.5, lambda: next(iter(world.workers.values())).leave())
    world.after(2.0, world.agents["a"].start)
    world.run()
    leaver, *others, newcomer = world.workers.values()
    end = max(worker.machine.applied for worker in world.workers.values())
    assert leaver.machine.phase is not Phase.ENDED
    assert 0 < leaver.machine.applied < end
    assert newcomer.machine.applied == end
    assert all(worker.machine.phase is Phase.ENDED for worker in [*others, newcomer])


@pytest.mark.parametrize("seed", range(10))
def test_all_may_leave_if_somebody_is_ready_to_take_over(seed: int) -> None:
    world = World(seed, calm=True)
    founders = dict(world.workers)
    machine = world.coordinator
    assert machine is not None
    machine.settings = msgspec.structs.replace(machine.settings, most=len(founders))  # the newcomer waits for a seat
    world.after(1.0, world.agents["a"].start)
    for worker in founders.values():
        world.after(2.5, worker.leave)
    world.run()
    newcomer = next(worker for name, worker in world.workers.items() if name not in founders)
    assert newcomer.machine.phase is Phase.ENDED
    assert all(0 < worker.machine.applied < newcomer.machine.applied for worker in founders.values())


def hosts_after_parting(seed: int, mutation: Mutation = SOUND) -> list[set[str]]:
    """Of hosts a, b and c, two cannot reach each other for good, and workers come from all: the hosts of each plan that
    was in force, or prepared, after somebody had been let go for it."""
    world = World(seed, mutation, calm=True)
    for host in "abc":
        agent = world.agents.get(host) or world.agents.setdefault(host, Agent(world, host))
        world.after(0.0, agent.start)
    world.after(3.0, lambda: world.part(("b", "c"), lasting=True))
    seated: dict[int, set[str]] = {}

    def look() -> None:
        machine = world.coordinator
        assert machine is not None
        if any(record.reason.startswith(UNREACHABLE) for record in machine.records.values()):
            plans = [plan for plan in (machine.standing.current, machine.standing.pending) if plan is not None]
            seated.update({plan.generation: {seat.host for seat in plan.seats} for plan in plans})
        world.after(0.01, look)

    world.after(3.0, look)
    for host in "bc":
        world.after(4.0, world.agents[host].start)
    world.run()
    return list(seated.values())


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_stay_parted_cost_some_workers_and_not_the_run(seed: int) -> None:
    found = hosts_after_parting(seed)
    assert found
    assert all("a" in hosts and not {"b", "c"} <= hosts for hosts in found)


class SeatsAnybody(Coordinator):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._surveys.admitted = lambda newcomers, *_: list(newcomers)  # type: ignore[method-assign]


def test_a_coordinator_that_seats_who_cannot_reach_all_is_seen() -> None:
    mutation = Mutation("seats who cannot reach all", coordinator=SeatsAnybody)
    assert any({"b", "c"} <= hosts for seed in range(20) for hosts in hosts_after_parting(seed, mutation))


@pytest.mark.parametrize("seed", range(60))
def test_a_coordinator_whose_journal_is_lost_goes_on_from_those_that_hold_the_state(seed: int) -> None:
    """Also if one of them, or the founder, dies in the same moment: the run is never founded anew while one lives."""
    world = World(seed, calm=True)
    for _ in range(2):
        world.after(0.0, world.agents["a"].start)

    def lose() -> None:
        living = [worker for worker in world.workers.values() if worker.alive and worker.machine.applied > 0]
        if len(living) < 2:
            world.after(0.1, lose)
            return
        reached.append(max(worker.machine.applied for worker in living))
        world.coordinator = None
        world._journal.clear()
        if seed % 3:
            world.kill(living[seed % len(living)], "was killed")
            world.agents["a"].start()
        world.after(0.1 + seed % 5 / 4, world._start_coordinator)

    def counts(name: str) -> bool:
        is_forgotten = world.coordinator is None or name not in world.coordinator.records
        return (is_forgotten and bool(reached)) or believed(name)

    reached: list[int] = []
    believed = world.counts
    world.counts = counts  # type: ignore[method-assign]
    world.after(1.0 + seed % 7 / 10, lose)
    world.run()
    assert reached
    foundings = [plan for plan in world.truth.plans.values() if plan.start is Start.FOUND]
    assert len(foundings) == 1
    ended = [worker.machine for worker in world.workers.values() if worker.machine.phase is Phase.ENDED]
    assert len(ended) >= 2
    assert len({machine.applied for machine in ended}) == 1


@pytest.mark.parametrize("seed", range(10))
def test_who_came_just_now_gives_the_last_result_to_one_that_is_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one see the operation complete in which a switch is agreed; they switch, one of them gives its state to a
    newcomer, and all of them die. The newcomer alone is ahead of the one that is left."""
    world = World(seed, calm=True)
    for _ in range(2):
        world.after(0.0, world.agents["a"].start)
    world.after(2.5, world.agents["a"].start)
    complete, swap = SimulatedGroup._complete, Worker._do_swap
    behind: list[str] = []
    newcomer: list[str] = []
    lost: list[Done] = []

    def is_last_before_the_switch(worker: Worker, done: Done) -> bool:
        """All agree on the next plan, and no validation follows before the step at which it starts."""
        batch = worker._result.batch if worker._result is not None else None
        is_step_next = batch is None or (batch.position + batch.num_samples) // world.batch % 3 != 0
        return len(done.held) > 1 and set(done.held) == {max(done.held)} != {0} and is_step_next and world.now > 2.5

    def complete_but_for_one(group: SimulatedGroup, worker: Worker, done: Done) -> None:
        if not lost and is_last_before_the_switch(worker, done):
            lost.append(done)
            behind.append(group.plan.members[-1])
        if done not in lost or worker.name not in behind:
            complete(group, worker, done)

    def swap_and_kill_the_others(worker: Worker, action: Swap) -> None:
        swap(worker, action)
        if behind and not newcomer:
            newcomer.append(worker.name)
            for other in list(world.workers.values()):
                if other.name not in (worker.name, *behind):
                    world.kill(other, "was killed")

    monkeypatch.setattr(SimulatedGroup, "_complete", complete_but_for_one)
    monkeypatch.setattr(Worker, "_do_swap", swap_and_kill_the_others)
    world.run()
    gifts = [plan.gifts for plan in world.truth.plans.values() if plan.start is Start.RECOVER]
    assert dict(zip(behind, newcomer, strict=True)) in gifts
    machines = [world.workers[name].machine for name in [*behind, *newcomer]]
    assert all(machine.phase is Phase.ENDED for machine in machines)
    assert len({machine.applied for machine in machines}) == 1
