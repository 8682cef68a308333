"""The coordinator's host is lost: workers elsewhere end soon, and leave what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.machines.lost_head import DESERTED_S, OrphanMove, Sight, decide, is_deserted
from paceline.placement.placement import Placement, Replica, Replicas
from paceline.server.errand import ORPHAN_TRIES, Errand
from paceline.server.keeper import RangeKeeper
from paceline.server.messages import ApplyLease, Forward
from paceline.testing.joint import Violation, World
from paceline.testing.joint.mutation import SOUND, Mutation
from paceline.testing.joint.workers import SimulatedWorker

PLACES = ("abc", "bc")  # of the workers: with some on the host that is lost, or none


def lose_head(seed: int, hosts: str, *, freezes: bool, mutation: Mutation = SOUND) -> World:
    world = World(seed, mutation._replace(num_hosts=3), calm=True, mode="allreduce")
    for worker in list(world.workers.values()):
        world.kill(worker, "was killed")
    for agent in world.agents.values():
        agent.children.clear()
    for host in hosts:
        for _ in range(1 + seed % 2):
            world.agents[host].start()

    return run_and_lose(world, 7.0 + seed % 7 / 10, lambda worker: worker.machine.applied, freezes=freezes)


def nothing(world: World) -> None:
    pass


def run_and_lose(
    world: World,
    after_s: float,
    done_by: Callable[[SimulatedWorker], int],
    *,
    freezes: bool,
    at_loss: Callable[[World], None] = nothing,
) -> World:
    """The head is lost after that time, and when every worker has done something."""

    def lose() -> None:
        if min(map(done_by, world.living()), default=0) > 0:
            at_loss(world)
            world.halting.lose_head(freezes=freezes)
        else:
            world.after(0.1, lose)

    world.after(after_s, lose)
    world.run()
    return world


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.parametrize("seed", range(12))
def test_every_host_that_is_left_has_the_run(seed: int, hosts: str, freezes: bool) -> None:
    world = lose_head(seed, hosts, freezes=freezes)
    left = world.halting.left
    assert {world.workers[name].host for name in left} == {"b", "c"}
    assert min(state.applied for state in left.values()) > 0
    assert len({state.applied for state in left.values()}) <= 2, "one may be an operation behind"


def lose_head_with_servers(
    seed: int,
    hosts: str,
    *,
    freezes: bool,
    mode: str = "sync",
    mutation: Mutation = SOUND,
    at_loss: Callable[[World], None] = nothing,
) -> World:
    """Servers are on all hosts, so that each range has a copy on one that is left."""
    world = World(seed, mutation._replace(num_hosts=3, num_replicas=2), calm=True, mode=mode)
    for process in list(world.processes.values()):
        world.kill(process, "was released")
    for agent in world.agents.values():
        agent.children.clear()
        agent.start_server()
    for host in hosts:
        world.agents[host].start()

    return run_and_lose(world, 5.0 + seed % 17 / 20, num_updates, freezes=freezes, at_loss=at_loss)


def num_updates(worker: SimulatedWorker) -> int:
    """That it knows of."""
    return worker.state.epoch + worker.leasing.holder.settled if worker.leasing is not None else worker.state.steps


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_on_servers_is_left_behind_with_the_run(seed: int, hosts: str, freezes: bool) -> None:
    world = lose_head_with_servers(seed, hosts, freezes=freezes)
    left = world.halting.left
    assert not world.halting.lacked
    assert left


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("hosts", PLACES)
@pytest.mark.parametrize("mode", ["async", "bounded"])
@pytest.mark.parametrize("seed", range(3))
def test_every_host_that_is_left_has_all_leases_that_are_done(seed: int, mode: str, hosts: str, freezes: bool) -> None:
    world = lose_head_with_servers(seed, hosts, freezes=freezes, mode=mode)
    assert not world.halting.lacked
    assert {world.workers[name].host for name in world.halting.left} == {"b", "c"}


class BelievesItsPlacement(Errand):
    def _may_have(self, server: str, number: int) -> bool:
        return self._losses[server] < ORPHAN_TRIES


def forget_a_move(world: World) -> None:
    """No worker has heard that a range went from a server to another one, and the head has the only other copy."""
    placement = world.head.placement
    for number, one in enumerate(placement.ranges):
        holders = {replica.server for replica in one.everybody()}
        on_head = [name for name in holders if world.servers[name].host == "a"]
        former = [name for name, server in world.servers.items() if server.alive and name not in holders]
        if on_head and former and former[0] in placement.card_of:
            before = Replicas(Replica(on_head[0], 1), (Replica(former[0], 1),), origin=one.origin)
            ranges = (*placement.ranges[:number], before, *placement.ranges[number + 1 :])
            for worker in world.living():
                worker.placement = msgspec.structs.replace(placement, ranges=ranges)
            return
    pytest.fail("the head has no range")


def test_a_range_that_moved_in_a_placement_that_a_worker_never_heard_of_is_found() -> None:
    """Who goes by the placement that it knows asks a server for ever that has the range no more."""
    world = lose_head_with_servers(3, "bc", freezes=False, mode="async", at_loss=forget_a_move)
    assert not world.halting.lacked
    mutation = Mutation("believes its placement", errand=BelievesItsPlacement)
    world = lose_head_with_servers(3, "bc", freezes=False, mode="async", mutation=mutation, at_loss=forget_a_move)
    assert world.halting.lacked


class AsksPrimariesOnly(Errand):
    def _speakers(self, placement: Placement) -> Mapping[str, Sequence[int]]:
        return placement.ranges_of


class LeavesTheLastStepOut(Errand):
    def __init__(self, ranges: Iterable[int], *, orphaned: bool = False, **content: Any) -> None:
        if orphaned:
            content["commit"] = None
        super().__init__(ranges, orphaned=orphaned, **content)


@pytest.mark.parametrize(
    ("errand", "mode"), [(AsksPrimariesOnly, "sync"), (LeavesTheLastStepOut, "sync"), (AsksPrimariesOnly, "async")]
)
def test_a_worker_that_gathers_otherwise_is_seen(errand: type[Errand], mode: str) -> None:
    mutation = Mutation("gathers otherwise", errand=errand)
    worlds = (lose_head_with_servers(seed, "bc", freezes=False, mode=mode, mutation=mutation) for seed in range(20))
    assert any(world.halting.lacked for world in worlds)


class RecordsNothingAsABackup(RangeKeeper):
    def _follow(self, ranges: Sequence[int], forward: Forward, parcel: Any) -> None:
        super()._follow(ranges, forward, parcel)
        for number in ranges:
            if isinstance(forward.push, ApplyLease):
                self._tenures[number].leases = LeaseSet()


def test_a_backup_that_does_not_know_what_it_has_is_seen() -> None:
    mutation = Mutation("records nothing as a backup", keeper=RecordsNothingAsABackup)
    with pytest.raises(Violation, match="its record says"):
        [lose_head_with_servers(seed, "bc", freezes=False, mode="async", mutation=mutation) for seed in range(20)]


def waits_for_ever(sight: Sight, patience_s: float) -> OrphanMove:
    return OrphanMove.WAIT


def gives_up_at_once(sight: Sight, patience_s: float) -> OrphanMove:
    move = decide(sight, patience_s)
    return OrphanMove.BREAK if move is OrphanMove.STOP else move


def waits_for_the_frozen(sight: Sight, patience_s: float) -> OrphanMove:
    move = decide(sight, patience_s)
    return OrphanMove.WAIT if move is OrphanMove.BREAK else move


@pytest.mark.parametrize(
    ("halts", "hosts", "freezes"),
    [(waits_for_ever, "bc", False), (gives_up_at_once, "bc", False), (waits_for_the_frozen, "abc", True)],
)
def test_a_worker_that_decides_otherwise_is_seen(halts: object, hosts: str, freezes: bool) -> None:
    mutation = Mutation("decides otherwise", halts=halts)  # type: ignore[arg-type]
    with pytest.raises(Violation):  # in every schedule
        lose_head(3, hosts, freezes=freezes, mutation=mutation)


def test_a_server_is_deserted_when_neither_coordinator_nor_workers_were_there_for_long() -> None:
    assert is_deserted(unheard_s=DESERTED_S, alone_s=DESERTED_S)
    assert not is_deserted(unheard_s=10 * DESERTED_S, alone_s=0.0), "workers go on while a coordinator stands still"
    assert not is_deserted(unheard_s=0.0, alone_s=10 * DESERTED_S), "workers are yet to come"
