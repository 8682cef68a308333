"""All real machines together in schedules that a test writes: who comes, who leaves, who cannot reach whom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.member_events import OperationDone
from paceline.control.machines.surveys import UNREACHABLE
from paceline.control.messages.plan import Phase, PlanStart
from paceline.testing.joint import World
from paceline.testing.joint.groups import SimulatedGroup
from paceline.testing.joint.mutation import SOUND, Mutation
from paceline.testing.joint.workers import SimulatedWorker


def calm_world(seed: int, mutation: Mutation = SOUND) -> World:
    """Without faults but for those of the test, on three hosts."""
    return World(seed, mutation._replace(num_hosts=3), calm=True, mode="allreduce")


@pytest.mark.parametrize("seed", range(20))
def test_who_wants_to_leave_leaves_and_who_comes_gets_a_seat(seed: int) -> None:
    world = calm_world(seed)
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
    world = calm_world(seed)
    founders = dict(world.workers)
    machine = world.head.machine
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
    was in force, or prepared, after somebody had been let go for it; without the founding, when all reached all."""
    world = calm_world(seed, mutation)
    for host in "abc":
        world.after(0.0, world.agents[host].start)
    world.after(3.0, world.part, "host b", "host c")
    seated: dict[int, set[str]] = {}

    def look() -> None:
        machine = world.head.machine
        assert machine is not None
        if any(record.reason.startswith(UNREACHABLE) for record in machine.records.values()):
            plans = [plan for plan in (machine.standing.current, machine.standing.pending) if plan is not None]
            made = [plan for plan in plans if plan.start is not PlanStart.FOUND]
            seated.update({plan.generation: {seat.host for seat in plan.seats} for plan in made})
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
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._planner._surveys.admitted = lambda newcomers, *_: list(newcomers)  # type: ignore[method-assign]


def test_a_coordinator_that_seats_who_cannot_reach_all_is_seen() -> None:
    mutation = Mutation("seats who cannot reach all", coordinator=SeatsAnybody)
    assert any({"b", "c"} <= hosts for seed in range(20) for hosts in hosts_after_parting(seed, mutation))


@pytest.mark.parametrize("seed", range(60))
def test_a_coordinator_whose_journal_is_lost_goes_on_from_those_that_hold_the_state(seed: int) -> None:
    """Also if one of them, or the founder, dies in the same moment: the run is never founded anew while one lives."""
    world = calm_world(seed)
    for _ in range(2):
        world.after(0.0, world.agents["a"].start)

    def lose() -> None:
        living = [worker for worker in world.workers.values() if worker.alive and worker.machine.applied > 0]
        if len(living) < 2:
            world.after(0.1, lose)
            return
        reached.append(max(worker.machine.applied for worker in living))
        world.head.lose_journal()
        if seed % 3:
            world.kill(living[seed % len(living)], "was killed")
            world.agents["a"].start()
        world.after(0.1 + seed % 5 / 4, world.head.start)

    reached: list[int] = []
    world.after(1.0 + seed % 7 / 10, lose)
    world.run()
    assert reached
    foundings = [plan for plan in world.truth.plans.values() if plan.start is PlanStart.FOUND]
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
    world = calm_world(seed)
    for _ in range(2):
        world.after(0.0, world.agents["a"].start)
    world.after(2.5, world.agents["a"].start)
    complete, swap = SimulatedGroup._complete, SimulatedWorker._do_swap
    behind: list[str] = []
    newcomer: list[str] = []
    lost: list[OperationDone] = []

    def is_last_before_the_switch(worker: SimulatedWorker, done: OperationDone) -> bool:
        """All agree on the next plan, and no validation follows before the step at which it starts."""
        batch = worker._result.batch if worker._result is not None else None
        is_step_next = batch is None or (batch.position + batch.num_samples) // world.batch % 3 != 0
        return len(done.held) > 1 and set(done.held) == {max(done.held)} != {0} and is_step_next and world.now > 2.5

    def complete_but_for_one(group: SimulatedGroup, worker: SimulatedWorker, done: OperationDone) -> None:
        if not lost and is_last_before_the_switch(worker, done):
            lost.append(done)
            behind.append(group.plan.members[-1])
        if done not in lost or worker.name not in behind:
            complete(group, worker, done)

    def swap_and_kill_the_others(worker: SimulatedWorker) -> None:
        swap(worker)
        if behind and not newcomer:
            newcomer.append(worker.name)
            for other in list(world.workers.values()):
                if other.name not in (worker.name, *behind):
                    world.kill(other, "was killed")

    monkeypatch.setattr(SimulatedGroup, "_complete", complete_but_for_one)
    monkeypatch.setattr(SimulatedWorker, "_do_swap", swap_and_kill_the_others)
    world.run()
    gifts = [plan.gifts for plan in world.truth.plans.values() if plan.start is PlanStart.RECOVER]
    assert dict(zip(behind, newcomer, strict=True)) in gifts
    machines = [world.workers[name].machine for name in [*behind, *newcomer]]
    assert all(machine.phase is Phase.ENDED for machine in machines)
    assert len({machine.applied for machine in machines}) == 1
