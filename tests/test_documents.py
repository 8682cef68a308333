"""Documents name files, modules and classes that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.messages import has_message

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
    *("DistributedSampler", "IterableDataset", "TensorDataset"),
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


@pytest.mark.parametrize(("name", "most"), [("README.md", 120), ("ARCHITECTURE.md", 250)])
def test_documents_that_everybody_reads_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_error_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    explained = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(explained) > 50
    assert not [message for message in explained if not has_message(message)]
