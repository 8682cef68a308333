"""The coordinator's host is lost: what its workers elsewhere do, by the real rules, and what must be left of the run.

The host dies with all that is on it, or it freezes: then nobody is told, and whoever waits for it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from paceline.control.leases.lease_set import lease_set
from paceline.control.machines.lost_head import OrphanMove, Sight, has_seat_on
from paceline.control.machines.member_events import GroupBroke, StopRun
from paceline.control.messages.plan import Phase, Plan
from paceline.server.keeper import PendingAnswer
from paceline.server.messages import Need, RangeRecord
from paceline.testing.joint.truth import Log, SimulatedState

if TYPE_CHECKING:
    from paceline.testing.joint.workers import SimulatedWorker
    from paceline.testing.joint.world import World

HEAD = "a"
PATIENCE_S = 2.0
SLACK_S = 6.0  # for the operation under way, the end and the last word
DIAL_S = 0.3  # for one that does not answer
RETRY_S = 0.05
MOST_TRIES = 100


class SimulatedHalting:
    def __init__(self, world: World) -> None:
        self._world = world
        self.lost_at = -1.0
        self.left: dict[str, SimulatedState] = {}  # what workers left on their hosts
        self.lacked: set[str] = set()  # workers that found nobody who has some range
        self.outrun: set[str] = set()  # workers whose servers had made a step that they had not seen
        self._broke: set[tuple[str, str]] = set()
        self._working: set[str] = set()  # members of a group that needs nobody on the host that was lost

    def lose_head(self, *, freezes: bool) -> None:
        world = self._world
        self.lost_at = world.now
        machine = world.head.machine
        plan = machine.standing.current if machine is not None else None
        needs_head = has_seat_on(plan, HEAD) or self._has_server_on_head()
        may_agree = plan is not None and not needs_head and not world.is_leased  # leases have no header to agree in
        if plan is not None and may_agree and all(self._is_in(plan, one) for one in plan.members):
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

    def _has_server_on_head(self) -> bool:
        """Whether a range has a copy there: its primary waits for all of them."""
        world = self._world
        everybody = [replica.server for one in world.head.placement.ranges for replica in one.everybody()]
        return any(world.servers[server].host == HEAD for server in everybody)

    def _is_in(self, plan: Plan, member: str) -> bool:
        machine = self._world.workers[member].machine
        return machine.plan == plan and machine.next is None and machine.holds_state

    def look(self, worker: SimulatedWorker) -> None:
        """By a worker that lives elsewhere, with every heartbeat."""
        world, machine = self._world, worker.machine
        unheard_s = world.now - worker.line.told
        if worker.is_orphaned:
            return
        has_nobody = machine.plan is None or machine.phase is Phase.ENDED or self._is_between_leases(worker)
        if unheard_s > PATIENCE_S and (has_nobody or self._waits_for_servers(worker)):
            self._leave_behind(worker)
            return
        stood_s = world.now - worker.works_since if worker.works_since >= 0 else 0.0
        sight = Sight(unheard_s, stood_s, machine.plan is not None, has_seat_on(machine.plan, HEAD))
        move = world.mutation.halts(sight, PATIENCE_S)
        if move is OrphanMove.STOP and not machine.stop_asked:
            worker.post(StopRun())
        elif move is OrphanMove.BREAK and machine.plan is not None:
            if stood_s >= PATIENCE_S and world.group_of(machine.plan).is_delivering:
                self._working.clear()  # a delay that was longer than its patience
            worker.post(GroupBroke(machine.plan.generation))
        is_waiting = stood_s > 0 or worker.asks_since >= 0
        limit_s = PATIENCE_S + SLACK_S + (PATIENCE_S if is_waiting else 0.0)
        world.truth.check(
            world.now - self.lost_at < limit_s, f"{worker.name} still trains, {limit_s:g} s after its head was lost"
        )

    def may_break(self, caller: str, server: str) -> bool:
        """A connection between two that live breaks once while what is left is saved: each is asked twice."""
        pair = (caller, server)
        is_first = pair not in self._broke
        if self.lost_at >= 0:
            self._broke.add(pair)
        return is_first

    def _is_between_leases(self, worker: SimulatedWorker) -> bool:
        """Where only a coordinator could hand it the next one."""
        leasing = worker.leasing
        return leasing is not None and leasing.is_open and not leasing.is_busy and leasing.asks_since < 0

    def _waits_for_servers(self, worker: SimulatedWorker) -> bool:
        return worker.asks_since >= 0 and self._world.now - worker.asks_since > PATIENCE_S

    def _leave_behind(self, worker: SimulatedWorker) -> None:
        """It writes what it holds into its host's folder, with what servers have, and ends."""
        worker.is_orphaned = True
        if self._world.is_served and worker.machine.holds_state:
            Gathering(self._world, worker, self._end_with)
        else:
            self._end(worker, holds=worker.machine.holds_state)

    def _end_with(self, worker: SimulatedWorker, found: Gathered | None) -> None:
        """All ranges are there, or it is known that one is not."""
        if found is None:
            self.lacked.add(worker.name)
            self._end(worker, holds=False)
        elif worker.leasing is not None:
            self._check_leases(worker, found)
            self._end(worker, holds=True)
        elif found.step > worker.state.steps:
            self.outrun.add(worker.name)  # the servers hold samples that its cursor does not count
            self._end(worker, holds=False)
        else:
            self._check_steps(worker, found)
            self._end(worker, holds=True)

    def _check_steps(self, worker: SimulatedWorker, found: Gathered) -> None:
        for number, log in found.logs.items():
            steps, wanted = [entry[1] for entry in log[1:]], list(range(log[0][2] + 1, worker.state.steps + 1))
            self._world.truth.check(
                steps == wanted, f"{worker.name} left steps {steps} of range {number} behind, at {worker.state.steps}"
            )

    def _check_leases(self, worker: SimulatedWorker, found: Gathered) -> None:
        """What is saved of a range is what its record says, each lease once, with all that are known to be done."""
        truth, leasing = self._world.truth, worker.leasing
        assert leasing is not None
        known = leasing.holder.known_done()
        for number, log in found.logs.items():
            record, which = found.records[number], f"range {number} that {worker.name} left behind"
            applied = [entry[1:] for entry in log if entry[0] == "lease"]
            truth.check(len(set(applied)) == len(applied), f"{which} has leases twice: {applied}")
            done = lease_set(record.epoch, record.prefix, record.beyond)
            noted = {(done.epoch, lease) for lease in (*range(done.prefix), *done.beyond)}
            now = {lease for lease in applied if lease[0] == done.epoch}
            truth.check(noted == now, f"{which} has {sorted(now)}, and its record says {sorted(noted)}")
            lacks = [lease for lease in (*range(known.prefix), *known.beyond) if not done.has(known.epoch, lease)]
            truth.check(not lacks, f"{which} lacks leases {lacks} of epoch {known.epoch}, which are done")

    def _end(self, worker: SimulatedWorker, *, holds: bool) -> None:
        world = self._world
        if holds:
            world.truth.left_behind(worker.name, worker.state)
            self.left[worker.name] = worker.state
        if worker.name in self._working:
            # One may not have seen that the end was agreed, when the others leave.
            has_ended = any(world.workers[name].machine.phase is Phase.ENDED for name in self._working)
            world.truth.check(has_ended, f"{worker.name} gave up a group that could have agreed on its end")
        world.kill(worker, "halted")
        if not any(one.alive and one.host != HEAD for one in world.workers.values()):
            world.is_finished = True


