"""The coordinator as a process of its own: killed, started again, doubled, orphaned."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.control.exit_codes import BROKEN, INTERRUPTED
from paceline.control.journal.reader import RunReader
from paceline.control.shell.client import command
from paceline.control.shell.config import VARIABLE, Config, launch
from paceline.control.shell.service import StatusAnswer
from paceline.control.shell.ticket import Access, Ticket, read_access
from paceline.errors import PacelineError
from paceline.testing.eventually import eventually
from paceline.testing.faults import fill
from paceline.wire.deadline import Deadline
from tests.control.helpers import WAIT_S, new_config, training


def status(ticket: Ticket) -> StatusAnswer:
    return command(ticket, "status", answer_type=StatusAnswer, deadline=Deadline(20.0, "a test"))


def access_of(folder: Path, pid: int) -> Access:
    """Of the coordinator with this process id, when it is there."""

    def is_there() -> bool:
        with contextlib.suppress(ValueError):
            return read_access(folder).pid == pid
        return False

    eventually(is_there, "the coordinator to listen")
    return read_access(folder)


@contextlib.contextmanager
def coordinator(config: Config) -> Iterator[subprocess.Popen[bytes]]:
    process = launch(config, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, text = process.communicate(timeout=WAIT_S)
    return process.returncode, text.decode()


def test_a_killed_coordinator_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    config = new_config(tmp_path, wanted=2)
    generations: set[int] = set()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(coordinator(config))
        ticket = access_of(tmp_path, first.pid).ticket
        trainees = stack.enter_context(training(ticket, 2))
        eventually(lambda: len(trainees[0].applied) > 5, "the run to start")
        for round_ in range(2):
            before = status(ticket)
            generations.add(before.generation)
            first.send_signal(signal.SIGKILL)
            first.wait(WAIT_S)
            reached = len(trainees[0].applied)
            if round_ == 1:
                trainees[1].vanish()  # nobody is there to say what follows; the survivor waits
            else:
                eventually(lambda: len(trainees[0].applied) > reached + 5, "training without a coordinator")  # noqa: B023
            first = stack.enter_context(coordinator(config))
            assert access_of(tmp_path, first.pid).ticket == ticket
            eventually(lambda: status(ticket).term == before.term + 1, "a new term")  # noqa: B023
            reached = len(trainees[0].applied)
            eventually(lambda: len(trainees[0].applied) > reached + 5, "the run to go on")  # noqa: B023
        assert trainees[0].applied == list(range(1, len(trainees[0].applied) + 1))
        after = status(ticket)
        assert after.generation not in generations
        assert {row["member"]: row["fate"] for row in after.members}[trainees[0].name] == ""
        with RunReader(tmp_path) as reader:
            assert [row.generation for row in reader.plans()] == [1, 2]
            eventually(lambda: len(reader.steps()) > reached, "what was done without a coordinator")
            operations = [row.operation for row in reader.steps()]
            assert operations == list(range(1, len(operations) + 1))


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    config = new_config(tmp_path)
    with coordinator(config) as first:
        access_of(tmp_path, first.pid)
        with coordinator(config) as second:
            code, text = ended(second)
        assert code == 2
        assert f"already has a coordinator, process {first.pid}" in text
        assert read_access(tmp_path).pid == first.pid


def test_ctrl_c_is_the_agents_and_sigterm_ends_only_the_coordinator(tmp_path: Path) -> None:
    with coordinator(new_config(tmp_path)) as process:
        ticket = access_of(tmp_path, process.pid).ticket
        process.send_signal(signal.SIGINT)
        assert status(ticket).over == ""
        process.send_signal(signal.SIGTERM)
        code, _ = ended(process)
        assert code == INTERRUPTED
    with RunReader(tmp_path) as reader:
        assert reader.status().status == "interrupted"


AGENT = """
import sys, time
from pathlib import Path
import msgspec
from paceline.control.shell.config import Config, launch
config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
print(launch(config, stderr=sys.stderr).pid, flush=True)
time.sleep(600)
"""


def test_a_coordinator_does_not_outlive_its_agent(tmp_path: Path) -> None:
    import msgspec

    config = new_config(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(msgspec.json.encode(config))
        agent.stdin.close()
        pid = int(agent.stdout.readline())
        access_of(tmp_path, pid)
        process = os.pidfd_open(pid)
        agent.kill()
        agent.wait(WAIT_S)
        eventually(lambda: _has_ended(process), "the coordinator to end")
        os.close(process)
    with RunReader(tmp_path) as reader:
        assert reader.status().status == "interrupted"


def _has_ended(process: int) -> bool:
    from paceline.wire.waiting import READ, is_ready

    return is_ready(process, READ)


def test_a_coordinator_that_cannot_remember_waits_and_says_nothing(mount_small: Callable[[str], Path]) -> None:
    folder = mount_small("1m")
    config = new_config(folder, wanted=1)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(coordinator(config))
        ticket = access_of(folder, first.pid).ticket
        filler = fill(folder / "filler")
        (trainee,) = stack.enter_context(training(ticket, 1))
        os.kill(first.pid, signal.SIGTERM)  # whether it waits for room already or not: it ends
        code, text = ended(first)
        assert code in (BROKEN, INTERRUPTED), text
        assert trainee.plans == []  # it was told nothing that is not on disk
        filler.unlink()
        second = stack.enter_context(coordinator(config))
        access_of(folder, second.pid)
        eventually(lambda: len(trainee.applied) > 2, "the run to start")
        assert [plan.generation for plan in trainee.plans] == [1]


def test_started_by_hand_it_says_how_it_is_started() -> None:
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    command_line = [sys.executable, "-m", "paceline.control.shell.service"]
    found = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert found.returncode == 2
    assert VARIABLE in found.stderr


def test_a_wrong_port_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = new_config(tmp_path)
        config = Config(
            **{field: getattr(config, field) for field in config.__struct_fields__} | {"port": taken.getsockname()[1]}
        )
        from paceline.control.shell.service import CoordinatorService

        with pytest.raises(PacelineError, match="choose a free port"):
            CoordinatorService(config)
