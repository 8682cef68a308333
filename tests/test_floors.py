"""A module imports only from floors below its own; the public surface is what the package exports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
# From the ground up. Floors in one row know nothing of each other.
FLOORS = [
    {"errors", "fault_points"},
    {"wire"},
    {"placement", "custody"},
    {"control"},
    {"collective", "server", "data", "checkpoint", "watch", "balance", "store"},
    {"nn", "c10d"},
    {"strategy", "engine"},
    {"train"},
    {"testing"},
    {"cli"},
]
LEVEL = {floor: level for level, floors in enumerate(FLOORS) for floor in floors}


def floor_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; say from which floor"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_from_floors_below(path: Path) -> None:
    mine = path.relative_to(SOURCE).parts[0]
    assert mine in LEVEL, f"{mine} is not a floor; add it to the list where it belongs"
    for name in imports_of(path):
        theirs = floor_of(name) if name.startswith("paceline") else ""
        if theirs in LEVEL and theirs != mine:
            assert LEVEL[theirs] < LEVEL[mine], f"{path.name} ({mine}) imports {name} from a floor that is not below"


def test_what_several_tests_need_is_in_a_module_of_its_own() -> None:
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    names = {path.stem for path in tests if path.name.startswith("test_")}
    shared = [(path.name, name) for path in tests for name in imports_of(path) if names & set(name.split("."))]
    assert not shared, "a test module imports from another; move what both need into a helper beside them"


SURFACE = {
    *("Session", "fit", "Task", "launch", "load_model", "warm_up"),
    *("Best", "Checkpoints", "EarlyStopping", "Every", "Fitted", "LoaderOptions", "SessionOptions", "Rates", "Total"),
    *("Validation", "WarmUp", "callbacks", "data", "errors", "nn"),
}


def test_the_public_surface_is_exactly_this() -> None:
    assert set(paceline.__all__) == SURFACE
    assert set(dir(paceline)) == SURFACE | {"__version__"}
    for name in SURFACE:
        found = getattr(paceline, name)
        assert getattr(found, "__module__", found.__name__).startswith("paceline")


def test_errors_that_a_script_may_catch_are_in_one_module() -> None:
    assert {name for name in vars(paceline.errors) if isinstance(vars(paceline.errors)[name], type)} - {
        "Any",
        "Path",
    } == {
        *(
            "PacelineError",
            "TrainingError",
            "NonFiniteGradient",
            "Refused",
            "Evicted",
            "EndedAlone",
            "Orphaned",
            "RunFailed",
        ),
        *("StrategyError", "Disagreement", "Diverged", "ServerError", "RequestRefused", "Unserved", "LoaderError"),
        *("CheckpointError", "CorruptCheckpoint", "DiskFull", "RunRefused", "LaunchFailed"),
        *("GroupError", "PeerLost", "Mismatch", "GroupAborted", "GroupClosed"),
        *("WireError", "ConnectionLost", "DeadlineExceeded", "HandshakeRefused", "ProtocolError", "AddressError"),
        *("CallFailed", "OutOfSharedMemory"),
    }


def test_what_only_other_floors_of_the_package_use_is_not_at_its_front() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PeerLost'"):
        _ = paceline.PeerLost


def test_commands_the_agent_and_the_coordinator_do_without_torch() -> None:
    """Its import takes seconds; a coordinator that died must be back before anybody misses it."""
    modules = (
        "paceline.cli.main, paceline.cli.run, paceline.cli.join, paceline.cli.people, paceline.control.shell.service"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