class Gathered(NamedTuple):
    """What servers have of each range, with their records of it."""

    logs: dict[int, Log]
    records: dict[int, RangeRecord]

    @property
    def step(self) -> int:
        """The newest that one of them has made."""
        return max(record.step for record in self.records.values())


class Gathering:
    """Asks whoever is left for all ranges, with the step that the worker was about to make."""

    def __init__(
        self, world: World, worker: SimulatedWorker, then: Callable[[SimulatedWorker, Gathered | None], None]
    ) -> None:
        self._world = world
        self._worker = worker
        self._then = then
        self._errand = world.mutation.errand(
            range(world.num_ranges),
            commit=worker.stepping.making if worker.stepping is not None else None,
            pull=Need(step=worker.state.steps),
            exports=True,
            orphaned=True,
        )
        self._logs: dict[int, Log] = {}
        self._tries = 0
        worker.receive(self._ask)

    def _ask(self) -> None:
        world, worker, errand = self._world, self._worker, self._errand
        self._tries += 1
        if errand.is_done:
            self._then(worker, Gathered(self._logs, errand.records))
        elif errand.forlorn(worker.placement) or self._tries > MOST_TRIES:
            self._then(worker, None)
        else:
            for server, request in errand.requests(worker.placement).items():
                if world.servers[server].is_stopped:  # it is dialed anew, and does not answer that
                    worker.later(DIAL_S, self._lose, server)
                else:
                    world.request(worker, server, request, None, self._take, self._lose)
            worker.later(RETRY_S, self._ask)

    def _take(self, server: str, outcome: PendingAnswer) -> None:
        given = self._errand.answered(server, outcome.answer)
        self._logs.update({number: outcome.parcel[number] for number in given})

    def _lose(self, server: str) -> None:
        self._errand.lost(server)
