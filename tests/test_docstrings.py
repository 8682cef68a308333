"""Every public name says what it is and shows how it is used; the examples run."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline
from paceline.errors import PacelineError
from tests.messages import has_message
from tests.snippets import ROOT, run_python

MODULES = [paceline.errors, paceline.callbacks, paceline.nn, paceline.data]


def public_names() -> Iterator[tuple[str, Any]]:
    for module in [paceline, *MODULES]:
        listed = getattr(module, "__all__", None)
        names = (
            listed if listed is not None else [name for name, value in vars(module).items() if is_own(value, module)]
        )
        for name in names:
            value = getattr(module, name)
            if not isinstance(value, ModuleType):
                yield f"{module.__name__}.{name}", value


def is_own(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


NAMES = dict(public_names())


def example_of(value: Any) -> str:
    """The code behind the prompts of a docstring."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(value.__doc__ or ""))


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if not name.startswith("_") and isinstance(value, Callable | property):  # type: ignore[arg-type]
            yield name, value


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    value = NAMES[name]
    assert value.__doc__ is not None
    assert not value.__doc__.startswith(f"{value.__name__}("), "made by dataclass; write what it is"
    if isinstance(value, type) and issubclass(value, PacelineError) and not example_of(value):
        (message,) = re.findall(r'For example: "(.*)"', " ".join(value.__doc__.split()))
        assert has_message(message), "nothing in the package says so"
    else:
        assert example_of(value), "show how it is used"


@pytest.mark.parametrize("name", [name for name, value in NAMES.items() if isinstance(value, type)])
def test_every_public_method_has_a_docstring(name: str) -> None:
    if NAMES[name].__module__.startswith(("paceline.nn", "paceline.train.callbacks")):
        return  # `forward`, and what `Callback` has said
    assert not [method for method, value in methods_of(NAMES[name]) if not inspect.getdoc(value)]


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    whole = tuple(re.findall(r"automodule:: (\S+)", page))
    assert not [name for name in NAMES if not name.startswith(whole) and not re.search(rf":: {name}$", page, re.M)]


BEFORE = """
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
x = torch.randn(512, 4)
data = TensorDataset(x, (x.sum(1) > 0).long())
valid_set = TensorDataset(x[:100], (x[:100].sum(1) > 0).long())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(x, y):
    return F.cross_entropy(model(x), y)


def validate(x, y):
    scores = model(x)
    return {"loss": F.cross_entropy(scores, y), "accuracy": (scores.argmax(1) == y).float().mean()}


def train(lr):
    pass


task = paceline.Task(model=model, optimizer=optimizer, loss_fn=loss_fn, data=data, global_batch=256, epochs=1)
"""
FIRST = """
kept = paceline.Checkpoints(folder="runs/digits/checkpoints")
with paceline.Session(model, optimizer, data=data, global_batch=256, checkpoints=kept) as session:
    for epoch in session.epochs(1):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
        session.score(loss)
"""


def test_the_examples_run(tmp_path: Path) -> None:
    """Each after the same lines, all in one process."""
    examples = {"what they need": FIRST} | {name: example_of(value) for name, value in NAMES.items()}
    script = tmp_path / "examples.py"
    script.write_text(f"from tests.test_docstrings import run_all\nrun_all({examples!r})\n")
    run_python(script)


def run_all(examples: dict[str, str]) -> None:
    failed = []
    for name, example in examples.items():
        names: dict[str, Any] = {"__name__": "example"}
        try:
            exec(compile(BEFORE + example, name, "exec"), names)
        except Exception:
            failed.append(f"{name}:\n{example}\n{traceback.format_exc()}")
    print("\n".join(failed), flush=True)
    os._exit(bool(failed))
