"""`paceline run` with real processes: plain scripts, and workers that have a session."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.control.shell.ticket import VARIABLE
from paceline.engine.slots import AgentRules
from paceline.testing.eventually import eventually
from tests.engine.commands import Command, completed, is_alive, paceline, state_of, write_script

FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def logs_of(folder: Path, name: str) -> Path:
    return folder / "runs" / name / "logs"


# -- output, environment, exit codes ---------------------------------------------------------------------------------


def test_lines_are_prefixed_and_kept_in_logs(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        rank = os.environ["RANK"]
        print("out of", rank)
        print("error of", rank, file=sys.stderr)
        print("x" * 200_000)
        sys.stdout.write("10%\\r20%\\r30%\\n")
        sys.stdout.write("no end")
        """,
    )
    code, out, err = completed(tmp_path, "run", "-n", "2", "--name", "a", script)
    assert (code, err.splitlines().count("[w0] error of 0")) == (0, 1)
    lines = out.splitlines()
    for rank in range(2):
        mine = [line.removeprefix(f"[w{rank}] ") for line in lines if line.startswith(f"[w{rank}]")]
        assert mine[0] == f"out of {rank}"
        assert "".join(mine[1:-2]) == "x" * 200_000
        assert mine[-2:] == ["30%", "no end"]
        log = (logs_of(tmp_path, "a") / f"w{rank}.log").read_text().splitlines()
        assert log[0].startswith("--- process ")
        assert {f"out of {rank}", f"error of {rank}", "30%", "no end"} <= set(log)
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700


def test_a_script_finds_what_torchrun_would_give_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "PACELINE_RUN"]
        print(*(os.environ[name] for name in names), os.environ["OMP_NUM_THREADS"], int(os.environ["MASTER_PORT"]) > 0)
        told = [name for name in sorted(os.environ) if name.split("_")[0] in ("ROLE", "GROUP", "TORCHELASTIC")]
        print(*(f"{name}={os.environ[name]}" for name in told))
        print(sys.argv[1:], os.getpid() == os.getsid(0), sys.stdin.read() == "")
        secret = open(int(os.environ["PACELINE_TICKET_FD"]), "rb", closefd=False)
        """,
    )
    arguments = ["run", "-n", "2", "--name", "a", script, "-n", "9", "--lr", "1", "--", "x"]
    code, out, err = completed(tmp_path, *arguments, OMP_NUM_THREADS="7")
    assert code == 0, err
    assert "[w1] 1 2 1 2 0 127.0.0.1 a 7 True" in out
    assert (
        "[w1] GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_NAME=default ROLE_RANK=1 ROLE_WORLD_SIZE=2 "
        "TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=a\n"
    ) in out
    assert "[w0] ['-n', '9', '--lr', '1', '--', 'x'] True True" in out


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    write_script(tmp_path, "import sys\nprint(__name__, sys.argv[1:])", "mine.py")
    code, out, _ = completed(tmp_path, "run", "-m", "mine", "-m", "5")
    assert (code, out) == (0, "[w0] __main__ ['-m', '5']\n")
    code, _, err = completed(tmp_path, "run", "-m", "nobodys")
    assert code == 2
    assert "no such module" in err


def test_one_process_that_fails_ends_the_others_and_is_named_last(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            try:
                1 / 0
            except ZeroDivisionError as error:
                print("about to fail")
                raise RuntimeError("the root cause") from error
        time.sleep(600)
        """,
    )
    code, _, err = completed(tmp_path, "run", "-n", "3", "--name", "a", script)
    assert code == 1
    end = err.split("paceline: the run a failed\n")[1].splitlines()
    assert end[0].startswith("w1 (process ")
    assert end[0].endswith("exited with code 1:")
    assert end[1] == "Traceback (most recent call last):"
    assert "ZeroDivisionError: division by zero" in end
    assert end[-2:] == ["RuntimeError: the root cause", f"logs: {logs_of(tmp_path, 'a')}"]


