"""Which messages the package can give, for documents that quote them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent


def has_message(quoted: str) -> bool:
    """Whether a text of the package has these words; `...` stands for what differs."""
    parts = [re.escape(part.strip()) for part in quoted.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in _texts())


@functools.cache
def _texts() -> list[str]:
    """Every text of the package but its docstrings, with a gap for each value in it."""
    found = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                found.append(node.value)
    return found
