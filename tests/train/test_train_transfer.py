"""State on its way from one worker to another: whole, or not at all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from paceline.collective import Group
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import Give
from paceline.control.messages.plan import Plan, PlanStart, Seat
from paceline.errors import ProtocolError
from paceline.train import transfer
from paceline.train.membership import Membership
from paceline.train.staging import Staging
from paceline.wire.card import Card

Damage = Callable[[torch.Tensor], torch.Tensor]


class Channel:
    """Both ends of a group in one place; what is sent may be damaged on the way."""

    def __init__(self, damage: Damage = lambda tensor: tensor) -> None:
        self._sent: deque[torch.Tensor] = deque()
        self._damage = damage

    def send(self, tensor: torch.Tensor, rank: int, *, tag: int) -> None:
        self._sent.append(self._damage(tensor.clone()) if tensor.nbytes > 1 << 16 else tensor.clone())

    def recv(self, tensor: torch.Tensor, rank: int, *, tag: int) -> None:
        tensor.copy_(self._sent.popleft())


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(100_003, generator=generator),
        "half": torch.randn(40_000, generator=generator).to(torch.bfloat16),
        "small": [torch.arange(5), torch.tensor(True), torch.zeros(0, 3)],
        "number": 3,
    }


def sent(damage: Damage = lambda tensor: tensor, expected_bytes: int = 0) -> dict[str, Any]:
    group = cast(Group, Channel(damage))
    transfer.send(group, 1, transfer.pack(state()))
    received: dict[str, Any] = transfer.receive(group, 0, Staging(expected_bytes))
    return received


@pytest.mark.parametrize("expected_bytes", [0, 1000, 500_000, 50_000_000])
def test_what_arrives_is_what_was_sent(expected_bytes: int) -> None:
    received, wanted = sent(expected_bytes=expected_bytes), state()
    assert received["number"] == 3
    for name in ("large", "half"):
        assert torch.equal(received[name], wanted[name])
    for one, other in zip(received["small"], wanted["small"], strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def flip_a_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor[70_001] ^= 4
    return tensor


def flip_the_last_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor[-1] ^= 1
    return tensor


def exchange_blocks(tensor: torch.Tensor) -> torch.Tensor:
    size = 1 << 15
    tensor[:size], tensor[size : 2 * size] = tensor[size : 2 * size].clone(), tensor[:size].clone()
    return tensor


@pytest.mark.parametrize("damage", [flip_a_bit, flip_the_last_bit, exchange_blocks])
def test_damage_is_noticed(damage: Damage) -> None:
    with pytest.raises(ProtocolError, match="arrived damaged"):
        sent(damage)


def test_memory_that_was_made_ready_is_used_once() -> None:
    staging = Staging(1 << 20)
    form = [(torch.float32, (1000,)), (torch.int64, ())]
    first, second = staging.take(form), staging.take(form)
    first[0].fill_(1.0)
    second[0].fill_(2.0)
    assert bool((first[0] == 1.0).all())
    assert first[1].shape == ()
    staging.release()


class Working:
    """A worker that has a state, which changes with every lease, and a group in which everything takes long."""

    goes_on = True

    def __init__(self) -> None:
        self.weights = torch.zeros(50_000)
        self.num_packed = 0
        self.go_on = threading.Event()
        self.sent: dict[int, list[torch.Tensor]] = {1: [], 2: []}

    def gift(self, whole: bool) -> dict[str, Any]:
        self.num_packed += 1
        return {"weights": self.weights}

    def get(self, generation: int) -> Working:
        return self

    def send(self, tensor: torch.Tensor, rank: int, *, tag: int) -> None:
        assert self.go_on.wait(30.0)
        self.sent[rank].append(tensor.clone())


def test_who_does_leases_copies_its_state_once_for_all_that_get_it() -> None:
    working = Working()
    membership = Membership(Member("A"), "test")
    membership.connect(working, working, working)  # type: ignore[arg-type]
    seats = tuple(Seat(Card(name, "worker", "h", ("", 0), "", b"", False, ())) for name in "ABC")
    plan = Plan(1, PlanStart.FOUND, seats, 0, {"B": "A", "C": "A"})
    for name in "BC":
        membership._give(Give(plan, name, whole=True))
        working.weights += 1.0  # the next lease
    working.go_on.set()
    membership.close()
    assert working.num_packed == 1
    for tensors in working.sent.values():
        assert torch.equal(tensors[-1].view(torch.float32), torch.zeros(50_000))
    assert membership._packed() is None, "nobody sends it any more"