@pytest.mark.parametrize(
    ("last", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(0)", 0)]
)
def test_the_exit_code_is_the_plain_scripts_own(tmp_path: Path, last: str, expected: int) -> None:
    code, _, _ = completed(tmp_path, "run", write_script(tmp_path, f"import os, sys\n{last}"))
    assert code == expected


def test_what_cannot_be_run_is_said_in_one_line(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    for arguments, said in [
        (["missing.py"], "no such file"),
        (["-n", "0", script], "-n 0"),
        (["-n", "2", "--max", "1", script], "--max 1"),
        (["--name", "../up", script], "cannot be a folder's name"),
        (["--listen", "0.0.0.0", script], "--listen 0.0.0.0"),
        (["--resume", "--name", "gone", script], "no run 'gone'"),
        (["--resume", script], "no run in"),
    ]:
        code, out, err = completed(tmp_path, "run", *arguments)
        assert (code, out) == (2, ""), arguments
        assert said in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_the_secret_is_in_no_argument_and_no_environment(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOREVER, session=False)
    with paceline(tmp_path, "run", "--name", "a", script) as command:
        found: list[bytes] = []

        def is_equipped() -> bool:
            """A process that was forked has its own environment when it runs its own program."""
            for pid in command.workers():
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found[:] = [entry for entry in environment if entry.startswith(VARIABLE.encode())]
            return len(found) == 1

        eventually(is_equipped, "a worker")
        (variable,), (pid,) = found, command.workers()
        assert variable.partition(b"=")[2].isdigit()
        ticket = Path(f"/proc/{pid}/fd", variable.partition(b"=")[2].decode()).read_bytes()
        secret = ticket.partition(b'"secret":"')[2].partition(b'"')[0]
        assert len(secret) > 20
        for each in command.processes():
            assert secret not in Path(f"/proc/{each}/environ").read_bytes()
            assert secret not in Path(f"/proc/{each}/cmdline").read_bytes()


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOREVER)
    with paceline(tmp_path, "run", "--name", "a", script) as command:
        eventually(lambda: "[w0] up" in command.out, "the run to start")
        code, _, err = completed(tmp_path, "run", "--name", "a", script)
        assert code == 2
        assert "in use" in err
        assert "--name" in err
        assert len(command.workers()) == 1


def test_a_name_that_was_used_is_refused_without_resume(tmp_path: Path) -> None:
    from paceline.control.journal.journal import Journal

    script = write_script(tmp_path, "print('hello')")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    Journal(tmp_path / "runs" / "a").close()
    code, _, err = completed(tmp_path, "run", "--name", "a", script)
    assert code == 2
    assert "--resume" in err
    assert completed(tmp_path, "run", "--resume", script)[:2] == (0, "[w0] hello\n")


# -- deaths ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_started_again_up_to_the_limit(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("born", os.getpid(), flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
        session=True,
    )
    with paceline(tmp_path, "run", "-n", "2", "--restarts", "2", "--name", "a", script) as command:
        eventually(lambda: "not started again" in command.err, "the agent to give up")
        assert command.out.count("[w1] born") == 3
        assert command.out.count("[w0] born") == 1
        assert "started again in 0.5 s" in command.err
        assert "started again in 1 s" in command.err
        assert len(command.workers()) == 1
        command.interrupt(signal.SIGTERM)
        eventually(lambda: "stopping after this step" in command.err, "the first answer")
        command.interrupt(signal.SIGTERM)
        assert command.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("victim", ["agent", "worker"])
def test_nothing_outlives_a_kill(tmp_path: Path, victim: str) -> None:
    """The worker has children of its own, as loaders are, one of them in a group of its own."""
    script = write_script(
        tmp_path,
        """
        for move in (lambda: None, os.setpgrp):
            if os.fork() == 0:
                move()
                time.sleep(600)
        print("up", os.getpid(), flush=True)
        time.sleep(600)
        """,
        session=True,
    )
    with paceline(tmp_path, "run", "-n", "2", "--restarts", "0", "--name", "a", script) as command:
        eventually(lambda: command.out.count("up") == 2 and len(command.workers()) == 6, "workers and their children")
        if victim == "agent":
            command.kill()
            eventually(lambda: not command.processes(), f"nothing to be left: {command.processes()}")
            assert command.wait() == -signal.SIGKILL
        else:
            pid = int(command.out.partition("[w0] up ")[2].split()[0])
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: len(command.workers()) == 3, "the children of the dead worker to be gone")


