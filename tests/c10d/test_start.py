"""`paceline run --backend paceline`: scripts that know nothing of Paceline get its backend and its store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
    import os, sys, socket, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(*sys.argv[1:])
    assert __name__ == "__main__"
    total = torch.ones(3)
    dist.all_reduce(total)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    part = dist.new_group([0, 1], backend="gloo")
    backends = [dist.get_backend(), dist.get_backend(mesh.get_group()), dist.get_backend(part)]
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(total).sum().backward()
    with socket.socket() as probe:
        is_open = probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0
    dist.barrier()
    dist.destroy_process_group()
    if "paceline" in backends:  # torch's own store is not made for that
        dist.init_process_group("gloo")
        backends.append(dist.get_backend())
        dist.destroy_process_group()
    print("found", total.tolist(), backends, is_open, "PACELINE_STORE_FD" in os.environ, flush=True)
"""


def paceline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "paceline", "run", "--plain", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment)


def test_a_script_that_asks_for_nothing_or_for_gloo_gets_our_backend_and_store(tmp_path: Path) -> None:
    done = paceline(tmp_path, "-n", "2", "--backend", "paceline", "script.py")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "found" in line]
    assert len(lines) == 2
    for line in lines:
        assert "found [2.0, 2.0, 2.0] ['paceline', 'paceline', 'paceline', 'paceline'] False False" in line


def test_without_the_flag_it_runs_as_written(tmp_path: Path) -> None:
    done = paceline(tmp_path, "-n", "2", "script.py", "gloo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['gloo', 'gloo', 'gloo']") == 2


def test_another_backend_is_refused_by_name(tmp_path: Path) -> None:
    done = paceline(tmp_path, "-n", "2", "--backend", "nccl", "script.py")
    assert done.returncode == 2
    assert "--backend nccl: there is only paceline" in done.stderr
