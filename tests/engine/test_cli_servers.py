"""`paceline run --servers` and `paceline join --servers` with real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from paceline.control.shell.ticket import ACCESS_FILE, read_access
from paceline.testing.eventually import eventually
from tests.engine.commands import Command, completed, is_alive, paceline, pids_of, write_script

TRAINING = """
from tests.engine import members
members.train(10**6)
"""


def servers(command: Command) -> list[int]:
    return [pid for pid in command.processes("paceline.server") if pid not in command.processes("reaper.py")]


def agent_log(folder: Path) -> str:
    path = folder / "runs" / "a" / "logs" / "agent.log"
    return path.read_text() if path.exists() else ""


def local_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def test_servers_beside_workers_a_death_a_leave_a_guest_and_nothing_left(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING)
    with paceline(tmp_path, "run", "-n", "1", "--servers", "2", "--replicas", "2", "--name", "a", script) as command:
        eventually(
            lambda: all(f"{label} has a session" in agent_log(tmp_path) for label in ("w0", "s0", "s1")),
            "the worker and the servers to take their tickets",
        )
        (first,), (second,) = pids_of(tmp_path, "s0"), pids_of(tmp_path, "s1")
        assert sorted(servers(command)) == sorted([first, second])
        line = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
        assert line[1:] == [b"-m", b"paceline.server", b""]
        eventually((tmp_path / "runs" / "a" / ACCESS_FILE).exists, "the coordinator to listen")
        access = read_access(tmp_path / "runs" / "a")
        assert access.ticket.local_name in local_sockets()

        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGTERM)
        eventually(lambda: len(pids_of(tmp_path, "s0")) == 2, "s0 to be started again")
        assert "paceline: s0 was killed by SIGKILL; it is started again in 0.5 s" in command.err
        eventually(lambda: f"s1: process {second} exited with code 0" in agent_log(tmp_path), "s1 to leave")
        assert pids_of(tmp_path, "s1") == [second]
        eventually(lambda: servers(command) == pids_of(tmp_path, "s0")[1:], "the new s0, and no other")
        code, out, _ = completed(tmp_path, "logs", "s0", "--name", "a")
        assert (code, out.count("--- process ")) == (0, 2)

        (tmp_path / "code").write_text(completed(tmp_path, "invite")[1])
        with paceline(tmp_path, "join", "@code", "--servers", "1", "-n", "0") as guest:
            eventually(lambda: servers(guest) == pids_of(tmp_path, "s0", "a-2") != [], "the guest's server")
            guest.interrupt()
            assert guest.wait() == 130

        assert completed(tmp_path, "stop", "--name", "a")[0] == 0
        assert command.wait() == 0, command.err
        assert not any(is_alive(pid) for pid in pids_of(tmp_path, "s0"))
        assert not command.processes()
        assert access.ticket.local_name not in local_sockets()


def test_the_servers_of_a_plain_script_end_with_it_and_its_code_is_the_runs(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import pathlib, sys, time
        log = pathlib.Path("runs/a/logs/agent.log")
        while "s0 has a session" not in log.read_text():
            time.sleep(0.01)
        sys.exit(3)
        """,
    )
    with paceline(tmp_path, "run", "--servers", "1", "--name", "a", script) as command:
        assert command.wait() == 3
        assert not command.processes()
    (server,) = pids_of(tmp_path, "s0")
    assert f"s0: process {server} exited with code 0" in agent_log(tmp_path)


def test_servers_do_not_outlive_their_agent(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\ntime.sleep(600)")
    with paceline(tmp_path, "run", "--servers", "2", "--name", "a", script) as command:
        eventually(lambda: len(servers(command)) == 2 and len(command.workers()) == 1, "all to start")
        command.kill()
        eventually(lambda: not command.processes(), f"nothing to be left: {command.processes()}")
        assert command.wait() == -signal.SIGKILL


def test_what_cannot_be_started_is_said_in_one_line(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    for arguments, said in [
        (["run", "--servers", "-1", script], "--servers -1"),
        (["run", "--servers", "2", "--replicas", "0", script], "--replicas 0"),
        (["run", "--servers", "2", "--replicas", "3", script], "each replica needs its own server; give --servers 3"),
        (["run", "--replicas", "2", script], "give --servers 2 or more, or leave out --replicas"),
        (["run", "--servers", "2", "--ranges", "equal", script], "--ranges equal: give auto"),
        (["run", "-n", "0", "--servers", "1", script], "-n 0: a run needs at least one worker"),
        (["join"], "there is no invitation"),
        (["join", "CODE", "--servers", "1"], "there is no script to run"),
        (["join", "CODE", "-n", "0"], "nothing would be started"),
        (["join", "CODE", "-n", "-1", "--servers", "1"], "-n -1"),
        (["join", "CODE", "-n", "1", "--servers", "-1", script], "--servers -1"),
        (["join", "CODE", "-n", "0", "--servers", "1", script], "no worker would run script.py"),
    ]:
        code, out, err = completed(tmp_path, *arguments)
        assert (code, out) == (2, ""), arguments
        assert said in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
