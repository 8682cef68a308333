"""Documents name files, modules and classes that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PYTHON = [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
CODE = "\n".join(path.read_text() for path in PYTHON)
# Classes of others that the documents speak of.
OTHERS = {
    *("Backend", "ProcessGroup", "TCPStore", "Trainer", "Fabric", "ModelParallelStrategy", "DDPStrategy", "LocalSGD"),
    *("Accelerator", "InitProcessGroupKwargs", "TrainingArguments"),
}
BUILTIN = re.compile(r"(\w*Error|Dist\w+|BatchNorm\w*|[A-Z0-9_]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    names = set(re.findall(r"`([\w/]+\.py)`", document.read_text()))
    there = {name for name in names if any(path.as_posix().endswith("/" + name) for path in PYTHON)}
    examples = {name for name in names if (ROOT / name).exists()}
    assert not names - there - examples - {"train.py", "script.py"}


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


def test_the_script_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+) with 1 workers", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
