"""`paceline run` for scripts that know nothing of Paceline: `env://` is the run's store, --backend stands in for Gloo,
and everything else is as the interpreter alone would have it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import store
from paceline.engine.local import free_port
from paceline.testing.eventually import eventually
from tests.engine.commands import completed, paceline, write_script

SOURCE = str(Path(store.__file__).resolve().parents[2])
pytestmark = pytest.mark.timeout(100)

# -- worlds ----------------------------------------------------------------------------------------------------------

WORLDS = """
    import os, sys, time, torch, torch.distributed as dist
    from datetime import timedelta

    rank, asked = int(os.environ["RANK"]), sys.argv[1:]

    def is_open():
        # By somebody who listens on all interfaces: Gloo may have the port on loopback by chance.
        anywhere = [f"{'0' * length}:{int(os.environ['MASTER_PORT']):04X}" for length in (8, 32)]
        lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
        return any(line[1] in anywhere and line[3] == "0A" for line in lines)

    def use_world():
        total = torch.ones(1)
        dist.all_reduce(total)
        part = dist.new_group([0, 1], backend="gloo")
        if rank < 2:
            dist.barrier(part)
        groups = [None, dist.new_group()] + ([part] if rank < 2 else [])
        made = {dist.get_backend(group) for group in groups}
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        print("found", int(total), *made, is_open(), "paceline" in dist.Backend.backend_list, flush=True)
        dist.barrier()
        dist.destroy_process_group()

    if not asked:  # a try that fails, before the others come, does not count
        if rank:
            try:
                dist.init_process_group(timeout=timedelta(seconds=0.5))
            except dist.DistStoreError:
                open("failed", "x").close()
        while not os.path.exists("failed"):
            time.sleep(0.01)
    dist.init_process_group(*asked)
    use_world()
    # The second world, in which the last is the first.
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=size - 1 - rank, world_size=size)
    rank = dist.get_rank()
    use_world()
    # A world of the script's own making.
    os.environ["MASTER_PORT"] = os.environ["OTHER_PORT"]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    use_world()
"""


def worlds_of(folder: Path, *arguments: str) -> list[str]:
    code, out, err = completed(folder, "run", *arguments, OTHER_PORT=str(free_port()))
    assert code == 0, err
    assert "paceline: " not in err
    return sorted(line.partition("found ")[2] for line in out.splitlines())


def test_who_asks_for_nothing_or_for_gloo_gets_our_backend_and_store(tmp_path: Path) -> None:
    found = worlds_of(tmp_path, "-n", "2", "--backend", "paceline", write_script(tmp_path, WORLDS))
    assert found == ["2 paceline False True"] * 4 + ["2 paceline True True"] * 2


def test_without_the_flag_it_is_gloo_on_our_store(tmp_path: Path) -> None:
    found = worlds_of(tmp_path, "-n", "4", write_script(tmp_path, WORLDS), "gloo")
    assert found == ["4 gloo False False"] * 8 + ["4 gloo True False"] * 4


def test_two_workers_with_one_rank_are_told(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, torch.distributed as dist

        os.environ["RANK"] = "0"
        dist.init_process_group("gloo")
        """,
    )
    code, _, err = completed(tmp_path, "run", "-n", "2", script)
    assert code == 1
    assert "comes as rank 0, as worker" in err


def test_another_backend_is_refused_by_name(tmp_path: Path) -> None:
    code, _, err = completed(tmp_path, "run", "--backend", "nccl", write_script(tmp_path, ""))
    assert code == 2
    assert "--backend nccl: there is only paceline" in err


def test_a_process_that_is_started_again_comes_to_the_next_world(tmp_path: Path) -> None:
    """Torch's scripts are not started again, but one that has a session too is."""
    script = write_script(
        tmp_path,
        """
        import pathlib, torch, torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        try:
            dist.barrier()  # all have begun
            if os.environ["RANK"] == "1" and not pathlib.Path("died").exists():
                pathlib.Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(total)
        except RuntimeError:
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            dist.barrier()
            dist.all_reduce(total.fill_(1.0))
        dist.all_reduce(total, group=dist.new_group())
        print("total", int(total), flush=True)
        time.sleep(600)
        """,
        session=True,
    )
    with paceline(tmp_path, "run", "-n", "2", script) as command:
        eventually(lambda: command.out.count("total 4") == 2, "the second world")
        assert "w0" not in command.err
        command.interrupt(signal.SIGTERM)
        eventually(lambda: "stopping after this step" in command.err, "the first answer")
        command.interrupt(signal.SIGTERM)
        command.wait()


# -- as the interpreter alone would have it --------------------------------------------------------------------------

