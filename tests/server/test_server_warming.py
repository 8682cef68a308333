"""A server has done everything once before it says that it is ready."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest

from paceline.server import __main__ as process
from paceline.server import member, warming
from paceline.server.dense import ELEMENTWISE, OptimizerSettings
from paceline.server.errors import HalfMade

LIFE = """
import sys
from paceline.server.member import ServerProcess
from paceline.server.warming import _live, warm_up
from paceline.server.dense import ELEMENTWISE, OptimizerSettings
import torch
if {warms}:
    warm_up()
before = set(sys.modules)
for kind in ELEMENTWISE:
    _live(OptimizerSettings(kind, {{"lr": 0.1}}), torch.float32, has_tables=True)
print(len(set(sys.modules) - before))
"""


def modules_of_a_first_life(*, warms: bool) -> int:
    """How many modules a server imports when it does everything for the first time."""
    done = subprocess.run(
        [sys.executable, "-c", LIFE.format(warms=warms)], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_a_server_that_is_warm_imports_nothing_when_it_is_brought_up() -> None:
    """A cold one imports the compiler of torch with its first optimizer, for a second or more, while all wait."""
    assert modules_of_a_first_life(warms=False) > 100
    assert modules_of_a_first_life(warms=True) == 0


def test_a_server_is_warm_before_anybody_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Joined(Exception):
        pass

    def join(_: object) -> None:
        order.append("joined")
        raise Joined

    monkeypatch.setattr(warming, "warm_up", lambda: order.append("warm"))
    monkeypatch.setattr(member, "ServerProcess", join)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(Joined):
        process._serve(None, 0)  # type: ignore[arg-type]
    assert order == ["warm", "joined"]


def test_a_server_without_room_for_tables_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def live(settings: OptimizerSettings, _: object, *, has_tables: bool) -> None:
        tried.append(settings.optimizer)
        if has_tables or settings.optimizer == "Adam":
            raise HalfMade("no room")

    monkeypatch.setattr(warming, "_live", live)
    warming.warm_up()
    assert set(tried) == set(ELEMENTWISE)


def test_a_request_to_leave_that_came_while_it_warmed_up_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the exit was swallowed, as Python does in callbacks: a server that joined would not be asked again."""
    asked = threading.Event()

    def swallow() -> None:
        with contextlib.suppress(SystemExit):
            process._end(0, None)

    monkeypatch.setattr(process, "_asked_to_leave", asked)
    monkeypatch.setattr(warming, "warm_up", swallow)
    monkeypatch.setattr(member, "ServerProcess", lambda _: pytest.fail("it joined"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert process._serve(None, 0) == 0  # type: ignore[arg-type]
