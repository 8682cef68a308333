"""`paceline` as a process, forked from a server that has imported everything already, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from paceline import engine
from paceline.control.journal.labels import read_started
from paceline.testing.account import account_of
from paceline.testing.eventually import eventually
from paceline.testing.forking import fork_context

WAIT_S = 60.0
_TOKEN = "PACELINE_TEST_TOKEN"
# Of the package, which the test run may have found by a relative path, and of the tests, for their scripts.
_PATHS = [str(Path(engine.__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[2])]

# Takes its ticket and nothing else: to its agent, a worker with a session; quick to start.
SESSION = """
import os, signal, sys, time
from paceline.control.shell.ticket import inherited
ticket = inherited()
assert ticket is not None
"""


def state_of(pid: int) -> str:
    """One letter, or empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def write_script(folder: Path, body: str, name: str = "script.py", *, session: bool = False) -> str:
    (folder / name).write_text((SESSION if session else "") + textwrap.dedent(body))
    return name


def pids_of(folder: Path, label: str, name: str = "a") -> list[int]:
    """All that were ever started in this slot."""
    return read_started(folder / "runs" / name).slots.get(label, [])


class Command:
    """A `paceline` command that runs; it leads a session, as it would in a terminal."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        stem = folder / f"command-{self.token}"
        self._files = stem.with_suffix(".out"), stem.with_suffix(".err")
        context = fork_context()
        variables = {"PYTHONPATH": os.pathsep.join(_PATHS), **environment, _TOKEN: self.token}
        self._process = context.Process(target=_main, args=(folder, arguments, variables, *map(str, self._files)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def out(self) -> str:
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def err(self) -> str:
        return self._files[1].read_text() if self._files[1].exists() else ""

    def wait(self) -> int:
        self._process.join(WAIT_S)
        code = self._process.exitcode
        assert code is not None, f"it does not end; so far: {self.out} {self.err}"
        return code

    def interrupt(self, number: int = signal.SIGINT) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def processes(self, containing: str = "") -> list[int]:
        """All that this command has started, directly or not, and that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if f"{_TOKEN}={self.token}".encode() in (entry / "environ").read_bytes():
                        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if containing in line and is_alive(int(entry.name)):
                            found.append(int(entry.name))
        return found

    def workers(self) -> list[int]:
        """Of those, the ones that run the script."""
        return [pid for pid in self.processes("script.py") if pid not in self.processes("reaper.py")]

    def coordinators(self) -> list[int]:
        return self.processes("paceline.control.shell.service")

    def close(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        eventually(lambda: not self.processes(), f"nothing to be left of {self.processes()}")


@contextlib.contextmanager
def paceline(folder: Path, *arguments: str, **environment: str) -> Iterator[Command]:
    """Started in this folder; at the end nothing of it may be left. What fails meanwhile has a note of what it said."""
    command = Command(folder, arguments, environment)
    try:
        yield command
    except BaseException as error:
        error.add_note(f"output of the command:\n{command.out}\nits errors:\n{command.err}")
        for path in sorted(folder.rglob("run.db")):
            error.add_note(account_of(path.parent))
        raise
    finally:
        command.close()


def completed(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    with paceline(folder, *arguments, **environment) as command:
        code = command.wait()
        return code, command.out, command.err


def _main(folder: Path, arguments: tuple[str, ...], environment: dict[str, str], out: str, error: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    for number, path in ((1, out), (2, error)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # A test run in the background, or behind nohup, ignores some; a command in a terminal begins with none ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = ["paceline", *arguments]
    from paceline.cli.main import main

    main()
