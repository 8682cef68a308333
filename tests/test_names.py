"""One name for one thing: a class name stands in one file, and words that a reader must guess do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
# Class names that may stand in several files, each with its reason.
SHARED: dict[str, str] = {}
# Names that were here once, and what replaced them.
RETIRED = {
    "desk": "LeaseDispatcher",
    "hand": "LeaseHolder",
    "warden": "ReaperHandle",
    "undertaker": "closer",
    "conveyor": "MemoryChannel",
    "remarks": "RUN_LOG",
    "judging": "Evaluator, header_checks",
    "chief": "coordinator",
}
# Whole runs of real processes for tests; nothing else is called a rehearsal.
REHEARSALS = SOURCE / "testing" / "rehearsal.py"
# Folders that share their name with a function of the package would hide it.
FUNCTIONS = {"fit", "launch", "load_model", "warm_up"}

FILES = sorted(SOURCE.rglob("*.py"))


def definitions(path: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    found = ast.walk(ast.parse(path.read_text()))
    return [node for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef)]


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_a_class_name_stands_in_one_file() -> None:
    files: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(path.relative_to(SOURCE)))
    assert len(files) > 300, "the package was not found"
    twice = {name: where for name, where in files.items() if len(where) > 1 and name not in SHARED}
    assert not twice, f"one name for several things: {twice}; say in the name what each of them is"


def test_retired_words_do_not_come_back() -> None:
    for path in FILES:
        names = [path.stem, *(node.name for node in definitions(path) if isinstance(node, ast.ClassDef))]
        for name in names:
            for word in words_of(name) & RETIRED.keys():
                raise AssertionError(f"{path.relative_to(SOURCE)}: {name!r}; this is called {RETIRED[word]} now")


def test_a_rehearsal_is_one_thing() -> None:
    named = {path for path in FILES for node in definitions(path) if "rehearsal" in words_of(node.name)}
    assert named == {REHEARSALS}


def test_no_folder_hides_a_function_of_the_package() -> None:
    assert not FUNCTIONS & {path.stem for path in SOURCE.iterdir()}
