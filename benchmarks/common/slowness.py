"""Machines that are unequal, made of one machine: for tests and measurements of shares.

    with Quota() as quota:             the kernel gives a group of processes a part of a core (cgroups, version 1 or 2)
        quota.add(pid)
        quota.limit(0.25)              of one core; None for no limit. May change at any time

    slowed(loss_fn, lambda: 4.0)       a loss function whose steps take four times as long to compute: it sleeps after

A quota slows down everything that a process does, whatever it runs, and needs the right to make cgroups (root, or a
folder that was delegated); `quota_obstacle` says why there is none. Sleeping needs nothing, but slows down only what
is computed forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError

# The kernel takes no less for either; the shorter they are, the less a slow process stands still at a time.
_LEAST_US = 1_000
_LEAST_CORES = 0.01
_WAIT_EMPTY_S = 5.0
_PREFIX = "paceline-"


class NoQuota(PacelineError):
    """Cgroups cannot be made here; the message says why."""


class Quota:
    """A cgroup with a quota of processor time. After `close` it is gone, and its processes are where they were. `root`
    is where /proc and the mounts are looked for."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._home, self._is_v2, self._origin = _controller(root)
        _sweep(self._home)
        self._path = self._home / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._path.mkdir()
        except OSError as error:
            raise NoQuota(f"no cgroup can be made in {self._home}: {error}") from error

    def add(self, pid: int) -> None:
        """All threads of a process, and what it starts from now on."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float | None) -> None:
        if cores is not None and not cores >= _LEAST_CORES:
            raise ValueError(f"limit({cores}): give {_LEAST_CORES} of a core or more, or None for no limit")
        period_us = _LEAST_US if cores is None else max(_LEAST_US, round(_LEAST_US / cores))
        quota = None if cores is None else str(round(cores * period_us))
        if self._is_v2:
            (self._path / "cpu.max").write_text(f"{quota or 'max'} {period_us}")
        else:
            # One after the other they must make sense too: no quota may be larger than its period allows.
            (self._path / "cpu.cfs_quota_us").write_text("-1")
            (self._path / "cpu.cfs_period_us").write_text(str(period_us))
            (self._path / "cpu.cfs_quota_us").write_text(quota or "-1")

    def close(self) -> None:
        ends_at = time.monotonic() + _WAIT_EMPTY_S
        while self._path.exists():
            with contextlib.suppress(OSError):
                for pid in (self._path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):  # it ended meanwhile
                        (self._origin / "cgroup.procs").write_text(pid)
                self._path.rmdir()
                return
            if time.monotonic() > ends_at:
                raise NoQuota(f"{self._path} cannot be removed; end what runs in it, and remove it by rmdir")
            time.sleep(0.01)

    def __enter__(self) -> Quota:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def quota_obstacle() -> str:
    """Why there can be no quotas here; "" if there can."""
    try:
        Quota().close()
    except NoQuota as error:
        return str(error)
    return ""


def _controller(root: Path) -> tuple[Path, bool, Path]:
    """Where a quota can be in the hierarchy that rules processors, whether that is one of version 2, and the cgroup of
    this process there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = [line.split()[1:4] for line in (root / "proc/self/mounts").read_text().splitlines()]
    except OSError as error:
        raise NoQuota(f"there are no cgroups here: {error}") from error
    mine = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    for mount, kind, options in mounts:
        if kind == "cgroup" and "cpu" in options.split(","):
            own = next((path for names, path in mine.items() if "cpu" in names.split(",")), "/")
            home = _existing(root / mount.lstrip("/"), own)
            return home, False, home
    for mount, kind, _ in mounts:
        if kind == "cgroup2":
            home = _existing(root / mount.lstrip("/"), mine.get("", "/"))
            # Where processes are, no controller can be handed on: their sibling is where a quota can be.
            for place in (home, home.parent):
                enabled = place / "cgroup.subtree_control"
                if enabled.exists() and "cpu" in enabled.read_text().split():
                    return place, True, home
            raise NoQuota(f"{home} does not hand on the controller of processors; start in a delegated cgroup")
    raise NoQuota("no hierarchy of cgroups is mounted that rules processors")


def _sweep(home: Path) -> None:
    """What processes left that were killed. One with processes in it cannot be removed, and is not."""
    for path in home.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def _existing(mount: Path, own: str) -> Path:
    """In a container the path may be one of the host's, which is not to be seen from here."""
    path = mount / own.lstrip("/")
    return path if path.is_dir() and os.access(path, os.W_OK) else mount


def slowed(loss_fn: Callable[..., torch.Tensor], factor: Callable[[], float]) -> Callable[..., torch.Tensor]:
    """The same loss, of which forward and backward together take `factor()` times as long in this process."""
    engine: Any = torch.autograd.Variable._execution_engine

    @functools.wraps(loss_fn)
    def slow(*batch: Any, **named: Any) -> torch.Tensor:
        began = time.monotonic()
        loss = loss_fn(*batch, **named)

        def sleep() -> None:
            time.sleep(max(0.0, factor() - 1.0) * (time.monotonic() - began))

        if loss.requires_grad:  # called when backward begins, what it queues when backward is over
            loss.register_hook(lambda _: engine.queue_callback(sleep))  # type: ignore[no-untyped-call]
        return loss

    return slow
