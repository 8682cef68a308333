"""Documents name files, modules and classes that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PYTHON = [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
CODE = "\n".join(path.read_text() for path in PYTHON)
# Classes of others that the documents speak of.
OTHERS = {
    *("Backend", "ProcessGroup", "TCPStore", "Trainer", "Fabric", "ModelParallelStrategy", "DDPStrategy", "LocalSGD"),
    *("Accelerator", "InitProcessGroupKwargs", "TrainingArguments", "DataLoader", "DistributedDataParallel"),
    *("DistributedSampler", "IterableDataset"),
}
BUILTIN = re.compile(r"(\w*Error|Dist\w+|BatchNorm\w*|[A-Z0-9_]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    names = set(re.findall(r"`([\w/]+\.py)`", document.read_text()))
    there = {name for name in names if any(path.as_posix().endswith("/" + name) for path in PYTHON)}
    examples = {name for name in names if (ROOT / name).exists()}
    saved = set(re.findall(r"<!-- file: (\S+) -->", document.read_text()))
    assert not names - there - examples - saved - {"train.py", "script.py"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_classes_that_are_named_exist(document: Path) -> None:
    names = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?(?:\(.*?\))?`", document.read_text()))
    wanted = {name for name in names if not BUILTIN.fullmatch(name)} - OTHERS
    assert not {name for name in wanted if not re.search(rf"\bclass {name}\b|\b{name} = ", CODE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def messages() -> list[str]:
    """Every text of the package, with a gap for each value in it."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_error_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    explained = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(explained) > 50
    texts = messages()
    gone = []
    for message in explained:
        pattern = re.compile(
            ".*".join(re.escape(part.strip()) for part in message.split("...") if part.strip()), re.DOTALL
        )
        if not any(pattern.search(text) for text in texts):
            gone.append(message)
    assert not gone
