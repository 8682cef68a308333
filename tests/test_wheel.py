"""The wheel as a user has it: built, installed into an environment of its own, and used outside of the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.wheel


def run(*command: str | Path, folder: Path) -> str:
    """As somebody types it who has no clone: nothing of this test's environment leads back to it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (built,) = folder.glob("paceline-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has this wheel, and what it depends on from the one that tests run in: torch is large."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Paths of such a file are looked at last, and .pth files there (that of the clone) are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"paceline", re.sub(r"-py3-.*", ".dist-info", wheel.name)}
    assert "paceline/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_script_of_the_readme_runs_alone_and_on_two_workers(installed: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    where = run(installed / "python", "-c", "import paceline; print(paceline.__file__)", folder=tmp_path)
    assert where.startswith(str(installed.parent)), "not the wheel's"
    assert "with 1 workers" in run(installed / "python", "train.py", folder=tmp_path)
    said = run(installed / "paceline", "run", "-n", "2", "--name", "tried", "train.py", folder=tmp_path)
    assert said.count("with 2 workers") == 3
    assert (tmp_path / "runs" / "tried" / "checkpoints" / "latest" / "model.safetensors").is_file()
    assert "ended" in run(installed / "paceline", "status", "--name", "tried", folder=tmp_path)
