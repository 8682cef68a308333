"""A function and its arguments, made ready to travel to workers.

Only between a process and the children it has started itself, over descriptors without a name. A function of a module
travels by its name; one of the main script too, and the worker runs that script again under another name, as
multiprocessing does; anything else travels by value if cloudpickle is installed.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def pack(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """What `worker.py` reads. Raises `ValueError` if it cannot travel."""
    preparation: dict[str, Any] = {"sys_path": list(sys.path), "sys_argv": list(sys.argv), "dir": str(Path.cwd())}
    try:
        work = pickle.dumps((function, arguments))
        if b"__main__" not in work:
            return pickle.dumps((preparation, work))
        if main := _main_script():
            return pickle.dumps((preparation | main, work))
        problem = "it is defined in an interactive session"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = str(error)
    try:
        import cloudpickle  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{function!r} cannot be sent to other processes: {problem}; put it into a module of its own and import it "
            "from there, or install cloudpickle"
        ) from None
    try:
        return pickle.dumps((preparation, cloudpickle.dumps((function, arguments))))
    except Exception as error:
        raise ValueError(
            f"{function!r} cannot be sent to other processes, because it or an argument holds something that exists "
            f"only in this one: {error}; make that inside of the function"
        ) from error


def _main_script() -> dict[str, str]:
    """How another process finds the main script's functions; empty for an interactive session."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    return {"init_main_from_path": os.path.abspath(path)} if path is not None and Path(path).is_file() else {}
