"""Two worlds in one process, to compare: the default one on Gloo, and a group over the same ranks on Paceline."""

from __future__ import annotations

import atexit
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline.c10d
from paceline.testing.crew import Crew
from paceline.testing.eventually import eventually

TIMEOUT = timedelta(seconds=60)
Program = Callable[[dist.ProcessGroup], Any]

_groups: dict[str, dist.ProcessGroup] = {}


def new_file() -> str:
    """A path for a file:// store that does not exist yet."""
    folder = tempfile.mkdtemp(prefix="paceline-world-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(Path(folder) / "store")


def enter_both(_: None, rank: int, layout: str, path: str) -> None:
    size = len(layout)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=TIMEOUT)
    options = paceline.c10d.Options(host_label=layout[rank])
    assert dist.group.WORLD is not None
    _groups["gloo"] = dist.group.WORLD
    _groups["paceline"] = dist.new_group(backend="paceline", timeout=TIMEOUT, pg_options=options)


def leave_both(_: None) -> None:
    _groups.clear()
    dist.destroy_process_group()


def compare(_: None, program: Program) -> None:
    """The program's result on both, which must be the same."""
    expected = program(_groups["gloo"])
    found = program(_groups["paceline"])
    assert_same(found, expected, program.__name__)


def on_paceline(_: None, program: Program) -> Any:
    return program(_groups["paceline"])


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        torch.testing.assert_close(found, expected, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected, f"{where}: {found!r} where Gloo has {expected!r}"


# -- worlds that tests make themselves -------------------------------------------------------------------------------


def each(crew: Crew, task: Callable[..., Any], *arguments: Any) -> None:
    for rank in range(crew.size):
        crew.start(task, rank, *arguments, ranks=[rank])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def init(rank: int, where: str, size: int = 3, timeout: timedelta = TIMEOUT, host_label: str = "") -> None:
    options: Any = paceline.c10d.Options(host_label=host_label)
    dist.init_process_group(
        "paceline", init_method=where, rank=rank, world_size=size, timeout=timeout, pg_options=options
    )


def total() -> float:
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor[0])


def wait_for_the_end_of_threads() -> None:
    lasting = "paceline-guardian"  # one a process, for as long as it lives

    def have_ended() -> bool:
        return not any(one.name.startswith("paceline") and one.name != lasting for one in threading.enumerate())

    eventually(have_ended, "the threads of all worlds end")
