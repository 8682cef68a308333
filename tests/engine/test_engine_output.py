"""Lines out of bytes, logs, and a reader of lines that stands still."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from paceline.engine.causes import tail
from paceline.engine.output import LONGEST_LINE, Output, Splitter


def test_lines_do_not_depend_on_how_the_bytes_come() -> None:
    text = "one\ntwo\n\nfour äöü\r\nbar 1\rbar 2\rbar 3\nno end"
    whole = ["one", "two", "", "four äöü", "bar 3", "no end"]
    data = text.encode()
    for seed in range(200):
        dice = random.Random(seed)
        splitter, lines, at = Splitter(), [], 0
        while at < len(data):
            size = dice.randint(1, 12)
            lines += splitter.feed(data[at : at + size])
            at += size
        assert lines + splitter.flush() == whole, seed


def test_lines_without_end_take_bounded_memory() -> None:
    splitter = Splitter()
    shown = sum(len(line) for _ in range(100) for line in splitter.feed(b"x" * 10_000))
    assert 1_000_000 - shown < LONGEST_LINE
    for _ in range(100):
        splitter.feed(b"\r" + b"y" * 1000)
    assert splitter.flush() == ["y" * 1000]


def test_a_terminal_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    moves = threading.Event()
    shown: list[str] = []

    def show(label: str, is_error: bool, line: str) -> None:
        assert moves.wait(60.0)
        shown.append(line)

    output = Output(show)
    pipes = output.open("w0", tmp_path / "w0.log")
    with open(pipes.out, "wb") as file:
        for number in range(30_000):  # far more than a pipe and the queue hold
            file.write(b"%d\n" % number)
    os.close(pipes.error)
    output.finish(pipes.printed)
    assert (tmp_path / "w0.log").read_text() == "".join(f"{number}\n" for number in range(30_000))
    moves.set()
    output.say("the end")
    output.close()
    assert shown[0] == "0"
    assert len(shown) < 30_000
    assert any("not shown here" in line for line in shown)


def test_a_display_that_breaks_does_not_lose_the_log(tmp_path: Path) -> None:
    def show(label: str, is_error: bool, line: str) -> None:
        raise BrokenPipeError

    output = Output(show)
    pipes = output.open("w0", tmp_path / "w0.log")
    os.write(pipes.out, b"one\n")
    os.write(pipes.error, b"two")
    os.close(pipes.out)  # the other one stays open, as if a grandchild had it
    output.finish(pipes.printed)
    output.close()
    os.close(pipes.error)
    assert sorted((tmp_path / "w0.log").read_text().splitlines()) == ["one", "two"]
    assert list(pipes.printed.error_lines) == ["two"]


@pytest.mark.parametrize("noise", [0, 50])
def test_the_last_traceback_is_shown_whole(noise: int) -> None:
    first = ["Traceback (most recent call last):", "  a", "KeyError: 1"]
    chain = ["", "The above exception was the direct cause of the following exception:", ""]
    second = ["Traceback (most recent call last):", "  b", "ValueError: 2"]
    older = ["Traceback (most recent call last):", "  old", "OSError", "went on"]
    assert tail([*older, *["x"] * noise, *first, *chain, *second]) == [*first, *chain, *second]
    assert tail(["y"] * (noise + 1)) == ["y"] * min(noise + 1, 30)
