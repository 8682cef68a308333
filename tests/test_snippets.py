"""Every piece of code in README and docs runs as it stands, and every command that they name is there."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.main import app
from tests.snippets import LANGUAGES, PAGES, ROOT, PageRun, Snippet, commands_of, snippets_of

RUN = [page for page in PAGES if any(snippet.is_run for snippet in snippets_of(page))]
SHELL = [(page, snippet) for page in PAGES for snippet in snippets_of(page) if snippet.language == "shell"]
NUM_NOT_RUN = 14


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    PageRun(page, tmp_path).run()


def test_what_is_not_run_is_counted_and_has_a_reason() -> None:
    found = [(name_of(page), snippet) for page in PAGES for snippet in snippets_of(page)]
    reasons = [
        f"{page}:{snippet.line}: {snippet.marks['not run']}"
        for page, snippet in found
        if not snippet.is_run and snippet.language in ("python", "shell")
    ]
    assert not [reason for reason in reasons if reason.endswith(": ")]
    assert len(reasons) == NUM_NOT_RUN, "\n".join(reasons)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_fence_says_what_it_holds(page: Path) -> None:
    assert {snippet.language for snippet in snippets_of(page)} <= LANGUAGES | {"set", "wait", "ended"}


@pytest.mark.parametrize(
    ("page", "snippet"), SHELL, ids=lambda value: name_of(value) if isinstance(value, Path) else ""
)
def test_every_command_is_one_that_there_is(page: Path, snippet: Snippet) -> None:
    """Also of those that are not run: options that are gone are found here."""
    for command in commands_of(snippet.code):
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        match words:
            case ["paceline", *rest]:
                parse(rest)
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module), command


def parse(words: list[str]) -> None:
    """By the command line's own parser, without doing it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        context = command.make_context(command.name, words)
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(command.name, words)
