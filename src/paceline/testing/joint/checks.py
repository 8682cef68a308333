"""What must hold of servers, leases and evictions in every schedule; what must hold of operations is in `truth`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from paceline.control.machines import founding
from paceline.control.machines.coordinator_events import CoordinatorState, Note, RunOver
from paceline.control.machines.server_manager import Aim
from paceline.control.messages.plan import Phase, PlanStart
from paceline.placement.placement import Placement, Replicas
from paceline.testing.joint.truth import Log, SimulatedState, Violation
from paceline.testing.joint.workers import SimulatedWorker

if TYPE_CHECKING:
    from paceline.testing.joint.servers import SimulatedServer
    from paceline.testing.joint.world import World


class Checks:
    """The log of a range begins with an entry that says since when; two logs that begin alike are of the same state."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._shown: dict[tuple[int, Any], Log] = {}  # the longest log that a worker saw of a range
        self._num_relieved = 0
        self._aim = Aim()
        self._began = 0  # the version in which the run was founded, when that was
        self._lost: dict[int, int] = {}  # the epoch that the workers were at when a range was lost
        self._has_rested = False
        self._newest = 0  # the generation of the last plan that was made

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    # -- on the way --------------------------------------------------------------------------------------------------

    def ended(self, note: Note) -> None:
        """Only who was cut off, stopped or unreachable may be given up: not who lives, and speaks."""
        process = self._world.processes[note.member]
        if "was not heard of" in note.text:
            may_be = self._world.faults.may_be_silent(process)
            self.check(may_be, f"{note.member} was given up, but it lives and speaks: {note}")
        elif note.kind == "evicted" and isinstance(process, SimulatedWorker) and self._world.head.has_no_plan:
            is_worthless = not process.alive or not founding.holds(process.machine.report())
            self.check(is_worthless, f"{note.member} was sent away with a state that no plan speaks of: {note}")
        elif note.kind == "released" and isinstance(process, SimulatedWorker):
            self._released(process, note)
        if founding.GONE_ON in note.text:
            machine = self._world.head.machine
            assert machine is not None
            last = machine.records[note.member].working.plan
            self.check(self._newest > last, f"nobody has gone on after generation {last}: {note}")
        elif note.kind == "dead" and "its connections broke" not in note.text:
            self.check(not process.alive, f"{note.member} was taken for dead, but it lives: {note}")

    def _released(self, worker: SimulatedWorker, note: Note) -> None:
        """A run goes on, or is over, without who is let go; one of which no plan speaks goes on from who holds it."""
        head = self._world.head
        machine = head.machine
        assert machine is not None
        if not head.had_plan and not machine.standing.over:
            is_holder = worker.alive and founding.holds(machine.records[worker.name].report)
            self.check(not is_holder, f"{note.member} was let go with a state that no plan speaks of: {note}")

    def planned(self, note: Note) -> None:
        self._newest = int(note.text.split()[1])

    def published(self, placement: Placement) -> None:
        world = self._world
        lost = [
            number for number, one in enumerate(placement.ranges) if one.origin == placement.version > placement.began
        ]
        if lost:
            self.check(world.num_replicas == 1, f"ranges {lost} were lost, but no two servers died at a time")
            self._lost.update(dict.fromkeys(lost, self._epoch()))

    def aimed(self, now: Aim, placement: Placement) -> None:
        """The ranges have other homes to go to. While the same servers are there it is for load: from one to one other,
        and not again and again."""
        before, self._aim = self._aim, now
        began, self._began = self._began, placement.began
        if (
            began != placement.began
            or not before.homes
            or (before.sites, before.num_bytes) != (now.sites, now.num_bytes)
        ):
            return
        pairs = list(zip(before.homes, now.homes, strict=True))
        moved = [number for number, (old, new) in enumerate(pairs) if old != new]
        concerned = {home for number in moved for home in set(before.homes[number]) ^ set(now.homes[number])}
        self.check(bool(moved), "the ranges were placed anew, and neither servers nor loads had changed")
        self.check(len(concerned) <= 2, f"{moved} move for load, between {sorted(concerned)}")
        moving = [n for n, one in enumerate(placement.ranges) if (one.joining or one.handing) and n not in moved]
        self.check(not moving, f"{moved} move for load while {moving} are on their way")
        self._num_relieved += 1
        most = 3 * self._world.num_ranges * self._world.loads.num_changes
        self.check(self._num_relieved <= most, f"ranges moved {self._num_relieved} times for load, and still do")

    def forgotten(self) -> None:
        """The journal is lost, and with it where the ranges should be."""
        self._aim = Aim()

    def died(self) -> None:
        """Who was taken for dead may have served until now, and what it took without a backup is gone too."""
        self._lost = dict.fromkeys(self._lost, self._epoch())

    def restored(self, number: int) -> None:
        """A worker loads a range that was lost."""
        self._lost[number] = max(self._lost.get(number, 0), self._epoch())

    def founds(self, standing: CoordinatorState) -> None:
        """The coordinator begins the run, or begins it anew: nobody that it could ask may hold a state of it. A journal
        that is lost is no excuse. Who was let go, and has not heard of it, is out: the others went on without it. That
        nobody is let go whose state the run needs is checked when it is (`_released`)."""
        world, plan = self._world, standing.current
        if plan is None or plan.start is not PlanStart.FOUND:
            return
        for worker in world.living():
            is_holder = founding.holds(worker.machine.report()) and world.head.counts_now(worker.name)
            if is_holder and not worker.machine.is_dismissed and not world.faults.may_be_silent(worker):
                raise Violation(f"the run is founded from {plan.base}, but {worker.name} holds {worker.state.applied}")

    def founded(self, generation: int, state: SimulatedState) -> None:
        """The run begins anew: what workers saw before is history."""
        self._shown.clear()

    def _epoch(self) -> int:
        return max((worker.state.epoch for worker in self._world.workers.values()), default=0)

    def seen(self, logs: dict[int, Log]) -> None:
        """What a worker was shown: of all that was shown of a range, the one is the beginning of the other."""
        for number, log in logs.items():
            key = (number, log[0])
            longest = self._shown.get(key, ())
            short, long = (log, longest) if len(log) < len(longest) else (longest, log)
            self.check(long[: len(short)] == short, f"of range {number} was shown {short} and {long}")
            self._shown[key] = long

    def seen_before_lease(self, epoch: int, lease: int, logs: dict[int, Log]) -> None:
        self.seen(logs)
        bound = self._world.bound
        if bound < 0:
            return
        for number in logs.keys() - self._lost.keys():
            seen = set(logs[number])
            lacks = [earlier for earlier in range(lease - bound) if ("lease", epoch, earlier) not in seen]
            self.check(not lacks, f"lease {lease} started without {lacks} in range {number}, {bound=}")

    def seen_after_epoch(self, epoch: int, logs: dict[int, Log]) -> None:
        self.seen(logs)
        for number in logs.keys() - self._lost.keys():
            seen = set(logs[number])
            lacks = [lease for lease in range(self._world.num_leases) if ("lease", epoch, lease) not in seen]
            self.check(not lacks, f"after epoch {epoch} range {number} lacks leases {lacks}")

    def seen_after_step(self, step: int, logs: dict[int, Log]) -> None:
        self.seen(logs)
        for number in logs.keys() - self._lost.keys():
            first, steps = logs[number][0][2], [entry[1] for entry in logs[number][1:]]
            wanted = list(range(first + 1, step + 1))
            self.check(steps[: len(wanted)] == wanted, f"after step {step} range {number} has {steps} since {first}")

    # -- at rest -----------------------------------------------------------------------------------------------------

    def may_end(self) -> bool:
        """Where the run lingers before its end: whether the faults are over, and all that moves has come to rest."""
        world = self._world
        if not world.lingers or self._has_rested or world.halted or world.is_finished:
            return True
        if not world.faults.are_over:
            return False
        if self._is_at_rest():
            self._has_rested = True
            self.check_logs(strict=True)
            return True
        from paceline.testing.joint.world import REST_S  # what it is measured by is the world's

        self.check(world.now < world.faults.end_at + REST_S, f"the ranges never come to rest: {world.describe()}")
        return False

    def _members(self) -> list[SimulatedServer]:
        machine = self._world.head.machine
        assert machine is not None
        return [self._world.servers[record.member] for record in machine.census.servers]

    def _is_at_rest(self) -> bool:
        """Whether all go by the newest placement, nothing is on its way, and every range has its backups."""
        world, machine = self._world, self._world.head.machine
        if machine is None or world.head.is_stopped:
            return False
        members = self._members()
        for server in members:
            if not server.alive or server.is_leaving or server.is_stopped:
                return False
            if server.keeper.placement.version < machine.placement.version and server.keeper.placement.version:
                return False
            if any(link.queue for link in server.keeper.links.values()):
                return False
        if not all(self._is_whole(replicas, members) for replicas in machine.placement.ranges):
            return False
        if any(not server.line.is_up for server in members):
            return False
        names = [server.name for server in members]
        return world.loads.is_level(machine.placement, names, machine._memory.manager.aim.num_moves)

    def _is_whole(self, replicas: Replicas, members: list[SimulatedServer]) -> bool:
        enough = min(self._world.num_replicas, len(members))
        is_moving = bool(replicas.joining or replicas.handing)
        holders = (replicas.primary, *replicas.backups)
        names = {server.name for server in members}
        return not is_moving and len(holders) >= enough and all(one.server in names for one in holders)

    # -- at the end --------------------------------------------------------------------------------------------------

    def over(self, over: RunOver) -> None:
        world = self._world
        if over.failed:
            has_one_copy = world.is_served and world.num_replicas == 1
            may_fail = world.may_fail or (world.head.has_lost_journal and has_one_copy)
            self.check(may_fail, f"the run failed: {over.reason}")
            return
        machine = world.head.machine
        assert machine is not None
        current = machine.standing.current
        if current is None or world.head.is_halting:
            return
        reports = [record.report for record in machine.records.values()]
        ended = [report.working.applied for report in reports if report.phase is Phase.ENDED]
        if not ended:
            return
        if not world.is_leased:
            world.truth.ended(world.truth.lineage_of(current.generation), max(ended))
        if world.is_served:
            self.check_logs(strict=False)
        if world.is_leased:
            wanted = {(epoch, lease) for epoch in range(world.num_epochs) for lease in range(world.num_leases)}
            lacks = wanted - world.head.rows
            self.check(not lacks or world.head.has_lost_journal, f"the run's database lacks leases {sorted(lacks)}")

    def check_logs(self, *, strict: bool) -> None:
        """What the primaries have is complete, each thing once; if `strict`, their backups have the same."""
        world = self._world
        attempts: dict[int, Any] = {}
        for number, replicas in enumerate(world.head.placement.ranges):
            server = world.servers[replicas.primary.server]
            store = server.store
            log = tuple(store.logs.get(number, ()))
            is_stopping = world.head.is_halting
            if not log and (number in self._lost or not server.alive or not strict or is_stopping):
                continue  # lost at the end, when nobody asks for it any more, or never loaded
            self.check(bool(log), f"nobody has range {number}")
            if not strict and server.keeper.placement.version < world.head.placement.version:
                continue
            if strict:
                for backup in replicas.backups:
                    other = world.servers[backup.server].store
                    is_same = (other.logs.get(number), other.staged.get(number)) == (list(log), store.staged[number])
                    self.check(is_same, f"the backup {backup.server} of range {number} has not what its primary has")
            self._check_counts(number, log)
            self._check_shown(number, log)
            if world.mode == "sync":
                self._check_attempts(number, log, attempts)

    def _check_counts(self, number: int, log: Log) -> None:
        """Every lease, and every step, counts once. Where a range was lost, those that began later do."""
        world = self._world
        twice = [entry for entry, count in Counter(entry[:3] for entry in log).items() if count > 1]
        self.check(not twice, f"range {number} counted {twice} twice")
        epoch = self._lost.get(number, -1)
        if world.mode == "sync":
            steps = [entry[1] for entry in log[1:]]
            last = max((worker.state.steps for worker in world.workers.values() if worker.alive), default=0)
            first = log[0][2] + 1 if epoch < 0 else min(steps, default=last + 1)
            self.check(steps[: last + 1 - first] == list(range(first, last + 1)), f"range {number} has steps {steps}")
            return
        if world.head.is_halting:
            return
        lacks = {
            ("lease", later, lease) for later in range(epoch + 1, world.num_epochs) for lease in range(world.num_leases)
        }.difference(log)
        self.check(not lacks, f"range {number} lacks {sorted(lacks)}")

    def _check_shown(self, number: int, log: Log) -> None:
        shown = self._shown.get((number, log[0]), ())
        self.check(tuple(log[: len(shown)]) == shown, f"of range {number} was shown {shown}, which is gone: {log}")

    def _check_attempts(self, number: int, log: Log, attempts: dict[int, Any]) -> None:
        """A step is that of one generation, with all its workers, and the same one in all ranges."""
        if number in self._lost:
            return
        for _, step, given in log[1:]:
            generations = {generation for _, (generation, _) in given}
            whole = [len(self._world.truth.plans[generation].seats) for generation in generations]
            self.check(whole == [len(given)], f"range {number} made step {step} of {given}")
            other = attempts.setdefault(step, given)
            self.check(given == other, f"ranges made step {step} of different attempts: {given}, {other}")
