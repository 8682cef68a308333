"""PyTorch's own suite for backends of torch.distributed, on Paceline or on Gloo.

    python -m tests.c10d.torch_suite --world-size 2 --json results.json            # the whole on Paceline
    python -m tests.c10d.torch_suite --world-size 2 --backend gloo --list          # what would be run

The suite ships with torch (`torch.testing._internal.distributed.distributed_test`). It decides when it is imported, by
the name of the backend, which tests apply. It is imported here as if for Gloo, and run on what was asked for: so the
tests that are run are Gloo's, less those that `torch_exclusions` names, plus all-to-all, which it leaves to MPI.

Each test is run by processes of its own, forked from this one, which has imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from tests.c10d import torch_exclusions

POLL_S = 0.005


def prepare(world_size: int) -> None:
    """What the suite reads from its surroundings when it is imported."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": tempfile.mkdtemp(prefix="paceline-suite-"),
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
    }


def load(backend: str) -> type[unittest.TestCase]:
    """The suite's class, with its backend changed and its processes forked."""
    import torch
    from torch.testing._internal.common_distributed import DistTestCases
    from torch.testing._internal.distributed import distributed_test

    import paceline.c10d  # noqa: F401

    suite: Any = distributed_test
    torch.set_num_threads(1)
    suite.BACKEND = os.environ["BACKEND"] = backend
    for supported in DistTestCases.backend_feature.values():
        if "gloo" in supported:
            supported.add(backend)
    suite.Barrier.sync = classmethod(_meet)

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            if test_name in torch_exclusions.ASK_FOR_GLOO_BY_NAME:  # in a process of its own, and its group is made
                suite.BACKEND = "gloo"
            super().run_test(test_name, parent_pipe)

    for name in torch_exclusions.ALL_TO_ALL:
        getattr(TorchSuite, name).__unittest_skip__ = False
    return TorchSuite


def _meet(cls: Any, wait_for: int | None = None, timeout: float = 30.0) -> None:
    """The suite's barrier over files, without its pauses of a tenth of a second."""
    num = int(os.environ["WORLD_SIZE"]) if wait_for is None else wait_for
    cls.barrier_id += 1
    folder = Path(os.environ["TEMP_DIR"]) / "barrier"
    (folder / f"{cls.barrier_id}-{os.getpid()}").touch()
    ends_at = time.monotonic() + timeout
    while sum(path.name.startswith(f"{cls.barrier_id}-") for path in folder.iterdir()) < num:
        if time.monotonic() > ends_at:
            raise RuntimeError("barrier timeout")
        time.sleep(POLL_S)


class Results(unittest.TextTestResult):
    """Remembers what became of each test, and how long it took."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        name = test.id().rpartition(".")[2]
        self.outcomes.setdefault(name, "passed")
        self.seconds[name] = round(time.monotonic() - self._began, 2)
        super().stopTest(test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = "skipped"
        super().addSkip(test, reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = "failed"
        super().addFailure(test, error)

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = "failed"
        super().addError(test, error)


def choose(suite: type[unittest.TestCase], backend: str, only: str, is_quick: bool) -> list[str]:
    names = unittest.TestLoader().getTestCaseNames(suite)
    quick = torch_exclusions.QUICK[int(os.environ["WORLD_SIZE"])] if is_quick else set()
    unknown = {*torch_exclusions.EXCLUDED, *quick} - set(names)
    if unknown:
        raise ValueError(f"not in the suite of this torch: {sorted(unknown)}")
    if backend != "gloo":
        names = [name for name in names if name not in torch_exclusions.EXCLUDED]
    if is_quick:
        names = [name for name in names if name in quick]
    return [name for name in names if re.search(only, name)]


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own suite for backends of torch.distributed")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", default="paceline", choices=["paceline", "gloo"])
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--quick", action="store_true", help="a selection of two minutes")
    parser.add_argument("--list", action="store_true", help="name the tests instead of running them")
    parser.add_argument("--json", type=Path, help="where to leave what became of each test")
    parser.add_argument("--against", type=Path, help="what --json left of Gloo: the same tests must have been run")
    arguments = parser.parse_args()
    prepare(arguments.world_size)
    suite = load(arguments.backend)
    names = choose(suite, arguments.backend, arguments.only, arguments.quick)
    if arguments.list:
        print(*names, sep="\n")
        return 0
    runner = unittest.TextTestRunner(resultclass=Results, verbosity=2)
    result: Any = runner.run(unittest.TestSuite(suite(name) for name in names))
    shutil.rmtree(os.environ["TEMP_DIR"], ignore_errors=True)
    counts = {kind: sum(one == kind for one in result.outcomes.values()) for kind in ("passed", "failed", "skipped")}
    excluded = 0 if arguments.backend == "gloo" else len(torch_exclusions.EXCLUDED)
    print(f"world size {arguments.world_size}, {arguments.backend}: {counts}, {excluded} excluded by name")
    if arguments.json:
        found = {"counts": counts, "outcomes": result.outcomes, "seconds": result.seconds}
        arguments.json.write_text(json.dumps(found, indent=1))
    is_same = arguments.against is None or check_run(result.outcomes, json.loads(arguments.against.read_text()))
    return 0 if result.wasSuccessful() and is_same else 1


def check_run(outcomes: dict[str, str], gloo: dict[str, Any]) -> bool:
    """Whether the tests that were run are Gloo's, less the excluded ones, plus all-to-all."""
    here = {name for name, outcome in outcomes.items() if outcome != "skipped"}
    there = {name for name, outcome in gloo["outcomes"].items() if outcome != "skipped"}
    expected = there - set(torch_exclusions.EXCLUDED)
    missing, added = expected - here, here - expected - set(torch_exclusions.ALL_TO_ALL)
    print(f"Gloo ran {len(there)}; not run here: {sorted(missing)}; run here alone: {sorted(added)}")
    return not missing and not added


if __name__ == "__main__":
    sys.exit(main())
