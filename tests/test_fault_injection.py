"""The faults that tests inject do what they say, and nothing when they are not armed."""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.custody.partial import free_bytes
from paceline.errors import ConnectionLost
from paceline.fault_points import FaultPoint
from paceline.testing import faults
from paceline.testing.crew import Crew, CrewError, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.memory import available_bytes


def session_at(steps: int, *, is_main: bool = False, rank: int = 0) -> Any:
    return SimpleNamespace(steps=steps, is_main=is_main, rank=rank)


# -- points ------------------------------------------------------------------------------------------------------------


def test_a_point_is_reached_in_vain_until_it_is_armed_and_after() -> None:
    point: FaultPoint[[int], str] = FaultPoint("a test")
    assert point.reach(1) is None
    with faults.armed(point, str):
        with faults.armed(point, lambda number: f"inner {number}"):
            assert point.reach(2) == "inner 2"
        assert point.reach(3) == "3"
    assert point.reach(4) is None


def test_an_action_that_counts_acts_once() -> None:
    struck: list[int] = []
    strike = faults.nth(3, lambda: struck.append(1))
    for number in range(6):
        strike(number)
        assert len(struck) == (number >= 2)


def test_a_full_disk_is_full_in_one_folder_only(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    with faults.full_disk(tmp_path / "full", 7):
        assert free_bytes(tmp_path / "full") == 7
        assert free_bytes(tmp_path) > 7
    assert free_bytes(tmp_path / "full") > 7


def test_little_memory_is_what_is_seen() -> None:
    with faults.little_memory(5):
        assert available_bytes() == 5
    assert available_bytes() > 5


@pytest.fixture
def pair() -> Any:
    ours, theirs = socket.socketpair()
    with contextlib.closing(Connection(ours, peer="a")) as one, contextlib.closing(Connection(theirs, peer="b")) as two:
        yield one, two


def test_traffic_is_struck_at_its_moment_on_connections_of_the_block_alone(pair: tuple[Connection, Connection]) -> None:
    deadline = Deadline(10.0, "a test")
    breaks = faults.nth(2, lambda: faults.fail(ConnectionResetError("a fault")))
    with faults.traffic(breaks):
        ours, theirs = socket.socketpair()
        with contextlib.closing(Connection(ours, peer="c")) as one, contextlib.closing(Connection(theirs, peer="d")):
            one.send("first", None, deadline=deadline)
            with pytest.raises(ConnectionLost, match="c broke: a fault"):
                one.send("second", None, deadline=deadline)
    pair[0].send("plain", None, deadline=deadline)
    assert pair[1].receive(deadline=deadline)[0].kind == "plain"


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_fault_strikes_once_at_its_step_on_its_worker(tmp_path: Path) -> None:
    struck: list[int] = []
    fault = faults.StepFault(lambda: struck.append(1), "main", 5)
    for session in (session_at(4, is_main=True), session_at(5), session_at(6, is_main=True)):
        fault(session)
    assert not struck
    for _ in range(2):
        fault(session_at(5, is_main=True))
    assert len(struck) == 1


@pytest.mark.parametrize(("worker", "struck"), [(1, [1]), ("all", [0, 1, 2])])
def test_outside_of_a_rehearsal_a_worker_is_known_by_its_rank(worker: faults.Who, struck: list[int]) -> None:
    found: list[int] = []
    for rank in range(3):
        faults.StepFault(partial(found.append, rank), worker, 5)(session_at(5, rank=rank))
    assert found == struck


def test_a_fault_that_strikes_once_leaves_word_for_other_processes(tmp_path: Path) -> None:
    struck: list[int] = []
    for _ in range(2):
        faults.StepFault(lambda: struck.append(1), "main", 1, tmp_path / "once")(session_at(1, is_main=True))
    assert len(struck) == 1


def end_by(_: None, kind: str) -> str:
    say("here")
    {"die": faults.die, "stand still": faults.stand_still}[kind]()
    return "went on"


def test_who_dies_is_dead_and_who_stands_still_goes_on_when_told() -> None:
    with Crew(2, form=False) as crew:
        crew.start(end_by, "die", ranks=[0])
        crew.start(end_by, "stand still", ranks=[1])
        crew.hear(0)
        crew.hear(1)
        with pytest.raises(CrewError, match="died"):
            crew.finish([0])
        crew.stop(1)  # until it stands still, by its own hand or by this
        crew.resume(1)
        assert crew.finish([1]) == ["went on"]


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_one_bit_of_one_element_is_flipped_and_flipped_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6, dtype=dtype).view(2, 3)
    before = tensor.clone()
    faults.flip(tensor, 4, 8 * dtype.itemsize - 1)
    assert tensor[1, 1] == (-4 if dtype.is_floating_point else 4 - 2**63)
    assert int((tensor != before).sum()) == 1
    faults.flip(tensor, 4, 8 * dtype.itemsize - 1)
    assert torch.equal(tensor, before)
    with pytest.raises(ValueError, match=r"has bits 0 to"):
        faults.flip(tensor, 0, 8 * dtype.itemsize)


def trained(where: faults.Where | None, at_step: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if where is not None:
        faults.flip_bit(optimizer, where, at_step=at_step, element=5, bit=22)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        seen.append(model.weight.detach().clone())
    return seen


def trained_in_a_session(where: faults.Where | None) -> torch.Tensor:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 4))
    if where is not None:
        faults.flip_bit(optimizer, where, at_step=2, element=5, bit=22)
    with Session(model, optimizer, data=data, global_batch=2, checkpoints=Checkpoints(every_s=None)) as session:
        for epoch in session.epochs(1):
            for batch in epoch:
                session.step(lambda x: model(x).square().mean(), batch)
    return model.weight.detach()


@pytest.mark.parametrize("where", ["gradient", "parameter", "optimizer"])
def test_a_bit_flips_in_a_session_too(where: faults.Where) -> None:
    assert not torch.equal(trained_in_a_session(where), trained_in_a_session(None))
    assert torch.equal(trained_in_a_session(None), trained_in_a_session(None))


@pytest.mark.parametrize(("where", "first"), [("gradient", 2), ("parameter", 2), ("optimizer", 3)])
def test_a_bit_that_flips_in_a_step_is_seen_from_there_on(where: faults.Where, first: int) -> None:
    """In the state of the optimizer it is seen one step later."""
    differs = [not torch.equal(one, two) for one, two in zip(trained(where), trained(None), strict=True)]
    assert differs == [False] * first + [True] * (4 - first)
