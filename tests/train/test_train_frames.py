"""Which frames a script's author sees of an error."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.train.frames import boundary
from paceline.train.session import Session


def frames_of(error: BaseException) -> list[str]:
    """The names of the functions in its traceback, outermost first."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def session_of(**settings: Any) -> tuple[Session, nn.Module]:
    model = nn.Linear(3, 1)
    data = [(torch.ones(3), torch.zeros(1)) for _ in range(8)]
    made = Session(model, torch.optim.SGD(model.parameters(), 0.1), data=data, global_batch=4, **settings)
    return made, model


def train(loss_fn: Callable[..., Any]) -> None:
    session, _ = session_of()
    for epoch in session.epochs(1):
        for batch in epoch:
            session.step(loss_fn, batch)


def test_a_refused_setting_shows_the_line_that_gave_it() -> None:
    here = "test_a_refused_setting_shows_the_line_that_gave_it"
    for settings in ({"micro_batch": 0}, {"seed": "x"}, {"strategy": "none"}):
        with pytest.raises((ValueError, TypeError)) as caught:
            session_of(**settings)
        assert frames_of(caught.value) == [here, "session_of"]


def test_an_error_of_the_script_shows_the_lines_of_the_script() -> None:
    here = "test_an_error_of_the_script_shows_the_lines_of_the_script"

    def loss_fn(*_: torch.Tensor) -> torch.Tensor:
        return helper()

    def helper() -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        train(loss_fn)
    assert frames_of(caught.value) == [here, "train", "loss_fn", "helper"]
    with pytest.raises(TypeError, match="loss_fn returned float") as refused:
        train(lambda *_: 1.0)
    assert frames_of(refused.value) == [here, "train"]
    with pytest.raises(TypeError, match=r"write def loss_fn\(x, y\)") as misfit:
        train(lambda batch: batch)
    assert frames_of(misfit.value) == [here, "train"]


def test_an_error_in_a_warm_up_shows_the_lines_of_the_script() -> None:
    here = "test_an_error_in_a_warm_up_shows_the_lines_of_the_script"

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        paceline.warm_up(nn.Linear(3, 1), loss_fn, [torch.ones(3)])
    assert frames_of(caught.value) == [here, "loss_fn"]


def test_misuse_of_a_loop_shows_the_loop() -> None:
    def script() -> None:
        session, _ = session_of()
        for epoch in session.epochs(1):
            for _ in epoch:
                pass

    with pytest.raises(RuntimeError, match="step was not called") as caught:
        script()
    assert frames_of(caught.value)[1:] == ["script"]


OURS = """
def refuse(wanted):
    raise ValueError(f"{wanted} cannot be")

def mistake(wanted):
    return {}[wanted]

def failing_call(wanted):
    return int(wanted)

def matrix(wanted):
    import torch
    return torch.zeros(2) @ torch.zeros(3)

def translate(wanted):
    from paceline.errors import PacelineError
    try:
        refuse(wanted)
    except ValueError as error:
        raise PacelineError("cannot go on") from error
"""


@pytest.fixture
def ours() -> dict[str, Callable[[str], Any]]:
    """Functions that are in a file of Paceline."""
    made: dict[str, Any] = {}
    exec(compile(OURS, str(Path(paceline.__file__).parent / "train" / "made_up.py"), "exec"), made)
    return made


@pytest.mark.parametrize("name", ["mistake", "failing_call", "matrix"])
def test_what_may_be_a_mistake_of_ours_is_shown_whole(ours: dict[str, Callable[[str], Any]], name: str) -> None:
    with pytest.raises((KeyError, ValueError, RuntimeError)) as caught:
        boundary(ours[name])("x")
    assert frames_of(caught.value)[-2:] == ["call", name]


def test_what_led_to_an_error_is_as_short_and_the_log_has_all(
    ours: dict[str, Callable[[str], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "paceline.train"), pytest.raises(paceline.errors.PacelineError) as caught:
        boundary(ours["translate"])("x")
    assert len(frames_of(caught.value)) == 1
    assert caught.value.__cause__ is not None
    assert frames_of(caught.value.__cause__) == []
    assert "in translate" in caplog.text
