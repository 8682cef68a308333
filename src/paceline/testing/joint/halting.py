"""The coordinator's host is lost: what its workers elsewhere do, by the real rules, and what must be left of the run.

The host dies with all that is on it, or it freezes: then nobody is told, and whoever waits for it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.control.lost_head import Move, Sight, has_seat_on
from paceline.control.member_events import Broke, Stop
from paceline.control.messages import Phase, Plan
from paceline.testing.joint.truth import State

if TYPE_CHECKING:
    from paceline.testing.joint.workers import Worker
    from paceline.testing.joint.world import World

HEAD = "a"
PATIENCE_S = 2.0
SLACK_S = 6.0  # for the operation under way, the end and the last word


class Halting:
    def __init__(self, world: World) -> None:
        self._world = world
        self.lost_at = -1.0
        self.left: dict[str, State] = {}  # what workers left on their hosts
        self._working: set[str] = set()  # members of a group that has nobody on the host that was lost

    def lose_head(self, *, freezes: bool) -> None:
        world = self._world
        self.lost_at = world.now
        machine = world.head.machine
        plan = machine.standing.current if machine is not None else None
        if plan is not None and not has_seat_on(plan, HEAD) and all(self._is_in(plan, one) for one in plan.members):
            self._working = set(plan.members)
        for agent in world.agents.values():
            agent.over = True  # nobody is started any more
        for process in [one for one in world.processes.values() if one.host == HEAD and one.alive]:
            if freezes:
                process.is_stopped = True
            else:
                world.kill(process, "was killed")
        if freezes:
            world.head.is_stopped = True
        else:
            world.head.crash()

    def _is_in(self, plan: Plan, member: str) -> bool:
        machine = self._world.workers[member].machine
        return machine.plan == plan and machine.next is None and machine.holds_state

    def look(self, worker: Worker) -> None:
        """By a worker that lives elsewhere, with every heartbeat."""
        world, machine = self._world, worker.machine
        unheard_s = world.now - worker.line.told
        if unheard_s > PATIENCE_S and (machine.plan is None or machine.phase is Phase.ENDED):
            self._leave_behind(worker)
            return
        stood_s = world.now - worker.works_since if worker.works_since >= 0 else 0.0
        sight = Sight(unheard_s, stood_s, machine.plan is not None, has_seat_on(machine.plan, HEAD))
        move = world.mutation.halts(sight, PATIENCE_S)
        if move is Move.STOP and not machine.stop_asked:
            worker.post(Stop())
        elif move is Move.BREAK and machine.plan is not None:
            worker.post(Broke(machine.plan.generation))
        limit_s = PATIENCE_S + SLACK_S + (PATIENCE_S if stood_s else 0.0)
        world.truth.check(
            world.now - self.lost_at < limit_s, f"{worker.name} still trains, {limit_s:g} s after its head was lost"
        )

    def _leave_behind(self, worker: Worker) -> None:
        """It writes what it holds into its host's folder, and ends."""
        world = self._world
        if worker.machine.holds_state:
            world.truth.left_behind(worker.name, worker.state)
            self.left[worker.name] = worker.state
        if worker.name in self._working:
            # One may not have seen that the end was agreed, when the others leave.
            has_ended = any(world.workers[name].machine.phase is Phase.ENDED for name in self._working)
            world.truth.check(has_ended, f"{worker.name} gave up a group that could have agreed on its end")
        world.kill(worker, "halted")
        if not any(one.alive and one.host != HEAD for one in world.processes.values()):
            world.is_finished = True
