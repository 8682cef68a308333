"""The contract of an engine, kept by the local one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline import engine
from paceline.control.exit_codes import exit_words
from paceline.control.shell.ticket import Ticket
from paceline.engine import reaper as script_of_reaper
from paceline.engine.base import Process
from paceline.engine.local import Job, LocalEngine
from paceline.engine.output import Output
from paceline.engine.reaper_handle import ReaperHandle, guarded
from paceline.testing.eventually import eventually
from tests.engine.commands import SESSION, is_alive, state_of

TICKET = Ticket(
    run="a", folder="", address=("127.0.0.1", 0), local_name="", host="", secret=b"s", fingerprint=b"f", tls=False
)
SLEEP = "import time; print('up', flush=True); time.sleep(600)"

Begin = Callable[[str], Process]


@contextlib.contextmanager
def starter(folder: Path, lines: list[str]) -> Iterator[Begin]:
    """Starts processes of Python code, and closes them at the end."""
    output, reaper = Output(lambda label, is_error, line: lines.append(line)), ReaperHandle()
    started: list[Process] = []

    def begin(code: str) -> Process:
        environment = {"PYTHONPATH": str(Path(engine.__file__).resolve().parents[2])}
        job = Job(command=("-c", code), workers=9, run="a", environment=environment)
        started.append(LocalEngine(job, TICKET, folder, output, reaper).start(len(started)))
        return started[-1]

    try:
        yield begin
    finally:
        for process in started:
            if process.exit_code() is None:
                process.close()
        reaper.close()
        output.close()


def wait_for_end(process: Process) -> int:
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    assert poll.poll(60_000)
    code = process.exit_code()
    assert code is not None
    return code


@pytest.mark.parametrize(("code", "expected"), [("", 0), ("raise SystemExit(5)", 5), ("import os; os.abort()", -6)])
def test_an_end_is_seen_and_the_last_words_are_kept(tmp_path: Path, code: str, expected: int) -> None:
    lines: list[str] = []
    with starter(tmp_path, lines) as begin:
        process = begin("import sys; sys.stdout.write('last'); sys.stdout.flush()\n" + code)
        assert wait_for_end(process) == expected
        process.close()
        assert process.exit_code() == expected
        assert process.last_lines()[:1] != []
        assert "last" in (tmp_path / "w0.log").read_text().splitlines()
    assert "last" in lines


def test_vitals_tell_a_process_that_works_from_one_that_does_not(tmp_path: Path) -> None:
    lines: list[str] = []
    with starter(tmp_path, lines) as begin:
        works, rests = begin("while True: pass"), begin(SLEEP)
        eventually(lambda: "up" in lines, "the second to start")
        rests.vitals()
        works.vitals()
        eventually(lambda: works.vitals().busy, "the first to work")
        eventually(lambda: not rests.vitals().busy, "the second to rest")
        rests.signal(signal.SIGSTOP)
        eventually(lambda: rests.vitals().state == "T", "it to stand still")
        rests.signal(signal.SIGCONT)
        eventually(lambda: rests.vitals().state == "S", "it to go on")
        rests.signal(signal.SIGTERM)
        assert wait_for_end(rests) == -signal.SIGTERM
        rests.close()


def test_who_takes_its_ticket_has_a_session(tmp_path: Path) -> None:
    lines: list[str] = []
    with starter(tmp_path, lines) as begin:
        plain, member = begin(SLEEP), begin(SESSION + SLEEP)
        eventually(lambda: lines.count("up") == 2, "both to be there")
        assert not plain.has_session()
        assert member.has_session()


def test_closing_ends_what_a_process_has_started(tmp_path: Path) -> None:
    lines: list[str] = []
    with starter(tmp_path, lines) as begin:
        process = begin(
            "import os, time\n"
            "for move in (int, os.setpgrp):\n"
            "    if (pid := os.fork()) == 0:\n"
            "        move(); time.sleep(600)\n"
            "    print(pid, flush=True)\n"
        )
        assert wait_for_end(process) == 0
        eventually(lambda: len(lines) == 2, "the children to be named")
        children = [int(line) for line in lines]
        assert all(is_alive(pid) for pid in children)
        process.close()
        assert not any(is_alive(pid) for pid in children)


def test_a_warden_that_is_killed_is_replaced(tmp_path: Path) -> None:
    reaper = ReaperHandle()
    os.kill(reaper._process.pid, signal.SIGKILL)
    eventually(lambda: state_of(reaper._process.pid) == "Z", "it to die")
    reaper.entrust(os.getsid(0) + 10**7)
    assert is_alive(reaper._process.pid)
    reaper.close()


def test_a_process_does_not_outlive_the_thread_that_started_it(tmp_path: Path) -> None:
    """By the kernel's hand alone: there is no reaper here."""
    code = (
        "import os, subprocess, sys\n"
        f"command = {guarded([sys.executable, '-c', SLEEP], 0)!r}\n"
        "command[command.index('0')] = str(os.getpid())\n"
        "process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
        "assert process.stdout.readline() == b'up\\n'\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    eventually(lambda: not is_alive(int(done.stdout)), "it to die")


def test_what_cannot_be_run_says_so(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        script_of_reaper.__file__,
        "exec",
        str(os.getpid()),
        str(tmp_path / "nothing"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert "cannot run" in done.stderr


def test_ends_are_told_as_people_say_them() -> None:
    assert exit_words(3) == "exited with code 3"
    assert exit_words(-9) == "was killed by SIGKILL"
    assert exit_words(-63) == "was killed by signal 63"