def test_a_dead_coordinator_comes_back(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOREVER, session=True)
    with paceline(tmp_path, "run", "--name", "a", script) as command:
        eventually(lambda: "up" in command.out, "the worker")
        workers = command.workers()
        seen: set[int] = set()
        for _ in range(3):
            eventually(lambda: bool(set(command.coordinators()) - seen), "a new coordinator")
            (pid,) = command.coordinators()
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert len(workers) == 1
        assert command.workers() == workers


def test_a_coordinator_that_never_works_ends_the_run_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken" / "paceline").mkdir(parents=True)
    (tmp_path / "broken" / "paceline" / "__init__.py").write_text("raise ImportError('out of luck')")
    script = write_script(tmp_path, FOREVER)
    code, _, err = completed(tmp_path, "run", "--name", "a", script, PYTHONPATH=str(tmp_path / "broken"))
    assert code == 1
    end = err.split("paceline: the run a failed\n")[1].splitlines()
    assert "the coordinator ended 11 times" in end[0]
    assert end[-2:] == ["ImportError: out of luck", f"logs: {logs_of(tmp_path, 'a')}"]


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_reaches_a_plain_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOREVER)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", script) as command:
        eventually(lambda: command.out.count("up") == 2, "the workers")
        command.interrupt()
        assert command.wait() == 130
        assert "Ctrl-C again" in command.err
        assert command.err.endswith(f"the run a was interrupted\nlogs: {logs_of(tmp_path, 'a')}\n")


def stubborn(tmp_path: Path) -> str:
    return write_script(
        tmp_path,
        """
        signal.signal(signal.SIGINT, lambda *_: print("INT", flush=True))
        signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True))
        print("up", flush=True)
        while True:
            time.sleep(0.05)
        """,
        session=True,
    )


def interrupt_again(command: Command, number: int = signal.SIGINT) -> None:
    """At the pace of a person: signals that come together count as one."""
    time.sleep(2 * AgentRules(workers=1).together_s)
    command.interrupt(number)


def test_ctrl_c_once_twice_thrice(tmp_path: Path) -> None:
    with paceline(tmp_path, "run", "--name", "a", stubborn(tmp_path)) as command:
        eventually(lambda: "up" in command.out, "the worker")
        wait_for_session(tmp_path)
        command.interrupt()
        eventually(lambda: "stopping after this step" in command.err, "the first answer")
        assert "INT" not in command.out, "the worker is in a session of its own"
        interrupt_again(command)
        eventually(lambda: "[w0] TERM" in command.out, "the worker to be asked")
        interrupt_again(command)
        assert command.wait() == 130


def test_who_ignores_the_second_ctrl_c_is_killed(tmp_path: Path) -> None:
    with paceline(tmp_path, "run", "--name", "a", stubborn(tmp_path)) as command:
        eventually(lambda: "up" in command.out, "the worker")
        wait_for_session(tmp_path)
        command.interrupt(signal.SIGHUP)
        eventually(lambda: "stopping after this step" in command.err, "the first answer")
        interrupt_again(command, signal.SIGHUP)
        assert command.wait() == 128 + signal.SIGHUP
        assert "[w0] TERM" in command.out


def wait_for_session(folder: Path) -> None:
    """Until the agent has seen that the ticket was taken."""
    log = logs_of(folder, "a") / "agent.log"
    eventually(lambda: log.exists() and "w0 has a session" in log.read_text(), "the agent to know")


def test_ctrl_z_stops_all_and_fg_continues_them(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOREVER)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", script) as command:
        eventually(lambda: command.out.count("up") == 2, "the workers")
        everybody = [command.pid, *command.workers(), *command.coordinators()]
        assert len(everybody) == 4
        os.kill(command.pid, signal.SIGTSTP)
        eventually(lambda: all(state_of(pid) == "T" for pid in everybody), "all to stand still")
        os.kill(command.pid, signal.SIGCONT)
        eventually(lambda: not any(state_of(pid) == "T" for pid in everybody), "all to go on")
        assert all(is_alive(pid) for pid in everybody)
        command.interrupt()
        assert command.wait() == 130
