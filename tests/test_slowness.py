"""Unequal machines made of one: quotas of the kernel where it grants them, else sleep."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.common.slowness import NoQuota, Quota, quota_obstacle, slowed
from paceline.strategy import Updater

pytestmark = pytest.mark.timeout(60)

SPIN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"


def test_a_quota_slows_a_process_down_and_is_gone_afterwards() -> None:
    if obstacle := quota_obstacle():
        pytest.skip(obstacle)
    with Quota() as quota:
        quota.limit(0.2)
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.stdin.read()\n{SPIN}"], stdin=subprocess.PIPE
        )
        quota.add(process.pid)
        process.communicate(b"", timeout=30)
        slow_s = time.monotonic() - began
        assert slow_s > 0.6, "a fifth of 0.2 s takes a second"
        path = quota._path
        quota.limit(None)
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        quota.add(left.pid)
    try:
        assert not path.exists()
        assert left.poll() is None, "a process that lives on is put back, not killed"
    finally:
        left.kill()
        left.wait()


def test_what_a_killed_process_left_is_removed() -> None:
    if obstacle := quota_obstacle():
        pytest.skip(obstacle)
    with Quota() as quota:
        gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
        gone.wait()
        left = quota._path.with_name(f"paceline-{gone.pid}-abcd")
        left.mkdir()
        with Quota():
            assert quota._path.exists()
        assert not left.exists()


def a_system(root: Path, cgroup: str, mounts: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mounts").write_text(mounts)
    return root


def test_version_2_is_used_where_processors_are_handed_on(tmp_path: Path) -> None:
    root = a_system(tmp_path, "0::/user/mine\n", "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    parent = tmp_path / "sys/fs/cgroup/user"
    (parent / "mine").mkdir(parents=True)
    (parent / "mine/cgroup.subtree_control").write_text("")
    with pytest.raises(NoQuota, match="does not hand on the controller"):
        Quota(root)
    (parent / "cgroup.subtree_control").write_text("cpu memory")
    quota = Quota(root)
    assert quota._path.parent == parent
    quota.limit(0.25)
    assert (quota._path / "cpu.max").read_text() == "1000 4000"
    quota.limit(None)
    assert (quota._path / "cpu.max").read_text() == "max 1000"


def test_version_1_has_files_of_its_own(tmp_path: Path) -> None:
    mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    root = a_system(tmp_path, "3:cpu,cpuacct:/\n0::/\n", mounts)
    (tmp_path / "sys/fs/cgroup/cpu").mkdir(parents=True)
    quota = Quota(root)
    quota.limit(0.5)
    assert (quota._path / "cpu.cfs_quota_us").read_text() == "1000"
    with pytest.raises(ValueError, match=r"0\.01 of a core"):
        quota.limit(0.001)


def test_where_there_are_no_cgroups_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoQuota, match="no cgroups here"):
        Quota(tmp_path)
    with pytest.raises(NoQuota, match="no hierarchy"):
        Quota(a_system(tmp_path / "a", "", "proc /proc proc rw 0 0\n"))
    root = a_system(tmp_path / "b", "1:cpu:/\n", "cgroup /cpu cgroup rw,cpu 0 0\n")
    with pytest.raises(NoQuota, match="no cgroup can be made"):
        Quota(root)


def test_sleep_makes_computing_longer_in_proportion() -> None:
    model = nn.Linear(4, 2)
    strategy = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        found: torch.Tensor = model(x).square().mean()
        return found

    def took_s(loss_fn: Callable[..., torch.Tensor]) -> float:
        began = time.monotonic()
        strategy.compute(loss_fn, torch.ones(3, 4), samples=3, total=3, step=1)
        return time.monotonic() - began

    assert took_s(slowed(loss_fn, lambda: 10.0)) > 0.2
    with torch.no_grad():
        assert not slowed(loss_fn, lambda: 10.0)(torch.ones(3, 4)).requires_grad
    strategy.close()
