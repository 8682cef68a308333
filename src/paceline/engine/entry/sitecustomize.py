"""Runs in every worker of `paceline run` before its script, and prepares what the script finds if it ever imports
torch.distributed: `env://` leads to the run's store, and with --backend our backend stands in for Gloo.

This folder, in which there must be nothing else, is first in the worker's PYTHONPATH, and the interpreter imports a
`sitecustomize` where it finds one. So the script is run by the interpreter itself, not by a program of ours.

Contract
- When the script begins, its environment and `sys.path` are as without us, the descriptor of the store is closed, and
  another `sitecustomize` that there is has been run. What the script starts finds nothing of ours.
- What stays is a finder in `sys.meta_path` until torch.distributed has been imported: then one handler in torch's table
  of them, and with --backend two functions of torch in wrappers. Nothing else of Paceline is imported before a script
  makes a world; a script without torch pays for reading this file.
- A forked child has what its parent has. Programs that the script starts, itself once more included, are on their own.

Failure. Where torch is not as we know it, or Paceline cannot be imported by the script, a script that was to run as
written does so with torch's own store, and a line says so; with --backend that is an error, when torch is imported or
when a world is made. What goes wrong here before is reported by the interpreter, which goes on without us.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in typing, whose import would take longer than everything here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
STORE_VARIABLE = "PACELINE_STORE_FD"  # the number of the descriptor with the invitation
BACKEND_VARIABLE = "PACELINE_BACKEND"  # what stands in for Gloo; not set where everything runs as written
# Those that tell the run's world from others, and which of its workers this is.
WORLD_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_TORCH = "torch.distributed"
_WRAPPED = ("_new_process_group_helper", "monitored_barrier")


class Preparation:
    """What torch.distributed is to be given once it has been imported."""

    def __init__(self, invitation: bytes, given: Mapping[str, str], backend: str) -> None:
        self._invitation = invitation
        self._given = given
        self._backend = backend

    def apply(self) -> None:
        # As names in torch.distributed, some of its modules are functions.
        handlers = getattr(sys.modules.get(f"{_TORCH}.rendezvous"), "_rendezvous_handlers", {})
        groups: Any = sys.modules.get(f"{_TORCH}.distributed_c10d")
        if self._backend and not ("env" in handlers and all(hasattr(groups, name) for name in _WRAPPED)):
            version = getattr(sys.modules.get("torch"), "__version__", "of unknown version")
            raise RuntimeError(
                f"--backend {self._backend}: torch {version} has no torch.distributed, or makes its groups in another "
                "way than this Paceline knows; run the script without --backend"
            )
        if "env" in handlers:
            handlers["env"] = self._entry_to_store(handlers["env"])
        elif groups is not None:
            _say("this torch has no env:// that could be led to the run's store")
        if self._backend:
            groups._new_process_group_helper = _with_our_backend(groups._new_process_group_helper)
            monitored = _with_our_barrier(groups.monitored_barrier)
            groups.monitored_barrier = sys.modules[_TORCH].monitored_barrier = monitored  # type: ignore[attr-defined]

    def _entry_to_store(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        found: list[Callable[..., Iterator[Any]]] = []

        def env(url: str, **arguments: Any) -> Iterator[Any]:
            if not found:
                try:
                    from paceline.store.env_handler import EnvHandler

                    found.append(EnvHandler(self._invitation, self._given, original))
                except ImportError as error:
                    if self._backend:
                        raise
                    _say(f"the run's store cannot be used: {error}")
                    found.append(original)
            return found[0](url, **arguments)

        return env


def _with_our_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_group(*arguments: Any, **named: Any) -> Any:
        from paceline.c10d.substitution import with_our_backend

        arguments, named = with_our_backend(original, arguments, named)
        return original(*arguments, **named)

    return make_group


def _with_our_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """Torch would refuse a group that is not called gloo, which is what the script asked for."""

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        from paceline.c10d.substitution import our_group

        if (ours := our_group(group)) is not None:
            ours.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    return monitored_barrier


def _say(what: str) -> None:
    print(f"paceline: {what}; a world by env:// has torch's own, which listens on all interfaces", file=sys.stderr)


class Finder:
    """Finds torch.distributed as others do, and applies the preparation when it has been executed."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._is_done = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCH:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                self._prepare(spec.loader)
                return spec
        return None

    def _prepare(self, loader: Any) -> None:
        """In the loader's own dictionary, so that the module has the loader that it would have."""
        execute = loader.exec_module

        def execute_and_apply(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == _TORCH and not self._is_done:
                self._is_done = True
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                vars(loader).pop("exec_module", None)
                self._preparation.apply()

        loader.exec_module = execute_and_apply


def leave_no_trace() -> tuple[bytes, str]:
    """Take what led here out of the environment: the invitation and the backend's name, which may be empty, are left
    to the caller."""
    others = os.environ["PYTHONPATH"].removeprefix(FOLDER).removeprefix(os.pathsep)
    if others:
        os.environ["PYTHONPATH"] = others
    else:
        del os.environ["PYTHONPATH"]
    sys.path.remove(FOLDER)
    sys.path_importer_cache.pop(FOLDER, None)
    backend = os.environ.pop(BACKEND_VARIABLE, "")
    with open(int(os.environ.pop(STORE_VARIABLE)), "rb") as file:  # and close it
        file.seek(0)
        return file.read(), backend


def run_the_other() -> None:
    """Another `sitecustomize` that this one stands before, if there is one."""
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)  # or the import that is under way would not find it


def main() -> None:
    invitation, backend = leave_no_trace()
    given = {name: os.environ[name] for name in WORLD_VARIABLES if name in os.environ}
    preparation = Preparation(invitation, given, backend)
    if _TORCH in sys.modules:
        preparation.apply()
    else:
        sys.meta_path.insert(0, Finder(preparation))
    run_the_other()


if __name__ == "sitecustomize":
    main()
