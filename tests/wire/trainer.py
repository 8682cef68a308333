"""A trainer for tests: visits an endpoint, starts DataLoader workers, tells their process ids, then waits to be
killed.

Its standard input has one line of JSON: port and secret.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.wire.dialing import dial
from tests.wire.helpers import WAIT_S, credentials, soon


class Busy(Dataset[torch.Tensor]):
    """Its items take longer than any test: a worker that is making one does not look whether its trainer lives."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        signal.alarm(int(WAIT_S) * 2)
        time.sleep(WAIT_S)
        return torch.tensor(index)


def main() -> None:
    told = json.loads(sys.stdin.readline())
    mine = credentials(secret=bytes.fromhex(told["secret"]))
    connection = dial(mine, ("127.0.0.1", told["port"]), "room/x", deadline=soon(), tls=told["tls"], pin=None)
    loader = DataLoader(Busy(), num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    workers = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
    connection.send("loading", {"pid": os.getpid(), "workers": workers}, deadline=soon())
    signal.alarm(int(WAIT_S) * 2)
    time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
