"""Which libraries this machine can be measured against, and how their processes are started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from paceline.cli.bench.allreduce.libraries import TORCH_GLOO, BenchLibrary

# One MPI's variables must not reach the other's processes.
_LEFT_OUT = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "I_MPI_", "HYDRA_", "HYDI_"),
    *("MPIR_", "MPI4PY_", "FI_", "GLOO_"),
)
_MPI4PY_REMEDY = "pip install 'paceline[bench]' (for mpi4py)"
_ASK_WAIT_S = 10.0


@dataclass(frozen=True)
class Missing:
    """A library that is not here, and how to get it."""

    name: str
    remedy: str


def find(name: str) -> BenchLibrary | Missing:
    return _FINDERS[name]()


def _find_gloo() -> BenchLibrary | Missing:
    return TORCH_GLOO


def _find_openmpi() -> BenchLibrary | Missing:
    launcher = _openmpi_launcher()
    if launcher is None:
        return Missing("openmpi", "apt install openmpi-bin, or the package of your system that has its mpirun")
    if util.find_spec("mpi4py") is None:
        return Missing("openmpi", _MPI4PY_REMEDY)
    return BenchLibrary(
        name="openmpi",
        driver="benchmarks.allreduce.mpi:OpenMpiDriver",
        launcher=(launcher, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n"),
        environment={"MPI4PY_MPIABI": "openmpi"},
        left_out=_LEFT_OUT,
    )


def _find_impi() -> BenchLibrary | Missing:
    prefix = Path(sys.prefix)
    launcher, libraries = prefix / "bin" / "mpiexec", prefix / "lib"
    try:
        metadata.version("impi-rt")
    except metadata.PackageNotFoundError:
        return Missing("impi", "pip install impi-rt")
    if not os.access(launcher, os.X_OK) or not (libraries / "libmpi.so.12").exists():
        return Missing("impi", "pip install --force-reinstall impi-rt (its mpiexec or library is not in place)")
    if util.find_spec("mpi4py") is None:
        return Missing("impi", _MPI4PY_REMEDY)
    search_path = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return BenchLibrary(
        name="impi",
        driver="benchmarks.allreduce.mpi:IntelMpiDriver",
        launcher=(str(launcher), "-n"),
        environment={
            "I_MPI_FABRICS": "shm",
            "LD_LIBRARY_PATH": os.pathsep.join(search_path),
            "MPI4PY_MPIABI": "mpich",  # Intel MPI keeps MPICH's binary interface
        },
        left_out=_LEFT_OUT,
    )


def _openmpi_launcher() -> str | None:
    """The first mpirun that is Open MPI's; other MPIs install one under the same name."""
    # The environment's own folder first, as mpi4py looks for the library there first.
    folders = [str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    for folder in dict.fromkeys(folders):
        for name in ("mpirun.openmpi", "mpirun"):
            candidate = shutil.which(name, path=folder)
            if candidate is not None and "Open MPI" in _version_text(candidate):
                return candidate
    return None


def _version_text(program: str) -> str:
    try:
        answer = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_WAIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


_FINDERS: dict[str, Callable[[], BenchLibrary | Missing]] = {
    "gloo": _find_gloo,
    "openmpi": _find_openmpi,
    "impi": _find_impi,
}
PEERS = tuple(_FINDERS)
