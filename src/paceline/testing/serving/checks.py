"""What must hold in every schedule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from paceline.control.serving import Aim
from paceline.placement.placement import Placement, Replicas
from paceline.testing.serving.parts import Entry
from paceline.testing.simulation.truth import Violation

if TYPE_CHECKING:
    from paceline.testing.serving.world import ServingWorld

Log = tuple[Entry, ...]


class Checks:
    """The log of a range begins with an entry that says since when; two logs that begin alike are of the same state."""

    def __init__(self, world: ServingWorld) -> None:
        self._world = world
        self._shown: dict[tuple[int, Entry], Log] = {}  # the longest log that a worker saw of a range
        self._num_relieved = 0
        self._lost: dict[int, int] = {}  # the epoch that the workers were at when a range was lost

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            raise Violation(text)

    # -- on the way --------------------------------------------------------------------------------------------------

    def published(self, placement: Placement) -> None:
        world = self._world
        lost = [number for number, one in enumerate(placement.ranges) if one.origin == placement.version > 1]
        self.check(world.num_replicas == 1 or not lost, f"ranges {lost} were lost, but no two servers died at a time")
        self._lost.update(dict.fromkeys(lost, self._epoch()))

    def aimed(self, before: Aim, now: Aim, placement: Placement) -> None:
        """The ranges have other homes to go to. While the same servers are there it is for load: from one to one other,
        when all ranges are where they should be, and not again and again."""
        if (before.sites, before.num_bytes) != (now.sites, now.num_bytes):
            return
        pairs = list(zip(before.homes, now.homes, strict=True))
        moved = [number for number, (old, new) in enumerate(pairs) if old != new]
        concerned = {home for number in moved for home in set(before.homes[number]) ^ set(now.homes[number])}
        self.check(bool(moved) and len(concerned) <= 2, f"{moved} move for load, between {sorted(concerned)}")
        moving = [number for number, one in enumerate(placement.ranges) if one.joining or one.handing]
        self.check(not moving, f"{moved} move for load while {moving} are on their way")
        self._num_relieved += 1
        most = 3 * self._world.num_ranges * self._world.loads.num_changes
        self.check(self._num_relieved <= most, f"ranges moved {self._num_relieved} times for load, and still do")

    def died(self) -> None:
        """Who was taken for dead may have served until now, and what it took without a backup is gone too."""
        self._lost = dict.fromkeys(self._lost, self._epoch())

    def _epoch(self) -> int:
        return max((worker.epoch for worker in self._world.workers.values()), default=0)

    def seen(self, logs: dict[int, Log]) -> None:
        """What a worker was shown: of all that was shown of a range, the one is the beginning of the other."""
        for number, log in logs.items():
            key = (number, log[0])
            longest = self._shown.get(key, ())
            short, long = sorted((log, longest), key=len)
            self.check(long[: len(short)] == short, f"of range {number} was shown {short} and {long}")
            self._shown[key] = long

    def seen_before_lease(self, epoch: int, lease: int, logs: dict[int, Log]) -> None:
        self.seen(logs)
        if self._world.bound < 0:
            return
        for number in logs.keys() - self._lost.keys():
            seen = set(logs[number])
            lacks = [earlier for earlier in range(lease - self._world.bound) if ("lease", epoch, earlier) not in seen]
            self.check(not lacks, f"lease {lease} started without {lacks} in range {number}, {self._world.bound=}")

    def seen_after_step(self, step: int, logs: dict[int, Log]) -> None:
        self.seen(logs)
        for number in logs.keys() - self._lost.keys():
            steps = [entry[1] for entry in logs[number][1:]]
            self.check(steps[:step] == list(range(1, step + 1)), f"after step {step} range {number} has {steps}")

    # -- at the end --------------------------------------------------------------------------------------------------

    def is_at_rest(self) -> bool:
        """Whether all went by the newest placement, nothing is on its way, and every range has its backups."""
        world = self._world
        members = world.members()
        if world.faults.are_under_way or not world.chief.alive:
            return False
        for server in members:
            if server.is_leaving or server.keeper.placement.version < world.newest.version:
                return False
            if any(link.queue for link in server.keeper.links.values()):
                return False
        if not all(self._is_whole(replicas) for replicas in world.newest.ranges):
            return False
        return world.loads.is_level(world.newest, world.memory.aim.num_moves)

    def _is_whole(self, replicas: Replicas) -> bool:
        world = self._world
        enough = min(world.num_replicas, len(world.members()))
        is_moving = bool(replicas.joining or replicas.handing)
        holders = (replicas.primary, *replicas.backups)
        return not is_moving and len(holders) >= enough and all(world.is_member(one.server) for one in holders)

    def check_end(self) -> None:
        attempts: dict[int, Any] = {}
        for number, replicas in enumerate(self._world.newest.ranges):
            store = self._world.servers[replicas.primary.server].store
            if number in self._lost and not store.logs.get(number):
                continue  # lost at the end, when nobody asks for it any more
            log = tuple(store.logs.get(number, ()))
            self.check(bool(log), f"nobody has range {number}")
            for backup in replicas.backups:
                other = self._world.servers[backup.server].store
                is_same = (other.logs.get(number), other.staged.get(number)) == (list(log), store.staged[number])
                self.check(is_same, f"the backup {backup.server} of range {number} has another state than its primary")
            self._check_counts(number, log)
            self._check_shown(number, log)
            if self._world.crew is not None:
                self._check_attempts(number, log, attempts)
                left = sorted(store.staged[number])
                self.check(not left, f"range {number} keeps what was staged for {left}, and nobody will ask for it")

    def _check_counts(self, number: int, log: Log) -> None:
        """Every lease, and every step, counts once. Where a range was lost, those that began later do."""
        world = self._world
        twice = [entry for entry, count in Counter(entry[:3] for entry in log).items() if count > 1]
        self.check(not twice, f"range {number} counted {twice} twice")
        epoch = self._lost.get(number, -1)
        if world.crew is not None:
            steps = [entry[1] for entry in log[1:]]
            first = 1 if epoch < 0 else min(steps, default=world.num_steps + 1)
            self.check(steps == list(range(first, world.num_steps + 1)), f"range {number} has steps {steps}")
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
        assert self._world.crew is not None
        for _, step, given in log[1:]:
            generations = {generation for _, (generation, _) in given}
            whole = [self._world.crew.sizes[generation] for generation in generations]
            self.check(whole == [len(given)], f"range {number} made step {step} of {given}")
            if not self._lost:
                other = attempts.setdefault(step, given)
                self.check(given == other, f"ranges made step {step} of different attempts: {given}, {other}")
