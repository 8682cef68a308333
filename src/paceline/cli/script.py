"""The script that a command is to run, found before anything is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def command_of(script: list[str], *, is_module: bool) -> tuple[str, ...]:
    """What comes after the interpreter. Raises `ValueError` if there is no such script."""
    name, *arguments = script
    if is_module:
        # As `python -m` looks for it.
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.remove(os.getcwd())
        if found is None:
            raise ValueError(f"-m {name}: there is no such module; is it installed, or in this folder?")
        return ("-m", name, *arguments)
    if not Path(name).is_file():
        hint = "this is a folder" if Path(name).is_dir() else f"there is no such file in {Path.cwd()}"
        raise ValueError(f"{name}: {hint}; give the path of a Python script, or -m and a module")
    return (name, *arguments)
