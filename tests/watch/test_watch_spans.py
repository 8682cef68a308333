"""What is recorded of a worker's training thread: nothing unless asked for, then whole steps after the first ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.watch import spans
from paceline.watch.spans import SpanRequest


@pytest.fixture(autouse=True)
def nothing_is_recorded_afterwards(tmp_path: Path) -> Iterator[None]:
    yield
    spans.finish()


def ask(monkeypatch: pytest.MonkeyPatch, folder: Path, skip: int, num_steps: int) -> None:
    request = SpanRequest(str(folder), skip, num_steps)
    monkeypatch.setenv(spans.VARIABLE, msgspec.json.encode(request).decode())
    monkeypatch.setenv("LOCAL_RANK", "3")
    spans.begin({"strategy": "allreduce"})


def do_step(number: int) -> None:
    before = spans.mark("session")
    spans.step(number)
    inner = spans.mark("forward")
    spans.mark(inner)
    spans.mark(before)


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    spans.begin({})
    assert not spans.is_wanted()
    assert spans.mark("reduce") == "script"
    spans.step(1)
    spans.finish()
    assert spans.read(tmp_path) == []


def test_a_mark_says_what_it_ends_so_that_it_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, tmp_path, 0, 10)
    assert spans.mark("backward") == "script"
    assert spans.mark("copy") == "backward"
    assert spans.mark("copy") == "copy"
    assert spans.mark("backward") == "copy"
    spans.finish()
    (recording,) = spans.read(tmp_path)
    assert recording.kinds == ["backward", "copy", "backward"]
    assert len(recording.times) == 4
    assert recording.times == sorted(recording.times)
    assert (recording.worker, recording.facts) == (3, {"strategy": "allreduce"})


def test_the_first_steps_are_left_out_and_enough_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, tmp_path, 2, 3)
    for number in range(1, 6):
        do_step(number)
        assert spans.read(tmp_path) == []
    do_step(6)  # its beginning ends the last one that is wanted
    (recording,) = spans.read(tmp_path)
    assert [number for _, number in recording.steps] == [3, 4, 5, 6]
    assert [recording.kinds[index] for index, _ in recording.steps[:-1]] == ["forward"] * 3
    assert spans.mark("reduce") == "script", "nothing more is recorded"


def test_a_recording_without_room_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_CAPACITY", 10)
    ask(monkeypatch, tmp_path, 0, 1000)
    for number in range(5):
        do_step(number)
    (recording,) = spans.read(tmp_path)
    assert len(recording.kinds) == 10
