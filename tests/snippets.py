"""The code of README and docs as something that can be run.

A page is run from its top in a folder of its own. Fences are `python`, `shell`, `text` or `diff`; the first two are
run, each command by itself. What a reader need not see is in comments of the page, each just above the fence that it is
about:

    <!-- file: train.py -->        the code is saved by this name, and not run by itself
    <!-- continues -->             this Python goes on from the Python above, in the same process
    <!-- before ... -->            lines of Python that come before that of the fence
    <!-- setup ... -->             the same for every Python below that does not continue another
    <!-- background -->            these commands go on while the rest of the page is run, as in another terminal
    <!-- exit code: 3 -->          that of the commands, if it is not 0
    <!-- not run: REASON -->       cannot be run alone; these are counted by a test

and, between fences,

    <!-- set: PID=COMMAND -->      wherever the commands below say PID, what this command prints is meant
    <!-- wait: COMMAND -->         repeated until it succeeds
    <!-- ended -->                 what goes on in the background comes to its end
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.testing.forking import fork_context

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "shell", "text", "diff"}
MARKS = {"file", "continues", "before", "setup", "background", "exit code", "not run", "set", "wait", "ended"}
DEADLINE_S = 60.0
_PART = re.compile(
    r"^<!-- (?P<mark>[a-z ]+?)(?:: ?|\n|(?= -->))(?P<text>.*?) ?-->$|^```(?P<language>\S*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass
class Snippet:
    """A fence, with the marks above it; or a mark by itself, such as `wait`, without a fence."""

    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)
    line: int = 0

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "shell") and "not run" not in self.marks


def snippets_of(page: Path) -> list[Snippet]:
    found: list[Snippet] = []
    marks: dict[str, str] = {}
    setup = ""
    text = page.read_text()
    for part in _PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        mark = part["mark"]
        if mark == "setup":
            setup = part["text"]
        elif mark in ("set", "wait", "ended"):
            found.append(Snippet(mark, part["text"], line=line))
        elif mark is not None:
            assert mark in MARKS, f"{page.name}:{line}: no mark is called {mark!r}"
            marks[mark] = part["text"]
        elif part["language"].startswith("{"):
            continue  # a directive of the site
        else:
            if "continues" not in marks and "file" not in marks:
                marks["before"] = setup + marks.get("before", "")
            found.append(Snippet(part["language"], part["code"], marks, line))
            marks = {}
    assert not marks, f"{page.name}: {marks} is above no fence"
    return found


def commands_of(code: str) -> Iterator[str]:
    """The commands of shell code, without what is said of them."""
    for line in code.replace("\\\n", " ").splitlines():
        if command := line.split(" #")[0].strip():
            yield command


class PageRun:
    """One page, from its top."""

    def __init__(self, page: Path, folder: Path) -> None:
        self._page = page
        self._folder = folder
        self._values: dict[str, str] = {}
        self._background: list[tuple[subprocess.Popen[str], Snippet]] = []

    def run(self) -> None:
        try:
            script: list[str] = []
            for snippet in snippets_of(self._page):
                if "continues" not in snippet.marks and script:
                    self._run_code(script)
                    script = []
                if snippet.language == "python" and snippet.is_run and "file" not in snippet.marks:
                    script += [snippet.marks.get("before", ""), snippet.code]
                else:
                    self._do(snippet)
            if script:
                self._run_code(script)
            self._check_background()
        finally:
            for process, _ in self._background:
                if process.poll() is None:
                    process.terminate()  # an agent then ends what it has started
                    print(_last_words(process))

    def _check_background(self) -> None:
        while self._background:
            self._check(*self._background[0])
            self._background.pop(0)

    def _do(self, snippet: Snippet) -> None:
        if "file" in snippet.marks:
            (self._folder / snippet.marks["file"]).write_text(snippet.code)
        elif snippet.language == "set":
            name, command = snippet.code.split("=", 1)
            process = self._start(command)
            self._values[name] = self._check(process, snippet).strip()
        elif snippet.language == "wait":
            self._wait(snippet)
        elif snippet.language == "ended":
            self._check_background()
        elif snippet.language == "shell" and snippet.is_run:
            for command in commands_of(snippet.code):
                self._do_command(command, snippet)

    def _do_command(self, command: str, snippet: Snippet) -> None:
        match shlex.split(command):
            case ["python", script, *arguments] if script.endswith(".py"):
                run_python(self._folder / script, *arguments)
            case _ if "background" in snippet.marks:
                self._background.append((self._start(command), snippet))
            case _:
                self._check(self._start(command), snippet)

    def _wait(self, snippet: Snippet) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (last := self._ended(self._start(snippet.code)))[0] != 0:
            assert time.monotonic() < deadline, f"{self._page.name}:{snippet.line}: {snippet.code}: {last}"
            for process, started in self._background:
                assert process.poll() is None, f"{self._page.name}:{started.line}: {self._ended(process)}"
            time.sleep(0.3)

    def _start(self, code: str) -> subprocess.Popen[str]:
        for name, value in self._values.items():
            code = re.sub(rf"\b{name}\b", value, code)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self._folder,
            env=os.environ | {"PATH": path, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _ended(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output

    def _check(self, process: subprocess.Popen[str], snippet: Snippet) -> str:
        code, output = self._ended(process)
        wanted = int(snippet.marks.get("exit code", 0))
        assert code == wanted, f"{self._page.name}:{snippet.line}: exit code {code}\n{snippet.code}\n{output}"
        return output

    def _run_code(self, lines: list[str]) -> None:
        script = self._folder / "snippet.py"
        script.write_text("\n".join(lines))
        run_python(script)


def _last_words(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=20.0)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def run_python(script: Path, *arguments: str) -> None:
    """As `python` would, but in a process that has imported torch already."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = fork_context().Process(target=_main, args=(script, arguments, output.name))
        process.start()
        process.join(DEADLINE_S)
        exit_code = process.exitcode
        process.kill()
        process.join()
        process.close()
        assert exit_code == 0, f"exit code {exit_code}\n{script.read_text()}\n{output.read()}"


def _main(script: Path, arguments: tuple[str, ...], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.chdir(script.parent)
    multiprocessing.set_start_method("fork", force=True)  # as in a script that was started by itself
    sys.argv = [script.name, *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(script.name, run_name="__main__")
    finally:
        # As an interpreter does at its end, and a process of multiprocessing does later or never.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
