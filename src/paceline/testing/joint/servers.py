"""Servers: the real keeper and the real machine of a server's membership, a store that keeps lists, links to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.control.machines.member_events import AdoptPlacement, Exit, Leave, MemberReady, SendReport
from paceline.control.machines.server_member import ServerMember, ServingChanged
from paceline.control.messages.members import Introduction, Serving
from paceline.placement.placement import Placement
from paceline.server.keeper import PendingAnswer, RangeKeeper
from paceline.server.messages import Acknowledged, ApplyLease, CommitStep, Forward, ServerRequest, StageStep
from paceline.testing.joint.processes import SimulatedProcess
from paceline.testing.joint.truth import Violation
from paceline.wire.card import Card

if TYPE_CHECKING:
    from paceline.testing.joint.world import World

BEAT_S = 0.3

Entry = tuple[Any, ...]


class ListStore:
    """The state of a range is what was applied to it, in order; first of all, when it began."""

    def __init__(self) -> None:
        self.logs: dict[int, list[Entry]] = {}
        self.staged: dict[int, dict[tuple[int, int, int], Any]] = {}

    def _there(self, number: int) -> list[Entry]:
        if number not in self.logs:
            raise Violation(f"range {number} is used where it is not")
        return self.logs[number]

    def load(self, ranges: Sequence[int], parcel: Any) -> None:
        for number in ranges:
            self.logs[number] = list(parcel)
            self.staged[number] = {}

    def stage(self, ranges: Sequence[int], push: StageStep, parcel: Any) -> None:
        for number in ranges:
            self.staged[number][(push.generation, push.step, push.rank)] = parcel

    def unstage(self, number: int, generation: int, step: int) -> None:
        for key in [key for key in self.staged[number] if key[:2] == (generation, step)]:
            del self.staged[number][key]

    def commit(self, ranges: Sequence[int], commit: CommitStep) -> None:
        for number in ranges:
            key = (commit.generation, commit.step)
            given = {rank: value for (*where, rank), value in self.staged[number].items() if tuple(where) == key}
            self._there(number).append(("step", commit.step, tuple(sorted(given.items()))))
            self.unstage(number, *key)

    def apply(self, ranges: Sequence[int], push: ApplyLease, parcel: Any) -> None:
        for number in ranges:
            self._there(number).append(("lease", push.epoch, push.lease))

    def pull(self, ranges: Sequence[int], parcel: Any) -> dict[int, tuple[Entry, ...]]:
        return {number: tuple(self._there(number)) for number in ranges}

    def snapshot(self, number: int) -> Any:
        return list(self.logs.get(number, ())), dict(self.staged.get(number, {}))

    def restore(self, number: int, parcel: Any) -> None:
        self.logs[number], self.staged[number] = list(parcel[0]), dict(parcel[1])

    def forget(self, number: int) -> None:
        self.logs.pop(number, None)
        self.staged.pop(number, None)


class SimulatedServer(SimulatedProcess):
    is_server = True

    def __init__(self, world: World, name: str, host: str, pid: int) -> None:
        super().__init__(world, name, host, pid)
        self.store = ListStore()
        self.keeper: RangeKeeper = world.mutation.keeper(name, self.store)
        self.machine: ServerMember = world.mutation.server_member(name)
        self.callers: dict[Callable[[], None], None] = {}  # whom to tell when the connection breaks
        self._waiting: list[tuple[PendingAnswer, Callable[[PendingAnswer], None]]] = []
        self._held: list[tuple[str, Forward, Any]] = []
        self._window = 0
        self._heard: object = None
        self._sent: dict[tuple[str, int], int] = {}  # the last forward to each other, on the connection of that number
        world.after(world.random.uniform(0.01, 0.3), self.receive, self._build)

    # -- membership --------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        card = Card(self.name, "server", self.host, ("", 0), "", b"", False, ())
        self.line.connect()
        self._post(MemberReady(Introduction(card, self.pid, self.host, self.host)))
        self._beat()

    def connected(self) -> None:
        self.line.say(self.machine.report())

    def hear(self, kind: str, body: Any) -> None:
        self._post(body)

    def leave(self) -> None:
        self._post(Leave())

    @property
    def is_leaving(self) -> bool:
        return self.machine.leaving

    def _post(self, event: Any) -> None:
        for action in self.machine.handle(event):
            if isinstance(action, SendReport):
                self.line.say(action.report)
            elif isinstance(action, AdoptPlacement):
                self._adopt(action.placement)
            elif isinstance(action, Exit):
                self.world.kill(self, f"exited ({action.verdict.value})")

    def _beat(self) -> None:
        if self.world.is_finished:
            return
        self.line.look()
        self._window += 1
        self._tell(force=True)
        self.line.say(self.machine.report())
        self.later(BEAT_S, self._beat)

    def _tell(self, *, force: bool = False) -> None:
        """Let the machine know how far the keeper is."""
        heard = self.keeper.heard()
        if heard == self._heard and not force:
            return
        self._heard = heard
        costs = self.world.loads.costs_on(self.name, self.keeper.placement)
        synced, handed = tuple(sorted(heard.synced)), tuple(sorted(heard.handed))
        self._post(ServingChanged(Serving(heard.version, synced, handed, window=self._window, costs=costs)))

    # -- requests and forwards ---------------------------------------------------------------------------------------

    def _adopt(self, placement: Placement) -> None:
        self.keeper.adopt(placement)
        held, self._held = self._held, []
        for sender, forward, parcel in held:
            self.take(sender, forward, parcel)
        self._look()
        self._tell()

    def serve(self, request: ServerRequest, parcel: Any, reply: Callable[[PendingAnswer], None]) -> None:
        self._waiting.append((self.keeper.serve(request, parcel), reply))
        self._look()

    def take(self, sender: str, forward: Forward, parcel: Any) -> None:
        is_blocked = any(other == sender for other, _, _ in self._held)
        if forward.version > self.keeper.placement.version or is_blocked:
            self._held.append((sender, forward, parcel))
            return
        message = self.keeper.take(sender, forward, parcel)
        peer = self.world.servers[sender]
        self.world.send_in_order(self.name, sender, "back", peer.acknowledged, self.name, message)
        if message.refused:
            self.world.faults.refused(self.name, sender)
        if forward.snapshot:
            self._tell()

    def acknowledged(self, server: str, message: Acknowledged) -> None:
        self.keeper.acknowledged(server, message)
        self._look()
        if self.keeper._handing:
            self._tell()

    def reconnected(self) -> None:
        """The connection to another is there again."""
        self._look()

    def _look(self) -> None:
        """Send what is new in the links, and give the answers that are free to go. On a new connection all that was not
        acknowledged is sent again, before anything else: forwards never overtake each other."""
        world = self.world
        for server, link in self.keeper.links.items():
            if not link.queue or world.is_broken(self.name, server):
                continue
            key = (server, world.connection_of(self.name, server))
            sent = self._sent.get(key, 0)
            if link.queue[-1][0].number <= sent:
                continue
            peer = world.servers[server]
            for forward, parcel in link.queue:
                if forward.number > sent:
                    self._sent[key] = forward.number
                    world.send_in_order(self.name, server, "forth", peer.take, self.name, forward, parcel)
        waiting, self._waiting = self._waiting, []
        for outcome, reply in waiting:
            if self.keeper.is_released(outcome.waits):
                reply(outcome._replace(answer=self.keeper.finish(outcome)))
                world.faults.answered(self, outcome.request)
            else:
                self._waiting.append((outcome, reply))

    def died(self) -> None:
        self.world.checks.died()
        self.world.lose_some_of(self.name)
        for tell in list(self.callers):
            self.world.after(self.world.delay(), tell)
