"""Tests can fail, and leave production code as it is: what is to go wrong is injected (`paceline.testing.faults`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}

# Functions of Paceline that tests overwrite all the same, by file. An interleaving of two threads inside a group has no
# point of its own, nor has a call of the operating system; calls are counted where nothing else shows them.
OVERWRITTEN = {
    "collective/test_corners.py": {"close_room", "enter", "_poll"},  # interleavings
    "collective/test_messages.py": {"read_one", "_call_thread"},
    "train/trainers.py": {"attempt"},
    "checkpoint/test_checkpoint_files.py": {"_exchange"},  # the operating system
    "wire/test_wire_memory.py": {"commit"},
    "wire/test_wire_handshake.py": {"_check_proof", "send"},  # what an attacker does, and overhears
    "control/mutations/of_control.py": {"parted", "worst_of", "has_begun", "is_any_unheard"},  # careless machines
    "control/test_control_scenarios.py": {"admitted"},
    "strategy/test_strategy_batch_norm.py": {"__init__"},  # counts
    "strategy/test_strategy_overlap.py": {"reduce", "reduce_late"},
    "strategy/test_strategy_refusals.py": {"check_known"},
    "train/table_trainers.py": {"take_ahead"},
    "train/test_train_halting.py": {"write"},
    "engine/test_engine_launch.py": {"find_shortfall"},  # stands for a run that would take minutes
    "server/test_server_warming.py": {"warm_up", "ServerProcess", "_live"},
    "test_bench_allreduce.py": {"run"},
    "train/test_train_bad_input.py": {"inherited"},
    "train/test_train_steps.py": {"newest_good"},
}


def is_function_name(name: str) -> bool:
    """Not a deadline or a limit that a test shortens, a clock, or a variable of a module."""
    return not name.isupper() and name not in (
        "time",
        "_tried",
        "_asked_to_leave",
        "_joined_run",
        "_unused",
        "__version__",
    )


def overwritten_in(path: Path) -> Iterator[str]:
    """Names that are set on something of Paceline's, by `setattr` or by an assignment."""
    lines = path.read_text().splitlines()
    modules = {name: module for node in ast.walk(TREES[path]) for name, module in imported_by(node)}
    for node in ast.walk(TREES[path]):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(name)), _]):
                if name.startswith("paceline.") and not any(f".{library}." in name for library in ("time", "shutil")):
                    yield name.rpartition(".")[2]
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, ast.Constant(value=str(name)), _]):
                if is_ours(modules.get(root_of(target), "paceline")):
                    yield name
            case ast.Assign(targets=[ast.Attribute(attr=name) as target]):
                if "method-assign" in lines[node.lineno - 1] or is_ours(modules.get(root_of(target), "")):
                    yield name


def imported_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            module = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            yield (alias.asname or alias.name).split(".")[0], module


def is_ours(module: str) -> bool:
    return module.startswith("paceline") and not module.startswith("paceline.testing")


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(TESTS)))
def test_production_code_is_not_overwritten_where_a_fault_can_be_injected(path: Path) -> None:
    found = {name for name in overwritten_in(path) if is_function_name(name)}
    assert found == OVERWRITTEN.get(str(path.relative_to(TESTS)), set())


def test_nothing_is_mocked() -> None:
    imported = [
        (path.name, module) for path in MODULES for node in ast.walk(TREES[path]) for _, module in imported_by(node)
    ]
    assert not [name for name, module in imported if module.startswith("unittest.mock")]


def holds_always(condition: ast.expr) -> bool:
    match condition:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=elements):
            return bool(elements)
        case ast.Lambda() | ast.GeneratorExp():
            return True
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(map(holds_always, values))
    return False


def test_every_assertion_can_fail() -> None:
    vain = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Assert) and holds_always(node.test)
    ]
    assert not vain


@pytest.mark.parametrize("text", ["1", "(x, 'said')", "x or True", "lambda: x", "(y for y in x)"])
def test_an_assertion_that_holds_always_is_seen(text: str) -> None:
    assert holds_always(ast.parse(text, mode="eval").body)
    assert not holds_always(ast.parse("x or y", mode="eval").body)
