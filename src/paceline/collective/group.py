"""The communicator of one plan: collectives among a fixed set of members, in ranks 0..size-1.

Every member calls the same operations in the same order. An operation works in place on CPU tensors of any layout,
returns when it is complete on this member (or at once, with `async_op=True`, and the `Handle` waits), and raises

    PeerLost           a member died: on every survivor, whatever it was waiting for
    Mismatch           members called different things; names both sides
    DeadlineExceeded   nothing happened for `timeout_s`; names who was waited for
    GroupAborted       `abort` was called here or elsewhere

A member that was late may complete the operation that the others gave up, if all of them had come to it; never a
later one. After any of these errors the group is over, every later call raises the same, and the contents of tensors
under way are undefined. `regroup` makes the next group in the same processes.

Tensors from `empty` lie in shared memory: reducing them needs no copy on one host. Their memory belongs to this
group; after it they are ordinary tensors. But those that were under way when a group failed may still be written to
by a member that wakes late: do not fill them again before its end is certain; take new ones from the next group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from paceline.collective import arguments, succession
from paceline.collective.arguments import flat, flat_all, put
from paceline.collective.base import Operation, Path, Sink, into
from paceline.collective.choice import CostModel, hosts_of
from paceline.collective.forming import Cancellation, Parts, assemble
from paceline.collective.lane import Handle, Receiving
from paceline.collective.linked import LinkPath
from paceline.collective.messages import Messages
from paceline.collective.reducing import AllReducer
from paceline.collective.reductions import find
from paceline.collective.sequencer import Key, Sequencer
from paceline.collective.shared import SharedPath
from paceline.collective.succession import Describe
from paceline.errors import GroupError
from paceline.fault_points import FaultPoint
from paceline.wire.card import Card
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import name_of
from paceline.wire.endpoint import Endpoint
from paceline.wire.memory import SharedMemory

DEFAULT_TIMEOUT_S = 300.0
FORMING_S = 60.0
FORMED: FaultPoint[[str], None] = FaultPoint("a group of this name is there on this member")


class Group:
    """Made by `Group.form`, `group.regroup` or `meeting.join`; a context manager that closes it."""

    def __init__(self, parts: Parts, *, timeout_s: float, ephemeral: bool) -> None:
        self._parts = parts
        self._health = parts.health
        self._ephemeral = ephemeral
        self.name = parts.name
        self.rank = parts.rank
        self.size = len(parts.cards)
        self.cards = parts.cards
        self.timeout_s = timeout_s
        self.hosts = hosts_of(parts.cards)
        self._sequencer = Sequencer(parts.health, timeout_s=timeout_s)
        self._operate = self._sequencer.operate
        self._messages = Messages(parts.health, parts.mailbox)
        self._path: Path = SharedPath(parts.local) if len(self.hosts) == 1 else LinkPath(parts.links)
        self._reducer = AllReducer(parts, self.hosts, self._path, self._operate)
        # Called with the id of a member on this host that died, on a thread of its own.
        self.on_death: Callable[[str], None] | None = None
        parts.local.watch_lifelines(self._lose)
        self._num_followers: Counter[tuple[str, ...]] = Counter()

    @classmethod
    def form(
        cls,
        endpoint: Endpoint,
        cards: Sequence[Card],
        rank: int,
        *,
        name: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        forming_s: float = FORMING_S,
        model: CostModel | None = None,
        ephemeral: bool = False,
        after: Group | None = None,
        cancellation: Cancellation | None = None,
        reserve_bytes: int = 0,
        memory: SharedMemory | None = None,
    ) -> Group:
        """Form a group with the members that the cards name, in that order; all of them call this with the same cards
        and name.

        A `model` is what this member would choose algorithms by; the group takes that of the lowest rank that has one,
        and where nobody has, all probe their links for at most a second. An `ephemeral` endpoint is closed with its
        last group. A group that this one comes `after` tells of members that die before they have come here. With a
        `cancellation`, another thread can end the forming: `GroupAborted`. `reserve_bytes` for tensors from `empty` are
        made ready meanwhile, or were before, in `memory` that a `SpareMemory` gave."""
        deadline = Deadline(forming_s, f"forming group {name}")
        witness = after._health if after is not None else None
        parts = assemble(endpoint, cards, rank, name, deadline, witness, cancellation, reserve_bytes, memory)
        group = cls(parts, timeout_s=timeout_s, ephemeral=ephemeral)
        try:
            group._reducer.settle_model(model, deadline)
            FORMED.reach(name)
        except BaseException:
            group._close(formed=False)
            raise
        return group

    def regroup(self, ranks: Sequence[int], *, forming_s: float = FORMING_S) -> Group:
        """A new group over these ranks of this one, in the order given, in the same processes. Works while this group
        does, and after it failed; not after `close`. All of `ranks` must call it with the same list."""
        arguments.check_ranks(ranks, self.rank, self.size)
        members = tuple(self.cards[rank].member for rank in ranks)
        name = succession.name_of_next(self.name, members, self._num_followers[members])
        following = self._form_next(ranks, name, self.timeout_s, forming_s)
        self._num_followers[members] += 1
        return following

    def succeed(
        self, *, make_word: Callable[[], bytes], describe: Describe, timeout_s: float, forming_s: float = FORMING_S
    ) -> tuple[Group, bytes]:
        """The next group, of who is left of this one, found out among them, in the order of their ranks; and what
        `make_word` gave on the first of them (empty, if it is alone). All of them call it. Works while this group does,
        after it failed, after `retire` and again; not after `close`. `timeout_s` is for the operations of the new one;
        errors name members as `describe` does."""
        deadline = Deadline(forming_s, "regroup")

        def form(ranks: Sequence[int], name: str) -> Group:
            return self._form_next(ranks, name, timeout_s, max(0.001, deadline.remaining_s()))

        return succession.succeed(self._parts, form, make_word, describe, deadline)

    def _form_next(self, ranks: Sequence[int], name: str, timeout_s: float, forming_s: float) -> Group:
        return Group.form(
            self._parts.endpoint,
            [self.cards[rank] for rank in ranks],
            list(ranks).index(self.rank),
            name=name,
            timeout_s=timeout_s,
            forming_s=forming_s,
            model=self.model,
            ephemeral=self._ephemeral,
            after=self,
        )

    @property
    def model(self) -> CostModel:
        """By which `auto` chooses."""
        return self._reducer.model

    def set_timeout(self, timeout_s: float) -> None:
        """How long operations called from now on may take."""
        Deadline(timeout_s, f"operations of group {self.name}")  # refuses what is no time
        self.timeout_s = self._sequencer.timeout_s = timeout_s

    # -- reductions --------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """Every member's tensor becomes the reduction of all, the same bits on each."""
        arguments.check_tensor("tensor", tensor)
        key = ("all_reduce", op, tensor.dtype, tensor.shape, -1, algorithm, ())
        return self._reducer.all_reduce(key, tensor, async_op, timeout_s)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """The root's tensor becomes the reduction of all; the others' stay as they are."""
        arguments.check_tensor("tensor", tensor)
        reduction = find(op, tensor.dtype)
        arguments.check_rank("root", root, self.size)

        def body(operation: Operation) -> None:
            with flat(tensor, writes=self.rank == root) as data:
                if self.size > 1:
                    self._path.reduce(operation, data, root, reduction)

        return self._operate(Key("reduce", op, tensor.dtype, tensor.shape, root), body, async_op, timeout_s)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: str = "sum",
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """`output` becomes the reduction of all members' inputs[rank]. The inputs may differ in size, but alike on
        all members."""
        arguments.check_tensor("output", output)
        reduction = find(op, output.dtype)
        arguments.check_list("inputs", inputs, self.size, output.dtype, writes=False)
        arguments.check_same("inputs[rank]", inputs[self.rank], "output", output)

        def body(operation: Operation) -> None:
            with flat(output) as result, flat_all(inputs, writes=False) as sends:
                put(sends[self.rank], result)

                def add(_: int, start: int, chunk: torch.Tensor) -> None:
                    part = result[start : start + chunk.numel()]
                    reduction.combine(part, chunk, part)

                self._exchange(operation, sends, [result.numel()] * self.size, add)
                if reduction.divides:
                    result.div_(self.size)

        sizes = tuple(tensor.numel() for tensor in inputs)
        return self._operate(Key("reduce_scatter", op, output.dtype, (), -1, "", sizes), body, async_op, timeout_s)

    # -- moving ------------------------------------------------------------------------------------------------------

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, async_op: bool = False, timeout_s: float | None = None
    ) -> Handle:
        """Every member's tensor becomes the root's."""
        arguments.check_tensor("tensor", tensor)
        arguments.check_rank("root", root, self.size)

        def body(operation: Operation) -> None:
            with flat(tensor, writes=self.rank != root) as data:
                if self.size > 1:
                    self._path.broadcast(operation, data, root)

        return self._operate(Key("broadcast", "", tensor.dtype, tensor.shape, root), body, async_op, timeout_s)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """outputs[r] becomes the tensor of rank r, on every member. Ranks may differ in size."""
        arguments.check_tensor("tensor", tensor)
        arguments.check_list("outputs", outputs, self.size, tensor.dtype, writes=True)
        arguments.check_same("outputs[rank]", outputs[self.rank], "tensor", tensor)

        def body(operation: Operation) -> None:
            with flat_all(outputs) as pieces, flat(tensor, writes=False) as mine:
                put(mine, pieces[self.rank])
                if self.size > 1:
                    self._path.all_gather(operation, pieces)

        sizes = tuple(output.numel() for output in outputs)
        return self._operate(Key("all_gather", "", tensor.dtype, (), -1, "", sizes), body, async_op, timeout_s)

    def gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """On the root, outputs[r] becomes the tensor of rank r; the others give None. Ranks may differ in size."""
        arguments.check_tensor("tensor", tensor)
        arguments.check_rank("root", root, self.size)
        own = ("tensor", tensor)
        receivers = arguments.given_at_root("outputs", outputs, own, root, self.rank, self.size, writes=True)

        def body(operation: Operation) -> None:
            with flat(tensor, writes=False) as mine, flat_all(receivers) as pieces:
                if pieces:
                    put(mine, pieces[root])
                nothing = mine[:0]
                sends = [mine if rank == root and self.rank != root else nothing for rank in range(self.size)]
                self._exchange(operation, sends, [piece.numel() for piece in pieces] or [0] * self.size, into(pieces))

        return self._operate(Key("gather", "", tensor.dtype, (), root), body, async_op, timeout_s)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """`output` becomes the root's inputs[rank]; the others give None. Ranks may differ in size."""
        arguments.check_tensor("output", output)
        arguments.check_rank("root", root, self.size)
        own = ("output", output)
        senders = arguments.given_at_root("inputs", inputs, own, root, self.rank, self.size, writes=False)

        def body(operation: Operation) -> None:
            with flat(output) as mine, flat_all(senders, writes=False) as pieces:
                if pieces:
                    put(pieces[root], mine)
                receives = [mine.numel() if rank == root and self.rank != root else 0 for rank in range(self.size)]
                self._exchange(operation, pieces or [mine[:0]] * self.size, receives, into([mine] * self.size))

        return self._operate(Key("scatter", "", output.dtype, (), root), body, async_op, timeout_s)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """outputs[r] becomes what rank r has at inputs[this rank]. All sizes may differ."""
        arguments.check_list("inputs", inputs, self.size, inputs[0].dtype if inputs else None, writes=False)
        arguments.check_list("outputs", outputs, self.size, inputs[0].dtype, writes=True)
        arguments.check_same("outputs[rank]", outputs[self.rank], "inputs[rank]", inputs[self.rank])

        def body(operation: Operation) -> None:
            with flat_all(outputs) as receivers, flat_all(inputs, writes=False) as senders:
                put(senders[self.rank], receivers[self.rank])
                self._exchange(operation, senders, [piece.numel() for piece in receivers], into(receivers))

        return self._operate(Key("all_to_all", "", inputs[0].dtype, (), -1), body, async_op, timeout_s)

    def barrier(self, *, async_op: bool = False, timeout_s: float | None = None) -> Handle:
        """Returns when every member has called it."""

        def body(operation: Operation) -> None:
            if self.size > 1:
                self._path.barrier(operation)

        return self._operate(Key("barrier", "", None, (), -1), body, async_op, timeout_s)

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(
        self,
        tensor: torch.Tensor,
        rank: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Handle:
        """Send to one member, which calls `recv`. In no order with the collectives."""
        return self._messages.send(tensor, rank, tag, async_op, self.timeout_s if timeout_s is None else timeout_s)

    def recv(
        self,
        tensor: torch.Tensor,
        rank: int | None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Receiving:
        """Receive into `tensor`, which must have the type and as many elements as what is sent; from any member if
        `rank` is None. The result's `source` says from whom. With `async_op` its time counts from the first `wait`."""
        return self._messages.receive(tensor, rank, tag, async_op, self.timeout_s if timeout_s is None else timeout_s)

    # -- several operations as one -----------------------------------------------------------------------------------

    def together(self, name: str, job: Callable[[], None], *, async_op: bool = False) -> Handle:
        """Do `job`, which calls operations of this group that wait, with none of another thread between them."""
        return self._sequencer.together(name, job, async_op)

    def mismatch(self, operation: str, text: str) -> GroupError:
        """End the group because what members gave does not fit together, as a job of `together` found out; what to
        raise, and what the others get."""
        self._health.fail("mismatch", text, self.rank)
        return self._health.error(operation)

    # -- memory, the end ---------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in shared memory."""
        if self._health.failure is not None:
            raise self._health.error("empty")
        name_of(dtype)
        return self._parts.arena.empty(shape, dtype)

    def committed_bytes(self) -> int:
        """The shared memory that this member's buffers and `empty` tensors cost now."""
        return self._parts.memory.committed_bytes()

    def abort(self, reason: str) -> None:
        """End the group: every wait of it, here and on the other members, raises `GroupAborted` with this reason.
        From any thread."""
        text = f"{self._health.describe(self.rank)} aborted: {reason}"
        self._health.fail("aborted", text, self.rank)

    def retire(self) -> None:
        """End all operations, and their threads. What tells who lives stays until `close`, for `succeed`."""
        self.abort("the group was retired")
        self._sequencer.close()
        self._messages.close()

    def disown(self) -> None:
        """In a forked child, which has no part in the group, and none of its threads: every call says so."""
        self._health.disown()
        self._sequencer.disown()
        self._messages.disown()

    def close(self) -> None:
        """Say goodbye and let go of memory, connections and threads. Who still needs this member gets `PeerLost`."""
        self._close(formed=True)

    def _close(self, *, formed: bool) -> None:
        self._health.close()
        self._sequencer.close()
        self._messages.close()
        self._parts.close(formed=formed)
        if self._ephemeral and self._parts.endpoint.num_rooms() == 0:
            self._parts.endpoint.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._health.failure is None else f", ended: {self._health.failure.text}"
        return f"Group({self.name!r}, rank {self.rank} of {self.size} on {len(self.hosts)} host(s){state})"

    def _lose(self, rank: int) -> None:
        if self._health.died(rank) and self.on_death is not None:
            self.on_death(self.cards[rank].member)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _exchange(
        self, operation: Operation, sends: Sequence[torch.Tensor], receives: Sequence[int], sink: Sink
    ) -> None:
        if self.size > 1:
            self._path.exchange(operation, sends, receives, sink)