OBSERVER = """
    import json, multiprocessing, os, subprocess, sys

    OURS = ("torch", "msgspec", "paceline")

    def found():
        names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
        return {
            "argv": sys.argv,
            "path": sys.path,
            "python path": os.environ.get("PYTHONPATH"),
            "other sitecustomize": sys.modules["sitecustomize"].__file__,
            "imported": [name for name in OURS if name in sys.modules],
            "variables": [name for name in os.environ if name.startswith(("PACELINE_STORE", "PACELINE_BACKEND"))],
            "ours": sum(type(finder).__name__ == "Finder" for finder in sys.meta_path),
            "memory": sum("memfd" in name for name in names),
        }

    def fail():
        raise ValueError("on purpose")

    if __name__ == "__main__":
        everything = {"here": found(), "file": __file__, "spec": str(__spec__)[:30], "command": sys.orig_argv[1:]}
        for method in ("fork", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                everything[method] = pool.apply(found)
        code = "import script, json; print(json.dumps(script.found()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        everything["program"] = json.loads(done.stdout)
        with open(sys.argv[1], "w") as file:
            json.dump(everything, file)
        fail()
"""


def test_a_script_and_what_it_starts_find_nothing_of_ours(tmp_path: Path) -> None:
    write_script(tmp_path, OBSERVER)
    (tmp_path / "theirs").mkdir()
    write_script(tmp_path / "theirs", "import os\nassert 'PACELINE_STORE_FD' not in os.environ", "sitecustomize.py")
    paths = os.pathsep.join(["theirs", SOURCE])  # a relative one stays as it is

    def observe(prefix: list[str]) -> tuple[dict[str, Any], list[str]]:
        command = [sys.executable, *prefix, "seen.json", "--more"]
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        lines = done.stderr.partition("\npaceline: ")[0].splitlines()
        return json.loads((tmp_path / "seen.json").read_text()), [line.removeprefix("[w0] ") for line in lines]

    for script in (["script.py"], ["-m", "script"]):
        plain, plain_error = observe(script)
        run, run_error = observe(["-m", "paceline", "run", "--plain", *script])
        assert run_error == plain_error
        for where, ours, memory in (("here", 1, 1), ("fork", 1, 1), ("spawn", 0, 0), ("program", 0, 0)):
            assert (run[where].pop("ours"), plain[where].pop("ours")) == (ours, 0), where
            # The run's ticket, which a Session would take.
            assert (run[where].pop("memory"), plain[where].pop("memory")) == (memory, 0), where
            assert not run[where]["imported"]
            assert not run[where]["variables"]
        assert run == plain


# -- a torch that is not as we know it -------------------------------------------------------------------------------

USUAL = "_rendezvous_handlers = {'env': lambda url, **_: iter(['torch'])}"
CALL = "print('entry', *torch.distributed.rendezvous._rendezvous_handlers['env']('env://'))"


def write_torch(folder: Path, *, rendezvous: str = USUAL, groups: str = "", is_there: bool = True) -> None:
    place = folder / "torch" / "distributed"
    place.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("__version__ = '9.9'")
    (place / "__init__.py").write_text("import torch.distributed.distributed_c10d" if is_there else "")
    (place / "distributed_c10d.py").write_text(f"import torch.distributed.rendezvous\n{groups}")
    (place / "rendezvous.py").write_text(rendezvous)


@pytest.mark.parametrize("changed", [{"rendezvous": ""}, {"groups": ""}, {"is_there": False}], ids=str)
def test_on_another_torch_scripts_run_as_written_and_the_flag_is_refused(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    write_torch(tmp_path, **{"groups": "def _new_process_group_helper(): ...", **changed})
    script = write_script(tmp_path, "import torch.distributed\nprint('ran')")
    code, out, err = completed(tmp_path, "run", script)
    assert (code, out) == (0, "[w0] ran\n")
    assert ("torch's own" in err) == ("rendezvous" in changed)
    code, out, err = completed(tmp_path, "run", "--backend", "paceline", script)
    assert (code, out) == (1, "")
    assert "--backend paceline: torch 9.9 has no torch.distributed, or makes its groups in another way" in err


def test_where_paceline_cannot_be_imported_torch_has_its_own_store(tmp_path: Path) -> None:
    write_torch(tmp_path)
    body = f"""
        import importlib.util, sys
        importlib.util.find_spec("torch.distributed")  # looks, and imports nothing of it
        assert "torch.distributed" not in sys.modules
        import torch.distributed
        assert "exec_module" not in vars(torch.distributed.__loader__)
        assert not any(type(finder).__name__ == "Finder" for finder in sys.meta_path)
        sys.modules["paceline"] = None
        {CALL}
        {CALL}
        """
    code, out, err = completed(tmp_path, "run", write_script(tmp_path, body))
    assert (code, out) == (0, "[w0] entry torch\n[w0] entry torch\n"), err
    assert err.count("the run's store cannot be used") == 1
